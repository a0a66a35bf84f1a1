"""AWQ (gemm): codes of 4 bits packed along the outputs, eight in a word of 32 bits in an order of their own.

qweight int32 [width, rows / 8]   qzeros int32 [groups, rows / 8]   scales [groups, rows]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats.parts import FLOATS, Directory, Made, MatrixPlan, Parts, by_module
from quire.quant.coded import AffineCodes, Grid, open_words
from quire.schema.errors import NotBuiltError

ROLES = ("qweight", "qzeros", "scales")
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where row i of eight lies in a word, from the low end
_BITS, _PER_WORD = 4, 8


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    for parts in by_module(directory, ROLES):
        _refuse_scaled_activation(parts)
        numbers = about.numbers_of(parts.module)
        parts.need("qweight", "scales", *(() if numbers.symmetric else ("qzeros",)))
        parts.expect_dtype("qweight", torch.int32)
        parts.expect_dtype("scales", *FLOATS)
        width, words = parts.matrix("qweight")
        groups, rows = parts.matrix("scales")[0], words * _PER_WORD
        parts.expect("scales", (groups, rows), f"one for each of {rows} rows")
        group = parts.group(width, numbers.group, groups, "scales")
        if "qzeros" in parts:
            parts.expect_dtype("qzeros", torch.int32)
            parts.expect("qzeros", (groups, words), "eight zero points in a word")
        yield MatrixPlan(parts.module, parts.names, partial(_make, parts, group))


def _refuse_scaled_activation(parts: Parts) -> None:
    """A vector of scales alone belongs to an activation, not to a matrix."""
    if set(parts.names) == {"scales"} and len(parts["scales"].shape) == 1:
        raise NotBuiltError(
            f"tensor {parts.names['scales']!r} scales an activation (AWQ's ScaledActivation), which is not built",
            param="quantization",
        )


def _make(parts: Parts, group: int, tensors: Mapping[str, Tensor]) -> Made:
    scale = Grid(tensors["scales"].t().contiguous(), 1, group)
    zero: Grid | int = 1 << _BITS - 1
    if "qzeros" in tensors:
        zero = Grid(open_eights(tensors["qzeros"]).t().to(torch.int16).contiguous(), 1, group)
    codes = open_eights(tensors["qweight"]).t().contiguous()
    yield f"{parts.module}.weight", AffineCodes(codes, _BITS, scale, zero)


def open_eights(words: Tensor) -> Tensor:
    """[n, rows / 8] words -> [n, rows] codes."""
    codes = open_words(words, _BITS).unflatten(1, (-1, _PER_WORD))
    return codes[:, :, list(_ORDER)].flatten(1)
