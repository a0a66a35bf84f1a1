"""Matrix products with weights stored as plain tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import cpu_has_bf16, op


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; weight is [out, in]."""
    return F.linear(x, weight, bias)


@linear.form("cpu", fits=lambda: not cpu_has_bf16())
def linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """For CPUs without half-precision matrix units: widen, multiply in float32, round once."""
    if x.dtype is torch.float32:
        return F.linear(x, weight, bias)
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


@op
def heads_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix per head: x [T, H, A], weight [H, A, B] -> [T, H, B]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


@heads_matmul.form("cpu", fits=lambda: not cpu_has_bf16())
def heads_matmul_widened(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype is torch.float32:
        return heads_matmul.reference(x, weight)
    return heads_matmul.reference(x.float(), weight.float()).to(x.dtype)
