"""The compiled form of a mixture of experts: see csrc/cpu/moe.h.

Used for experts that are all packed, or all plain with as many rows as other plain matmuls (`few_rows`).
Must not know: routers, modules, models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.ops.blocks import Weights
from quire.ops.cpu.block import MatrixWork, matrix_work
from quire.ops.cpu.native import DTYPES
from quire.ops.moe import Mixture, run_mixture
from quire.ops.op import FormTable, Kernels
from quire.ops.packed import Matrix

CLAMPED = -1


class MoeWork(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("up", "down", "x", "weights", "index", "stream", "out")),
        *((name, c_int64) for name in ("tokens", "experts", "top_k")),
        ("act", c_int32), ("dtype", c_int32), ("alpha", c_float), ("limit", c_float),
    ]  # fmt: skip


class Handle(NamedTuple):
    work: MoeWork
    plain: bool
    width: int  # of the result
    buffers: list[Any]  # what addresses point into


def add_forms(
    table: FormTable, library: ctypes.CDLL, acts: dict[str, int], few_rows: Callable[[Kernels, torch.dtype], int]
) -> None:
    """`few_rows`: with plain weights of a dtype, more rows are left to torch."""
    table.made(run_mixture)(partial(_form, library, acts, few_rows))


def _form(
    library: ctypes.CDLL,
    acts: dict[str, int],
    few_rows: Callable[[Kernels, torch.dtype], int],
    before: Callable[..., Tensor],
    kernels: Kernels,
) -> Callable[..., Tensor]:
    run = library.qc_run_moe
    most = {dtype: few_rows(kernels, dtype) for dtype in DTYPES}

    def run_mixture_native(
        x: Tensor, weights: Tensor, index: Tensor, experts: Mixture, stream: Tensor | None = None
    ) -> Tensor:
        if experts.handle is None:
            experts.handle = _handle(experts, acts, x.dtype) or False
        handle: Handle | bool = experts.handle
        if isinstance(handle, bool) or handle.work.dtype != DTYPES.get(x.dtype):
            return before(x, weights, index, experts, stream)
        if handle.plain and x.shape[0] > most[x.dtype]:
            return before(x, weights, index, experts, stream)
        work = handle.work
        x, weights, index = x.contiguous(), weights.float().contiguous(), index.long().contiguous()
        stream = None if stream is None else stream.contiguous()
        out = torch.empty((x.shape[0], handle.width), dtype=x.dtype)
        work.x, work.weights, work.index = x.data_ptr(), weights.data_ptr(), index.data_ptr()
        work.stream, work.out = None if stream is None else stream.data_ptr(), out.data_ptr()
        work.tokens, work.top_k = index.shape
        run(ctypes.byref(work))
        return out

    return run_mixture_native


def _handle(experts: Mixture, acts: dict[str, int], dtype: torch.dtype) -> Handle | None:
    """None: the kernels do not support these."""
    if experts.rule is None or dtype not in DTYPES:
        return None
    name, alpha, limit = experts.rule
    act = CLAMPED if name == "clamped" else acts.get(name)
    matrices = (*experts.up, *experts.down)
    plain = any(isinstance(matrix, Tensor) for matrix in matrices)
    if act is None or (plain and any(isinstance(matrix, Matrix) for matrix in matrices)):
        return None
    alive: list[Any] = []
    arrays = [
        (MatrixWork * len(projections))(
            *(matrix_work(Weights(m, b), alive) for m, b in zip(projections, biases, strict=True))
        )
        for projections, biases in ((experts.up, experts.up_bias), (experts.down, experts.down_bias))
    ]
    alive += arrays
    last = experts.down[0]
    width = last.shape[0] if isinstance(last, Tensor) else last.rows
    work = MoeWork(up=ctypes.addressof(arrays[0]), down=ctypes.addressof(arrays[1]), experts=len(experts.up))
    work.act, work.dtype, work.alpha, work.limit = act, DTYPES[dtype], alpha, limit
    return Handle(work, plain, width, alive)
