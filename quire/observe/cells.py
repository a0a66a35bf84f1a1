"""Numbers that several processes add to, and any of them can read together.

A process owns one row of 64-bit floats: in its own memory, or, where a folder is given, in a file there that the
others map. It writes only its own row, so nothing is locked, and adding costs what it costs in one process. A row
outlives its process: what was counted stays counted, however that process ended. Must not know: what a cell means.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
from pathlib import Path

from quire.base.log import logger

log = logger(__name__)
SUFFIX = ".cells"
_HEAD_BYTES = 32  # a digest of what the cells mean, so that rows of another meaning are never added up
_CELL_BYTES = 8
Row = memoryview


class Cells:
    """`mine` is this process's row, `rows()` everybody's. `kind` and `meaning` say which rows belong together."""

    def __init__(self, size: int, *, kind: str, meaning: str, folder: str | None = None) -> None:
        self._kind = kind
        self._size = size
        self._folder = None if folder is None else Path(folder)
        self._digest = hashlib.sha256(f"{size} {meaning}".encode()).digest()
        self._others: dict[str, Row[float]] = {}
        self._refused: set[str] = set()
        self._name = f"{kind}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        self.mine = self._make()

    def rows(self) -> list[Row[float]]:
        """Every row there is, this process's first."""
        if self._folder is None:
            return [self.mine]
        for path in sorted(self._folder.glob(f"{self._kind}-*{SUFFIX}")):
            if path.name != self._name and path.name not in self._others and path.name not in self._refused:
                self._look(path)
        return [self.mine, *self._others.values()]

    def _make(self) -> Row[float]:
        if self._folder is None:
            return memoryview(bytearray(self._size * _CELL_BYTES)).cast("d")
        path, unfinished = self._folder / self._name, self._folder / f".{self._name}"
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, self._digest)
            os.ftruncate(descriptor, _HEAD_BYTES + self._size * _CELL_BYTES)
            row = _view(descriptor, mmap.ACCESS_WRITE)
        finally:
            os.close(descriptor)
        unfinished.rename(path)  # nobody sees a row that is half made
        return row

    def _look(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            matches = os.read(descriptor, _HEAD_BYTES) == self._digest
            if matches and os.fstat(descriptor).st_size == _HEAD_BYTES + self._size * _CELL_BYTES:
                self._others[path.name] = _view(descriptor, mmap.ACCESS_READ)
            else:
                self._refused.add(path.name)
                log.warning("Numbers in %s are not of this server's kind and are left out", path)
        finally:
            os.close(descriptor)


def _view(descriptor: int, access: int) -> Row[float]:
    return memoryview(mmap.mmap(descriptor, 0, access=access))[_HEAD_BYTES:].cast("d")


class LeaderLock:
    """Who of several processes does a thing that only one must do. The turn passes on when its holder dies."""

    def __init__(self, folder: str | None, name: str) -> None:
        self._path = None if folder is None else Path(folder) / f"{name}.lock"
        self._descriptor: int | None = None

    def mine(self) -> bool:
        if self._path is None or self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
