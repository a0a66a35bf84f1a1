"""Bytes in memory as tensors, without copying them.

In: a buffer (a mapped file, or one that was read). Out: views. A view of a mapped file must never be written to.
Must not know: file formats.
"""

from __future__ import annotations

import warnings
from mmap import mmap

import torch
from torch import Tensor


def as_bytes(buffer: mmap | bytearray) -> Tensor:
    """The whole buffer as uint8; the tensor keeps it alive."""
    with warnings.catch_warnings():  # a map is read-only, and nobody here writes
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8)


def cut(whole: Tensor, start: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A view of the bytes [start, start + num_bytes) as numbers; a copy only where they lie at an odd address."""
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    flat = whole[start : start + num_bytes]
    if start % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)
