"""A file mapped into memory, read from front to back: pages come in ahead of use and go out after it.

Owns: the map and the advice to the system about it. The map is read-only: writing through a view of it would end the
process, so whoever hands views on must copy before changing anything.
Must not know: what the bytes mean.
"""

from __future__ import annotations

import mmap
import os

_AHEAD = 64 << 20  # bytes asked for before they are used
_STEP = 1 << 20  # the system reads no more than about this per request


class MappedFile:
    """Empty files cannot be mapped; callers check the size first."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._asked = 0

    def view(self, start: int, num_bytes: int) -> memoryview:
        return memoryview(self.map)[start : start + num_bytes]

    def expect(self, start: int, num_bytes: int) -> None:
        """These bytes are used next: ask for them and for what follows. Returns at once."""
        if start + 2 * _AHEAD < self._asked:
            self._asked = start  # from the front again
        begin = max(self._asked, start) // _STEP * _STEP
        end = min(start + num_bytes + _AHEAD, self.size)
        for at in range(begin, end, _STEP):
            self.map.madvise(mmap.MADV_WILLNEED, at, min(_STEP, self.size - at))
        self._asked = max(self._asked, end)

    def forget(self, start: int, num_bytes: int) -> None:
        """These bytes are not needed soon: their pages no longer count as this process's memory."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)
