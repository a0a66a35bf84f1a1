"""Grouped matmuls on CUDA of inputs and weights in e4m3, both read by the tensor cores as they are: as moe_many.py.

    x ──round_rows──▶ codes ──_bytes_kernel──▶ act(x w1) [P, F], sorted, rounded ──_bytes_kernel──▶ (.. w2) [P, dim]

Scales of weights are those of rows, which multiply the result, or of blocks of 128 x 128. Inputs have one scale per
row, or one for each 128 columns. Where either side has scales of 128 columns, sums of 128 columns are scaled and then
added up. The first matmul may round its results itself, if its tiles are 128 columns wide.

Weights are read through a descriptor, and so are the rows of the second matmul; those of the first are gathered. With
few rows per expert, tiles are swapped: weights are the left operand, whose tiles have at least 64 rows on Hopper, and
tokens the right one, of 16 and more. Floor, per layer: 3 dim F bytes of every expert that is touched, and 6 P dim F
operations at twice the speed of 16 bits. 128 experts of 2048 x 768: 604 MB, 144 us; 16,384 tokens, k = 8: 0.85 ms at
1,456 TFLOP/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.coded_experts import ExpertCodes
from quire.ops.triton import moe
from quire.ops.triton.act import gate_up
from quire.ops.triton.moe_many import num_programs, tile_of
from quire.ops.triton.sizes import cdiv, next_power_of_2

GROUP = 128  # columns of an input that share a scale, if those of the weights do; and of a step
LARGEST = tl.constexpr(448.0)  # of e4m3
_ROUND_FEW, _ROUND_MANY = 1024, 4096  # numbers that one program rounds, if there are up to or more than so many:
_MANY = 1 << 21


class BytesConfig(NamedTuple):
    """BN counts result columns. `resident`: persistent programs of a multiprocessor, with flattened loops if `flat`; 0:
    each takes one tile. `steps`: inputs have a scale for each 128 columns, as they must where blocks of weights have.
    `rounds`: the first matmul rounds its results, of BN 128, itself, for steps."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    resident: int = 0
    flat: bool = True
    group: int = 8
    steps: bool = False
    rounds: bool = False


class RoundedTokens(NamedTuple):
    codes: Tensor  # e4m3 [rows, width]
    scale: Tensor  # float32 [rows, groups]


# --- inputs


@triton.jit(do_not_specialize=["total"])
def _round_kernel(
    x, end, codes, scale, total, K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS of all `total` groups of SIZE columns, of which each row of x has GROUPS. EXPERTS above 0: rows are sorted
    pairs, of which there are as many as `end` has for the last expert."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if EXPERTS > 0:
        total = tl.load(end + EXPERTS - 1) * GROUPS
        if tl.program_id(0) * ROWS >= total:
            return
    group, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    column = (group % GROUPS * SIZE)[:, None] + k[None, :]
    at = (group // GROUPS).to(tl.int64)[:, None] * K + column
    inside = (group < total)[:, None] & (k < SIZE)[None, :] & (column < K)
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(y), 1), 1e-12) / LARGEST
    tl.store(scale + group, s, mask=group < total)
    tl.store(codes + at, (y / s[:, None]).to(codes.dtype.element_ty), mask=inside)


def round_rows(x: Tensor, size: int, *, end: Tensor | None = None, early: bool = False) -> RoundedTokens:
    """x [rows, width] (contiguous) to e4m3, with a scale for each `size` columns. `end`: that of ExpertTiles, if
    rows are sorted pairs, past the last of which there is nothing."""
    rows, width = x.shape
    size = min(size, width)
    groups, block = cdiv(width, size), next_power_of_2(size)
    total = rows * groups
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    tile = max(_ROUND_MANY if total * size > _MANY else _ROUND_FEW, block)
    _round_kernel[(cdiv(total, tile // block),)](
        x, end, codes, scale, total, K=width, GROUPS=groups, SIZE=size, EXPERTS=0 if end is None else len(end) - 1,
        ROWS=tile // block, BLOCK=block, EARLY=early, num_warps=4 if tile > _ROUND_FEW else 2,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return RoundedTokens(codes, scale)


# --- sums of a tile; swapped ones are [rows of weights, tokens]


@triton.jit
def times(x, y, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """x [BM, k], y [rows, k]: acc + x y', or its transpose if swapped."""
    if SWAP:
        return tl.dot(y, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)


@triton.jit
def of_rows(s, SWAP: tl.constexpr):
    """Numbers for each row of the weights, beside such sums."""
    if SWAP:
        return s[:, None]
    else:
        return s[None, :]


@triton.jit
def of_tokens(s, SWAP: tl.constexpr):
    if SWAP:
        return s[None, :]
    else:
        return s[:, None]


@triton.jit
def _rows_of(a, at, first, start, FIRST: tl.constexpr):
    if FIRST:
        return tl.load(at + start)
    else:
        return a.load([first, start])


@triton.jit
def _sum_joined(a, at, w, expert, n, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """(gate, up) of the first matmul, which are one tile; not swapped, and of codes alone."""
    acc = tl.zeros((BM, 2 * BN), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(at + start)
        y = w.load([expert * 2, n, start]).reshape(2 * BN, BK)
        acc = times(x, y, acc, False, "tf32")
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))


@triton.jit
def _sum_apart(
    a, at, a_scale, live, w, w_scale, expert, first, n, K: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr,
    STEPS: tl.constexpr, BLOCKS: tl.constexpr, SWAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """(gate, up) if FIRST, else (results, zeros). STEPS: of scaled sums of 128 columns; BLOCKS: weights have scales for
    them too."""
    parts: tl.constexpr = 2 if FIRST else 1
    gate = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    grid = w_scale
    if BLOCKS:
        grid += (expert * (parts * N // 128) + n // 128) * (K // 128)
    for start in range(0, K, BK):
        if STEPS:
            s = tl.load(a_scale + start // 128, mask=live, other=0.0)
            s_up = s
            if BLOCKS:
                if FIRST:
                    s_up = s * tl.load(grid + N // 128 * (K // 128) + start // 128)
                s = s * tl.load(grid + start // 128)
        x = _rows_of(a, at, first, start, FIRST)
        y = w.load([expert * parts, n, start]).reshape(BN, BK)
        if STEPS:
            gate += times(x, y, tl.zeros_like(gate), SWAP, "tf32") * of_tokens(s, SWAP)
        else:
            gate = times(x, y, gate, SWAP, "tf32")
        if FIRST:
            y_up = w.load([expert * parts + 1, n, start]).reshape(BN, BK)
            if STEPS:
                up += times(x, y_up, tl.zeros_like(up), SWAP, "tf32") * of_tokens(s_up, SWAP)
            else:
                up = times(x, y_up, up, SWAP, "tf32")
    return gate, up


@triton.jit
def _finished(sums, scale, bias, rows, inside, SCALED: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr):
    """Times the scales of rows, plus the bias."""
    if SCALED:
        sums *= of_rows(tl.load(scale + rows, mask=inside, other=0.0), SWAP)
    if BIAS:
        sums += of_rows(tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32), SWAP)
    return sums


@triton.jit(do_not_specialize=["programs"])
def _bytes_kernel(
    a, a_scale, w, w_scale, bias, out, out_scale, order, tile_expert, tile_start, end, programs, alpha, limit,
    EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr,
    SWAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLAT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (programs,). w: a descriptor; a: one too, or with FIRST the tokens themselves. STEPS: inputs have a scale
    for each 128 columns; BLOCKS: so have weights, for 128 rows. ROUND: so will results, which are codes."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    columns: tl.constexpr = (N + BN - 1) // BN
    tiles = tl.load(end + EXPERTS)
    for work in tl.range(tl.program_id(0), tiles * columns, programs, flatten=FLAT):
        tile, column = tile_of(work, tiles, columns, GROUP)
        expert, first = tl.load(tile_expert + tile), tl.load(tile_start + tile)
        row, n = first + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        live = row < tl.load(end + expert)
        pair = tl.load(order + row, mask=live, other=0)
        source = (pair // TOP_K if FIRST else tl.where(live, row, 0)).to(tl.int64)
        at = a
        if FIRST:
            at = a + source[:, None] * K + tl.arange(0, BK)[None, :]
        if FIRST and not STEPS and not SWAP:
            gate, up = _sum_joined(a, at, w, expert, column * BN, K, BM, BN, BK)
        else:
            gate, up = _sum_apart(
                a, at, a_scale + source * (K // 128), live, w, w_scale, expert, first, column * BN, K, N, FIRST,
                STEPS, BLOCKS, SWAP, BM, BN, BK,
            )  # fmt: skip
        if not STEPS:
            s = of_tokens(tl.load(a_scale + source, mask=live, other=0.0), SWAP)
            gate, up = gate * s, up * s
        rows = expert * (2 * N if FIRST else N) + n
        result = _finished(gate, w_scale, bias, rows, n < N, not BLOCKS, BIAS, SWAP)
        if FIRST:
            up = _finished(up, w_scale, bias, rows + N, n < N, not BLOCKS, BIAS, SWAP)
            result = gate_up(result, up, alpha, limit, ACT)
        target = (row if FIRST else pair).to(tl.int64)
        if ROUND:
            s = tl.maximum(tl.max(tl.abs(result), 0 if SWAP else 1), 1e-12) / LARGEST
            tl.store(out_scale + target * columns + column, s, mask=live)
            result = result / of_tokens(s, SWAP)
        places = out + (of_tokens(target * N, SWAP) + of_rows(n, SWAP))
        tl.store(places, result.to(out.dtype.element_ty), mask=of_tokens(live, SWAP) & of_rows(n < N, SWAP))


def fits(x: Tensor, up: ExpertCodes | Tensor, down: ExpertCodes | Tensor) -> bool:
    """Whether both matmuls of a layer can use this kernel."""
    return (
        x.dtype in (torch.bfloat16, torch.float16) and isinstance(up, ExpertCodes) and isinstance(down, ExpertCodes)
        and _takes(up) and _takes(down) and up.shape[1] == 2 * down.width
    )  # fmt: skip


def _takes(w: ExpertCodes) -> bool:
    if w.form != "e4m3" or w.width % GROUP or w.codes.data_ptr() % 16:
        return False
    if w.scale is None:
        return w.row_scale is not None
    return w.block == (GROUP, GROUP) and w.row_scale is None and w.shape[1] % GROUP == 0


def product(
    a: RoundedTokens, w: ExpertCodes, bias: Tensor | None, tiles: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int, *,
    pairs: int, act: tuple[int, float, float] | None, config: BytesConfig, dtype: torch.dtype | None,
    early: bool = False,
) -> Tensor | RoundedTokens:  # fmt: skip
    """As moe_many.product. `dtype`: of the results; None: they are rounded, with a scale for each 128 columns."""
    order, expert, start, end = tiles
    code, alpha, limit = act or (0, 0.0, 0.0)
    first = act is not None
    (experts, rows, k), bm, bn = w.shape, config.bm, config.bn
    n, parts = (rows // 2, 2) if first else (rows, 1)
    steps = w.scale is not None or a.scale.shape[1] > 1
    device, codes = a.codes.device, torch.float8_e4m3fn
    out = torch.empty((pairs, n), dtype=codes if dtype is None else dtype, device=device)
    scale = torch.empty((pairs, n // GROUP), dtype=torch.float32, device=device) if dtype is None else None
    joined = first and not steps and not config.swap
    box = [2 if joined else 1, bn, config.bk]
    weights = TensorDescriptor(w.codes, [experts * parts, n, k], [n * k, k, 1], box)
    source = a.codes if first else TensorDescriptor(a.codes, [pairs, k], [k, 1], [bm, config.bk])
    programs = num_programs(expert.shape[0] * cdiv(n, bn), device, config.resident)
    _bytes_kernel[(programs,)](
        source, a.scale, weights, w.row_scale if w.scale is None else w.scale, bias, out, scale, order, expert, start,
        end, programs, alpha, limit,
        EXPERTS=experts, N=n, K=k, TOP_K=top_k, ACT=code, BIAS=bias is not None, FIRST=first, STEPS=steps,
        BLOCKS=w.scale is not None, ROUND=dtype is None, SWAP=config.swap, BM=bm, BN=bn, BK=config.bk,
        GROUP=config.group, FLAT=config.flat and config.resident > 0, EARLY=early, num_warps=config.warps,
        num_stages=config.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out if scale is None else RoundedTokens(out, scale)


_FEW = BytesConfig(16, 128, 128, 4, 3, swap=True, steps=True, rounds=True)
_SOME = BytesConfig(64, 128, 128, 4, 4)
_MANY_ROWS = BytesConfig(128, 128, 128, 8, 4), BytesConfig(128, 256, 128, 8, 3, resident=1)


def configs_of(pairs: int, up: ExpertCodes, down: ExpertCodes, all_experts: int = 0) -> tuple[BytesConfig, BytesConfig]:
    """Tiles of the first and the second matmul, by the average number of pairs per expert, as measured on an H200."""
    each, blocks = pairs / (all_experts or up.shape[0]), up.scale is not None or down.scale is not None
    if each <= 12:
        return _FEW, _FEW._replace(stages=4)
    if each <= 24:
        return _FEW._replace(bm=32), _FEW._replace(bm=32, stages=4)
    if blocks:
        return _SOME._replace(warps=8, rounds=True), _SOME._replace(resident=2 if each > 200 else 0)
    if each <= 200:
        return _SOME._replace(rounds=True), _SOME._replace(resident=2)
    return _MANY_ROWS


def run_experts(
    x: Tensor, weights: Tensor, index: Tensor, up: ExpertCodes, down: ExpertCodes, *, b1: Tensor | None,
    b2: Tensor | None, act: tuple[int, float, float], stream: Tensor | None, all_experts: int = 0,
    configs: tuple[BytesConfig, BytesConfig] | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """As moe.run_experts, for more than one token."""
    pairs, experts, top_k, share = index.numel(), up.shape[0], index.shape[1], all_experts > 0
    first, second = configs or configs_of(pairs, up, down, all_experts)
    tiles = moe.sort_pairs(index, experts, first.bm, share=share, early=early)
    a = round_rows(x, _group_of(up, first), early=early)
    dtype = None if first.rounds else x.dtype
    h = product(a, up, b1, tiles[:4], top_k, pairs=pairs, act=act, config=first, dtype=dtype, early=early)
    if isinstance(h, Tensor):
        h = round_rows(h, _group_of(down, second), end=tiles.end if share else None, early=early)
    second = second._replace(bm=first.bm)
    y = product(h, down, b2, tiles[:4], top_k, pairs=pairs, act=None, config=second, dtype=x.dtype, early=early)
    assert isinstance(y, Tensor)
    return moe.combine(y, weights, stream, index=index if share else None, early=early)


def _group_of(w: ExpertCodes, config: BytesConfig) -> int:
    """How many columns of an input share a scale."""
    return GROUP if config.steps or w.scale is not None else w.width
