"""Experts of 8 and 4 bits for a few tokens on CUDA: as moe_few.py, with rows that are decoded as they are read.

    _up_kernel    grid (pairs, columns of F):  h[pair] = act(x[token] w1[expert])
    _down_kernel  grid (tokens, columns):      out[token] = stream + sum over its k of weight * (h[pair] w2[expert])

A row is summed in float32, 16 columns at a time, whose sum is multiplied by the scale of their block; the scale of the
row comes last.
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
from quire.ops.triton.decode import CODES, opened, scales_at, zeros_at
from quire.ops.triton.sizes import cdiv, next_power_of_2

_LEAST_BYTES = 128  # of a row that are read together


class CodedFewConfig(NamedTuple):
    """Result columns, bytes of a row, warps: of the first matmul, then of the second, with four experts a token."""

    up: tuple[int, int, int] = (8, 512, 4)
    down: tuple[int, int, int] = (4, 512, 4)


@triton.jit
def _load_piece(w, rows, live, start, BYTES: tl.constexpr, B: tl.constexpr):
    """[E, BN, B] bytes of rows [E, BN]."""
    at = start + tl.arange(0, B)
    inside = live[:, :, None] & (at < BYTES)[None, None, :]
    return tl.load(w + rows[:, :, None] * BYTES + at[None, None, :], mask=inside, other=0.0)


@triton.jit
def _runs(y, E: tl.constexpr, BN: tl.constexpr, B: tl.constexpr):
    """Sums of 16 neighbours, which a thread has and which share a scale."""
    return tl.sum(tl.reshape(y, (E, BN, B // 16, 16)), 3)


@triton.jit
def _run_sums(
    y, x, scale, zero, grid, live, k, run, GRID_K: tl.constexpr, BLOCK_K: tl.constexpr, K: tl.constexpr,
    SCALED: tl.constexpr, LESS: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Numbers [E, BN, B] times columns k of the rows at x [E] or [1], summed in runs that begin at columns `run`. LESS: with
    zero points, of which 8 was subtracted."""
    inputs = tl.load(x[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
    part = _runs(y.to(tl.float32) * inputs[:, None, :], E, BN, B)
    if SCALED:
        group = run // BLOCK_K
        at = grid[:, :, None] + group[None, None, :]
        inside = live[:, :, None] & (group < GRID_K)[None, None, :]
        if LESS:
            part -= (zeros_at(zero, at, inside, True) - 8.0) * _runs(inputs[:, None, :], x.shape[0], 1, B)
        part *= scales_at(scale, at, inside)
    return part


@triton.jit
def _piece_sums(
    codes, x, scale, zero, grid, live, start, GRID_K: tl.constexpr, BLOCK_K: tl.constexpr, K: tl.constexpr,
    FORM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, B: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """[E, BN, B / 16]: what the piece that begins at byte `start` adds to the sums."""
    k, run = start + tl.arange(0, B), start + tl.arange(0, B // 16) * 16
    if FORM == 0:
        return _run_sums(codes, x, scale, zero, grid, live, k, run, GRID_K, BLOCK_K, K, SCALED, False, E, BN, B)
    else:
        k, run = k // 64 * 128 + k % 64, run // 64 * 128 + run % 64
        low, high = opened(codes, tl.bfloat16 if ASM else tl.float32, FORM == 1, ASM)
        part = _run_sums(low, x, scale, zero, grid, live, k, run, GRID_K, BLOCK_K, K, SCALED, ZERO, E, BN, B)
        part += _run_sums(
            high, x, scale, zero, grid, live, k + 64, run + 64, GRID_K, BLOCK_K, K, SCALED, ZERO, E, BN, B
        )  # fmt: skip
        return part


@triton.jit
def _row_sums(
    codes, x, w, scale, zero, row_scale, rows, grid, live, K: tl.constexpr, BYTES: tl.constexpr, GRID_K: tl.constexpr,
    BLOCK_K: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, BY_ROW: tl.constexpr,
    E: tl.constexpr, BN: tl.constexpr, B: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[E, BN]: rows times the inputs at x [E] or [1]; `codes`: their first piece. Unrolled, so that reads overlap."""
    sums = tl.zeros((E, BN, B // 16), tl.float32)
    for start in tl.static_range(0, BYTES, B):
        if start > 0:
            codes = _load_piece(w, rows, live, start, BYTES, B)
        sums += _piece_sums(
            codes, x, scale, zero, grid, live, start, GRID_K, BLOCK_K, K, FORM, SCALED, ZERO, E, BN, B, ASM
        )  # fmt: skip
    total = tl.sum(sums, 2)
    if BY_ROW:
        total = total * tl.load(row_scale + rows, mask=live, other=0.0)
    return total


@triton.jit
def _up_kernel(
    x, index, w, scale, zero, row_scale, bias, out, x_stride, alpha, limit,
    N: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr, GRID_N: tl.constexpr,
    GRID_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr,
    ZERO: tl.constexpr, BY_ROW: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, BN: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """GATED: w holds gate rows, then up rows, and N counts results; else N counts all rows and nothing follows."""
    E: tl.constexpr = 2 if GATED else 1
    pair = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    each = n[None, :] + tl.arange(0, E)[:, None] * N  # rows of gates and of ups
    live = (n < N)[None, :] & (each >= 0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(index + pair).to(tl.int64)
    rows = expert * ROWS + each
    grid = (expert * GRID_N + each // BLOCK_N) * GRID_K
    source = x + (pair // TOP_K).to(tl.int64) * x_stride + tl.zeros((1,), tl.int64)
    codes = _load_piece(w, rows, live, 0, BYTES, B)
    acc = _row_sums(
        codes, source, w, scale, zero, row_scale, rows, grid, live, K, BYTES, GRID_K, BLOCK_K, FORM, SCALED, ZERO,
        BY_ROW, E, BN, B, ASM,
    )  # fmt: skip
    if BIAS:
        acc += tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(acc))
        y = gate_up(gate, up, alpha, limit, ACT)
    else:
        y = tl.sum(acc, 0)
    tl.store(out + pair.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _down_kernel(
    h, index, weights, w, scale, zero, row_scale, bias, stream, out,
    N: tl.constexpr, K: tl.constexpr, BYTES: tl.constexpr, GRID_N: tl.constexpr, GRID_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr,
    B: tl.constexpr, E: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """All experts of a token at once; E: TOP_K, to the next power of two. EARLY: launched right after _up_kernel, which
    lets this start only when everything before it is done; so the selected experts may be read (bypassing L1) and with
    them the first piece, before the wait for h."""
    token = tl.program_id(0).to(tl.int64)
    n, j = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, E)
    if EARLY:
        gdc_launch_dependents()
    kind: tl.constexpr = out.dtype.element_ty
    chosen = j < TOP_K
    live = chosen[:, None] & (n < N)[None, :]
    expert = tl.load(index + token * TOP_K + j, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
    weight = tl.load(weights + token * TOP_K + j, mask=chosen, other=0.0, cache_modifier=".cg").to(tl.float32)
    rows = expert[:, None] * N + n[None, :]
    grid = (expert[:, None] * GRID_N + (n // BLOCK_N)[None, :]) * GRID_K
    codes = _load_piece(w, rows, live, 0, BYTES, B)
    if EARLY:
        gdc_wait()
    source = h + tl.where(chosen, token * TOP_K + j, token * TOP_K) * K
    y = _row_sums(
        codes, source, w, scale, zero, row_scale, rows, grid, live, K, BYTES, GRID_K, BLOCK_K, FORM, SCALED, ZERO,
        BY_ROW, E, BN, B, ASM,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(live, y.to(kind).to(tl.float32) * weight[:, None], 0.0), 0)
    if ADD:
        total = total.to(kind).to(tl.float32)
        total += tl.load(stream + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(kind), mask=n < N)


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
    config: CodedFewConfig = CodedFewConfig(), early: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, dim], index [T, k] -> [T * k, F]; without `act` the full result [T * k, 2 F]."""
    rows = w1.shape[1]
    n = rows if act is None else rows // 2
    code, alpha, limit = act or (0, 0.0, 0.0)
    bn, size, warps = config.up
    out = torch.empty((index.numel(), n), dtype=x.dtype, device=x.device)
    launch = {"launch_pdl": True} if early else {}
    _up_kernel[(index.numel(), cdiv(n, bn))](
        x, index, w1.codes, w1.scale, w1.zero, w1.row_scale, b1, out, x.stride(0), alpha, limit,
        N=n, ROWS=rows, **constants(w1), TOP_K=index.shape[1], GATED=act is not None, ACT=code, BIAS=b1 is not None,
        BN=bn, B=_size(w1, size), EARLY=early, ASM=x.is_cuda, num_warps=warps, **launch,
    )  # fmt: skip
    return out


def down(
    h: Tensor, weights: Tensor, index: Tensor, w2: ExpertCodes, b2: Tensor | None, stream: Tensor | None, *,
    config: CodedFewConfig = CodedFewConfig(), early: bool = False,
) -> Tensor:  # fmt: skip
    """h [T * k, F] -> [T, dim], weighted and summed; `stream` [T, dim] is added."""
    (tokens, top_k), n = index.shape, w2.shape[1]
    bn, size, warps = config.down
    experts = next_power_of_2(top_k)
    bn = max(1, bn * 4 // experts)
    out = torch.empty((tokens, n), dtype=h.dtype, device=h.device)
    launch = {"launch_pdl": True} if early else {}
    _down_kernel[(tokens, cdiv(n, bn))](
        h, index, weights, w2.codes, w2.scale, w2.zero, w2.row_scale, b2, stream, out,
        N=n, **constants(w2), TOP_K=top_k, BIAS=b2 is not None, ADD=stream is not None,
        BN=bn, B=_size(w2, size), E=experts, EARLY=early, ASM=h.is_cuda, num_warps=warps,
        **launch,
    )  # fmt: skip
    return out


def _size(w: ExpertCodes, most: int) -> int:
    """Bytes of a row that are read together: whole chunks."""
    return max(_LEAST_BYTES, min(most, next_power_of_2(w.codes.shape[2])))
