"""Ops of models whose layers keep several streams (layers/altup.py): sums across streams and means of rows, in float32.

Products and sums are separate calls on purpose: fused, they would round differently at the end of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.alone import keep_apart
from quire.ops.op import Op, op

root: Op[[Tensor], Tensor] = op(torch.sqrt)


@op
def row_mean(x: Tensor) -> Tensor:
    """[T, ..., W] -> [T, ..., 1] in float32."""
    return x.float().mean(-1, keepdim=True)


@op
def mix_streams(x: Tensor, coefs: Tensor) -> Tensor:
    """x [T, n, W], to each stream of which the streams are added times its row of coefs [T, n, n]."""
    wide, factors = x.float(), coefs.float()
    mixed = wide
    for index in range(x.shape[1]):
        mixed = mixed + wide[:, index, None] * factors[:, :, index, None]
    return mixed.to(x.dtype)


@op
def correct_streams(x: Tensor, innovation: Tensor, factors: Tensor) -> Tensor:
    """x [T, n, W] + innovation [T, W] * (1 + factors [T, n]): what one stream learned reaches all."""
    gains = factors.float() + 1.0
    return (x.float() + innovation.float()[:, None] * gains[..., None]).to(x.dtype)


keep_apart(root)
keep_apart(row_mean)
keep_apart(mix_streams, rows=2)
keep_apart(correct_streams, rows=3)
