"""GPTQ: codes packed along the inputs in words of 32 bits, zero points along the outputs.

    qweight int32 [width * bits / 32, rows]   qzeros int32 [groups, rows * bits / 32]   scales [groups, rows]
    g_idx int32 [width]: the group of each column; absent or in order where groups are neighbours

Bits follow each other over words (3 bits too). Zero points of the first version of the format are one too small. Codes
of 2, 4 and 8 bits get that one back as a whole word, because writers take it from whole words: below a zero point of 0
it is borrowed from the next code. Without such a borrow, adding it code by code gives the same, but for a stored code
of ones: here it is a 0 that carries one to the next code, where writers that know no borrow may have meant one more
than the largest code. Zero points of 0 are what files have, and those beyond the codes' range are not, so it is read
so. (AutoGPTQ's own packer lost all codes of a word above such a 0; no reader finds them.) Codes of 3 bits, which cross
words, get it one by one, and a code of ones is a 0 there too.

Of a symmetric matrix the zero point is the middle of the codes. Some files say that they are of the first version and
store the middle itself; some of 3 bits have other ones taken from their words. Both are read as the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from quire.checkpoint.quantization import CodeNumbers, Quantization
from quire.loader.formats.parts import FLOATS, Directory, Made, MatrixPlan, Parts, by_module
from quire.quant.coded import AffineCodes, Grid, open_words
from quire.schema.errors import CheckpointError

ROLES = ("qweight", "qzeros", "scales", "g_idx")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # 1 in every code of a word
_OTHER_ONES = (0x24924924, 0x92492492 - (1 << 32), 0x49249249)  # that GPTQModel took from words of 3 bits, up to 2026


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    for parts in by_module(directory, ROLES):
        parts.need("qweight", "scales", "qzeros")
        numbers = about.numbers_of(parts.module)
        parts.expect_dtype("qweight", torch.int32)
        parts.expect_dtype("qzeros", torch.int32)
        parts.expect_dtype("scales", *FLOATS)
        words, rows = parts.matrix("qweight")
        if words * 32 % numbers.bits:
            raise parts.wrong("qweight", f"its words do not hold whole codes of {numbers.bits} bits")
        width = words * 32 // numbers.bits
        groups = parts.matrix("scales")[0]
        parts.expect("scales", (groups, rows), f"one for each of {rows} rows")
        group = parts.group(width, numbers.group, groups, "scales")
        if rows * numbers.bits % 32:
            raise parts.wrong("qweight", f"{rows} rows of {numbers.bits} bits are not whole words of zero points")
        parts.expect("qzeros", (groups, rows * numbers.bits // 32), f"{rows} codes of {numbers.bits} bits")
        if "g_idx" in parts:
            parts.expect("g_idx", (width,), "one for each column")
            parts.expect_dtype("g_idx", torch.int32, torch.int64)
        yield MatrixPlan(parts.module, parts.names, partial(_make, parts, numbers, group, about.zeros_from_one))


def _make(parts: Parts, numbers: CodeNumbers, group: int, from_one: bool, tensors: Mapping[str, Tensor]) -> Made:
    bits = numbers.bits
    codes = open_words(tensors["qweight"].t(), bits)
    scales = tensors["scales"].t().contiguous()
    zeros = _zero_points(tensors["qzeros"], numbers, from_one).t().to(torch.int16)
    order = column_order(parts, tensors.get("g_idx"), group, scales.shape[1])
    zero: Grid | int = Grid(zeros.contiguous(), 1, group)
    if torch.equal(zeros, zeros[:1, :1].expand_as(zeros)):
        zero = int(zeros[0, 0])
    yield f"{parts.module}.weight", AffineCodes(codes, bits, Grid(scales, 1, group), zero, order)


def _zero_points(words: Tensor, numbers: CodeNumbers, from_one: bool) -> Tensor:
    """uint8 [groups, rows]; `from_one`: stored one too small."""
    bits = numbers.bits
    if not from_one or (numbers.symmetric and _is_middle(words, bits)):
        return open_words(words, bits)
    if numbers.symmetric and bits == 3 and _is_middle(other := words + _other_ones(words), bits):
        return open_words(other, bits)
    if bits in _ONES:
        return open_words(words + _ONES[bits], bits)  # int32 wraps around
    return open_words(words, bits) + 1 & (1 << bits) - 1


def _is_middle(words: Tensor, bits: int) -> bool:
    return bool((open_words(words, bits) == 1 << bits - 1).all())


def _other_ones(words: Tensor) -> Tensor:
    return torch.tensor(_OTHER_ONES, dtype=torch.int32, device=words.device).repeat(words.shape[1] // len(_OTHER_ONES))


def column_order(parts: Parts, g_idx: Tensor | None, group: int, groups: int, role: str = "g_idx") -> Tensor | None:
    """The group of each column; None: it follows from a column's place."""
    if g_idx is None:
        return None
    order = g_idx.long()
    if bool((order < 0).all()):  # some exporters say so that there is no order
        return None
    if bool(((order < 0) | (order >= groups)).any()):
        low, high = int(order.min()), int(order.max())
        raise CheckpointError(
            f"tensor {parts.names[role]!r} names groups {low} to {high}; there are 0 to {groups - 1}",
            param=parts.names[role],
        )
    in_place = torch.arange(len(order), device=order.device) // group
    return None if torch.equal(order, in_place) else order
