"""Grouped matmuls of some rows on Hopper at memory bandwidth: as `product` in moe_many.py, in Gluon.

With up to 64 pairs an expert, a step waits for the experts' weights to be read. They are the tall operand of `wgmma`
here, the pairs the narrow one. A producer streams the weights of one tile after another through a ring of buffers, by
TMA, and never waits for a tile to be finished; the rows of the pairs come beside them. Two consumers, warp groups, have
half of a tile's weights each. Programs are persistent. Those of the second matmul begin while those of the first end,
and fill their ring with weights before they wait for its rows.

    producer ──▶ ring of (256 x 64 weights | rows x 64) ──▶ consumer 0: weights 0 .. 127    ──▶ out
                                                        ──▶ consumer 1: weights 128 .. 255  ──▶ out

Floor: the bytes of the experts that are touched, at 4.4 TB/s. 128 of 2048 x 768: 805 MB, 183 us; 403 MB, 92 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.act import gate_up
from quire.ops.triton.descriptors import describe, load_tile
from quire.ops.triton.moe_split import BK, buffer_before, gathered, next_buffer, processors

WEIGHTS = gl.constexpr(128)  # rows of weights of a consumer
_COPIERS = 4  # warps of a producer that gathers rows


class StreamConfig(NamedTuple):
    bm: int  # pairs of a tile
    buffers: int = 5

    def product(
        self, a: Tensor, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int, *,
        pairs: int, act: tuple[int, float, float] | None, early: bool = False,
    ) -> Tensor:  # fmt: skip
        return product(a, w, bias, tiles, top_k, pairs=pairs, act=act, config=self, early=early)


@gluon.jit
def _fill_weights(w, row, k, full, to, N: gl.constexpr, FIRST: gl.constexpr):
    """FIRST: each consumer's are gates, then the ups that belong to them."""
    if FIRST:
        HALF: gl.constexpr = WEIGHTS // 2
        for part in gl.static_range(2):
            load_tile(w, [row + part * HALF, k], full, to.slice(part * WEIGHTS, HALF, 0))
            load_tile(w, [row + part * HALF + N, k], full, to.slice(part * WEIGHTS + HALF, HALF, 0))
    else:
        load_tile(w, [row, k], full, to)


@gluon.jit
def _produce(
    a, w, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, a_stride,
    EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, BM: gl.constexpr,
    BUFFERS: gl.constexpr, FIRST: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """AHEAD: chunks of weights that are loaded before the first matmul has ended. Which tiles there are was written by
    the kernel before that one, which waits for it before this one may begin."""
    RESULTS: gl.constexpr = WEIGHTS if FIRST else 2 * WEIGHTS
    COLUMNS: gl.constexpr = (N + RESULTS - 1) // RESULTS
    WEIGHT_ROWS: gl.constexpr = 2 * N if FIRST else N
    BYTES: gl.constexpr = (2 * WEIGHTS if FIRST else 2 * WEIGHTS + BM) * BK * 2
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tiles = gl.load(end + EXPERTS)
    at, phase = 0, 1
    if AHEAD:
        if gl.program_id(0) < tiles * COLUMNS:
            expert = gl.load(tile_expert + gl.program_id(0) // COLUMNS)
            row = expert * WEIGHT_ROWS + gl.program_id(0) % COLUMNS * RESULTS
            for early in gl.static_range(AHEAD):
                mbarrier.expect(full.index(early), BYTES)
                _fill_weights(w, row, early * BK, full.index(early), weights.index(early), N, FIRST)
        gdc_wait()
    for work in range(gl.program_id(0), tiles * COLUMNS, programs):
        tile, column = work // COLUMNS, work % COLUMNS
        expert, first = gl.load(tile_expert + tile), gl.load(tile_start + tile)
        row = expert * WEIGHT_ROWS + column * RESULTS
        if FIRST:
            source = gathered(order, first, gl.load(end + expert), a_stride, TOP_K, BM, lay)
            for start in range(0, K, BK):
                mbarrier.wait(empty.index(at), phase)
                mbarrier.expect(full.index(at), BYTES)
                _fill_weights(w, row, start, full.index(at), weights.index(at), N, FIRST)
                async_copy.async_copy_global_to_shared(rows.index(at), a + start + source)
                async_copy.mbarrier_arrive(full.index(at), increment_count=False)
                at, phase = next_buffer(at, phase, BUFFERS)
        else:
            for start in range(0, K, BK):
                mbarrier.wait(empty.index(at), phase)
                if (work != gl.program_id(0)) | (start >= AHEAD * BK):
                    mbarrier.expect(full.index(at), BYTES)
                    _fill_weights(w, row, start, full.index(at), weights.index(at), N, FIRST)
                load_tile(a, [first, start], full.index(at), rows.index(at))
                at, phase = next_buffer(at, phase, BUFFERS)


@gluon.jit
def _store(
    acc, bias, out, order, last, expert, first, column, alpha, limit,
    N: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """acc [weights, pairs] of a consumer whose results begin at `column`; FIRST: gates, then ups."""
    BM: gl.constexpr = acc.shape[1]
    RESULTS: gl.constexpr = acc.shape[0] // 2 if FIRST else acc.shape[0]
    if FIRST:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [2, RESULTS, BM]), [1, 2, 0]))
        if BIAS:
            c = column + gl.arange(0, RESULTS, layout=gl.SliceLayout(1, gate.type.layout))
            gate += gl.load(bias + expert * 2 * N + c, mask=c < N, other=0.0).to(gl.float32)[:, None]
            up += gl.load(bias + expert * 2 * N + N + c, mask=c < N, other=0.0).to(gl.float32)[:, None]
        result = gate_up(gate, up, alpha, limit, ACT)
    else:
        result = acc
        if BIAS:
            c = column + gl.arange(0, RESULTS, layout=gl.SliceLayout(1, acc.type.layout))
            result += gl.load(bias + expert * N + c, mask=c < N, other=0.0).to(gl.float32)[:, None]
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(result.to(out.dtype.element_ty), wide)
    n = column + gl.arange(0, RESULTS, layout=gl.SliceLayout(1, wide))
    m = first + gl.arange(0, BM, layout=gl.SliceLayout(0, wide))
    live = m < last
    target = m if FIRST else gl.load(order + m, mask=live, other=0)
    at = out + target.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(at, result, mask=live[None, :] & (n < N)[:, None])


@gluon.jit
def _consume(
    bias, out, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, alpha, limit,
    WHICH: gl.constexpr, EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr, BM: gl.constexpr, BUFFERS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    RESULTS: gl.constexpr = WEIGHTS if FIRST else 2 * WEIGHTS
    COLUMNS: gl.constexpr = (N + RESULTS - 1) // RESULTS
    own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    tiles = gl.load(end + EXPERTS)
    at, phase = 0, 0
    for work in range(gl.program_id(0), tiles * COLUMNS, programs):
        tile, column = work // COLUMNS, work % COLUMNS
        expert, first = gl.load(tile_expert + tile), gl.load(tile_start + tile)
        acc = gl.zeros([WEIGHTS, BM], gl.float32, layout=own)
        for start in range(0, K, BK):
            mbarrier.wait(full.index(at), phase)
            if FIRST:  # its rows were not written by TMA
                fence_async_shared()
            mine = weights.index(at).slice(WHICH * WEIGHTS, WEIGHTS, 0)
            acc = warpgroup_mma(mine, rows.index(at).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(buffer_before(at, BUFFERS)), count=1, pred=start > 0)
            at, phase = next_buffer(at, phase, BUFFERS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(buffer_before(at, BUFFERS)), count=1)
        begin = column * RESULTS + WHICH * (RESULTS // 2)
        last = gl.load(end + expert)
        _store(acc, bias, out, order, last, expert, first, begin, alpha, limit, N, ACT, BIAS, FIRST)


@gluon.jit(do_not_specialize=["programs"])
def _stream_kernel(
    a, w, bias, out, order, tile_expert, tile_start, end, programs, a_stride, alpha, limit,
    EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr, FIRST: gl.constexpr, BM: gl.constexpr, BUFFERS: gl.constexpr, EARLY: gl.constexpr,
    COPIERS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """grid (programs,). w: a descriptor; a: one too, or with FIRST the tokens themselves."""
    AHEAD: gl.constexpr = min(BUFFERS, K // BK) if EARLY and not FIRST else 0
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(w.dtype, [BUFFERS, BM, BK], layout)
    weights = gl.allocate_shared_memory(w.dtype, [BUFFERS, 2 * WEIGHTS, BK], layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(BUFFERS):
        mbarrier.init(full.index(at), count=1 + 32 * COPIERS if FIRST else 1)
        mbarrier.init(empty.index(at), count=2)
    fence_async_shared()
    if EARLY:
        if FIRST:  # the second matmul reads the tiles before it waits: they have to be there when it begins
            gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize([
        (_consume, (bias, out, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, alpha, limit,
                    0, EXPERTS, N, K, ACT, BIAS, BM, BUFFERS, FIRST)),
        (_consume, (bias, out, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, alpha, limit,
                    1, EXPERTS, N, K, ACT, BIAS, BM, BUFFERS, FIRST)),
        (_produce, (a, w, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, a_stride,
                    EXPERTS, N, K, TOP_K, BM, BUFFERS, FIRST, AHEAD)),
    ], [4, COPIERS], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip


def product(
    a: Tensor, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int,
    *, pairs: int, act: tuple[int, float, float] | None, config: StreamConfig, early: bool = False,
) -> Tensor:  # fmt: skip
    """As moe_many.product."""
    order, expert, start, end = tiles
    code, alpha, limit = act or (0, 0.0, 0.0)
    first = act is not None
    experts, rows, k = w.shape
    n = rows // 2 if first else rows
    out = torch.empty((pairs, n), dtype=a.dtype, device=a.device)
    box, results = (WEIGHTS.value // 2, WEIGHTS.value) if first else (2 * WEIGHTS.value, 2 * WEIGHTS.value)
    weights = describe(w.view(experts * rows, k), (box, BK.value))
    source = a if first else describe(a, (config.bm, BK.value))
    programs = min(expert.shape[0] * -(-n // results), processors(a.device))
    _stream_kernel[(programs,)](
        source, weights, bias, out, order, expert, start, end, programs, a.stride(0), alpha, limit, EXPERTS=experts,
        N=n, K=k, TOP_K=top_k, ACT=code, BIAS=bias is not None, FIRST=first, BM=config.bm, BUFFERS=config.buffers,
        EARLY=early, COPIERS=_COPIERS if first else 1, CONSUMER_REGS=120 if config.bm < 128 else 216, PRODUCER_REGS=72,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
