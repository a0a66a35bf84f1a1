"""Mixture of experts for a few tokens on CUDA: no sorting, two launches after the routing.

With a few tokens hardly two of them share an expert, so every pair (token, one of its k experts) reads the matrices of
its expert separately, on the CUDA cores:

    _up_kernel    grid (pairs, columns of F):  h[pair] = act(x[token] w1[expert])
    _down_kernel  grid (tokens, columns):      out[token] = stream + sum over its k of weight * (h[pair] w2[expert])

Rounding is that of the grouped matmuls in moe.py: h, and every expert's result before it is weighted. Of pairs whose
expert another rank has (SHARE: index -1), neither matrices nor h are read. Floor: 6 dim F bytes a pair (bf16). 2048 x
768, k = 8: 1 token, 75 MB, 18 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.act import gate_up


class MoeFewConfig(NamedTuple):
    """Result columns, entries of a tile, warps: of the first matmul, then of the second."""

    up: tuple[int, int, int] = (2, 1024, 4)
    down: tuple[int, int, int] = (1, 256, 2)


@triton.jit
def _rows_of(w, n, k, stride, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    at = w + n.to(tl.int64)[:, None] * stride + k[None, :]
    if N % BN == 0 and K % BK == 0:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _up_kernel(
    x, index, w, bias, out, x_stride, w_stride_e, w_stride_n, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, SHARE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATED: w holds gate rows, then up rows, and N counts results; else N counts all rows and nothing follows."""
    pair = tl.program_id(0)
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    if EARLY:  # in this order: when the second matmul starts, the routing is done (see _down_kernel)
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(index + pair).to(tl.int64)
    if SHARE and expert < 0:
        return
    source = x + (pair // TOP_K).to(tl.int64) * x_stride
    weights = w + expert * w_stride_e
    sums = tl.zeros((BN, BK), tl.float32)
    sums_up = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        h = tl.load(source + start + k, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
        sums += _rows_of(weights, n, start + k, w_stride_n, N, K, BN, BK) * h
        if GATED:
            sums_up += _rows_of(weights + N * w_stride_n, n, start + k, w_stride_n, N, K, BN, BK) * h
    acc, acc_up = tl.sum(sums, 1), tl.sum(sums_up, 1)
    if BIAS:
        at = bias + expert * (2 * N if GATED else N) + n
        acc += tl.load(at, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            acc_up += tl.load(at + N, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        acc = gate_up(acc, acc_up, alpha, limit, ACT)
    tl.store(out + pair.to(tl.int64) * N + n, acc.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _experts_piece(rows, live, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """[experts, columns, entries] of the second matrices. WHOLE: none of them is outside."""
    at = rows[:, :, None] + k[None, None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=live[:, :, None] & (k < K)[None, None, :], other=0.0)


@triton.jit
def _pairs_piece(pairs, chosen, k, K: tl.constexpr):
    """[experts, 1, entries] of the pairs' activations."""
    at = pairs + k[None, :]
    return tl.load(at, mask=chosen[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)[:, None, :]


@triton.jit
def _down_kernel(
    h, index, weights, w, bias, stream, out, w_stride_e, w_stride_n,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
    SHARE: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All experts of a token at once: a tile is [experts, columns, entries]. EARLY: launched right after
    _up_kernel, which lets this start only when everything before it is done; so the selected experts may be read
    (bypassing L1) and with them the first tile, before the wait for h."""
    token = tl.program_id(0).to(tl.int64)
    j, n, k = tl.arange(0, BLOCK_K), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    if EARLY:
        gdc_launch_dependents()
    chosen = j < TOP_K
    expert = tl.load(index + token * TOP_K + j, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
    weight = tl.load(weights + token * TOP_K + j, mask=chosen, other=0.0, cache_modifier=".cg").to(tl.float32)
    if SHARE:
        chosen = chosen & (expert >= 0)
    rows = w + expert[:, None] * w_stride_e + n[None, :] * w_stride_n  # [experts, columns]
    live = chosen[:, None] & (n < N)[None, :]
    whole: tl.constexpr = N % BN == 0 and K % BK == 0 and TOP_K == BLOCK_K and not SHARE
    tile = _experts_piece(rows, live, k, K, whole)
    if EARLY:
        gdc_wait()
    pairs = h + (token * TOP_K + j)[:, None] * K
    sums = tile.to(tl.float32) * _pairs_piece(pairs, chosen, k, K)
    for start in range(BK, K, BK):
        tile = _experts_piece(rows, live, start + k, K, whole)
        sums += tile.to(tl.float32) * _pairs_piece(pairs, chosen, start + k, K)
    y = tl.sum(sums, 2)
    if BIAS:
        y += tl.load(bias + expert[:, None] * N + n[None, :], mask=live, other=0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    total = tl.sum(y.to(kind).to(tl.float32) * weight[:, None], 0).to(kind)
    if ADD:
        total = (total.to(tl.float32) + tl.load(stream + token * N + n, mask=n < N, other=0.0).to(tl.float32)).to(kind)
    tl.store(out + token * N + n, total, mask=n < N)


def up(
    x: Tensor, index: Tensor, w1: Tensor, b1: Tensor | None, act: tuple[int, float, float] | None, *,
    config: MoeFewConfig = MoeFewConfig(), share: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, dim], index [T, k] -> [T * k, F]; without `act` the full result [T * k, 2 F]. `share`: where index is -1,
    nothing is written."""
    rows, k = w1.shape[1:]
    n = rows if act is None else rows // 2
    code, alpha, limit = act or (0, 0.0, 0.0)
    bn, bk, warps = config.up
    bk = min(bk, triton.next_power_of_2(k))
    out = torch.empty((index.numel(), n), dtype=x.dtype, device=x.device)
    launch = {"launch_pdl": True} if early else {}
    _up_kernel[(index.numel(), triton.cdiv(n, bn))](
        x, index, w1, b1, out, x.stride(0), w1.stride(0), w1.stride(1), alpha, limit,
        N=n, K=k, TOP_K=index.shape[1], GATED=act is not None, ACT=code, BIAS=b1 is not None, SHARE=share, BN=bn,
        BK=bk, EARLY=early, num_warps=warps, **launch,
    )  # fmt: skip
    return out


def down(
    h: Tensor, weights: Tensor, index: Tensor, w2: Tensor, b2: Tensor | None, stream: Tensor | None, *,
    config: MoeFewConfig = MoeFewConfig(), share: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """h [T * k, F] -> [T, dim], weighted and summed; `stream` [T, dim] is added."""
    (tokens, top_k), (n, k) = index.shape, w2.shape[1:]
    bn, bk, warps = config.down
    bk = min(bk, triton.next_power_of_2(k))
    out = torch.empty((tokens, n), dtype=h.dtype, device=h.device)
    launch = {"launch_pdl": True} if early else {}
    _down_kernel[(tokens, triton.cdiv(n, bn))](
        h, index, weights, w2, b2, stream, out, w2.stride(0), w2.stride(1),
        N=n, K=k, TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k), BIAS=b2 is not None, SHARE=share,
        ADD=stream is not None, BN=bn, BK=bk, EARLY=early, num_warps=warps, **launch,
    )  # fmt: skip
    return out
