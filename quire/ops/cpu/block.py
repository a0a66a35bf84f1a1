"""The CPU form of `join_blocks`: decoder blocks as one compiled call, see csrc/cpu/block.h.

`NativeStep` is the interface of a step's attention plan, `NativeCache` that of a layer's cache, `NativeReduce` that of
a sum over ranks; with other plans, caches and sums the layers run one by one. `BlocksCall` holds the addresses of the
blocks' weights and caches, and keeps the tensors alive. Must not know: modules, architectures.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.ops.blocks import BlockParts, BlocksRun, StepTurn, Weights, join_blocks
from quire.ops.cpu.low_rank import native_slots
from quire.ops.cpu.native import CACHE_DTYPES, DTYPES, KINDS, AttentionWork, Segment
from quire.ops.lora import AdapterRows
from quire.ops.op import FormTable, Kernels
from quire.ops.parts import Delta, PartialSums


class NativeStep:
    """A step whose attention the kernels can run."""

    work: AttentionWork  # with the fields of the step filled in


class NativeCache:
    """A layer's keys and values as the kernels read them."""

    rows: Tensor  # [slots, keys of all kv heads, then values, then an int8 cache's scales]


class NativeReduce:
    """A sum over ranks that the kernels can make in the middle of a call."""

    work: Structure


class MatrixWork(Structure):
    _fields_ = [
        ("segments", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("num_segments", c_int64),
        ("rows", c_int64), ("width", c_int64), ("weight_stride", c_int64),
    ]  # fmt: skip


class BlockWork(Structure):
    _fields_ = [
        ("attention", AttentionWork), ("qkv", MatrixWork), ("o", MatrixWork), ("up", MatrixWork), ("down", MatrixWork),
        ("low", c_void_p * 4), ("norm_weight", c_void_p * 2), ("eps", c_float * 2), ("offset", c_float * 2),
        ("wide", c_int32 * 2), ("act", c_int32), ("dtype", c_int32),
    ]  # fmt: skip


class TurnWork(Structure):
    _fields_ = [("step", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("turned", c_int32), ("dtype", c_int32)]


def matrix_work(weights: Weights, alive: list[Any]) -> MatrixWork:
    """Addresses of one matrix; what they point into is added to `alive`."""
    bias = None if weights.bias is None else weights.bias.data_ptr()
    matrix = weights.matrix
    if isinstance(matrix, Tensor):
        return MatrixWork(None, matrix.data_ptr(), bias, 0, *matrix.shape, matrix.stride(0))
    segments = (Segment * len(matrix.parts))(
        *(Segment(KINDS[part.kind], part.rows, part.data.data_ptr()) for part in matrix.parts)
    )
    alive.append(segments)
    return MatrixWork(ctypes.addressof(segments), None, bias, len(segments), matrix.rows, matrix.parts[0].width, 0)


class BlocksCall:
    def __init__(
        self,
        library: ctypes.CDLL,
        acts: Mapping[str, int],
        blocks: Sequence[BlockParts],
        which: Sequence[int],
        dtype: torch.dtype,
        most_rows: int,
    ) -> None:
        """`which[i]`: the index of block i's turn in a call. Steps with more rows are refused."""
        self._run, self._count, self._dtype, self._most = library.qc_run_blocks, len(blocks), dtype, most_rows
        self._alive: list[Any] = list(blocks)
        self._works = [_block_work(parts, acts, dtype, self._alive) for parts in blocks]
        self._blocks = (c_void_p * len(blocks))(*map(ctypes.addressof, self._works))
        self._which = (c_int32 * len(blocks))(*which)
        self._turns = (TurnWork * (max(which) + 1))()
        self._num_slots = _link_adapters(blocks, self._works)
        reduce = blocks[0].reduce
        self._ranks = ctypes.addressof(reduce.work) if isinstance(reduce, NativeReduce) else None

    def __call__(
        self, x: Tensor, delta: Delta, turns: Sequence[StepTurn], rows: AdapterRows | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """(stream after the last attention, output of the last mlp); None: this step cannot run here."""
        if rows is not None and not self._num_slots:
            return None
        if x.shape[0] > self._most or not x.is_contiguous() or isinstance(delta, PartialSums):
            return None
        if delta is not None and not delta.is_contiguous():
            return None
        for work, (plan, cos, sin) in zip(self._turns, turns, strict=True):
            if not isinstance(plan, NativeStep):
                return None
            work.step = ctypes.addressof(plan.work)
            if cos is None or sin is None:
                work.cos, work.sin, work.turned, work.dtype = None, None, 0, 0
            elif cos.dtype is self._dtype or cos.dtype is torch.float32:
                work.cos, work.sin = cos.data_ptr(), sin.data_ptr()
                work.turned, work.dtype = cos.shape[-1], DTYPES[cos.dtype]
            else:
                return None
        stream, out = torch.empty_like(x), torch.empty_like(x)
        self._run(
            self._blocks, self._which, self._count, self._turns, len(self._turns),
            None if rows is None else rows.index.data_ptr(), self._num_slots, x.data_ptr(),
            None if delta is None else delta.data_ptr(), stream.data_ptr(), out.data_ptr(),
            self._ranks,
        )  # fmt: skip
        return stream, out


def add_forms(
    table: FormTable, library: ctypes.CDLL, acts: Mapping[str, int], few_rows: Callable[[Kernels, torch.dtype], int]
) -> None:
    """`few_rows`: with plain weights of a dtype, more rows are left to torch."""
    table.made(join_blocks)(partial(_form, library, acts, few_rows))


def _form(
    library: ctypes.CDLL,
    acts: Mapping[str, int],
    few_rows: Callable[[Kernels, torch.dtype], int],
    before: Callable[..., BlocksRun | None],
    kernels: Kernels,
) -> Callable[..., BlocksRun | None]:
    limits = {dtype: few_rows(kernels, dtype) for dtype in DTYPES}

    def join_blocks_native(blocks: Sequence[BlockParts], which: Sequence[int], dtype: torch.dtype) -> BlocksRun | None:
        known = all(
            isinstance(parts.cache, NativeCache) and parts.cache.rows.dtype in CACHE_DTYPES and parts.act in acts
            for parts in blocks
        )
        reduce = blocks[0].reduce
        sums = (reduce is None or isinstance(reduce, NativeReduce)) and all(parts.reduce is reduce for parts in blocks)
        if not (known and sums) or dtype not in DTYPES:
            return before(blocks, which, dtype)
        is_plain = any(isinstance(weights.matrix, Tensor) for parts in blocks for weights in parts.matrices)
        return BlocksCall(library, acts, blocks, which, dtype, limits[dtype] if is_plain else sys.maxsize)

    return join_blocks_native


def _link_adapters(blocks: Sequence[BlockParts], works: Sequence[BlockWork]) -> int:
    """Number of slots of adapters that the blocks have; 0: none, or others than kernels can add."""
    slots = [[native_slots(low) for low in parts.adapters or (None,) * 4] for parts in blocks]
    if any(one is None for own in slots for one in own):
        return 0
    for work, own in zip(works, slots, strict=True):
        for i, one in enumerate(own):
            assert one is not None
            work.low[i] = one.address
    first = slots[0][0]
    assert first is not None
    return first.count


def _block_work(parts: BlockParts, acts: Mapping[str, int], dtype: torch.dtype, alive: list[Any]) -> BlockWork:
    assert isinstance(parts.cache, NativeCache)
    work = BlockWork()
    for name, weights in zip(("qkv", "o", "up", "down"), parts.matrices, strict=True):
        setattr(work, name, matrix_work(weights, alive))
    for i, norm in enumerate(parts.norms):
        assert norm.weight is not None
        work.norm_weight[i], work.eps[i], work.offset[i] = norm.weight.data_ptr(), norm.eps, norm.offset
        work.wide[i] = norm.wide or norm.offset != 0
    work.act, work.dtype = acts[parts.act], DTYPES[dtype]
    attention, prep, cache = work.attention, parts.prep, parts.cache.rows
    attention.heads, attention.kv_heads, attention.dtype = prep.heads, prep.kv_heads, DTYPES[dtype]
    attention.size = work.qkv.rows // (prep.heads + 2 * prep.kv_heads)
    attention.cache, attention.cache_stride, attention.cache_slots = cache.data_ptr(), cache.stride(0), cache.shape[0]
    attention.cache_dtype = CACHE_DTYPES[cache.dtype]
    attention.scale, attention.softcap, attention.pairs = parts.scale, parts.softcap, prep.pairs
    if prep.q_weight is not None and prep.k_weight is not None:
        attention.q_weight, attention.k_weight = prep.q_weight.data_ptr(), prep.k_weight.data_ptr()
        attention.eps, attention.offset, attention.norm_each = prep.eps, prep.offset, prep.q_weight.dim() == 2
        attention.norm_wide = prep.wide or prep.offset != 0
    for name, tensor in (("sinks", parts.sinks), ("alibi", parts.alibi)):
        if tensor is not None:
            alive.append(tensor.float().contiguous())
            setattr(attention, name, alive[-1].data_ptr())
    return work
