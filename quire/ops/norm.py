"""Normalization: RMS and layer norm, each alone or after adding to the residual stream.

Rounding follows transformers: `rms_norm` rounds to the input's dtype before multiplying by the weight, `rms_norm_wide`
multiplies in float32 and rounds once. In float32 both are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.alone import keep_apart
from quire.ops.op import op
from quire.ops.parts import PartialSums, whole


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x), rounded, times weight, over the last dimension."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


@rms_norm.form("cpu")
def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype is torch.float32 and weight.ndim == 1:  # one call, and the same bits as the reference
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return rms_norm.reference(x, weight, eps)


@op
def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x), rounded, over the last dimension."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@op
def rms_norm_wide(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) times (weight + offset), all in float32, then rounded."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    wide = weight.float()
    return (h * (wide + offset if offset else wide)).to(x.dtype)


@op
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """(x - mean) / std times (weight + offset) plus bias, in float32, then rounded."""
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        h = h * (weight.float() + offset)
    if bias is not None:
        h = h + bias.float()
    return h.to(x.dtype)


@layer_norm.form("cpu")
def layer_norm_cpu(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    if weight is not None and weight.ndim > 1:  # a weight per head
        return (F.layer_norm(x.float(), (x.shape[-1],), None, None, eps) * (weight.float() + offset)).to(x.dtype)
    if offset and weight is not None:
        weight = weight + offset
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@op
def add_layer_norm(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + delta), x + delta). A form may overwrite x with the sum: use the one returned."""
    total = x + whole(delta)
    return layer_norm.reference(total, weight, bias, eps, offset), total


@add_layer_norm.form("cpu")
def add_layer_norm_cpu(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = x + whole(delta)
    return layer_norm_cpu(total, weight, bias, eps, offset), total


@op
def add_rms_norm(x: Tensor, delta: Tensor | PartialSums, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + delta), x + delta): a sublayer's output is added to the stream and normalized. A form may
    overwrite x with the sum: use the one returned."""
    total = x + whole(delta)
    return rms_norm.reference(total, weight, eps), total


@add_rms_norm.form("cpu")
def add_rms_norm_cpu(x: Tensor, delta: Tensor | PartialSums, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + whole(delta)
    return rms_norm_cpu(total, weight, eps), total


@op
def add_rms_norm_wide(
    x: Tensor, delta: Tensor | PartialSums, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm_wide(x + delta), x + delta). A form may overwrite x with the sum."""
    total = x + whole(delta)
    return rms_norm_wide.reference(total, weight, eps, offset), total


for _norm, _rows in (
    (rms_norm, 1),
    (unit_rms, 1),
    (rms_norm_wide, 1),
    (layer_norm, 1),
    (add_layer_norm, 2),
    (add_rms_norm, 2),
    (add_rms_norm_wide, 2),
):
    keep_apart(_norm, _rows)
