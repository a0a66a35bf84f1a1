"""Where parameters lie: on CPU side by side in large maps, elsewhere wherever torch puts them.

Asking torch for some hundred tensors of a few megabytes each costs a quarter of a second of start-up (its allocator
touches every page, and filling touches them again); a large anonymous map costs nothing until it is filled. A map lives
as long as any tensor in it. Must not know: whose numbers these are.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from quire.schema.errors import ConfigError

MAP_BYTES = 1 << 26
ALIGN = 64  # a cache line
NO_MEMORY = (OSError, OverflowError, ValueError)  # what a map of that size raises


class Arena:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._map: mmap.mmap | None = None
        self._used = self._size = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Not filled."""
        count = math.prod(shape)
        if self.device.type != "cpu" or count == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        memory, offset = self._take(count * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    def _take(self, size: int) -> tuple[mmap.mmap, int]:
        if self._map is None or self._used + size > self._size:
            self._size = max(MAP_BYTES, -(-size // MAP_BYTES) * MAP_BYTES)
            try:
                self._map, self._used = new_map(self._size), 0
            except NO_MEMORY as wrong:
                raise ConfigError(
                    f"there is no memory for {self._size} more bytes of weights ({wrong})", param="model"
                ) from None
        offset = self._used
        self._used += -(-size // ALIGN) * ALIGN
        return self._map, offset


def new_map(size: int) -> mmap.mmap:
    """Zeros that take memory once they are written, in huge pages where the system has some. Raises NO_MEMORY."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # only a hint: a kernel without huge pages refuses it
            made.madvise(mmap.MADV_HUGEPAGE)
    return made
