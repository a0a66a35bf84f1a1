"""Files that all the processes of one test run share: the first that needs them makes them, the others wait for it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` filled, in this process or in another one of this run. It is read only."""
    own = factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own  # each worker has a folder of its own in one
    folder, whole = root / f"shared-{name}", root / f"shared-{name}.whole"
    with open(root / f"shared-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what somebody left who failed
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder
