"""Sender: tensors of mapped files to a device, in pieces through pinned memory, without a host copy of the model.

Each thread that loads has two small pinned buffers: while the device reads one, the thread fills the other from the
file's pages. In: a host tensor, of any size. Out: the same on the device, in the dtype it is stored in.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from quire.quant.scheme import PIECE


class Sender:
    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        """`piece`: bytes of a buffer."""
        self._device, self._piece = device, piece
        self._mine = threading.local()

    def send(self, tensor: Tensor) -> Tensor:
        """Not copied if it is there already."""
        return tensor if tensor.device == self._device else self.copy(tensor)

    def copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = tensor.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        for start in range(0, source.numel(), self._piece):
            part = source[start : start + self._piece]
            buffer, event = self._next()
            if event is not None:
                event.synchronize()
            buffer[: part.numel()].copy_(part)
            target[start : start + part.numel()].copy_(buffer[: part.numel()], non_blocking=True)
            if event is not None:
                event.record()
        return out

    def _next(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """The buffer that was used longest ago, and when the device is done with it."""
        mine = self._mine.__dict__
        if "buffers" not in mine:
            pin = self._device.type == "cuda"
            mine["buffers"] = [
                (torch.empty(self._piece, dtype=torch.uint8, pin_memory=pin), torch.cuda.Event() if pin else None)
                for _ in range(2)
            ]
        buffers: list[tuple[Tensor, torch.cuda.Event | None]] = mine["buffers"]
        buffers.reverse()
        return buffers[0]
