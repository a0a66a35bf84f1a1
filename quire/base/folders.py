"""Private folders for as long as a process lives: made for this user alone, and swept by a later one if left behind.

A folder holds a file that its owner has locked; the system lets go of the lock when the owner dies, by whatever cause.
A folder without that file, or of another user, or whose lock is held, is left alone.
Must not know what is kept in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile

from quire.base.log import logger

log = logger(__name__)
PREFIX = "quire-"
_LOCK = "owner.lock"
_locks: dict[str, int] = {}  # folder -> descriptor of its locked file


def make_folder() -> str:
    """A new one that no other user can enter (mode 0700)."""
    folder = tempfile.mkdtemp(prefix=PREFIX)
    with contextlib.suppress(OSError):  # a file system without locks: such a folder is never swept
        _hold(folder)
    return folder


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def sweep_folders() -> None:
    """Remove those whose owner is gone."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.path not in _locks:
                with contextlib.suppress(OSError):
                    _sweep(entry.path)


def _hold(folder: str) -> None:
    """The file gets its name once it is locked, so that nobody finds it without."""
    lock = os.open(f"{folder}/.{_LOCK}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(f"{folder}/.{_LOCK}", f"{folder}/{_LOCK}")
    except OSError:
        os.close(lock)
        raise
    _locks[folder] = lock


def _sweep(folder: str) -> None:
    """OSError: it is not ours to remove."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    lock = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        log.info("Removed %s, which a process that was killed had left behind", folder)
    finally:
        os.close(lock)
