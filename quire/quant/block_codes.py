"""Which packed kind holds a coded matrix of a checkpoint, and its codes as that kind stores them.

Kinds share a scale of 16 bits among 32 neighbouring columns (Q6Z: 16). What is whole numbers times such scales keeps
every code; what is not can be rounded to 8 bits. Must not know: how kinds lie in memory, or who multiplies them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.packed import BLOCK, FORMS
from quire.quant.coded import CodedMatrix, Integers

_SYMMETRIC = ("Q4Z", "Q5Z", "Q8Z")  # kinds of one scale for a block, by size
_WITH_MINIMA = ("Q4M", "Q5M")
_SCALE_ERROR = 2**-9  # of a scale rounded to float16, as bfloat16 would round the number


class BlockCodes(NamedTuple):
    """What `pack_codes` takes."""

    q: Tensor
    scales: Tensor
    added: Tensor | None
    kind: str


def block_codes(coded: CodedMatrix) -> BlockCodes | None:
    """None: no kind holds its codes."""
    rows, width = coded.shape
    if width % BLOCK or not rows or not width or (integers := coded.integers()) is None:
        return None
    per_block = integers.group == width or integers.group % BLOCK == 0
    if not per_block and (integers.group != BLOCK // 2):
        return None
    scales = integers.scale.half()
    lost = (scales.float() - integers.scale).abs() > _SCALE_ERROR * integers.scale.abs()
    if not scales.isfinite().all() or lost.any():
        return None
    is_between = integers.zero is not None and integers.zero.is_floating_point()  # zero points between two codes
    if not per_block:
        return None if is_between else _signed(_without_zero(integers), scales, ("Q6Z",))
    repeats = (width if integers.group == width else integers.group) // BLOCK
    if integers.zero is not None and (codes := _with_minima(integers, scales, repeats)) is not None:
        return codes
    return None if is_between else _signed(_without_zero(integers), scales.repeat_interleave(repeats, 1), _SYMMETRIC)


def bears_rounding(coded: CodedMatrix) -> bool:
    """Whether its numbers may be rounded to blocks of 8 bits: they have no more bits than that."""
    return coded.shape[1] % BLOCK == 0 and min(coded.shape) > 0


def _without_zero(integers: Integers) -> Tensor:
    if integers.zero is None:
        return integers.q
    rows, width = integers.q.shape
    return (integers.q.view(rows, -1, integers.group) - integers.zero[:, :, None]).view(rows, width)


def _signed(q: Tensor, scales: Tensor, kinds: tuple[str, ...]) -> BlockCodes | None:
    low, high = (int(end) for end in torch.aminmax(q))
    for kind in kinds:
        form = FORMS[kind]
        half = 1 << form.bits - 1
        if -half <= low and high < half:
            return BlockCodes((q + form.zero).to(torch.uint8), scales, None, kind)
    return None


def _with_minima(integers: Integers, scales: Tensor, repeats: int) -> BlockCodes | None:
    """As scale * code + added; None: the smallest signed kind holds it, or no kind does."""
    assert integers.zero is not None
    if not integers.zero.is_floating_point():
        low, high = (int(end) for end in torch.aminmax(_without_zero(integers)))
        if low >= -8 and high < 8:
            return None
    added = (integers.scale * -integers.zero.float()).half()
    if not added.isfinite().all() or int(integers.q.min()) < 0:
        return None
    for kind in _WITH_MINIMA:
        if int(integers.q.max()) < 1 << FORMS[kind].bits:
            spread = scales.repeat_interleave(repeats, 1), added.repeat_interleave(repeats, 1)
            return BlockCodes(integers.q.to(torch.uint8), *spread, kind)
    return None
