"""Gated activations on CUDA: [gate | up] -> f(gate) * up in one pass; and `gate_up`, the same inside other kernels.

Floor: 3 F b bytes a row of F results of b bytes (two read, one written). 8192 rows of 12288 bf16: 604 MB, 141 us at
4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.coded import LARGEST
from quire.ops.rounded import RoundedRows, RowCode
from quire.ops.triton.norm import rounded, store_scales
from quire.ops.triton.sizes import cdiv, next_power_of_2

SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, TANH, CLAMPED = range(8)
CODES = {
    "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "quick_gelu": QUICK_GELU, "relu": RELU, "relu2": RELU2,
    "tanh": TANH,
}  # fmt: skip
MOST_ROUNDED = 32768  # entries of a row that one program rounds
_TILE = (2048, 8)  # entries and warps of a program


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def gate_up(gate, up, alpha, limit, ACT: tl.constexpr):
    """f(gate) * up, in float32. ACT 7: (up + 1) * gate * sigmoid(alpha * gate), both clamped."""
    if ACT == 0:
        return gate * tl.sigmoid(gate) * up
    elif ACT == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACT == 2:
        return 0.5 * gate * (1.0 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    elif ACT == 3:
        return gate * tl.sigmoid(1.702 * gate) * up
    elif ACT == 4:
        return tl.maximum(gate, 0.0) * up
    elif ACT == 5:
        positive = tl.maximum(gate, 0.0)
        return positive * positive * up
    elif ACT == 6:
        return _tanh(gate) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * tl.sigmoid(gate * alpha)


@triton.jit
def _gated_kernel(
    x, out, stride, alpha, limit, WIDTH: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = x + row * stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate_up(gate, up, alpha, limit, ACT)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


def gated(
    x: Tensor, code: int, alpha: float = 0.0, limit: float = 0.0, *, tile: tuple[int, int] = _TILE, early: bool = False
) -> Tensor:  # fmt: skip
    """x [n, 2 F] (rows may be apart) -> [n, F]. `tile`: entries and warps of a program, at most."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = min(tile[0], next_power_of_2(width))
        grid = (rows, cdiv(width, block))
        warps = max(1, tile[1] * block // tile[0])
        _gated_kernel[grid](
            x, out, x.stride(0), alpha, limit, WIDTH=width, ACT=code, BLOCK=block, EARLY=early, num_warps=warps,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


@triton.jit
def _rounded_kernel(
    x, out, scales, stride, alpha, limit,
    WIDTH: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """grid (rows,). As _gated_kernel, as codes up to LARGEST and a scale for each GROUP of a row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = x + row * stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = tl.where(inside, gate_up(gate, up, alpha, limit, ACT), 0.0).to(x.dtype.element_ty).to(tl.float32)
    codes, scale = rounded(result[None, :], LARGEST, GROUP)
    tl.store(out + row * WIDTH + column[None, :], codes.to(out.dtype.element_ty), mask=inside[None, :])
    here = tl.program_id(0) + tl.arange(0, 1)
    store_scales(scales, scale, here, tl.num_programs(0), (WIDTH + GROUP - 1) // GROUP)


def gated_rounded(x: Tensor, code: int, into: RowCode, *, early: bool = False) -> RoundedRows:
    """x [n, 2 F] (rows may be apart) -> [n, F]. F is at most MOST_ROUNDED."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=into.dtype, device=x.device)
    groups = width // into.group if into.group else 1
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    if rows:
        block = next_power_of_2(width)
        _rounded_kernel[(rows,)](
            x, out, scales, x.stride(0), 0.0, 0.0, WIDTH=width, ACT=code, BLOCK=block,
            LARGEST=LARGEST[into.dtype], GROUP=into.group or block, EARLY=early,
            num_warps=min(16, max(1, block // 512)), **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return RoundedRows(out, scales, x.dtype)


def gated_form(code: int, early: bool = False) -> Callable[[Tensor], Tensor]:
    """The form of one gated activation."""

    def form(x: Tensor) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        flat = x if x.ndim == 2 else x.flatten(0, -2)
        return gated(flat, code, early=early).view(*x.shape[:-1], x.shape[-1] // 2)

    return form


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    return gated(x if x.stride(-1) == 1 else x.contiguous(), CLAMPED, alpha, limit)
