"""A file of memory that has no name (memfd): who has its descriptor shares it, and it is gone with the last of them.

Also in Pythons that were built with a libc older than the system's, as those of conda and of uv were: they know neither
os.memfd_create nor the numbers of seals, all of which the system has.
"""

from __future__ import annotations

import errno
import fcntl
import os

_CLOEXEC, _ALLOW_SEALING = 1, 2
_ADD_SEALS, _SEAL_ITSELF, _SEAL_SHRINK, _SEAL_GROW = 1033, 1, 2, 4


def memory_file(name: str, *, sealable: bool = False) -> int:
    """A descriptor of an empty one, which programs that this process starts do not get. OSError: the system has none.
    `name`: for those who look into /proc."""
    flags = _CLOEXEC | (_ALLOW_SEALING if sealable else 0)
    return os.memfd_create(name, flags) if hasattr(os, "memfd_create") else _of_libc(name, flags)


def seal_size(descriptor: int) -> None:
    """Nobody changes it any more, nor this."""
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_ITSELF)


def _of_libc(name: str, flags: int) -> int:
    import ctypes  # lazy

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = int(libc.memfd_create(name.encode(), ctypes.c_uint(flags)))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor
