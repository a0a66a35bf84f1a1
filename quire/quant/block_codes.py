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
    if width % BLOCK or not rows or not width or (found := coded.integers()) is None:
        return None
    per_block = found.group == width or found.group % BLOCK == 0
    if not per_block and (found.group != BLOCK // 2):
        return None
    scales = found.scale.half()
    lost = (scales.float() - found.scale).abs() > _SCALE_ERROR * found.scale.abs()
    if not scales.isfinite().all() or lost.any():
        return None
    if not per_block:
        return _signed(_without_zero(found), scales, ("Q6Z",))
    repeats = (width if found.group == width else found.group) // BLOCK
    if found.zero is not None and (codes := _with_minima(found, scales, repeats)) is not None:
        return codes
    return _signed(_without_zero(found), scales.repeat_interleave(repeats, 1), _SYMMETRIC)


def bears_rounding(coded: CodedMatrix) -> bool:
    """Whether its numbers may be rounded to blocks of 8 bits: they have no more bits than that."""
    return coded.shape[1] % BLOCK == 0 and min(coded.shape) > 0


def _without_zero(found: Integers) -> Tensor:
    if found.zero is None:
        return found.q
    rows, width = found.q.shape
    return (found.q.view(rows, -1, found.group) - found.zero[:, :, None]).view(rows, width)


def _signed(q: Tensor, scales: Tensor, kinds: tuple[str, ...]) -> BlockCodes | None:
    low, high = (int(end) for end in torch.aminmax(q))
    for kind in kinds:
        form = FORMS[kind]
        half = 1 << form.bits - 1
        if -half <= low and high < half:
            return BlockCodes((q + form.zero).to(torch.uint8), scales, None, kind)
    return None


def _with_minima(found: Integers, scales: Tensor, repeats: int) -> BlockCodes | None:
    """As scale * code + added; None: the smallest signed kind holds it, or no kind does."""
    assert found.zero is not None
    low, high = (int(end) for end in torch.aminmax(_without_zero(found)))
    if low >= -8 and high < 8:
        return None
    added = (found.scale * -found.zero.float()).half()
    if not added.isfinite().all() or int(found.q.min()) < 0:
        return None
    for kind in _WITH_MINIMA:
        if int(found.q.max()) < 1 << FORMS[kind].bits:
            spread = scales.repeat_interleave(repeats, 1), added.repeat_interleave(repeats, 1)
            return BlockCodes(found.q.to(torch.uint8), *spread, kind)
    return None
