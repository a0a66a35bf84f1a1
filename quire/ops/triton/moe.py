"""Mixture of experts on CUDA: routing, sorting pairs by expert, two grouped products, the weighted sum. No host sync.

A pair is (token, one of its k experts), numbered token * k + choice. Pairs are sorted by expert (`order`), every expert
is cut into tiles of BM pairs, and a tile table on the device says which expert a tile has and where its pairs start.
Grids come from the largest number of tiles there can be; programs past the real number leave at once, so the same
launch serves any routing and can be captured.

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

from quire.ops.triton.act import gate_up

_CHUNK = 1024  # pairs that one program sorts
_INLINE = 8  # chunks up to which every program counts all pairs itself
_TILE_ROWS = 64  # rows of the tile table that one program fills


class Config(NamedTuple):
    """Tile of a grouped product; BN counts result columns (a gated product reads twice as many rows of weights)."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    order: Tensor  # [P] pairs sorted by expert
    expert: Tensor  # [most tiles] of each tile; -1: there is no such tile
    start: Tensor  # [most tiles] its first place in `order`
    end: Tensor  # [E] where the pairs of an expert end
    direct: bool = False  # tile i is pair i; only `expert` is set


# --- routing


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits, bias, weights, index, tokens, scale,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    SCORE: tl.constexpr, RENORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """SCORE 0: softmax, 1: sigmoid, 2: softmax over the chosen only. Among equals the lowest expert."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = (token < tokens)[:, None] & (e < EXPERTS)[None, :]
    x = tl.load(logits + token[:, None] * EXPERTS + e[None, :], mask=inside, other=-float("inf")).to(tl.float32)
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
    choice = tl.where((e < EXPERTS)[None, :], choice, -float("inf"))
    chosen = tl.full((BLOCK_T, BLOCK_K), -float("inf"), tl.float32)
    places = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for step in range(TOP_K):
        best = tl.min(tl.where(choice == tl.max(choice, 1)[:, None], e[None, :], EXPERTS - 1), 1)
        here = e[None, :] == best[:, None]
        value = tl.sum(tl.where(here, scores, 0.0), 1)
        chosen = tl.where((j == step)[None, :], value[:, None], chosen)
        places = tl.where((j == step)[None, :], best[:, None], places)
        choice = tl.where(here, -float("inf"), choice)
    live = (j < TOP_K)[None, :]
    if SCORE == 2:
        w = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        w = w / tl.sum(w, 1)[:, None]
    else:
        w = tl.where(live, chosen, 0.0)
        if RENORM:
            w = w / (tl.sum(w, 1)[:, None] + 1e-20)
        w = w * scale
    at = token[:, None] * TOP_K + j[None, :]
    tl.store(weights + at, w, mask=live & (token < tokens)[:, None])
    tl.store(index + at, places, mask=live & (token < tokens)[:, None])


_SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}


def route(
    logits: Tensor, top_k: int, *, score: str = "softmax", renorm: bool = True, scale: float = 1.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights [T, k] float32, experts [T, k] int32). Groups of experts are the reference's business."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    index = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        block_t = 1  # one warp a token, however many there are
        _route_kernel[(triton.cdiv(tokens, block_t),)](
            logits.contiguous(), bias, weights, index, tokens, scale,
            EXPERTS=experts, BLOCK_E=triton.next_power_of_2(experts), TOP_K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k), BLOCK_T=block_t, SCORE=_SCORES[score], RENORM=renorm,
            BIAS=bias is not None, num_warps=block_t,
        )  # fmt: skip
    return weights, index


# --- sorting pairs by expert


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(index, counts, pairs, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """grid (chunks,): how many pairs of a chunk go to each expert."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(index + at, mask=at < pairs, other=0).to(tl.int32)
    e = tl.arange(0, BLOCK_E)
    tl.store(counts + tl.program_id(0) * BLOCK_E + e, tl.histogram(chosen, BLOCK_E, mask=at < pairs))


@triton.jit
def _totals(index, counts, pairs, chunks, chunk, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, INLINE: tl.constexpr):
    """(pairs of each expert, those of them in the chunks before `chunk`), both [BLOCK_E]."""
    total = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for c in range(0, chunks):
        if INLINE:
            at = c * CHUNK + tl.arange(0, CHUNK)
            chosen = tl.load(index + at, mask=at < pairs, other=0).to(tl.int32)
            found = tl.histogram(chosen, BLOCK_E, mask=at < pairs)
        else:
            found = tl.load(counts + c * BLOCK_E + tl.arange(0, BLOCK_E))
        total += found
        before += tl.where(c < chunk, found, 0)
    return total, before


@triton.jit(do_not_specialize=["pairs", "chunks", "most_tiles", "bm"])
def _sort_kernel(
    index, counts, order, tile_expert, tile_start, end, pairs, chunks, most_tiles, bm,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, TILES: tl.constexpr,
    INLINE: tl.constexpr,
):  # fmt: skip
    """grid (chunks + parts of the tile table,): place every pair of a chunk, or fill a part of the table."""
    program = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    total, before = _totals(index, counts, pairs, chunks, program, BLOCK_E, CHUNK, INLINE)
    first = tl.cumsum(total, 0) - total
    if program < chunks:
        base = first + before
        for piece in range(0, CHUNK, PIECE):
            at = program * CHUNK + piece + tl.arange(0, PIECE)
            chosen = tl.load(index + at, mask=at < pairs, other=-1).to(tl.int32)
            mine = chosen[:, None] == e[None, :]
            seen = tl.cumsum(mine.to(tl.int32), 0)
            place = tl.sum(tl.where(mine, seen - 1 + base[None, :], 0), 1)
            tl.store(order + place, at, mask=at < pairs)
            base += tl.sum(mine.to(tl.int32), 0)
    else:
        tiles = (total + bm - 1) // bm
        tile_end = tl.cumsum(tiles, 0)
        t = (program - chunks) * TILES + tl.arange(0, TILES)
        expert = tl.sum((tile_end[None, :] <= t[:, None]).to(tl.int32), 1)
        here = e[None, :] == expert[:, None]
        skipped = tl.sum(tl.where(here, (tile_end - tiles)[None, :], 0), 1)
        start = tl.sum(tl.where(here, first[None, :], 0), 1) + (t - skipped) * bm
        tl.store(tile_expert + t, tl.where(expert < EXPERTS, expert, -1), mask=t < most_tiles)
        tl.store(tile_start + t, start, mask=t < most_tiles)
        if program == chunks:
            tl.store(end + e, first + total, mask=e < EXPERTS)


def sort_pairs(index: Tensor, experts: int, bm: int) -> Tiles:
    """index [T, k] (contiguous): pairs by expert, in rising order within one."""
    pairs, device = index.numel(), index.device
    if index.shape[0] == 1:
        return Tiles(index, index, index, index, direct=True)
    chunks = triton.cdiv(pairs, _CHUNK)
    most_tiles = min(pairs, experts) + pairs // bm
    block_e = triton.next_power_of_2(experts)
    inline = chunks <= _INLINE
    order, expert, start, end = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, most_tiles, most_tiles, experts)
    )
    counts = index if inline else torch.empty((chunks, block_e), dtype=torch.int32, device=device)
    if not inline:
        _count_kernel[(chunks,)](index, counts, pairs, EXPERTS=experts, BLOCK_E=block_e, CHUNK=_CHUNK, num_warps=4)
    _sort_kernel[(chunks + triton.cdiv(most_tiles, _TILE_ROWS),)](
        index, counts, order, expert, start, end, pairs, chunks, most_tiles, bm, EXPERTS=experts, BLOCK_E=block_e,
        CHUNK=_CHUNK, PIECE=max(16, 8192 // block_e), TILES=_TILE_ROWS, INLINE=inline, num_warps=4,
    )  # fmt: skip
    return Tiles(order, expert, start, end)


# --- the grouped product


@triton.jit(do_not_specialize=["pairs", "most_tiles"])
def _experts_kernel(
    a, w, bias, out, order, tile_expert, tile_start, end, pairs, most_tiles, a_stride, w_stride_e, w_stride_n, alpha,
    limit,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of pairs times BN columns. FIRST: rows of `a` are tokens and results are in sorted order; else rows of
    `a` are in sorted order and results go to their pair. GATED: w holds gate rows, then up rows; N counts results."""
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
    a_at = a + source.to(tl.int64)[:, None] * a_stride + k[None, :]
    w_at = w + expert * w_stride_e + (n % N).to(tl.int64)[None, :] * w_stride_n + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            x, g = tl.load(a_at), tl.load(w_at)
        else:
            x = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
            g = tl.load(w_at, mask=(k < K - start)[:, None], other=0.0)
        acc = tl.dot(x, g, acc, input_precision=PRECISION)
        if GATED:
            if K % BK == 0:
                u = tl.load(w_at + N * w_stride_n)
            else:
                u = tl.load(w_at + N * w_stride_n, mask=(k < K - start)[:, None], other=0.0)
            acc_up = tl.dot(x, u, acc_up, input_precision=PRECISION)
        a_at += BK
        w_at += BK
    if BIAS:
        own = bias + expert * (2 * N if GATED else N) + n % N
        acc += tl.load(own).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(own + N).to(tl.float32)[None, :]
    if GATED:
        acc = gate_up(acc, acc_up, alpha, limit, ACT)
    target = (row if FIRST else pair).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


def product(
    a: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles, top_k: int, config: Config, *, pairs: int, first: bool,
    act: tuple[int, float, float] | None = None,
) -> Tensor:  # fmt: skip
    """One grouped product. `act` (code, alpha, limit): w is [E, 2 N, K] and the result [P, N]; else [E, N, K]."""
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
        BM=config.bm, BN=config.bn, BK=config.bk, GROUP=8, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(y, weights, out, DIM: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """grid (tokens, columns): out[t] = sum of weights[t, j] * y[t * k + j]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DIM
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + j).to(tl.float32)
        acc += weight * tl.load(y + (token * TOP_K + j) * DIM + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + column, acc.to(out.dtype.element_ty), mask=inside)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """y [T * k, dim], weights [T, k] -> [T, dim]."""
    (tokens, top_k), dim = weights.shape, y.shape[1]
    out = torch.empty((tokens, dim), dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(dim))
    _combine_kernel[(tokens, triton.cdiv(dim, block))](
        y, weights, out, DIM=dim, TOP_K=top_k, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out


def configs_of(pairs: int, experts: int, dtype: torch.dtype, *, fixed: bool = False) -> tuple[Config, Config]:
    """Tiles of the first and the second product, by how many pairs an expert has on average. `fixed`: the same for any
    number, so that no result depends on how many tokens there are."""
    each = 32 if fixed else pairs / experts
    if dtype is torch.float32:
        return (Config(16, 32, 32, 4, 3), Config(16, 32, 32, 4, 3)) if each < 32 else (Config(64, 32, 32, 4, 2),) * 2
    if each <= 8:
        return Config(16, 32, 128, 4, 4), Config(16, 64, 128, 4, 4)
    if each <= 24:
        return Config(32, 64, 128, 4, 3), Config(32, 64, 128, 4, 4)
    if each <= 64:
        return Config(64, 64, 64, 4, 4), Config(64, 128, 64, 4, 4)
    return Config(128, 128, 64, 8, 3), Config(128, 128, 64, 8, 4)


def run_experts(
    x: Tensor, weights: Tensor, index: Tensor, w1: Tensor, w2: Tensor, *, b1: Tensor | None, b2: Tensor | None,
    act: Callable[[Tensor], Tensor], codes: dict[Callable, int], configs: tuple[Config, Config] | None = None,
    fixed: bool = False,
) -> Tensor:  # fmt: skip
    """`codes`: which gated activations can join the first product; others run between the two."""
    (tokens, top_k), experts, pairs = index.shape, w1.shape[0], index.numel()
    if not tokens:
        return torch.empty_like(x)
    x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
    first, second = configs or configs_of(pairs, experts, x.dtype, fixed=fixed)
    tiles = sort_pairs(index, experts, first.bm)
    known = _fused_act(act, codes)
    h = product(x, w1, b1, tiles, top_k, first, pairs=pairs, first=True, act=known)
    if known is None:
        h = act(h).contiguous()
    y = product(h, w2, b2, tiles, top_k, second._replace(bm=first.bm), pairs=pairs, first=False)
    return combine(y, weights)


def _fused_act(act: Callable, codes: dict[Callable, int]) -> tuple[int, float, float] | None:
    """(code, alpha, limit) of an activation that the first product can apply."""
    if isinstance(act, partial):
        code = codes.get(act.func)
        return None if code is None else (code, float(act.keywords["alpha"]), float(act.keywords["limit"]))
    code = codes.get(act)
    return None if code is None else (code, 0.0, 0.0)
