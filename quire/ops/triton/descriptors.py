"""TMA for kernels in Gluon: descriptors of tensors, made once for an address, a shape and a box; and `load_tile`, the
copy to shared memory, whose name depends on Triton's version."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Up to Triton 3.6 the one name, in 3.8 both, from 3.9 on the other.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class _Address(NamedTuple):
    """Stands in for a tensor in a cached descriptor, without keeping its memory alive."""

    at: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.at


@lru_cache(8192)
def described(
    at: int, dtype: torch.dtype, shape: tuple[int, int], stride: int, box: tuple[int, int], swizzle: int
) -> TensorDescriptor:
    """Of a matrix whose rows are `stride` apart; zeros past its end."""
    layout = gl.NVMMASharedLayout(swizzle, dtype.itemsize * 8, 2)
    return TensorDescriptor(_Address(at, dtype), list(shape), [stride, 1], list(box), layout)


def describe(x: Tensor, box: tuple[int, int], swizzle: int = 128) -> TensorDescriptor:
    return described(x.data_ptr(), x.dtype, (x.shape[0], x.shape[1]), x.stride(0), box, swizzle)
