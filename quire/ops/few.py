"""Matmuls of a few rows fused with the ops before and after them, for devices where launches dominate.

Each op is a sequence of plain ops with the same results. A device that has a form of `few_rows` or of
`part_rows` says up to how many rows its forms are faster; if that is 0, layers call the plain ops.

    few_rows     norm_linear, norm_linears, linear_add, norm_router: everything around a matmul is fused into it
    part_rows    linear_parts, linear_act: a matmul is split along K, and the consumer adds up the `PartialSums`, or
                 `sum_parts` does; of which adapters they add, `added_rows` says

Which codes they read, `few_rows` and `part_rows` say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.coded import CodedWeight, coded_linear
from quire.ops.linear import linear
from quire.ops.lora import AddedLowRank, LowRank, add_low_rank
from quire.ops.norm import rms_norm, rms_norm_wide
from quire.ops.op import op
from quire.ops.parts import PartialSums


class NormRule(NamedTuple):
    """An RMS norm over full rows, as data; see ops/norm.py. wide or offset: rms_norm_wide."""

    weight: Tensor | None  # [K]
    eps: float
    offset: float
    wide: bool


@op
def few_rows(width: int, dtype: torch.dtype, matrices: Sequence[Tensor | CodedWeight]) -> int:
    """Up to how many rows the ops below are faster, in a block of this width that has these matrices; 0: they cannot
    read one of them, or are never faster."""
    return 0


@op
def norm_linear(
    x: Tensor,  # [M, K]
    norm: NormRule,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    act: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """act(norm(x) weight' + bias)."""
    y = _linear(normed(x, norm), weight, bias)
    return y if act is None else act(y)


@op
def norm_linears(
    x: Tensor, norm: NormRule, weights: Sequence[Tensor | CodedWeight], bias: Tensor | None
) -> Tensor:  # fmt: skip
    """norm(x) weight' + bias of matrices one below another, which are coded differently."""
    h = normed(x, norm)
    y = torch.cat([_linear(h, weight, None) for weight in weights], -1)
    return y if bias is None else y + bias


@op
def linear_add(
    x: Tensor,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    stream: Tensor | None,
    following: Tensor | CodedWeight | None = None,
) -> Tensor:
    """stream + (x weight' + bias); no stream: another rank adds it. `following`: the matrix of the next matmul, which a
    device may begin to bring to its cache; results do not depend on it."""
    y = _linear(x, weight, bias)
    return y if stream is None else stream + y


@op
def norm_router(x: Tensor, norm: NormRule, weight: Tensor, bias: Tensor | None, wide: bool) -> tuple[Tensor, Tensor]:
    """(logits [M, E] float32, norm(x)): the matmul of a router, which needs its input again. wide: in float32."""
    h = normed(x, norm)
    if wide:
        return linear.reference(h.float(), weight.float(), None if bias is None else bias.float()), h
    return linear.reference(h, weight, bias).float(), h


@op
def part_rows(width: int, dtype: torch.dtype, matrices: Sequence[Tensor | CodedWeight]) -> int:
    """Up to how many rows the ops below are faster, in a block of this width that has these matrices; 0: they cannot
    read one of them, or are never faster."""
    return 0


@op
def added_rows(matrices: Sequence[tuple[Tensor | CodedWeight, LowRank]]) -> int:
    """Up to how many rows the ops below add adapters to these matmuls faster than `add_low_rank` does; 0: they cannot,
    or are never faster."""
    return 0


@op
def linear_parts(
    x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, added: AddedLowRank | None = None
) -> PartialSums:
    """x weight' + bias, for consumers of partial sums: `add_rms_norm`, `add_rms_norm_wide` and `prepare_qkv`."""
    return PartialSums(_linear(x, weight, bias, added).float()[None], x.dtype)


@op
def sum_parts(product: PartialSums) -> Tensor:
    """[M, N]: for consumers that take no partial sums, such as a sum over ranks."""
    return product.whole()


@op
def linear_act(
    x: Tensor,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    act: Callable[[Tensor], Tensor],
    added: AddedLowRank | None = None,
) -> Tensor:
    """act(x weight' + bias)."""
    return act(_linear(x, weight, bias, added))


def _linear(x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, added: AddedLowRank | None = None) -> Tensor:
    if added is not None:
        return add_low_rank.reference(_linear(x, weight, bias), x, *added)
    if isinstance(weight, Tensor):
        return linear.reference(x, weight, bias)
    return coded_linear.reference(x, weight, bias)


def normed(x: Tensor, norm: NormRule) -> Tensor:
    """The norm by its references."""
    assert norm.weight is not None
    if norm.wide or norm.offset:
        return rms_norm_wide.reference(x, norm.weight, norm.eps, norm.offset)
    return rms_norm.reference(x, norm.weight, norm.eps)
