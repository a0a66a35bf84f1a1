"""Inputs of matmuls rounded to 8 bits by the op that makes them: a norm, a matmul with a gated activation.

Rounding them in a pass of its own reads and writes every activation once more. Each op is a sequence of plain ops with
the same results. A device that has a form of `rounded_rows` says from how many rows on a block should go this way.
References do what separate ops do. Must not know: layers, models, which device this is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.coded import CodedWeight, decode_weight, quantize_rows
from quire.ops.few import NormRule, normed
from quire.ops.op import op
from quire.ops.parts import Delta, PartialSums, whole


class RoundedRows(NamedTuple):
    """Rows [T, K] as codes of 8 bits."""

    codes: Tensor  # [T, K], float8_e4m3fn or int8
    scale: Tensor  # [groups, T] float32
    dtype: torch.dtype  # of the rows, and of what is made of them


class RowCode(NamedTuple):
    """How rows are rounded."""

    dtype: torch.dtype  # float8_e4m3fn or int8
    group: int = 0  # neighbouring columns that share a scale; 0: all of a row

    @classmethod
    def of(cls, weight: CodedWeight) -> RowCode:
        """That of a weight's inputs."""
        return cls(weight.codes.dtype, 0 if weight.group == weight.width else weight.group)


@op
def rounded_rows(matrices: Sequence[Tensor | CodedWeight]) -> int:
    """From how many rows on the ops below are faster for a block with these matrices; 0: never."""
    return 0


@op
def add_norm_rounded(x: Tensor, delta: Delta, norm: NormRule, code: RowCode) -> tuple[RoundedRows, Tensor]:
    """(norm(x + delta) rounded, x + delta). A form may overwrite x with the sum: use the one returned."""
    total = x if delta is None else x + whole(delta)
    return _rounded(normed(total, norm), code), total


@op
def rounded_linear(x: RoundedRows, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    numbers = (x.codes.float().unflatten(1, (len(x.scale), -1)) * x.scale.t()[:, :, None]).flatten(1)
    wide = F.linear(numbers, decode_weight.reference(weight, torch.float32), None if bias is None else bias.float())
    return wide.to(x.dtype)


@op
def rounded_parts(x: RoundedRows, weight: CodedWeight, bias: Tensor | None) -> Tensor | PartialSums:
    """As rounded_linear; its consumer adds parts up, if there are any (ops/parts.py)."""
    return rounded_linear.reference(x, weight, bias)


@op
def rounded_act(
    x: RoundedRows, weight: CodedWeight, bias: Tensor | None, act: Callable[[Tensor], Tensor], code: RowCode
) -> RoundedRows:
    """act(x @ weight.T + bias) rounded; `act` is gated."""
    return _rounded(act(rounded_linear.reference(x, weight, bias)), code)


def _rounded(x: Tensor, code: RowCode) -> RoundedRows:
    codes, scale = quantize_rows.reference(x, code.dtype, code.group or x.shape[1])
    return RoundedRows(codes, scale, x.dtype)
