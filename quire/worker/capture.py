"""Capturing CUDA graphs: one stream and one memory pool for all of them.

Owns: the stream that captures need, and the pool whose memory every graph uses anew, since none runs beside another.
Must not know: what a graph holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Left = TypeVar("Left")


class Capturer:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def capture(
        self, step: Callable[[], Left], first: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Left]:
        """A graph of what `step` launches, and what it returned. `first` runs before, outside of the capture."""
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if first is not None:
                first()
            graph = torch.cuda.CUDAGraph()
            # A kernel that is loaded in the middle of a capture would end a strict one.
            mode = "relaxed" if first is None else "thread_local"
            graph.capture_begin(pool=self._pool, capture_error_mode=mode)
            try:
                left = step()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, left


def seconds_on_device(launch: Callable[[], object], device: torch.device) -> float:
    """What the device takes for it, by its own clock."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(torch.cuda.current_stream(device))
    launch()
    ended.record(torch.cuda.current_stream(device))
    ended.synchronize()
    return began.elapsed_time(ended) / 1000


class _Borrowed:
    """Memory by its address, in the form torch reads (the CUDA array interface)."""

    def __init__(self, tensor: Tensor, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": typestr, "data": (tensor.data_ptr(), False),
            "strides": None, "version": 3,
        }  # fmt: skip


def borrow(tensor: Tensor) -> Tensor:
    """A view of the same memory that does not keep it: whoever replays the graph knows that it is there."""
    assert tensor.is_contiguous()
    stand_in = {4: "<i4", 2: "<i2"}[tensor.element_size()]  # the interface knows no bfloat16
    return torch.as_tensor(_Borrowed(tensor, stand_in), device=tensor.device).view(tensor.dtype)
