"""Grouped matmuls of many rows on Hopper with specialized warps: as `product` in moe_many.py, in Gluon.

A program has two consumers, warp groups that multiply, and a producer, which fills a ring of buffers in shared memory:
weights and sorted rows by TMA, gathered rows by asynchronous copies. Both consumers use the same tile of weights, each
with its own rows of the tile. Nothing but the ring holds them together, so one multiplies while the other stores.

    producer ──full──▶ ring of (rows | weights) ──▶ consumer 0: rows 0 .. WM     ──▶ out
                 ◀─empty─                       ──▶ consumer 1: rows WM .. 2 WM  ──▶ out

A consumer whose rows lie past the end of the expert multiplies nothing. Programs are persistent.

Floor: as in moe_many.py. Needs: 16-bit weights, an inner dimension that is a multiple of 64, Hopper's instructions.
"""

from __future__ import annotations

from functools import cache
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

BK = gl.constexpr(64)  # of the inner dimension in a buffer: a row of 128 bytes, what the swizzle covers
_COPIERS = 4  # warps of a producer that gathers rows


class SplitConfig(NamedTuple):
    """`bm` rows, half of them a consumer's; `columns`: rows of weights, with a gate half of them gates."""

    bm: int = 128
    columns: int = 256
    buffers: int = 4
    group: int = 8

    def product(
        self, a: Tensor, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int, *,
        pairs: int, act: tuple[int, float, float] | None, early: bool = False,
    ) -> Tensor:  # fmt: skip
        return product(a, w, bias, tiles, top_k, pairs=pairs, act=act, config=self, early=early)


@gluon.jit
def _place(work, tiles, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """(tile, column): down GROUP tiles, then to the next column."""
    band, inner = work // (GROUP * COLUMNS), work % (GROUP * COLUMNS)
    height = gl.minimum(tiles - band * GROUP, GROUP)
    return band * GROUP + inner % height, inner // height


@gluon.jit
def next_buffer(at, phase, BUFFERS: gl.constexpr):
    at += 1
    wrapped = at == BUFFERS
    return gl.where(wrapped, 0, at), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def buffer_before(at, BUFFERS: gl.constexpr):
    """Computed: a loop of Triton 3.6 does not carry a variable along that is set to another one of those it carries."""
    return gl.where(at == 0, BUFFERS - 1, at - 1)


@gluon.jit
def _fill_weights(w, row, k, full, to, N: gl.constexpr, BN: gl.constexpr, FIRST: gl.constexpr):
    if FIRST:
        HALF: gl.constexpr = BN // 2
        load_tile(w, [row, k], full, to.slice(0, HALF, 0))
        load_tile(w, [row + N, k], full, to.slice(HALF, HALF, 0))
    else:
        load_tile(w, [row, k], full, to)


@gluon.jit
def gathered(order, first, last, a_stride, TOP_K: gl.constexpr, WM: gl.constexpr, lay: gl.constexpr):
    """Where a consumer's rows begin among the tokens; those past the end are the first token's."""
    m = first + gl.arange(0, WM, layout=gl.SliceLayout(1, lay))
    token = gl.load(order + m, mask=m < last, other=0) // TOP_K
    return (token * a_stride)[:, None] + gl.arange(0, BK, layout=gl.SliceLayout(0, lay))[None, :]


@gluon.jit
def _produce(
    a, w, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, a_stride,
    EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, WM: gl.constexpr, BN: gl.constexpr,
    BUFFERS: gl.constexpr, GROUP: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    RESULTS: gl.constexpr = BN // 2 if FIRST else BN
    COLUMNS: gl.constexpr = (N + RESULTS - 1) // RESULTS
    WEIGHT_ROWS: gl.constexpr = 2 * N if FIRST else N
    BYTES: gl.constexpr = (BN if FIRST else BN + 2 * WM) * BK * 2
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tiles = gl.load(end + EXPERTS)
    at, phase = 0, 1
    for work in range(gl.program_id(0), tiles * COLUMNS, programs):
        tile, column = _place(work, tiles, COLUMNS, GROUP)
        expert, first = gl.load(tile_expert + tile), gl.load(tile_start + tile)
        row = expert * WEIGHT_ROWS + column * RESULTS
        if FIRST:
            last = gl.load(end + expert)
            from0 = gathered(order, first, last, a_stride, TOP_K, WM, lay)
            from1 = gathered(order, first + WM, last, a_stride, TOP_K, WM, lay)
            for start in range(0, K, BK):
                mbarrier.wait(empty.index(at), phase)
                mbarrier.expect(full.index(at), BYTES)
                _fill_weights(w, row, start, full.index(at), weights.index(at), N, BN, FIRST)
                async_copy.async_copy_global_to_shared(rows.index(2 * at), a + start + from0)
                async_copy.async_copy_global_to_shared(rows.index(2 * at + 1), a + start + from1)
                async_copy.mbarrier_arrive(full.index(at), increment_count=False)
                at, phase = next_buffer(at, phase, BUFFERS)
        else:
            for start in range(0, K, BK):
                mbarrier.wait(empty.index(at), phase)
                mbarrier.expect(full.index(at), BYTES)
                load_tile(a, [first, start], full.index(at), rows.index(2 * at))
                load_tile(a, [first + WM, start], full.index(at), rows.index(2 * at + 1))
                _fill_weights(w, row, start, full.index(at), weights.index(at), N, BN, FIRST)
                at, phase = next_buffer(at, phase, BUFFERS)


@gluon.constexpr_function
def _wide(rows, columns):
    """Of a warp group: rows where `wgmma` leaves them, eight adjacent columns in a thread."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, c] for c in (32, 64, 128) if c < columns] + [[r, 0] for r in (64,) if r < rows]
    return gl.DistributedLinearLayout(
        registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, columns]
    )


@gluon.jit
def _store(
    acc, bias, out, order, last, expert, first, column, alpha, limit,
    N: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Bias, activation and store of a consumer's rows. Threads exchange 16-bit results so that each has eight adjacent
    columns."""
    WM: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1] // 2 if FIRST else acc.shape[1]
    if FIRST:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [WM, 2, BN]), [0, 2, 1]))
        if BIAS:
            c = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, gate.type.layout))
            gate += gl.load(bias + expert * 2 * N + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias + expert * 2 * N + N + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
        result = gate_up(gate, up, alpha, limit, ACT)
    else:
        result = acc
        if BIAS:
            c = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, acc.type.layout))
            result += gl.load(bias + expert * N + c, mask=c < N, other=0.0).to(gl.float32)[None, :]
    wide: gl.constexpr = _wide(WM, BN)
    result = gl.convert_layout(result.to(out.dtype.element_ty), wide)
    m = first + gl.arange(0, WM, layout=gl.SliceLayout(1, wide))
    n = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, wide))
    live = m < last
    target = m if FIRST else gl.load(order + m, mask=live, other=0)
    at = out + target.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(at, result, mask=live[:, None] & (n < N)[None, :])


@gluon.jit
def _consume(
    bias, out, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, alpha, limit,
    WHICH: gl.constexpr, EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr, WM: gl.constexpr, BN: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    RESULTS: gl.constexpr = BN // 2 if FIRST else BN
    COLUMNS: gl.constexpr = (N + RESULTS - 1) // RESULTS
    own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    tiles = gl.load(end + EXPERTS)
    at, phase = 0, 0
    for work in range(gl.program_id(0), tiles * COLUMNS, programs):
        tile, column = _place(work, tiles, COLUMNS, GROUP)
        expert, first = gl.load(tile_expert + tile), gl.load(tile_start + tile) + WHICH * WM
        last = gl.load(end + expert)
        if first < last:
            acc = gl.zeros([WM, BN], gl.float32, layout=own)
            for start in range(0, K, BK):
                mbarrier.wait(full.index(at), phase)
                if FIRST:  # its rows were not written by TMA
                    fence_async_shared()
                mine, theirs = rows.index(2 * at + WHICH), weights.index(at).permute((1, 0))
                acc = warpgroup_mma(mine, theirs, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(buffer_before(at, BUFFERS)), count=1, pred=start > 0)
                at, phase = next_buffer(at, phase, BUFFERS)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(buffer_before(at, BUFFERS)), count=1)
            _store(acc, bias, out, order, last, expert, first, column, alpha, limit, N, ACT, BIAS, FIRST)
        else:
            for _start in range(0, K, BK):
                mbarrier.wait(full.index(at), phase)
                mbarrier.arrive(empty.index(at), count=1)
                at, phase = next_buffer(at, phase, BUFFERS)


@gluon.jit(do_not_specialize=["programs"])
def _split_kernel(
    a, w, bias, out, order, tile_expert, tile_start, end, programs, a_stride, alpha, limit,
    EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr, FIRST: gl.constexpr, WM: gl.constexpr, BN: gl.constexpr, BUFFERS: gl.constexpr,
    GROUP: gl.constexpr, EARLY: gl.constexpr, COPIERS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """grid (programs,). w: a descriptor; a: one too, or with FIRST the tokens themselves."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(w.dtype, [2 * BUFFERS, WM, BK], layout)
    weights = gl.allocate_shared_memory(w.dtype, [BUFFERS, BN, BK], layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(BUFFERS):
        mbarrier.init(full.index(at), count=1 + 32 * COPIERS if FIRST else 1)
        mbarrier.init(empty.index(at), count=2)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gl.warp_specialize([
        (_consume, (bias, out, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, alpha, limit,
                    0, EXPERTS, N, K, ACT, BIAS, WM, BN, BUFFERS, GROUP, FIRST)),
        (_consume, (bias, out, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, alpha, limit,
                    1, EXPERTS, N, K, ACT, BIAS, WM, BN, BUFFERS, GROUP, FIRST)),
        (_produce, (a, w, order, tile_expert, tile_start, end, rows, weights, full, empty, programs, a_stride,
                    EXPERTS, N, K, TOP_K, WM, BN, BUFFERS, GROUP, FIRST)),
    ], [4, COPIERS], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def product(
    a: Tensor, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int,
    *, pairs: int, act: tuple[int, float, float] | None, config: SplitConfig, early: bool = False,
) -> Tensor:  # fmt: skip
    """As moe_many.product."""
    order, expert, start, end = tiles
    code, alpha, limit = act or (0, 0.0, 0.0)
    first = act is not None
    experts, rows, k = w.shape
    n = rows // 2 if first else rows
    out = torch.empty((pairs, n), dtype=a.dtype, device=a.device)
    box = config.columns // 2 if first else config.columns
    weights = describe(w.view(experts * rows, k), (box, BK.value))
    source = a if first else describe(a, (config.bm // 2, BK.value))
    programs = min(expert.shape[0] * -(-n // box), processors(a.device))
    copiers, registers = (_COPIERS, (216, 72)) if first else (1, (232, 40))
    _split_kernel[(programs,)](
        source, weights, bias, out, order, expert, start, end, programs, a.stride(0), alpha, limit, EXPERTS=experts,
        N=n, K=k, TOP_K=top_k, ACT=code, BIAS=bias is not None, FIRST=first, WM=config.bm // 2, BN=config.columns,
        BUFFERS=config.buffers, GROUP=config.group, EARLY=early, COPIERS=copiers, CONSUMER_REGS=registers[0],
        PRODUCER_REGS=registers[1], num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
