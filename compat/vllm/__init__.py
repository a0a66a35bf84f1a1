"""`import vllm`, answered by Quire. See table.py; this file only turns the table into modules.

Each module of the table is made when it is imported and looks its names up in Quire when they are used, so that
`import vllm` costs as little as `import quire`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from quire.base.registry import load
from vllm.table import COMMANDS, MISSING, names

__version__ = "0.13.0+quire"  # the documented interface; quire.__version__ is the engine's own
__version_tuple__ = (0, 13, 0, "quire")
_NAMES = names()
_PACKAGES = {path.rsplit(".", depth)[0] for path in (*_NAMES, *MISSING) for depth in range(1, path.count(".") + 1)}
_WITHOUT_SOME = {path.partition(":")[0] for path in MISSING}


def _why_missing(path: str) -> str | None:
    """Why a documented module, or a name in one, is not here, if it is one of those."""
    module, _, name = path.rpartition(".")
    parts = path.split(".")
    keys = (f"{module}:{name}", *(".".join(parts[:n]) for n in range(len(parts), 0, -1)))
    return next((MISSING[key] for key in keys if key in MISSING), None)


def _is_package(path: str) -> bool:
    """`from vllm.x import y` asks the finder for vllm.x.y before it fails, which says why: of a package only."""
    return path in _PACKAGES or ((path in _WITHOUT_SOME or _why_missing(path) is not None) and path not in COMMANDS)


def _look_up(module: str, name: str) -> Any:
    if module == "vllm.version" and name in ("__version__", "__version_tuple__"):
        return globals()[name]
    if module == "vllm.envs" and name.startswith("VLLM_"):
        return load("vllm.shims:read_variable")(name)
    if target := _NAMES.get(module, {}).get(name):
        return load(target)
    if (below := f"{module}.{name}") in _NAMES or below in _PACKAGES:
        return importlib.import_module(below)
    if (reason := _why_missing(f"{module}.{name}")) and not name.startswith("__"):
        raise AttributeError(f"Quire has no {module}.{name}: {reason}")
    raise AttributeError(f"module {module!r} has no attribute {name!r} (answered by Quire)")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("vllm."):
            return None
        if fullname in _NAMES or fullname in _PACKAGES:
            return importlib.util.spec_from_loader(fullname, self, is_package=_is_package(fullname))
        if reason := _why_missing(fullname):  # named after its parent, or `from` would drop what it says
            raise ModuleNotFoundError(f"Quire has no {fullname}: {reason}", name=fullname.rpartition(".")[0])
        return None

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        if (words := COMMANDS.get(fullname)) is None:
            return None
        run = f"sys.argv[0] = 'vllm'; sys.exit(main([*{words!r}, *sys.argv[1:]]))"
        source = f"import sys; from quire.cli.main import main; {run}"
        return compile(source, f"<{fullname}>", "exec")

    def exec_module(self, module: ModuleType) -> None:
        known = _NAMES.get(module.__name__, {})
        module.__doc__ = f"{module.__name__}, answered by Quire."
        module.__dict__["__all__"] = sorted(known)
        module.__dict__["__getattr__"] = lambda name: _look_up(module.__name__, name)
        module.__dict__["__dir__"] = lambda: sorted({*module.__dict__, *known})


sys.meta_path.append(_Finder())
__all__ = sorted(_NAMES["vllm"])


def __getattr__(name: str) -> Any:
    return _look_up("vllm", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
