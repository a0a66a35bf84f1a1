"""Experts of 8 and 4 bits for a few tokens on CUDA: as moe_few.py, with rows that are decoded as they are read.

    _up_kernel    grid (pairs, columns of F):  h[pair] = act(x[token] w1[expert])
    _down_kernel  grid (tokens, columns):      out[token] = stream + sum over its k of weight * (h[pair] w2[expert])

A row is summed in float32 after each number was multiplied by the scale of its block; the scale of the row comes last.
Of pairs whose expert another rank has (SHARE: index -1), neither codes nor h are read.
Floor: 3 dim F codes a pair. 2048 x 768, k = 8, 1 token: 38 MB in 8 bits, 9 us; 2880 x 2880, k = 4, 4 bits with a byte
for each 32: 53 MB, 12 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.coded_experts import ExpertCodes
from quire.ops.triton.act import gate_up
from quire.ops.triton.decode import CODES, scales_at, spread, values_of, zeros_at
from quire.ops.triton.sizes import cdiv, next_power_of_2

_LEAST_BYTES = 128  # of a row that are read together


class CodedFewConfig(NamedTuple):
    """Result columns, bytes of a row, warps: of the first matmul, then of the second."""

    up: tuple[int, int, int] = (4, 1024, 4)
    down: tuple[int, int, int] = (4, 512, 4)


@triton.jit
def _bytes_piece(
    x, w, scale, rows, grid, live, start, GRID_K: tl.constexpr, BLOCK_K: tl.constexpr, K: tl.constexpr,
    SCALED: tl.constexpr, BN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """B columns of codes of 8 bits times those of x: [BN, B]."""
    k = start + tl.arange(0, B)
    inside = live[:, None] & (k < K)[None, :]
    y = tl.load(w + rows[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        groups: tl.constexpr = B // 128
        group = (start + tl.arange(0, groups) * 128) // BLOCK_K
        s = scales_at(scale, grid[:, None] + group[None, :], live[:, None] & (group < GRID_K)[None, :])
        y = y * spread(s, BN, groups, 128)
    return y * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _halves_piece(
    x, w, scale, zero, rows, grid, live, start, GRID_K: tl.constexpr, BLOCK_K: tl.constexpr, K: tl.constexpr,
    BYTES: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """B bytes, each with two codes, times the columns of x that they belong to: [BN, B]."""
    at = start + tl.arange(0, B)
    both = tl.load(w + rows[:, None] * BYTES + at[None, :], mask=live[:, None] & (at < BYTES)[None, :], other=0)
    size: tl.constexpr = BLOCK_K if BLOCK_K < 64 else 64
    groups: tl.constexpr = B // size
    first = start + tl.arange(0, groups) * size
    first = first // 64 * 128 + first % 64
    k = at // 64 * 128 + at % 64
    total = tl.zeros((BN, B), tl.float32)
    for half in tl.static_range(2):
        group = (first + half * 64) // BLOCK_K
        inside = live[:, None] & (group < GRID_K)[None, :]
        places = grid[:, None] + group[None, :]
        y = values_of((both.to(tl.int32) >> (4 * half)) & 15, FORM)
        if FORM == 2:
            y = y - spread(zeros_at(zero, places, inside, ZERO), BN, groups, size)
        y = y * spread(scales_at(scale, places, inside), BN, groups, size)
        column = k + half * 64
        total += y * tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _row_sums(
    x, w, scale, zero, row_scale, expert, n, live, ROWS: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr,
    GRID_N: tl.constexpr, GRID_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr,
    SCALED: tl.constexpr, ZERO: tl.constexpr, BY_ROW: tl.constexpr, BN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Rows n of an expert's matrix times the row that begins at x: [BN]."""
    rows = expert * ROWS + n
    grid = (expert * GRID_N + n // BLOCK_N) * GRID_K
    sums = tl.zeros((BN, B), tl.float32)
    for start in range(0, BYTES, B):
        if FORM == 0:
            sums += _bytes_piece(x, w, scale, rows, grid, live, start, GRID_K, BLOCK_K, K, SCALED, BN, B)
        else:
            sums += _halves_piece(
                x, w, scale, zero, rows, grid, live, start, GRID_K, BLOCK_K, K, BYTES, FORM, ZERO, BN, B
            )  # fmt: skip
    total = tl.sum(sums, 1)
    if BY_ROW:
        total = total * tl.load(row_scale + rows, mask=live, other=0.0)
    return total


@triton.jit
def _up_kernel(
    x, index, w, scale, zero, row_scale, bias, out, x_stride, alpha, limit,
    N: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr, GRID_N: tl.constexpr,
    GRID_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr,
    ZERO: tl.constexpr, BY_ROW: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATED: w holds gate rows, then up rows, and N counts results; else N counts all rows and nothing follows."""
    pair = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live = n < N
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(index + pair).to(tl.int64)
    if SHARE and expert < 0:
        return
    source = x + (pair // TOP_K).to(tl.int64) * x_stride
    acc = _row_sums(
        source, w, scale, zero, row_scale, expert, n, live, ROWS, K, BYTES, GRID_N, GRID_K, BLOCK_N, BLOCK_K, FORM,
        SCALED, ZERO, BY_ROW, BN, B,
    )  # fmt: skip
    if BIAS:
        acc += tl.load(bias + expert * ROWS + n, mask=live, other=0.0).to(tl.float32)
    if GATED:
        second = _row_sums(
            source, w, scale, zero, row_scale, expert, n + N, live, ROWS, K, BYTES, GRID_N, GRID_K, BLOCK_N, BLOCK_K,
            FORM, SCALED, ZERO, BY_ROW, BN, B,
        )  # fmt: skip
        if BIAS:
            second += tl.load(bias + expert * ROWS + n + N, mask=live, other=0.0).to(tl.float32)
        acc = gate_up(acc, second, alpha, limit, ACT)
    tl.store(out + pair.to(tl.int64) * N + n, acc.to(out.dtype.element_ty), mask=live)


@triton.jit
def _down_kernel(
    h, index, weights, w, scale, zero, row_scale, bias, stream, out,
    N: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr, GRID_N: tl.constexpr, GRID_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, SHARE: tl.constexpr, ADD: tl.constexpr,
    BN: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One expert of a token after another, unrolled so that their reads overlap; with SHARE there is a branch between
    them."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live = n < N
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    kind: tl.constexpr = out.dtype.element_ty
    total = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(index + pair).to(tl.int64)
        if not SHARE or expert >= 0:
            y = _row_sums(
                h + pair * K, w, scale, zero, row_scale, expert, n, live, N, K, BYTES, GRID_N, GRID_K, BLOCK_N,
                BLOCK_K, FORM, SCALED, ZERO, BY_ROW, BN, B,
            )  # fmt: skip
            if BIAS:
                y += tl.load(bias + expert * N + n, mask=live, other=0.0).to(tl.float32)
            total += y.to(kind).to(tl.float32) * tl.load(weights + pair).to(tl.float32)
    if ADD:
        total = total.to(kind).to(tl.float32)
        total += tl.load(stream + token * N + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(kind), mask=live)


def constants(w: ExpertCodes) -> dict[str, int | bool]:
    """What the kernels of this package know of a matrix before they run."""
    grid = (1, 1) if w.scale is None else (w.scale.shape[1], w.scale.shape[2])
    return {
        "K": w.width, "BYTES": w.codes.shape[2], "GRID_N": grid[0], "GRID_K": grid[1], "BLOCK_N": w.block[0],
        "BLOCK_K": w.block[1] or w.width, "FORM": CODES[w.form], "SCALED": w.scale is not None,
        "ZERO": w.zero is not None, "BY_ROW": w.row_scale is not None,
    }  # fmt: skip


def up(
    x: Tensor, index: Tensor, w1: ExpertCodes, b1: Tensor | None, act: tuple[int, float, float] | None, *,
    config: CodedFewConfig = CodedFewConfig(), share: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, dim], index [T, k] -> [T * k, F]; without `act` the full result [T * k, 2 F]. `share`: where index is -1,
    nothing is written."""
    rows = w1.shape[1]
    n = rows if act is None else rows // 2
    code, alpha, limit = act or (0, 0.0, 0.0)
    bn, size, warps = config.up
    out = torch.empty((index.numel(), n), dtype=x.dtype, device=x.device)
    launch = {"launch_pdl": True} if early else {}
    _up_kernel[(index.numel(), cdiv(n, bn))](
        x, index, w1.codes, w1.scale, w1.zero, w1.row_scale, b1, out, x.stride(0), alpha, limit,
        N=n, ROWS=rows, **constants(w1), TOP_K=index.shape[1], GATED=act is not None, ACT=code, BIAS=b1 is not None,
        SHARE=share, BN=bn, B=_size(w1, size), EARLY=early, num_warps=warps, **launch,
    )  # fmt: skip
    return out


def down(
    h: Tensor, weights: Tensor, index: Tensor, w2: ExpertCodes, b2: Tensor | None, stream: Tensor | None, *,
    config: CodedFewConfig = CodedFewConfig(), share: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """h [T * k, F] -> [T, dim], weighted and summed; `stream` [T, dim] is added."""
    (tokens, top_k), n = index.shape, w2.shape[1]
    bn, size, warps = config.down
    out = torch.empty((tokens, n), dtype=h.dtype, device=h.device)
    launch = {"launch_pdl": True} if early else {}
    _down_kernel[(tokens, cdiv(n, bn))](
        h, index, weights, w2.codes, w2.scale, w2.zero, w2.row_scale, b2, stream, out,
        N=n, **constants(w2), TOP_K=top_k, BIAS=b2 is not None, SHARE=share, ADD=stream is not None, BN=bn,
        B=_size(w2, size), EARLY=early, num_warps=warps, **launch,
    )  # fmt: skip
    return out


def _size(w: ExpertCodes, most: int) -> int:
    """Bytes of a row that are read together: whole chunks."""
    return max(_LEAST_BYTES, min(most, next_power_of_2(w.codes.shape[2])))
