"""Normalization on CUDA: RMS and layer norm over rows or heads, alone or fused with the residual addition.

One program normalizes a tile of rows in registers; sums are float32. Rounding is that of ops/norm.py:
narrow forms round before multiplying by the weight, wide ones after.

Floor: a row of W entries of b bytes moves 2 W b (alone) or 4 W b (with the addition: stream and delta in, stream and
result out). 8192 rows of 4096 bf16 with the addition: 268 MB, 63 us at 4.3 TB/s. A few rows: one launch, about 2 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.coded import LARGEST
from quire.ops.few import NormRule
from quire.ops.parts import Delta, PartialSums
from quire.ops.rounded import RoundedRows, RowCode
from quire.ops.triton.sizes import cdiv, next_power_of_2

MAX_WIDTH = 16384
_TILE = 1024  # least entries of a program, for short rows


@triton.jit
def rounded(values, LARGEST: tl.constexpr, GROUP: tl.constexpr):
    """(values [rows, n] over their scales, to be stored as codes; the scales [rows, n / GROUP]). Whole numbers are
    rounded half away from zero. A group with a NaN has a scale that is NaN where codes are whole numbers, which have
    none."""
    ROWS: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    groups = tl.reshape(values, (ROWS, WIDTH // GROUP, GROUP))
    if LARGEST == 127.0:
        bits = tl.max(tl.abs(groups).to(tl.int32, bitcast=True), 2)  # NaN is the largest of these
        largest = bits.to(tl.float32, bitcast=True)
        scale = tl.where(largest < 1e-12, 1e-12, largest) / LARGEST
    else:
        scale = tl.maximum(tl.max(tl.abs(groups), 2), 1e-12) / LARGEST
    groups = groups / scale[:, :, None]
    if LARGEST == 127.0:
        groups = tl.where(groups < 0, groups - 0.5, groups + 0.5)
    return tl.reshape(groups, (ROWS, WIDTH)), scale


@triton.jit
def store_scales(scales, scale, row, rows, GROUPS: tl.constexpr):
    """scale [rows of a program, n] to scales [GROUPS, rows]; row: their numbers."""
    group = tl.arange(0, scale.shape[1])
    at = scales + group.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(at, scale, mask=(row < rows)[:, None] & (group < GROUPS)[None, :])


@triton.jit
def _weighted_sum(parts, part_stride, factors, inside, live, PARTS: tl.constexpr):
    """[rows, n] float32: a row's parts times its factors, added up as `_combine_kernel` of moe.py does."""
    acc = tl.zeros(inside.shape, tl.float32)
    for part in tl.static_range(PARTS):
        factor = tl.load(factors + part, mask=live, other=0.0).to(tl.float32)
        value = tl.load(parts + part * part_stride, mask=inside, other=0.0).to(tl.float32)
        acc = tl.fma(tl.broadcast_to(factor[:, None], acc.shape), value, acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x, delta, weight, bias, out, scales, rows, x_stride, x_head_stride, delta_stride, part_stride, weight_stride, eps,
    offset, factors,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, LAYER: tl.constexpr, WIDE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, FACTORS: tl.constexpr, LARGEST: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row r of `x` is head r % HEADS of token r // HEADS; `out` is contiguous. ADD: x += delta first, in place; delta
    is the sum of PARTS, rounded. FACTORS: each part of a row times its factor. LARGEST: results are codes up to it,
    with a scale for each GROUP of a row; 0: numbers."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    weight_at = (head * weight_stride)[:, None] + column[None, :]
    if EARLY:
        gdc_launch_dependents()
    if WEIGHT:  # no kernel before this one makes them, so they come while those still run
        gain = tl.load(weight + weight_at, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
    at = (token * x_stride + head * x_head_stride)[:, None] + column[None, :]
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        delta_at = delta + (token * delta_stride)[:, None] + column[None, :]
        if FACTORS:
            step = _weighted_sum(delta_at, part_stride, factors + token * PARTS, inside, row < rows, PARTS)
        else:
            step = tl.load(delta_at, mask=inside, other=0.0).to(tl.float32)
            for part in tl.static_range(1, PARTS):
                step += tl.load(delta_at + part * part_stride, mask=inside, other=0.0).to(tl.float32)
        total = (h + step.to(x.dtype.element_ty).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at, total, mask=inside)
        h = total.to(tl.float32)
    if LAYER:
        mean = tl.sum(h, 1) / WIDTH
        h = tl.where(inside, h - mean[:, None], 0.0)
    h = h * tl.rsqrt(tl.sum(h * h, 1) / WIDTH + eps)[:, None]
    kind: tl.constexpr = x.dtype.element_ty
    if not WIDE:
        h = h.to(kind).to(tl.float32)
    if WEIGHT:
        h = h * (gain.to(tl.float32) + offset)
    if BIAS:
        h = h + tl.load(bias + weight_at, mask=inside, other=0.0).to(tl.float32)
    if LARGEST > 0:
        h, scale = rounded(tl.where(inside, h, 0.0).to(kind).to(tl.float32), LARGEST, GROUP)
        store_scales(scales, scale, row, rows, (WIDTH + GROUP - 1) // GROUP)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], h.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor,  # [T, W] or [T, H, W], any strides but 1 in the last dimension
    weight: Tensor | None,  # [W] or [H, W]
    eps: float,
    *,
    delta: Tensor | PartialSums | None = None,
    bias: Tensor | None = None,
    offset: float = 0.0,
    layer: bool = False,
    wide: bool = False,
    warps: int = 0,  # 0: by the tile
    early: bool = False,  # see few.py
    code: RowCode | None = None,  # of the result, if it is to be codes
    scales: Tensor | None = None,  # [groups, T], gets their scales
) -> Tensor:
    tokens, width = x.shape[0], x.shape[-1]
    heads = x.shape[1] if x.ndim == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype if code is None else code.dtype, device=x.device)
    if not out.numel():
        return out
    block = next_power_of_2(width)
    rows = max(1, _TILE // block)  # by the width alone: a row's sum must not depend on the number of rows
    per_head = weight is not None and weight.ndim == 2
    parts, factors = _parts_of(delta)
    _norm_kernel[(cdiv(tokens * heads, rows),)](
        x, parts, weight, bias, out, scales, tokens * heads, x.stride(0), x.stride(1) if x.ndim == 3 else 0,
        *((0, 0) if parts is None else (parts.stride(1), parts.stride(0))), width if per_head else 0, eps, offset,
        factors, WIDTH=width, HEADS=heads, BLOCK=block, ROWS=rows, ADD=delta is not None, LAYER=layer,
        WIDE=wide or layer, WEIGHT=weight is not None, BIAS=bias is not None,
        PARTS=1 if parts is None else len(parts), FACTORS=factors is not None,
        LARGEST=0.0 if code is None else LARGEST[code.dtype], GROUP=(code.group if code else 0) or block, EARLY=early,
        num_warps=warps or min(16, max(1, block * rows // 256)), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def _parts_of(delta: Delta) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(delta, PartialSums):
        return delta.sums, delta.factors
    return None if delta is None else delta[None], None


def fits(x: Tensor, weight: Tensor | None, delta: Tensor | PartialSums | None = None) -> bool:
    """Whether the kernel supports these shapes and strides; if not, the reference is used."""
    return (
        x.ndim in (2, 3)
        and x.shape[-1] <= MAX_WIDTH
        and x.stride(-1) == 1
        and (weight is None or (weight.is_contiguous() and (weight.ndim == 1 or x.ndim == 3)))
        and (delta is None or (x.ndim == 2 and _adds(x, delta)))
    )


def _adds(x: Tensor, delta: Tensor | PartialSums) -> bool:
    step = delta.sums[0] if isinstance(delta, PartialSums) else delta
    return step.shape == x.shape and step.stride(-1) == 1


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, early: bool = False) -> Tensor:
    return _launch(x, weight, eps, early=early)


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, early: bool = False) -> Tensor:
    return _launch(x, weight, eps, offset=offset, wide=True, early=early)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0, *, early: bool = False
) -> Tensor:
    return _launch(x, weight, eps, bias=bias, offset=offset, layer=True, early=early)


def add_layer_norm(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float = 0.0, *, early: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x is overwritten with the sum."""
    return _launch(x, weight, eps, delta=delta, bias=bias, offset=offset, layer=True, early=early), x


def add_rms_norm(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor, eps: float, *, early: bool = False, warps: int = 0
) -> tuple[Tensor, Tensor]:
    """x is overwritten with the sum."""
    return _launch(x, weight, eps, delta=delta, early=early, warps=warps), x


def add_rms_norm_wide(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor, eps: float, offset: float = 0.0, *, early: bool = False
) -> tuple[Tensor, Tensor]:
    """x is overwritten with the sum."""
    return _launch(x, weight, eps, delta=delta, offset=offset, wide=True, early=early), x


def add_norm_rounded(
    x: Tensor, delta: Delta, norm: NormRule, code: RowCode, *, early: bool = False
) -> tuple[RoundedRows, Tensor]:
    """x is overwritten with the sum."""
    groups = x.shape[1] // code.group if code.group else 1
    scales = torch.empty((groups, len(x)), dtype=torch.float32, device=x.device)
    wide = bool(norm.wide or norm.offset)
    codes = _launch(
        x, norm.weight, norm.eps, delta=delta, offset=norm.offset, wide=wide, early=early, code=code, scales=scales
    )
    return RoundedRows(codes, scales, x.dtype), x
