"""The C library's allocator: what it may keep of memory that was freed.

glibc keeps freed memory for later: a process that once read something large stays large, in each thread's arena anew.
Where there is another C library, nothing happens here. Must not know: what memory is used for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def trim() -> None:
    """Give the system back whatever is free, of all arenas. Takes milliseconds, without the interpreter's lock."""
    if (call := _function("malloc_trim")) is not None:
        call(0)


def map_large(least: int) -> None:
    """From now on each allocation of at least so many bytes goes back to the system when it is freed.

    Costs its pages anew each time: for processes whose large allocations are rare.
    """
    if (call := _function("mallopt")) is not None:
        call(_M_MMAP_THRESHOLD, least)
        call(_M_TRIM_THRESHOLD, least)


@cache
def _function(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = ctypes.CDLL(None)[name]
    except (AttributeError, OSError):
        return None
    return function
