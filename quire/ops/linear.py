"""Matrix products with weights stored as plain tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base import env
from quire.ops.op import cpu_dtypes, op

FIXED_ROWS = 16  # of every product in batch-invariant mode on CPU


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; weight is [out, in]."""
    return F.linear(x, weight, bias)


@linear.form("cpu")
def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Where the CPU has no units for the dtype: widen, multiply in float32, round once."""
    if x.dtype in cpu_dtypes():
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


@linear.form("cpu", env.BATCH_INVARIANT.get)
def linear_cpu_fixed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In products of FIXED_ROWS rows, whatever x has: a library sums in an order that follows the shape."""
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if short := -rows % FIXED_ROWS:
        flat = F.pad(flat, (0, 0, 0, short))
    parts = [linear_cpu(part, weight, bias) for part in flat.split(FIXED_ROWS)]
    return torch.cat(parts)[:rows].view(*x.shape[:-1], weight.shape[0])


@op
def heads_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix per head: x [T, H, A], weight [H, A, B] -> [T, H, B]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


@heads_matmul.form("cpu")
def heads_matmul_cpu(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype in cpu_dtypes():
        return heads_matmul.reference(x, weight)
    return heads_matmul.reference(x.float(), weight.float()).to(x.dtype)


@heads_matmul.form("cpu", env.BATCH_INVARIANT.get)
def heads_matmul_cpu_fixed(x: Tensor, weight: Tensor) -> Tensor:
    heads = [linear_cpu_fixed(x[:, head], weight[head].t()) for head in range(x.shape[1])]
    return torch.stack(heads, 1)
