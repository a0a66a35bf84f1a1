"""A driver without a GPU under the real Triton: kernels are compiled, and their launches kept instead of executed.

What a test did to Quire's kernels ends with it: the next one in the process finds them as they were imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from quire.ops.triton import launch


class FakeStub:
    """In the place of the C stub: keeps what it was called with."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    seen: list[tuple] = []

    def __init__(self, source: Any, metadata: Any) -> None:
        self.num_args = len(source.signature)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, *args)

    def launch(self, *args: Any) -> None:
        given = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args[13:]]
        assert len(given) == self.num_args
        FakeStub.seen.append((*args[:9], given))


class FakeUtils:
    @staticmethod
    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple:
        return 1, hash(kernel) & 0xFFFF, 32, 0, 1024

    @staticmethod
    def unload_module(module: int) -> None:
        """Nothing was loaded."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class FakeDriver:
    utils, launcher_cls = FakeUtils, FakeStub

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def without_gpu() -> Iterator[list[tuple]]:
    """Yields the list of launches."""
    _forget_launches()
    unaligned = {id(param): param.do_not_specialize_on_alignment for kernel in _kernels() for param in kernel.params}
    driver.set_active(FakeDriver())
    try:
        yield FakeStub.seen
    finally:
        _forget_launches()
        for param in [param for kernel in _kernels() for param in kernel.params]:
            param.do_not_specialize_on_alignment = unaligned.get(id(param), False)
        driver._active = None


def _kernels() -> list[Any]:
    return launch.kernels_of([module for name, module in list(sys.modules.items()) if name.startswith("quire.")])


def _forget_launches() -> None:
    FakeStub.seen.clear()
    for kernel in _kernels():
        kernel.device_caches.clear()
        vars(kernel).pop("run", None)
