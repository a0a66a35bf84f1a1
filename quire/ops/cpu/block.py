"""A whole decoder block as one compiled call, for blocks of the common form: see csrc/cpu/block.h.

`NativeStep` is what a step's attention plan has to offer; `BlockCall` holds the addresses of one block's weights and
cache. It keeps the tensors alive. Must not know: modules, architectures.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.native import CACHE_DTYPES, DTYPES, KINDS, AttentionWork, Segment, kernels
from quire.ops.few import NormRule
from quire.ops.packed import Matrix
from quire.ops.qkv import QkvPrep


class NativeStep:
    """A step whose attention the kernels can run."""

    work: AttentionWork  # what belongs to the step is filled in


class MatrixWork(Structure):
    _fields_ = [
        ("segments", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("num_segments", c_int64),
        ("rows", c_int64), ("width", c_int64), ("weight_stride", c_int64),
    ]  # fmt: skip


class BlockWork(Structure):
    _fields_ = [
        ("attention", AttentionWork), ("qkv", MatrixWork), ("o", MatrixWork), ("up", MatrixWork), ("down", MatrixWork),
        ("norm_weight", c_void_p * 2), ("eps", c_float * 2), ("offset", c_float * 2), ("wide", c_int32 * 2),
        ("act", c_int32), ("dtype", c_int32),
    ]  # fmt: skip


class Weights(NamedTuple):
    """One product's matrix, packed or plain, and its bias."""

    matrix: Matrix | Tensor
    bias: Tensor | None


class BlockParts(NamedTuple):
    """What a block is made of. `prep` without cos and sin."""

    products: tuple[Weights, Weights, Weights, Weights]  # qkv, o, up, down
    norms: tuple[NormRule, NormRule]
    prep: QkvPrep
    cache: Tensor  # [slots, row]
    scale: float
    softcap: float
    sinks: Tensor | None
    alibi: Tensor | None
    act: int


def matrix_work(given: Weights, held: list[Any]) -> MatrixWork:
    """Addresses of one matrix; what they point into is added to `held`."""
    bias = None if given.bias is None else given.bias.data_ptr()
    matrix = given.matrix
    if isinstance(matrix, Tensor):
        return MatrixWork(None, matrix.data_ptr(), bias, 0, *matrix.shape, matrix.stride(0))
    segments = (Segment * len(matrix.parts))(
        *(Segment(KINDS[part.kind], part.rows, part.data.data_ptr()) for part in matrix.parts)
    )
    held.append(segments)
    return MatrixWork(ctypes.addressof(segments), None, bias, len(segments), matrix.rows, matrix.parts[0].width, 0)


class BlockCall:
    def __init__(self, parts: BlockParts, dtype: torch.dtype) -> None:
        library = kernels()
        assert library is not None
        self._run = library.qc_run_block
        self._held: list[Any] = [parts]  # what addresses point into
        work = self._work = BlockWork()
        self._at = ctypes.byref(work)
        for name, weights in zip(("qkv", "o", "up", "down"), parts.products, strict=True):
            setattr(work, name, matrix_work(weights, self._held))
        for i, norm in enumerate(parts.norms):
            assert norm.weight is not None
            work.norm_weight[i], work.eps[i], work.offset[i] = norm.weight.data_ptr(), norm.eps, norm.offset
            work.wide[i] = norm.wide or norm.offset != 0
        work.act, work.dtype = parts.act, DTYPES[dtype]
        self._attention(work.attention, parts, dtype)

    def _attention(self, work: AttentionWork, parts: BlockParts, dtype: torch.dtype) -> None:
        prep, cache = parts.prep, parts.cache
        work.heads, work.kv_heads, work.dtype = prep.heads, prep.kv_heads, DTYPES[dtype]
        work.size = self._work.qkv.rows // (prep.heads + 2 * prep.kv_heads)
        work.cache, work.cache_stride, work.cache_dtype = cache.data_ptr(), cache.stride(0), CACHE_DTYPES[cache.dtype]
        work.scale, work.softcap, work.pairs = parts.scale, parts.softcap, prep.pairs
        if prep.q_weight is not None and prep.k_weight is not None:
            work.q_weight, work.k_weight = prep.q_weight.data_ptr(), prep.k_weight.data_ptr()
            work.eps, work.offset, work.norm_each = prep.eps, prep.offset, prep.q_weight.dim() == 2
            work.norm_wide = prep.wide or prep.offset != 0
        for name, given in (("sinks", parts.sinks), ("alibi", parts.alibi)):
            if given is not None:
                self._held.append(given.float().contiguous())
                setattr(work, name, self._held[-1].data_ptr())

    def __call__(
        self, x: Tensor, delta: Tensor | None, step: NativeStep, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(stream after attention, what the mlp adds)."""
        stream, out, turn = torch.empty_like(x), torch.empty_like(x), self._work.attention
        if cos is not None:
            turn.turned, turn.turn_dtype = cos.shape[-1], DTYPES[cos.dtype]
        self._run(
            self._at, ctypes.byref(step.work), x.data_ptr(), None if delta is None else delta.data_ptr(),
            None if cos is None else cos.data_ptr(), None if sin is None else sin.data_ptr(), stream.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return stream, out
