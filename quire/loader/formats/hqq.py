"""HQQ: codes of 1 to 8 bits in groups with float scales and zero points, as transformers saves hqq's layers.

    W_q              uint8, codes from the high end of a byte (3 bits: int32, ten in a word). The matrix is reshaped to
                     [groups, group] (axis 1) or [group, groups] (axis 0) and split into as many bands of rows as a byte
                     has codes; a byte holds one code of each band. view_as_float: the same bytes as floats
    scale, zero      one for each group, or one for all: number = scale * (code - zero)
    shape int64 [2]  nbits, group_size, axis: one number each; packing: text as bytes

Axis 1: a group is neighbouring columns of a row; axis 0: rows of one column, so many apart as a column has groups.
What else a layer saves (compute_dtype, offload_meta and others) concerns hqq's own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats.parts import FLOATS, Directory, Made, MatrixPlan, Parts, by_module
from quire.loader.formats.scaled import check_finite
from quire.quant.coded import AffineCodes, Grid
from quire.schema.errors import CheckpointError

_NEEDED = ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing")
_NESTED = ("scale_q", "zero_q", "meta_scale", "meta_zero")  # scales that are codes themselves
_FLAGS = ("quant_scale", "quant_zero")
ROLES = (
    *_NEEDED, *_NESTED, *_FLAGS, "unpack_view_dtype", "view_as_float", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_MOST = 1 << 31
_LONGEST_TEXT = 64


class _Packing(NamedTuple):
    bits: int
    per_word: int
    word: torch.dtype
    nbits: tuple[float, ...]  # that are packed so


_PACKINGS = {
    "8bit_u8": _Packing(8, 1, torch.uint8, (8, 6, 5)),
    "4bit_u8": _Packing(4, 2, torch.uint8, (4,)),
    "3bit_32": _Packing(3, 10, torch.int32, (3,)),
    "2bit_u8": _Packing(2, 4, torch.uint8, (2, 1.58)),
    "1bit_u8": _Packing(1, 8, torch.uint8, (1,)),
}


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    for parts in by_module(directory, ROLES):
        if "W_q" not in parts and "packing" not in parts:
            continue  # a plain layer that has something called scale or shape
        if nested := [role for role in _NESTED if role in parts]:
            raise parts.wrong(nested[0], "scales and zero points that are quantized themselves are not built")
        parts.need(*_NEEDED)
        parts.matrix("W_q")
        parts.expect_dtype("W_q", torch.uint8, torch.int32, *FLOATS)
        parts.expect("shape", (2,), "rows and columns")
        parts.expect_dtype("shape", torch.int32, torch.int64)
        for role in ("scale", "zero"):
            parts.expect_dtype(role, *FLOATS)
        if parts["zero"].shape != parts["scale"].shape:
            raise parts.wrong("zero", f"expected {list(parts['scale'].shape)}, as its scales")
        for role in ("nbits", "group_size", "axis", *(role for role in _FLAGS if role in parts)):
            if parts[role].shape not in ((), (1,)):
                raise parts.wrong(role, "expected one number")
        text = parts["packing"]
        if text.dtype != torch.uint8 or len(text.shape) != 1 or text.shape[0] > _LONGEST_TEXT:
            raise parts.wrong("packing", f"expected at most {_LONGEST_TEXT} bytes of text")
        yield MatrixPlan(parts.module, parts.names, partial(_make, parts))


def _make(parts: Parts, tensors: Mapping[str, Tensor]) -> Made:
    for role in _FLAGS:
        if role in tensors and bool(tensors[role].reshape(()) != 0):
            raise parts.wrong(role, "scales and zero points that are quantized themselves are not built")
    packing = _packing(parts, tensors)
    rows, width = _shape(parts, tensors["shape"])
    group, axis = int(_number(parts, tensors, "group_size", 1, _MOST)), int(_number(parts, tensors, "axis", 0, 1))
    across, whole = ("columns", width) if axis == 1 else ("rows", rows)
    if whole % group:
        raise _says(parts, "group_size", f"{group}, which does not divide the {whole} {across} of {parts.module!r}")
    groups = rows * width // group
    codes = _opened(parts, tensors["W_q"], packing, (groups, group) if axis == 1 else (group, groups))
    scale, zero = (_grid(parts, role, tensors[role], (rows, width), group, axis) for role in ("scale", "zero"))
    yield f"{parts.module}.weight", AffineCodes(codes.view(rows, width), packing.bits, scale, zero)


def _opened(parts: Parts, stored: Tensor, packing: _Packing, shape: tuple[int, int]) -> Tensor:
    """uint8 codes of the reshaped matrix."""
    raw = stored
    if stored.is_floating_point() and stored.shape[1] * stored.itemsize % packing.word.itemsize == 0:
        raw = stored.contiguous().view(packing.word)
    bands = -(-shape[0] // packing.per_word)
    if raw.dtype != packing.word or tuple(raw.shape) != (bands, shape[1]):
        expected = f"{str(packing.word).removeprefix('torch.')} {[bands, shape[1]]}"
        raise parts.wrong("W_q", f"{shape[0]} x {shape[1]} codes of {packing.bits} bits are {expected}")
    if packing.per_word == 1:
        return raw
    if packing.bits != 3 and shape[0] % packing.per_word:
        raise parts.wrong("W_q", f"{shape[0]} rows of codes do not fill bytes of {packing.per_word}")
    shifts = [packing.bits * (packing.per_word - 1 - band) for band in range(packing.per_word)]
    mask = (1 << packing.bits) - 1
    return torch.cat([(raw >> shift & mask).to(torch.uint8) for shift in shifts])[: shape[0]]


def _grid(parts: Parts, role: str, values: Tensor, shape: tuple[int, int], group: int, axis: int) -> Grid:
    rows, width = shape
    groups = rows * width // group
    check_finite(parts, role, values)
    if values.numel() == 1:
        return Grid(values.reshape(1, 1), rows, width)
    if values.numel() != groups:
        raise parts.wrong(role, f"[{rows}, {width}] in groups of {group} has {groups} of them")
    if axis == 1:
        return Grid(values.reshape(rows, width // group), 1, group)
    return Grid(values.reshape(rows // group, width).repeat(group, 1), 1, 1)


def _packing(parts: Parts, tensors: Mapping[str, Tensor]) -> _Packing:
    text = bytes(tensors["packing"].tolist()).decode("ascii", "replace")
    packing = _PACKINGS.get(text)
    if packing is None:
        raise _says(parts, "packing", f"{text!r}; known are {', '.join(_PACKINGS)}")
    nbits = _number(parts, tensors, "nbits", 1, 8)
    if not any(abs(nbits - known) < 1e-3 for known in packing.nbits):
        raise _says(parts, "nbits", f"{nbits:g}, but its packing is {text}")
    return packing


def _shape(parts: Parts, stored: Tensor) -> tuple[int, int]:
    rows, width = (int(n) for n in stored)
    if not (0 < rows < _MOST and 0 < width < _MOST):
        raise _says(parts, "shape", f"{[rows, width]}")
    return rows, width


def _number(parts: Parts, tensors: Mapping[str, Tensor], role: str, low: int, high: int) -> float:
    value = float(tensors[role].reshape(()))
    if not low <= value <= high:
        raise _says(parts, role, f"{value:g}; expected {low} to {high}")
    return value


def _says(parts: Parts, role: str, what: str) -> CheckpointError:
    return CheckpointError(f"tensor {parts.names[role]!r} says {what}", param=parts.names[role])
