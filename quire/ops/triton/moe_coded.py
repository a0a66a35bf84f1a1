"""Experts of 8 and 4 bits on CUDA: the grouped matmuls of moe.py, whose weights are decoded in registers.

    route, sort_pairs (moe.py) ──_coded_kernel──▶ act(x w1) [P, F], sorted ──_coded_kernel──▶ (.. w2) [P, dim] ──combine

Codes become numbers of the input's type before they are multiplied: exactly, but for the scales of blocks narrower than
a step (4 bits in groups of 16 to 64 columns), which are multiplied into them first. Scales of wider blocks multiply the
sums of a step, those of rows the result. 8-bit weights are multiplied by inputs that are rounded to 8 bits too, by
moe_bytes.py where sizes and scales allow it, else here, with many pairs per expert.

Tiles may be swapped: weights are then the left operand, which tensor cores take from registers, and tokens the right.
Floor, per layer: 3 dim F codes of every expert that is touched, and 6 P dim F operations. 128 experts of 2048 x 768, 8
bits: 604 MB, 141 us; 32 experts of 2880 x 2880, 4.25 bits: 423 MB, 98 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.coded_experts import ExpertCodes
from quire.ops.triton import moe, moe_bytes, moe_coded_few, moe_few
from quire.ops.triton.act import gate_up
from quire.ops.triton.decode import scales_at, spread, values_of, zeros_at
from quire.ops.triton.moe_bytes import GROUP, BytesConfig, RoundedTokens, of_rows, of_tokens, round_rows, times
from quire.ops.triton.moe_coded_few import CodedFewConfig, constants
from quire.ops.triton.sizes import cdiv

ROUND_FROM = 96  # average pairs per expert, from which inputs are rounded to 8 bits


class CodedTileConfig(NamedTuple):
    """Tile of a grouped matmul; BN counts result columns. Codes of 4 bits are read in steps of 128 columns."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = True


# Of 8-bit inputs and weights, both read by the tensor cores from shared memory: the first and the second matmul. With
# scales of blocks, the sums of a step are kept beside those of all.
ROUNDED_ROWS = (CodedTileConfig(128, 128, 128, 8, 3, swap=False), CodedTileConfig(128, 256, 128, 8, 3, swap=False))
ROUNDED_BLOCKS = (CodedTileConfig(128, 64, 128, 8, 3, swap=False), CodedTileConfig(128, 128, 128, 8, 3, swap=False))


@triton.jit
def _sum_bytes(
    acc, a, a_scale, w, scale, source, rows, grid, K: tl.constexpr, GRID_K: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr, ROUNDED: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Codes of 8 bits. SCALED: BLOCK_K is a multiple of BK. ROUNDED: rows of `a` are codes too, with a scale for each
    128 columns if the weights have some for blocks, else one."""
    k = tl.arange(0, BK)
    a_at = a + source[:, None] * K + k[None, :]
    w_at = w + rows[:, None] * K + k[None, :]
    groups: tl.constexpr = (K + 127) // 128
    for start in range(0, K, BK):
        if K % BK == 0:
            x, y = tl.load(a_at), tl.load(w_at)
        else:
            x = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
            y = tl.load(w_at, mask=(k < K - start)[None, :], other=0.0)
        if not ROUNDED:
            y = y.to(x.dtype)
        if SCALED:
            part = times(x, y, tl.zeros_like(acc), SWAP, PRECISION)
            part *= of_rows(scales_at(scale, grid + start // BLOCK_K, None), SWAP)
            if ROUNDED:
                part *= of_tokens(tl.load(a_scale + source * groups + start // 128), SWAP)
            acc += part
        else:
            acc = times(x, y, acc, SWAP, PRECISION)
        a_at += BK
        w_at += BK
    return acc


@triton.jit
def _half(
    both, scale, zero, grid, start, half: tl.constexpr, GRID_K: tl.constexpr, BLOCK_K: tl.constexpr,
    FORM: tl.constexpr, ZERO: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Numbers [R, 64] of the low or the high halves of bytes, as float32; not scaled if BLOCK_K is at least a chunk."""
    y = values_of((both.to(tl.int32) >> (4 * half)) & 15, FORM)
    if BLOCK_K >= 128:
        if FORM == 2:
            y = y - zeros_at(zero, grid + start // BLOCK_K, None, ZERO)[:, None]
    else:
        groups: tl.constexpr = 64 // BLOCK_K
        at = grid[:, None] + ((start + half * 64) // BLOCK_K + tl.arange(0, groups))[None, :]
        if FORM == 2:
            y = y - spread(zeros_at(zero, at, None, ZERO), R, groups, BLOCK_K)
        y = y * spread(scales_at(scale, at, None), R, groups, BLOCK_K)
    return y


@triton.jit
def _sum_halves(
    acc, a, w, scale, zero, source, rows, grid, K: tl.constexpr, BYTES: tl.constexpr, GRID_K: tl.constexpr,
    BLOCK_K: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Codes of 4 bits, in chunks of 128 columns: low halves are the first 64, high halves the others."""
    k = tl.arange(0, 64)
    a_at = a + source[:, None] * K + k[None, :]
    w_at = w + rows[:, None] * BYTES + k[None, :]
    for start in range(0, 2 * BYTES, 128):
        both = tl.load(w_at)
        if K % 128 == 0:
            x_low, x_high = tl.load(a_at), tl.load(a_at + 64)
        else:
            x_low = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
            x_high = tl.load(a_at + 64, mask=(k + 64 < K - start)[None, :], other=0.0)
        low = _half(both, scale, zero, grid, start, 0, GRID_K, BLOCK_K, FORM, ZERO, R).to(x_low.dtype)
        high = _half(both, scale, zero, grid, start, 1, GRID_K, BLOCK_K, FORM, ZERO, R).to(x_low.dtype)
        if BLOCK_K >= 128:
            part = times(x_low, low, tl.zeros_like(acc), SWAP, PRECISION)
            part = times(x_high, high, part, SWAP, PRECISION)
            acc += part * of_rows(scales_at(scale, grid + start // BLOCK_K, None), SWAP)
        else:
            acc = times(x_low, low, acc, SWAP, PRECISION)
            acc = times(x_high, high, acc, SWAP, PRECISION)
        a_at += 128
        w_at += 64
    return acc


@triton.jit(do_not_specialize=["most_tiles"])
def _coded_kernel(
    a, a_scale, w, scale, zero, row_scale, bias, out, order, tile_expert, tile_start, end, most_tiles, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr, GRID_N: tl.constexpr, GRID_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, ROUNDED: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One tile of pairs times BN columns; FIRST, GATED and DIRECT as in moe.py."""
    columns: tl.constexpr = (N + BN - 1) // BN
    R: tl.constexpr = 2 * BN if GATED else BN
    all_rows: tl.constexpr = 2 * N if GATED else N
    program = tl.program_id(0)
    group, inner = program // (TILES * columns), program % (TILES * columns)
    size = tl.minimum(most_tiles - group * TILES, TILES)
    tile, column = group * TILES + inner % size, inner // size
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
    source = (pair // TOP_K if FIRST else tl.where(live, row, 0)).to(tl.int64)
    n = column * BN + tl.arange(0, BN)
    if GATED:  # gate and up rows interleaved: one matmul, whose adjacent columns form pairs
        both = tl.arange(0, R)
        w_row = (column * BN + both // 2) % N + both % 2 * N
    else:
        w_row = n % N
    rows = expert * all_rows + w_row
    grid = (expert * GRID_N + w_row // BLOCK_N) * GRID_K
    acc = tl.zeros((R, BM) if SWAP else (BM, R), tl.float32)
    if FORM == 0:
        acc = _sum_bytes(
            acc, a, a_scale, w, scale, source, rows, grid, K, GRID_K, BLOCK_K, SCALED, ROUNDED, SWAP, PRECISION, BK
        )  # fmt: skip
    else:
        acc = _sum_halves(
            acc, a, w, scale, zero, source, rows, grid, K, BYTES, GRID_K, BLOCK_K, FORM, ZERO, SWAP, PRECISION, R
        )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    if BY_ROW:
        acc *= tl.load(row_scale + rows)[None, :]
    if ROUNDED and not SCALED:
        acc *= tl.load(a_scale + source)[:, None]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BM, BN, 2)))
        acc = gate_up(gate, up, alpha, limit, ACT)
    target = (row if FIRST else pair).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


def product(
    a: Tensor, w: ExpertCodes, bias: Tensor | None, tiles: moe.ExpertTiles, top_k: int, config: CodedTileConfig, *,
    pairs: int, first: bool, act: tuple[int, float, float] | None = None, rounded: RoundedTokens | None = None,
) -> Tensor:  # fmt: skip
    """As moe.product. `rounded`: `a`, which is contiguous, in 8 bits."""
    gated = act is not None
    code, alpha, limit = act or (0, 0.0, 0.0)
    rows = w.shape[1]
    n = rows // 2 if gated else rows
    out = torch.empty((pairs, n), dtype=a.dtype, device=a.device)
    most_tiles = pairs if tiles.direct else tiles.expert.shape[0]
    _coded_kernel[(most_tiles * cdiv(n, config.bn),)](
        a if rounded is None else rounded.codes, None if rounded is None else rounded.scale, w.codes, w.scale, w.zero,
        w.row_scale, bias, out, tiles.order, tiles.expert, tiles.start, tiles.end, most_tiles, alpha, limit,
        N=n, **constants(w), ROUNDED=rounded is not None, TOP_K=top_k, ACT=code, BIAS=bias is not None, FIRST=first,
        GATED=gated, DIRECT=tiles.direct, PRECISION="ieee" if a.dtype is torch.float32 else "tf32", SWAP=config.swap,
        BM=config.bm, BN=config.bn, BK=config.bk, TILES=8, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def configs_of(
    pairs: int, experts: int, dtype: torch.dtype, *, fixed: bool = False
) -> tuple[CodedTileConfig, CodedTileConfig]:
    """Tiles of the first and the second matmul, by the average number of pairs per expert. `fixed`: one for all, so
    that no result depends on the number of tokens. Not tuned yet."""
    if dtype is torch.float32:
        return (CodedTileConfig(16, 32, 32, 4, 2, swap=False),) * 2
    each = 32 if fixed else pairs / experts
    if each <= 12:
        return (CodedTileConfig(16, 64, 128, 4, 4), CodedTileConfig(16, 128, 128, 4, 4))
    if each <= 48:
        return (CodedTileConfig(32, 64, 128, 4, 3), CodedTileConfig(32, 128, 128, 4, 3))
    if each <= 96:
        return (CodedTileConfig(64, 64, 128, 4, 3), CodedTileConfig(64, 128, 128, 4, 3))
    return (CodedTileConfig(128, 64, 128, 8, 3), CodedTileConfig(128, 128, 128, 8, 3))


def run_experts(
    x: Tensor, weights: Tensor, index: Tensor, up: ExpertCodes | Tensor, down: ExpertCodes | Tensor, *,
    b1: Tensor | None, b2: Tensor | None, act: Callable[[Tensor], Tensor], codes: dict[Callable, int],
    stream: Tensor | None = None, all_experts: int = 0,
    configs: tuple[CodedTileConfig, CodedTileConfig] | None = None,
    byte_configs: tuple[BytesConfig, BytesConfig] | None = None, fixed: bool = False, early: bool = False,
    round_from: float | None = ROUND_FROM, few: CodedFewConfig = CodedFewConfig(),
) -> Tensor:  # fmt: skip
    """As moe.run_experts. `round_from`: average pairs per expert from which inputs of 8-bit weights are rounded to 8
    bits, where moe_bytes.py, which always does, cannot multiply them; None: never."""
    (tokens, top_k), experts, pairs, share = index.shape, up.shape[0], index.numel(), all_experts > 0
    if not tokens:
        return torch.empty_like(x)
    x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
    stream = None if stream is None else stream.contiguous()
    known = moe.fused_act(act, codes)
    if configs is None and byte_configs is None and tokens <= moe.FEW_TOKENS and not fixed:
        return _run_few(x, weights, index, up, down, b1, b2, act, known, stream, share, early, few)
    among = all_experts or experts
    most = math.inf if round_from is None or fixed or x.dtype is torch.float32 else round_from * among
    if most < math.inf and known is not None and configs is None and tokens > 1 and moe_bytes.fits(x, up, down):
        assert isinstance(up, ExpertCodes) and isinstance(down, ExpertCodes)
        return moe_bytes.run_experts(
            x, weights, index, up, down, b1=b1, b2=b2, act=known, stream=stream, all_experts=all_experts,
            configs=byte_configs, early=early,
        )  # fmt: skip
    rounds = pairs > most
    first, second = configs or configs_of(pairs, among, x.dtype, fixed=fixed)
    if rounds and configs is None:
        first, second = rounded_config(up, first, 0), rounded_config(down, second, 1)
    tiles = moe.sort_pairs(index, experts, first.bm, share=share)
    multiply = partial(_grouped, tiles=tiles, top_k=top_k, pairs=pairs, rounds=rounds, share=share)
    h = multiply(x, up, b1, config=first, first=True, act=known)
    if known is None:
        h = act(h).contiguous()
    second = second._replace(bm=first.bm)
    y = multiply(h, down, b2, config=second, first=False, act=None)
    return moe.combine(y, weights, stream, index=index if share else None)


def rounded_config(w: ExpertCodes | Tensor, config: CodedTileConfig, side: int) -> CodedTileConfig:
    """The tile for inputs in 8 bits, where weights are; `side`: 0 for the first matmul, 1 for the second."""
    if isinstance(w, Tensor) or w.form != "e4m3":
        return config
    chosen = (ROUNDED_ROWS if w.scale is None else ROUNDED_BLOCKS)[side]
    return chosen._replace(bm=config.bm)


def _grouped(
    a: Tensor, w: ExpertCodes | Tensor, bias: Tensor | None, tiles: moe.ExpertTiles, top_k: int,
    config: CodedTileConfig, *, pairs: int, first: bool, act: tuple[int, float, float] | None, rounds: bool,
    share: bool,
) -> Tensor:  # fmt: skip
    if isinstance(w, Tensor):
        plain = moe.MoeTileConfig(*config[:5])._replace(bk=min(config.bk, 64))
        return moe.product(a, w, bias, tiles, top_k, plain, pairs=pairs, first=first, act=act)
    rounded = None
    if rounds and w.form == "e4m3":
        end = tiles.end if share and not first and not tiles.direct else None
        rounded = round_rows(a, w.width if w.scale is None else GROUP, end=end)
    return product(a, w, bias, tiles, top_k, config, pairs=pairs, first=first, act=act, rounded=rounded)


def _run_few(
    x: Tensor, weights: Tensor, index: Tensor, w1: ExpertCodes | Tensor, w2: ExpertCodes | Tensor, b1: Tensor | None,
    b2: Tensor | None, act: Callable[[Tensor], Tensor], known: tuple[int, float, float] | None, stream: Tensor | None,
    share: bool, early: bool, config: CodedFewConfig,
) -> Tensor:  # fmt: skip
    h = (
        moe_few.up(x, index, w1, b1, known, share=share, early=early) if isinstance(w1, Tensor)
        else moe_coded_few.up(x, index, w1, b1, known, config=config, share=share, early=early)
    )  # fmt: skip
    if known is None:
        h, early = act(h).contiguous(), False
    if isinstance(w2, Tensor):
        return moe_few.down(h, weights, index, w2, b2, stream, share=share, early=early)
    return moe_coded_few.down(h, weights, index, w2, b2, stream, config=config, share=share, early=early)
