"""Where the compiled CPU kernels lie, if this installation has them. The library itself is loaded by ops/cpu/native.py.

The build (setup.py) puts libquire_cpu.so beside the Python files, or a note that says why it could not. Must not know:
what the kernels do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from quire.base import env

FOLDER = Path(__file__).resolve().parent.parent / "ops" / "cpu"
LIBRARY, NOTE = "libquire_cpu.so", "not_built.txt"


def library() -> Path | None:
    """None: not built, or switched off by QUIRE_CPU_KERNELS=off."""
    if env.CPU_KERNELS.get() == "off":
        return None
    named = env.CPU_KERNELS_FILE.get()
    return _found(Path(named) if named else FOLDER / LIBRARY)


@cache  # asked some hundred times while a model is built
def _found(path: Path) -> Path | None:
    return path if path.is_file() else None


def why_not() -> str:
    """Why `library` gives None, in words for a user."""
    if env.CPU_KERNELS.get() == "off":
        return "QUIRE_CPU_KERNELS is off"
    if named := env.CPU_KERNELS_FILE.get():
        return f"QUIRE_CPU_KERNELS_FILE names {named}, which is not a file"
    note = FOLDER / NOTE
    reason = note.read_text().strip() if note.is_file() else "the package was installed without building them"
    return f"{reason}; with a C++20 compiler installed, `pip install` Quire again"
