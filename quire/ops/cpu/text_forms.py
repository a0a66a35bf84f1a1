"""The compiled form of attention within texts that are read at once: csrc/cpu/texts.h.

It takes float32 heads of a multiple of 16 numbers, and neither capped scores nor sinks nor learned distances: those are
left to the form without kernels. Must not know: modules, models, configuration.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.ops.cpu.native import TextsWork

PANEL, MAX_SIZE = 16, 256  # as csrc/cpu has them


def ragged_form(library: ctypes.CDLL, before: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of ops.attention.ragged_attention; `before` takes what the kernel does not."""
    attend = library.qc_attend_texts

    def ragged_native(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        near: Tensor | None = None,
    ) -> Tensor:
        fits = _fits(q, k, v) and scale > 0 and (not window or query_lens == key_lens)
        if softcap or sinks is not None or near is not None or not fits:
            return before(
                q, k, v, query_lens, key_lens, scale=scale, window=window, softcap=softcap, sinks=sinks, near=near
            )
        heads, size = q.shape[1:]
        q, k, v = (_rows(t) for t in (q, k, v))
        out = torch.empty((q.shape[0], heads, size))
        lens = [(ctypes.c_int64 * len(counts))(*counts) for counts in (query_lens, key_lens)]
        work = TextsWork(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), *map(ctypes.addressof, lens),
            len(query_lens), q.shape[0], k.shape[0], q.stride(0), k.stride(0), v.stride(0),
            heads, k.shape[1], size, window, scale,
        )  # fmt: skip
        attend(ctypes.byref(work))
        return out

    return ragged_native


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    size = q.shape[2]
    is_float = q.dtype is k.dtype is v.dtype is torch.float32
    return is_float and size % PANEL == 0 and size <= MAX_SIZE and v.shape[2] == size


def _rows(heads: Tensor) -> Tensor:
    """[T, H, D] with the heads of a token side by side."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()
