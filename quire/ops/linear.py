"""Matmuls with weights stored as plain tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.alone import keep_apart
from quire.ops.op import cpu_dtypes, op


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; weight is [out, in]."""
    return F.linear(x, weight, bias)


@linear.form("cpu")
def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """If the CPU has no units for the dtype: widen, multiply in float32, round once."""
    if x.dtype in cpu_dtypes():
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


keep_apart(linear)


@op
def heads_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix per head: x [T, H, A], weight [H, A, B] -> [T, H, B]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


@heads_matmul.form("cpu")
def heads_matmul_cpu(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype in cpu_dtypes():
        return heads_matmul.reference(x, weight)
    return heads_matmul.reference(x.float(), weight.float()).to(x.dtype)


keep_apart(heads_matmul)
