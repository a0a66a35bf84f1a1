"""Mixture of experts on CUDA: routing, sorting pairs by expert, two grouped matmuls, the weighted sum. No host sync.

A pair is (token, one of its k experts), numbered token * k + choice. Pairs are sorted by expert (`order`), those of an
expert are split into tiles of BM, and a tile table on the device has the expert and the first pair of each tile.
Grids are sized for the largest possible number of tiles; programs past the actual number return at once, so the same
launch works for any routing and can be captured.

Where ranks divide the experts (SHARE), `index` is -1 for what another rank has. Such pairs are not sorted and have no
tile; nothing is computed or written for them, so the sum leaves them out: what lies in their places may not be numbers.

    route ──▶ weights, index [T, k] ──_sort_kernel──▶ order [P], tiles ──_experts_kernel──▶ act(x w1) [P, F], sorted
                                   ──_experts_kernel──▶ (.. w2) [P, dim], by pair ──_combine_kernel──▶ [T, dim]

Floor, per layer: 6 P dim F flops, and the weights of every expert that is touched, 6 dim F bytes each (bf16). 128
experts of 2048 x 768, k = 8: 1 token, 8 experts, 75 MB, 18 us; 32 tokens, about 111 experts, 1.05 GB, 245 us; 256
tokens, all, 1.2 GB, 282 us; 16,384 tokens, 1.24 TFLOP, 1.55 ms at 800 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.parts import PartialSums
from quire.ops.triton import moe_few, moe_many
from quire.ops.triton.act import gate_up

FEW_TOKENS = 4  # up to which each pair reads its expert separately (moe_few.py)
_TILE_ROWS = 32  # rows of the tile table that one program fills


class MoeTileConfig(NamedTuple):
    """Tile of a grouped matmul; BN counts result columns (a gated matmul reads twice as many rows of weights)."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


class SortConfig(NamedTuple):
    """`piece`: pairs that a program places, by comparing each with `width` others at once; `chunk`: pairs that are
    counted together beforehand, 0: none are, and each is compared with all."""

    chunk: int
    piece: int
    width: int
    warps: int


FEW_PAIRS = SortConfig(0, 16, 512, 4)
_MOST_INLINE = 4096  # pairs up to which each is compared with all
MANY_PAIRS = SortConfig(256, 32, 32, 4)
_SCAN = (256, 8)  # chunks and experts of which a program adds up the counts
_LEAST_BINS = 8  # of a histogram; a rank may have a single expert, and fewer bins have not been tried on a GPU


class ExpertTiles(NamedTuple):
    order: Tensor  # [P] pairs sorted by expert; those of other ranks are not among them
    expert: Tensor  # [most tiles] of each tile; -1: there is no such tile
    start: Tensor  # [most tiles] its first index in `order`
    end: Tensor  # [E + 1] end of each expert's pairs; last, the number of tiles
    direct: bool = False  # tile i is pair i; only `expert` is set


# --- routing


@triton.jit
def _scores(logits, bias, at, inside, e, EXPERTS: tl.constexpr, SCORE: tl.constexpr, BIAS: tl.constexpr):
    """(scores, selection keys), [tokens, experts]. SCORE 0: softmax, 1: sigmoid, 2: plain logits."""
    x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    if SCORE == 0:
        scores = tl.exp(x - tl.max(x, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    elif SCORE == 1:
        scores = tl.sigmoid(x)
    else:
        scores = x
    choice = scores
    if BIAS:
        choice = choice + tl.load(bias + e, mask=e < EXPERTS, other=0.0)[None, :]
    return scores, tl.where((e < EXPERTS)[None, :], choice, -float("inf"))


@triton.jit
def _ordered(x):
    """A float as an int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _as_float(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weights_of(chosen, live, scale, SCORE: tl.constexpr, RENORM: tl.constexpr):
    """From the scores of the selected experts [tokens, k] to their weights."""
    if SCORE == 2:
        w = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        return w / tl.sum(w, 1)[:, None]
    w = tl.where(live, chosen, 0.0)
    if RENORM:
        w = w / (tl.sum(w, 1)[:, None] + 1e-20)
    return w * scale


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits, bias, weights, index, tokens, scale,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    SCORE: tl.constexpr, RENORM: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Select one expert after another; ties go to the lowest."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = (token < tokens)[:, None] & (e < EXPERTS)[None, :]
    scores, choice = _scores(
        logits, bias, token[:, None] * EXPERTS + e[None, :], inside, e, EXPERTS, SCORE, BIAS
    )  # fmt: skip
    chosen = tl.full((BLOCK_T, BLOCK_K), -float("inf"), tl.float32)
    experts = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    key = (_ordered(choice).to(tl.int64) << 32) | (BLOCK_E - 1 - e)[
        None, :
    ]  # one reduction finds both value and expert
    for step in range(TOP_K):
        top = tl.max(key, 1)
        best = tl.minimum(BLOCK_E - 1 - (top & 0x7FFFFFFF).to(tl.int32), EXPERTS - 1)
        here = e[None, :] == best[:, None]
        if BIAS:
            value = tl.sum(tl.where(here, scores, 0.0), 1)
        else:
            value = _as_float((top >> 32).to(tl.int32))
        chosen = tl.where((j == step)[None, :], value[:, None], chosen)
        experts = tl.where((j == step)[None, :], best[:, None], experts)
        key = tl.where(here, -(1 << 63), key)  # below every other key
    live = (j < TOP_K)[None, :]
    w = _weights_of(chosen, live, scale, SCORE, RENORM)
    at = token[:, None] * TOP_K + j[None, :]
    tl.store(weights + at, w.to(weights.dtype.element_ty), mask=live & (token < tokens)[:, None])
    tl.store(index + at, experts, mask=live & (token < tokens)[:, None])


_SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}


def route(
    logits: Tensor, top_k: int, *, score: str = "softmax", renorm: bool = True, scale: float = 1.0,
    bias: Tensor | None = None, dtype: torch.dtype = torch.float32, early: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights [T, k] of `dtype`, experts [T, k] int32). Groups of experts are left to the reference."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=dtype, device=logits.device)
    index = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, index
    block_e, block_k = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
    launch = {"launch_pdl": True} if early else {}
    _route_kernel[(tokens,)](  # one warp per token, whatever their number
        logits.contiguous(), bias, weights, index, tokens, scale, EXPERTS=experts, BLOCK_E=block_e, TOP_K=top_k,
        BLOCK_K=block_k, BLOCK_T=1, SCORE=_SCORES[score], RENORM=renorm, BIAS=bias is not None, EARLY=early,
        num_warps=1, **launch,
    )  # fmt: skip
    return weights, index


# --- sorting pairs by expert


@triton.jit
def _counted(index, at, pairs, BLOCK_E: tl.constexpr, SHARE: tl.constexpr):
    """How many of some pairs go to each expert, [BLOCK_E]."""
    inside = at < pairs
    chosen = tl.load(index + at, mask=inside, other=0).to(tl.int32)
    if SHARE:
        inside = inside & (chosen >= 0)
        chosen = tl.maximum(chosen, 0)
    return tl.histogram(chosen, BLOCK_E, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    index, counts, pairs, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """grid (chunks,): how many pairs of a chunk go to each expert."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    e = tl.arange(0, BLOCK_E)
    tl.store(counts + tl.program_id(0) * BLOCK_E + e, _counted(index, at, pairs, BLOCK_E, SHARE))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counts, chunks, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """grid (BLOCK_E / COLUMNS,): counts [chunks + 1, BLOCK_E] become those of the chunks before; last, of all."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, chunks, ROWS):
        c = start + tl.arange(0, ROWS)
        at, inside = counts + c[:, None] * BLOCK_E + e[None, :], (c < chunks)[:, None]
        here = tl.load(at, mask=inside, other=0)
        tl.store(at, before[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        before += tl.sum(here, 0)
    tl.store(counts + chunks * BLOCK_E + e, before)


@triton.jit
def _totals(
    index, counts, pairs, chunks, BLOCK_E: tl.constexpr, WIDTH: tl.constexpr, INLINE: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Pairs of each expert, [BLOCK_E]. INLINE: they were not counted before."""
    if INLINE:
        total = tl.zeros((BLOCK_E,), tl.int32)
        for start in range(0, pairs, WIDTH):
            total += _counted(index, start + tl.arange(0, WIDTH), pairs, BLOCK_E, SHARE)
        return total
    else:
        return tl.load(counts + chunks * BLOCK_E + tl.arange(0, BLOCK_E))


@triton.jit
def _ranks(
    index, p, begin, end, pairs, PIECE: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, SHARE: tl.constexpr
):  # fmt: skip
    """How many of the pairs from begin to end sort before each of `p` [PIECE]: those of lower experts (ALL) and the
    earlier ones of the same expert."""
    mine = tl.load(index + p, mask=p < pairs, other=0).to(tl.int32)
    before = tl.zeros((PIECE, WIDTH), tl.int32)
    for start in range(begin, end, WIDTH):
        q = start + tl.arange(0, WIDTH)
        theirs = tl.load(index + q, mask=q < end, other=1 << 12).to(tl.int32)
        if SHARE:
            theirs = tl.where(theirs < 0, 1 << 12, theirs)  # before nobody
        low, high = (mine << 18)[:, None], ((mine << 18) | (p - begin))[:, None]  # an expert, then the pair's number
        key = ((theirs << 18) | (q - begin))[None, :]
        if ALL:
            before += (key < high).to(tl.int32)
        else:
            before += ((key < high) & (key >= low)).to(tl.int32)
    return mine, tl.sum(before, 1)


@triton.jit
def _place(
    index, counts, order, first, pairs, program, e,
    BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr, INLINE: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Sort PIECE pairs. `first`: where each expert's pairs begin."""
    p = program * PIECE + tl.arange(0, PIECE)
    if INLINE:
        mine, rank = _ranks(index, p, 0, pairs, pairs, PIECE, WIDTH, True, SHARE)
    else:
        chunk = program * PIECE // CHUNK
        end = tl.minimum(program * PIECE + PIECE, pairs)
        mine, rank = _ranks(index, p, chunk * CHUNK, end, pairs, PIECE, WIDTH, False, SHARE)
        expert = tl.maximum(mine, 0) if SHARE else mine
        rank += tl.gather(first + tl.load(counts + chunk * BLOCK_E + e), expert, 0)
    inside = p < pairs
    if SHARE:
        inside = inside & (mine >= 0)
    tl.store(order + rank, p, mask=inside)


@triton.jit(do_not_specialize=["pairs", "chunks", "placers", "most_tiles", "bm"])
def _sort_kernel(
    index, counts, order, tile_expert, tile_start, end, pairs, chunks, placers, most_tiles, bm,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr, INLINE: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (placers + parts of the tile table,): sort PIECE pairs, or fill a part of the table."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    if program < placers:
        first = tl.zeros((BLOCK_E,), tl.int32)
        if not INLINE:
            total = _totals(index, counts, pairs, chunks, BLOCK_E, WIDTH, INLINE, SHARE)
            first = tl.cumsum(total, 0) - total
        _place(index, counts, order, first, pairs, program, e, BLOCK_E, CHUNK, PIECE, WIDTH, INLINE, SHARE)
    else:
        total = _totals(index, counts, pairs, chunks, BLOCK_E, WIDTH, INLINE, SHARE)
        first = tl.cumsum(total, 0) - total
        tiles = (total + bm - 1) // bm
        tile_end = tl.cumsum(tiles, 0)
        t = (program - placers) * TILES + tl.arange(0, TILES)
        expert = tl.sum((tile_end[None, :] <= t[:, None]).to(tl.int32), 1)
        here = e[None, :] == expert[:, None]
        skipped = tl.sum(tl.where(here, (tile_end - tiles)[None, :], 0), 1)
        start = tl.sum(tl.where(here, first[None, :], 0), 1) + (t - skipped) * bm
        tl.store(tile_expert + t, tl.where(expert < EXPERTS, expert, -1), mask=t < most_tiles)
        tl.store(tile_start + t, start, mask=t < most_tiles)
        if program == placers:
            tl.store(end + e, first + total, mask=e < EXPERTS)
            tl.store(end + EXPERTS, tl.sum(tiles, 0))


def sort_config_of(pairs: int) -> SortConfig:
    return FEW_PAIRS if pairs <= _MOST_INLINE else MANY_PAIRS


def bins_of(experts: int) -> int:
    return max(_LEAST_BINS, triton.next_power_of_2(experts))


def sort_pairs(
    index: Tensor, experts: int, bm: int, *, share: bool = False, early: bool = False, config: SortConfig | None = None
) -> ExpertTiles:
    """index [T, k] (contiguous): pairs by expert, in ascending order within one. `share`: -1 is among them."""
    pairs, device = index.numel(), index.device
    if index.shape[0] == 1:
        return ExpertTiles(index, index, index, index, direct=True)
    config = config or sort_config_of(pairs)
    inline = config.chunk == 0
    most_tiles = min(pairs, experts) + pairs // bm
    block_e = bins_of(experts)
    order, expert, start, end = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, most_tiles, most_tiles, experts + 1)
    )
    chunks = 0 if inline else triton.cdiv(pairs, config.chunk)
    counts = index if inline else _count_pairs(index, block_e, config.chunk, share, early)
    placers = triton.cdiv(pairs, config.piece)
    _sort_kernel[(placers + triton.cdiv(most_tiles, _TILE_ROWS),)](
        index, counts, order, expert, start, end, pairs, chunks, placers, most_tiles, bm, EXPERTS=experts,
        BLOCK_E=block_e, CHUNK=config.chunk, PIECE=config.piece, WIDTH=config.width, TILES=_TILE_ROWS, INLINE=inline,
        SHARE=share, EARLY=early, num_warps=config.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return ExpertTiles(order, expert, start, end)


def _count_pairs(index: Tensor, block_e: int, chunk: int, share: bool, early: bool) -> Tensor:
    """[chunks + 1, block_e]: pairs of each expert in the chunks before; last, in all."""
    pairs, launch = index.numel(), {"launch_pdl": True} if early else {}
    chunks = triton.cdiv(pairs, chunk)
    counts = torch.empty((chunks + 1, block_e), dtype=torch.int32, device=index.device)
    _count_kernel[(chunks,)](
        index, counts, pairs, BLOCK_E=block_e, CHUNK=chunk, SHARE=share, EARLY=early, num_warps=4, **launch
    )
    rows, columns = _SCAN
    _scan_kernel[(triton.cdiv(block_e, columns),)](
        counts, chunks, BLOCK_E=block_e, ROWS=rows, COLUMNS=columns, EARLY=early, num_warps=4, **launch
    )
    return counts


# --- the grouped matmul


@triton.jit(do_not_specialize=["pairs", "most_tiles"])
def _experts_kernel(
    a, w, bias, out, order, tile_expert, tile_start, end, pairs, most_tiles, a_stride, w_stride_e, w_stride_n, alpha,
    limit,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of pairs times BN columns. FIRST: rows of `a` are tokens and results are in sorted order; else rows of
    `a` are in sorted order and results go to their pair. GATED: w holds gate rows, then up rows; N counts results."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    columns: tl.constexpr = (N + BN - 1) // BN
    program = tl.program_id(0)
    group, inner = program // (GROUP * columns), program % (GROUP * columns)
    size = tl.minimum(most_tiles - group * GROUP, GROUP)
    tile, column = group * GROUP + inner % size, inner // size
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.arange(0, BM)
    if DIRECT:
        row, live = tile + row, row < 1
        pair = tl.where(live, row, tile)
    else:
        row = tl.load(tile_start + tile) + row
        live = row < tl.load(end + expert)
        pair = tl.load(order + row, mask=live, other=0)
    source = pair // TOP_K if FIRST else tl.where(live, row, 0)
    n, k = column * BN + tl.arange(0, BN), tl.arange(0, BK)
    if GATED:  # gate and up rows interleaved: one matmul, whose adjacent columns form pairs
        both = tl.arange(0, 2 * BN)
        w_row = (column * BN + both // 2) % N + both % 2 * N
    else:
        w_row = n % N
    a_at = a + source.to(tl.int64)[:, None] * a_stride + k[None, :]
    w_at = w + expert * w_stride_e + w_row.to(tl.int64)[None, :] * w_stride_n + k[:, None]
    acc = tl.zeros((BM, 2 * BN if GATED else BN), tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            x, y = tl.load(a_at), tl.load(w_at)
        else:
            x = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
            y = tl.load(w_at, mask=(k < K - start)[:, None], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        a_at += BK
        w_at += BK
    if BIAS:
        acc += tl.load(bias + expert * (2 * N if GATED else N) + w_row).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BM, BN, 2)))
        acc = gate_up(gate, up, alpha, limit, ACT)
    target = (row if FIRST else pair).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


def product(
    a: Tensor, w: Tensor, bias: Tensor | None, tiles: ExpertTiles, top_k: int, config: MoeTileConfig, *,
    pairs: int, first: bool, act: tuple[int, float, float] | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """One grouped matmul. `act` (code, alpha, limit): w is [E, 2 N, K] and the result [P, N]; else [E, N, K]."""
    gated = act is not None
    code, alpha, limit = act or (0, 0.0, 0.0)
    rows, k = w.shape[1:]
    n = rows // 2 if gated else rows
    out = torch.empty((pairs, n), dtype=a.dtype, device=a.device)
    most_tiles = pairs if tiles.direct else tiles.expert.shape[0]
    _experts_kernel[(most_tiles * triton.cdiv(n, config.bn),)](
        a, w, bias, out, tiles.order, tiles.expert, tiles.start, tiles.end, pairs, most_tiles, a.stride(0),
        w.stride(0), w.stride(1), alpha, limit, N=n, K=k, TOP_K=top_k, ACT=code, BIAS=bias is not None, FIRST=first,
        GATED=gated, DIRECT=tiles.direct, PRECISION="ieee" if a.dtype is torch.float32 else "tf32",
        BM=config.bm, BN=config.bn, BK=config.bk, GROUP=8, EARLY=early, num_warps=config.warps,
        num_stages=config.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    y, weights, index, stream, out, DIM: tl.constexpr, TOP_K: tl.constexpr, SHARE: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (tokens, columns): out[t] = sum of weights[t, j] * y[t * k + j]. ADD: rounded, and added to stream[t].
    SHARE: pairs whose index is -1 are left out."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DIM
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + j).to(tl.float32)
        live = inside
        if SHARE:
            live = inside & (tl.load(index + token * TOP_K + j) >= 0)
        part = tl.load(y + (token * TOP_K + j) * DIM + column, mask=live, other=0.0).to(tl.float32)
        acc = tl.fma(tl.broadcast_to(weight, (BLOCK,)), part, acc)  # as norms do: the same bits
    kind: tl.constexpr = out.dtype.element_ty
    if ADD:
        acc = acc.to(kind).to(tl.float32)
        acc += tl.load(stream + token * DIM + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + column, acc.to(kind), mask=inside)


def combine(
    y: Tensor, weights: Tensor, stream: Tensor | None = None, *, index: Tensor | None = None, early: bool = False
) -> Tensor:
    """y [T * k, dim], weights [T, k] (and stream [T, dim], contiguous) -> [T, dim]. `index` [T, k]: only pairs that do
    not have -1 there."""
    (tokens, top_k), dim = weights.shape, y.shape[1]
    out = torch.empty((tokens, dim), dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(dim))
    _combine_kernel[(tokens, triton.cdiv(dim, block))](
        y, weights, index, stream, out, DIM=dim, TOP_K=top_k, SHARE=index is not None, ADD=stream is not None,
        BLOCK=block, EARLY=early, num_warps=max(1, block // 256), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


Config = MoeTileConfig | moe_many.MoeManyConfig


def configs_of(
    pairs: int, experts: int, dtype: torch.dtype, *, fixed: bool = False
) -> tuple[MoeTileConfig, MoeTileConfig]:
    """Tiles of the first and the second matmul, by the average number of pairs per expert, as measured on an H200.
    `experts`: those of all ranks, if ranks divide them. `fixed`: no result may depend on the number of tokens. Tensor
    cores sum in one order whatever the tile; in float32 a single tile size is used."""
    each = 32 if fixed and dtype is torch.float32 else pairs / experts
    if dtype is torch.float32:
        return (MoeTileConfig(16, 32, 32, 4, 3) if each < 32 else MoeTileConfig(64, 32, 32, 4, 2),) * 2
    if each <= 12:
        return MoeTileConfig(16, 64, 128, 4, 3), MoeTileConfig(16, 128, 128, 4, 3)
    if each <= 48:
        return MoeTileConfig(32, 64, 128, 4, 3), MoeTileConfig(32, 128, 128, 4, 3)
    if each <= 96:
        return MoeTileConfig(64, 128, 64, 8, 3), MoeTileConfig(64, 256, 64, 8, 3)
    return MoeTileConfig(128, 128, 64, 8, 3), MoeTileConfig(128, 256, 64, 8, 3)


def tma_configs_of(pairs: int, experts: int) -> tuple[Config, Config]:
    """As configs_of, where operands may be read through descriptors. Rows of the first matmul are gathered: with few of
    them, descriptors gain nothing for its weights either."""
    each = pairs / experts
    if each <= 12:
        return MoeTileConfig(16, 64, 128, 4, 3), moe_many.MoeManyConfig(16, 128, 128, 4, 3, resident=False)
    if each <= 26:
        return MoeTileConfig(32, 64, 128, 4, 3), moe_many.MoeManyConfig(32, 128, 128, 4, 3, resident=False)
    if each <= 64:
        return moe_many.MoeManyConfig(64, 128, 64, 4, 4, resident=False), moe_many.MoeManyConfig(64, 128, 128, 4, 4)
    if each <= 640:
        return moe_many.FIRST._replace(stages=4, resident=False), moe_many.SECOND._replace(stages=4)
    return moe_many.FIRST, moe_many.SECOND


def run_experts(
    x: Tensor, weights: Tensor, index: Tensor, w1: Tensor, w2: Tensor, *, b1: Tensor | None, b2: Tensor | None,
    act: Callable[[Tensor], Tensor], codes: dict[Callable, int], stream: Tensor | None = None,
    in_parts: bool = False, all_experts: int = 0, configs: tuple[Config, Config] | None = None, fixed: bool = False,
    early: bool = False,
) -> Tensor | PartialSums:  # fmt: skip
    """`codes`: the gated activations that can be fused into the first matmul; others run between the two. `in_parts`:
    the weighted sum is left to a norm, if there are more than a few tokens and all experts are here. `fixed`: results
    do not depend on the number of tokens. `early`: see few.py."""
    (tokens, top_k), experts, pairs, share = index.shape, w1.shape[0], index.numel(), all_experts > 0
    if not tokens:
        return torch.empty_like(x)
    x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
    stream = None if stream is None else stream.contiguous()
    known = fused_act(act, codes)
    if configs is None and tokens <= FEW_TOKENS and not fixed:
        h = moe_few.up(x, index, w1, b1, known, share=share, early=early)
        if known is None:
            h, early = act(h).contiguous(), False
        return moe_few.down(h, weights, index, w2, b2, stream, share=share, early=early)
    if configs is None:
        if known is not None and tokens > 1 and moe_many.fits(x, w1, w2):
            configs = tma_configs_of(pairs, all_experts or experts)
        else:
            configs = configs_of(pairs, all_experts or experts, x.dtype, fixed=fixed)
    first, second = configs
    tiles = sort_pairs(index, experts, first.bm, share=share, early=early)
    h = _matmul(x, w1, b1, tiles, top_k, first, pairs, True, known, early)
    if known is None:
        h = act(h).contiguous()
    y = _matmul(h, w2, b2, tiles, top_k, second._replace(bm=first.bm), pairs, False, None, early)
    if in_parts and stream is None and not share:
        return PartialSums(y.view(tokens, top_k, -1).transpose(0, 1), y.dtype, weights)
    return combine(y, weights, stream, index=index if share else None, early=early)


def _matmul(
    a: Tensor, w: Tensor, bias: Tensor | None, tiles: ExpertTiles, top_k: int, config: Config, pairs: int, first: bool,
    act: tuple[int, float, float] | None, early: bool,
) -> Tensor:  # fmt: skip
    if isinstance(config, MoeTileConfig):
        return product(a, w, bias, tiles, top_k, config, pairs=pairs, first=first, act=act, early=early)
    return moe_many.product(a, w, bias, tiles[:4], top_k, pairs=pairs, act=act, config=config, early=early)


def fused_act(act: Callable, codes: dict[Callable, int]) -> tuple[int, float, float] | None:
    """(code, alpha, limit) of an activation that the first matmul can apply."""
    if isinstance(act, partial):
        code = codes.get(act.func)
        return None if code is None else (code, float(act.keywords["alpha"]), float(act.keywords["limit"]))
    code = codes.get(act)
    return None if code is None else (code, 0.0, 0.0)
