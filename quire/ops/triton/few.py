"""Matmuls of a few rows with a large matrix on CUDA, fused with the ops before and after them.

With few rows a matmul costs one read of its matrix; the rest is launch overhead. A program takes BN rows of the matrix,
reads them in tiles of BK entries (16 bytes per thread and access) and multiplies on the CUDA cores. Before: the RMS
norm of every row, which each program recomputes (a row is a few kilobytes of cache). After: bias, a gated activation,
the residual addition. Intermediate values are rounded where the separate ops round.

With `early` (programmatic dependent launch) a program starts while the previous kernel still runs, reads its first
tile of the matrix, and only then waits for that kernel's output.

Floor: the bytes of the matrix at 4.3 TB/s, and a launch, about 1.4 us inside a graph. 1024 x 4096 bf16: 8.4 MB, 2 us;
4096 x 24576: 201 MB, 47 us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.coded import CodedWeight, is_simple
from quire.ops.few import NormRule
from quire.ops.triton.act import gate_up

_TALL = 1 << 16  # columns of a matrix past which launch overhead is negligible
_ALONE = 1  # rows up to which an unfused matmul uses this kernel


class FewRowsConfig(NamedTuple):
    """BN counts result columns (a gated matmul reads twice as many rows of the matrix)."""

    bn: int
    bk: int
    warps: int


@triton.jit
def _row(x, k, scale, norm_weight, offset, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """A tile of one row as float32, normalized if NORM (1: rounded before the weight, 2: after)."""
    kind: tl.constexpr = x.dtype.element_ty
    if K % BK == 0:
        h = tl.load(x + k).to(tl.float32)
    else:
        h = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM > 0:
        h = h * scale
        if NORM == 1:
            h = h.to(kind).to(tl.float32)
        if K % BK == 0:
            g = tl.load(norm_weight + k).to(tl.float32)
        else:
            g = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        h = (h * (g + offset)).to(kind).to(tl.float32)
    return h


@triton.jit
def _scale(x, eps, K: tl.constexpr, WHOLE: tl.constexpr):
    """1 / rms of a row."""
    k = tl.arange(0, WHOLE)
    h = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(h * h, 0) / K + eps)


@triton.jit
def _keep(normed, row, h, k, K: tl.constexpr, KEEP: tl.constexpr):
    """The first program stores the norm that every program computes."""
    if KEEP:
        tl.store(normed + row * K + k, h.to(normed.dtype.element_ty), mask=(k < K) & (tl.program_id(0) == 0))


@triton.jit
def _joined(acc, a, h, m, row):
    """acc [BM, BN] with a [BN, BK] times h [BK] added to one row."""
    return acc + tl.where((m == row)[:, None], tl.sum(a.to(tl.float32) * h[None, :], 1)[None, :], 0.0)


@triton.jit
def _piece(w, n, k, stride, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """w[n, k] as stored."""
    at = w + n.to(tl.int64)[:, None] * stride + k[None, :]
    if N % BN == 0 and K % BK == 0:
        return tl.load(at)
    return tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _one(
    x, norm_weight, w, normed, a, b, n, k, w_stride, eps, offset,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The matmul of one row: sums [1, BN] of both parts. `a` and `b` are the first tiles of the matrix."""
    scale = 0.0
    if NORM > 0:
        scale = _scale(x, eps, K, WHOLE)
    h = _row(x, k, scale, norm_weight, offset, K, BK, NORM)
    _keep(normed, 0, h, k, K, KEEP)
    sums = a.to(tl.float32) * h[None, :]
    sums_up = b.to(tl.float32) * h[None, :] if GATED else sums
    for start in range(BK, K, BK):
        h = _row(x, start + k, scale, norm_weight, offset, K, BK, NORM)
        _keep(normed, 0, h, start + k, K, KEEP)
        sums += _piece(w, n, start + k, w_stride, N, K, BN, BK).to(tl.float32) * h[None, :]
        if GATED:
            sums_up += _piece(w + N * w_stride, n, start + k, w_stride, N, K, BN, BK).to(tl.float32) * h[None, :]
    acc = tl.sum(sums, 1)[None, :]
    return acc, tl.sum(sums_up, 1)[None, :] if GATED else acc


@triton.jit
def _each_row(
    acc, acc_up, x, norm_weight, normed, a, b, k, m, scales, x_stride, offset,
    M: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Both sums plus one tile of the matrix times one tile of every row."""
    for row in tl.static_range(M):
        scale = tl.sum(tl.where(m == row, scales, 0.0), 0) if NORM > 0 else 0.0
        h = _row(x + row * x_stride, k, scale, norm_weight, offset, K, BK, NORM)
        _keep(normed, row, h, k, K, KEEP)
        acc = _joined(acc, a, h, m, row)
        if GATED:
            acc_up = _joined(acc_up, b, h, m, row)
    return acc, acc_up


@triton.jit
def _several(
    x, norm_weight, w, normed, a, b, n, k, m, x_stride, w_stride, eps, offset,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WHOLE: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The matmul of M rows: sums [BM, BN] of both parts. The next tiles of the matrix are prefetched."""
    scales = tl.zeros((BM,), tl.float32)
    if NORM > 0:
        for row in tl.static_range(M):
            scales = tl.where(m == row, _scale(x + row * x_stride, eps, K, WHOLE), scales)
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K - BK, BK):
        next_a = _piece(w, n, start + BK + k, w_stride, N, K, BN, BK)
        next_b = _piece(w + N * w_stride, n, start + BK + k, w_stride, N, K, BN, BK) if GATED else next_a
        acc, acc_up = _each_row(
            acc, acc_up, x, norm_weight, normed, a, b, start + k, m, scales, x_stride, offset, M, K, BK, NORM, GATED,
            KEEP,
        )  # fmt: skip
        a, b = next_a, next_b
    last: tl.constexpr = (K - 1) // BK * BK
    return _each_row(
        acc, acc_up, x, norm_weight, normed, a, b, last + k, m, scales, x_stride, offset, M, K, BK, NORM, GATED, KEEP
    )  # fmt: skip


@triton.jit
def _few_kernel(
    x, norm_weight, w, w_scale, bias, stream, out, normed, x_stride, w_stride, eps, offset, alpha, limit,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WHOLE: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr, ROUND: tl.constexpr, CODED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (columns,). out [M, N] = f(norm(x) w' + bias) or stream + .. ; GATED: w holds gate rows, then up rows.
    CODED: w are codes, and each of its rows is times its number in w_scale. KEEP: norm(x) is stored too. ROUND: results
    are rounded to the dtype of x, whatever dtype they are stored in."""
    n, k, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BM)
    if EARLY:
        gdc_launch_dependents()
    a = _piece(w, n, k, w_stride, N, K, BN, BK)
    b = _piece(w + N * w_stride, n, k, w_stride, N, K, BN, BK) if GATED else a
    if EARLY:
        gdc_wait()
    if M == 1:
        acc, acc_up = _one(
            x, norm_weight, w, normed, a, b, n, k, w_stride, eps, offset, N, K, BN, BK, WHOLE, NORM, GATED, KEEP
        )  # fmt: skip
    else:
        acc, acc_up = _several(
            x, norm_weight, w, normed, a, b, n, k, m, x_stride, w_stride, eps, offset, M, N, K, BM, BN, BK, WHOLE,
            NORM, GATED, KEEP,
        )  # fmt: skip
    if CODED:
        acc *= tl.load(w_scale + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up *= tl.load(w_scale + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ROUND:
        acc = acc.to(x.dtype.element_ty).to(tl.float32)
        acc_up = acc_up.to(x.dtype.element_ty).to(tl.float32)
    _finish(acc, acc_up, stream, out, n, m, alpha, limit, M, N, GATED, ACT, ADD)


@triton.jit
def _finish(
    y, up, stream, out, n, m, alpha, limit, M: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """The epilogue of the matmul, and the store."""
    kind: tl.constexpr = out.dtype.element_ty
    inside = (n < N)[None, :] & (m < M)[:, None]
    at = m[:, None] * N + n[None, :]
    if GATED:
        y = gate_up(y, up, alpha, limit, ACT).to(kind).to(tl.float32)
    if ADD:
        y += tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(kind), mask=inside)


def few_linear(
    x: Tensor,  # [M, K], rows may be apart
    w: Tensor | CodedWeight,  # [N, K], or [2 N, K] with act
    bias: Tensor | None = None,
    *,
    norm: NormRule | None = None,
    act: tuple[int, float, float] | None = None,  # (code, alpha, limit) of a gated activation
    stream: Tensor | None = None,  # [M, N] contiguous, to be added
    out: Tensor | None = None,  # [M, N], of any dtype
    normed: Tensor | None = None,  # [M, K], gets norm(x)
    rounded: bool = True,  # to the dtype of x, before the epilogue
    config: FewRowsConfig | None = None,
    early: bool = False,
) -> Tensor:
    w, scale = (w.codes, w.scale) if isinstance(w, CodedWeight) else (w, None)
    rows, k = x.shape
    n = w.shape[0] // 2 if act is not None else w.shape[0]
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    bn, bk, warps = config or config_of(rows, n, k, gated=act is not None, coded=scale is not None)
    code, alpha, limit = act or (0, 0.0, 0.0)
    rule = norm or NormRule(None, 0.0, 0.0, False)
    kind = 0 if norm is None else 2 if rule.wide or rule.offset else 1
    early = early and n <= _TALL
    launch = {"launch_pdl": True} if early else {}
    _few_kernel[(triton.cdiv(n, bn),)](
        x, rule.weight, w, scale, bias, stream, out, normed, x.stride(0), w.stride(0), rule.eps, rule.offset, alpha,
        limit, M=rows, N=n, K=k, BM=triton.next_power_of_2(rows), BN=bn, BK=bk, WHOLE=triton.next_power_of_2(k),
        NORM=kind, GATED=act is not None, ACT=code, BIAS=bias is not None, ADD=stream is not None,
        KEEP=normed is not None, ROUND=rounded, CODED=scale is not None, EARLY=early, num_warps=warps, **launch,
    )  # fmt: skip
    return out


def few_router(
    x: Tensor, w: Tensor, bias: Tensor | None, norm: NormRule, *, wide: bool, early: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(logits [M, E] float32, norm(x))."""
    logits = torch.empty((x.shape[0], w.shape[0]), dtype=torch.float32, device=x.device)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    few_linear(x, w, bias, norm=norm, out=logits, normed=normed, rounded=not wide, early=early)
    return logits, normed


# Up to how many rows, by the width of the model: (width, rows), the first that is wide enough.
_FEW_ROWS = ((2048, 2), (1 << 30, 1))


def few_rows(width: int, dtype: torch.dtype, matrices: Sequence[Tensor | CodedWeight]) -> int:
    """Up to how many rows a block's matmuls use these kernels: those with numbers, and with codes in rows."""
    if not all(isinstance(matrix, Tensor) or is_simple(matrix) for matrix in matrices):
        return 0
    return next(rows for most, rows in _FEW_ROWS if width <= most)


def config_of(rows: int, n: int, k: int, *, gated: bool, coded: bool = False) -> FewRowsConfig:
    """As measured on an H200 (benchmarks/gpu/sweep.py few)."""
    bk = triton.next_power_of_2(k)
    if coded:  # as many bytes of a tile as below, in twice as many entries; not measured
        plain = config_of(rows, n, k, gated=gated)
        return plain._replace(bk=min(2 * plain.bk, bk))
    if gated and k <= 1024:
        return FewRowsConfig(2, min(512, bk), 2) if rows == 1 else FewRowsConfig(8, bk, 4)
    if gated:
        return FewRowsConfig(4, 1024, 4)
    if n > _TALL:
        return FewRowsConfig(2, min(1024, bk), 4)
    if n > k:
        return FewRowsConfig(4, min(1024, bk), 2 if k <= 2048 else 4)
    return FewRowsConfig(4, min(2048, bk), 8) if n * k <= 1 << 24 else FewRowsConfig(4, 1024, 2)


# --- forms of ops/few.py and of ops/linear.py


def norm_linear(
    x: Tensor, norm: NormRule, weight: Tensor | CodedWeight, bias: Tensor | None,
    act: Callable[[Tensor], Tensor] | None = None, *, codes: Mapping[Callable, int], early: bool = False,
) -> Tensor:  # fmt: skip
    """`codes`: the gated activations that can be fused; others run after it."""
    code = None if act is None else codes.get(act)
    y = few_linear(x, weight, bias, norm=norm, act=None if code is None else (code, 0.0, 0.0), early=early)
    return y if act is None or code is not None else act(y)


def norm_linears(
    x: Tensor, norm: NormRule, weights: Sequence[Tensor | CodedWeight], bias: Tensor | None, *, early: bool = False
) -> Tensor:
    if len(weights) == 1:
        return few_linear(x, weights[0], bias, norm=norm, early=early)
    y = torch.cat([few_linear(x, weight, norm=norm, early=early) for weight in weights], -1)
    return y if bias is None else y + bias


def linear_add(
    x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, stream: Tensor | None,
    following: Tensor | CodedWeight | None = None, *, early: bool = False,
) -> Tensor:  # fmt: skip
    """`following` is not used."""
    return few_linear(x, weight, bias, stream=None if stream is None else stream.contiguous(), early=early)


def norm_router(
    x: Tensor, norm: NormRule, weight: Tensor, bias: Tensor | None, wide: bool, *, early: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return few_router(x, weight, bias, norm, wide=wide, early=early)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, early: bool = False) -> Tensor:
    """A few rows with this kernel, more with the library."""
    if x.ndim == 2 and x.shape[0] <= _ALONE and x.dtype is weight.dtype and x.stride(1) == weight.stride(1) == 1:
        return few_linear(x, weight, bias, early=early)
    return F.linear(x, weight, bias)
