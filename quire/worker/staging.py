"""Staging: what a step must tell the device, packed into one pinned buffer and sent by one copy that nobody waits for.

Owns: a ring of pinned buffers and the device's copy, whose address never changes (graphs read it). A buffer is filled
again only after the device has read it. On CPU the same code runs without pinning or events.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DEPTH = 4  # buffers: more than the steps that may be under way
_ALIGN = 4  # words: kernels are compiled for addresses that 16 bytes divide, and once more for others


def align(words: int) -> int:
    return -(-words // _ALIGN) * _ALIGN


class Staging:
    def __init__(self, size: int, device: torch.device) -> None:
        """`size` in int32 words."""
        self.size = size
        self.device_words = torch.zeros(size, dtype=torch.int32, device=device)
        on_device = device.type != "cpu"
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=on_device) for _ in range(DEPTH)]
        self._events = [torch.cuda.Event() for _ in range(DEPTH)] if on_device else []
        self._turn = 0

    def pack(self, parts: list[np.ndarray]) -> list[Tensor]:
        """Send int32 and int64 arrays; returns each one's place on the device, good until the next call."""
        self._turn = (self._turn + 1) % DEPTH
        if self._events:
            self._events[self._turn].synchronize()
        host, views, end = self._host[self._turn], [], 0
        words = host.numpy()
        for part in parts:
            wide, start = part.dtype.itemsize // 4, align(end)
            end = start + part.size * wide
            if end > self.size:
                raise RuntimeError(f"a step needs {end} words of staging, there are {self.size}")
            words[start:end].view(part.dtype)[:] = part
            place = self.device_words[start:end]
            views.append(place if wide == 1 else place.view(torch.int64))
        self.device_words[:end].copy_(host[:end], non_blocking=True)
        if self._events:
            self._events[self._turn].record()
        return views
