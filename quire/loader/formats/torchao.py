"""torchao in safetensors files: a coded parameter is flattened into the tensors of its class, and the file's metadata
says which class that is and what else it knows, as JSON under the parameter's name.

    MODULE._weight_qdata, ._weight_scale, ._weight_zero_point, ...      metadata["MODULE.weight"]: {_type, _data}

    Float8Tensor              qdata float8 [rows, width]; scale: one, one per row, or one per block
    Int8Tensor                qdata int8 [rows, width]; scale and zero_point [rows, groups]: scale * (code - zero)
    IntxUnpackedToInt8Tensor  the same, with codes of fewer bits in each byte
    Int4Tensor                qdata int8 [rows, width/2], signed codes, the first of two in the low half of a byte;
                              scale and zero_point [groups, rows], both floats: scale * code + zero
    Int4TilePackedTo4dTensor  qdata int32 [rows/8, width/128, 32, 4], codes from 0 in the order of a tensor core's tile,
                              of a matrix padded with further rows and columns; scale_and_zero [groups, rows, 2]:
                              scale * (code - 8) + zero

Scales of inputs are not used. Must not know: torchao's configuration, which repeats this for all parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.checkpoint.limits import shown
from quire.loader.formats.parts import FLOATS, FP8, Directory, Made, MatrixPlan, Parts
from quire.loader.formats.scaled import check_finite
from quire.quant.coded import PLAIN_INPUT, AffineCodes, FloatCodes, Grid, InputCoding, open_halves
from quire.schema.errors import CheckpointError, NotBuiltError

_ROLES = (
    "qdata", "scale_and_zero", "per_tensor_scale", "act_per_tensor_scale", "act_quant_scale", "act_quant_zero_point",
    "act_pre_scale", "scale", "zero_point",
)  # fmt: skip
_NAME = re.compile(rf"^(?:(?P<module>.*)\.)?_(?P<leaf>\w+?)_(?P<role>{'|'.join(_ROLES)})$")
_MOST_JSON, _MOST = 1 << 16, 1 << 31
_MIDDLE = 8  # of 16 codes
_TILE_ROWS, _TILE_COLUMNS, _LANES, _WORDS = 8, 128, 32, 4  # of a tile-packed matrix
_NEAREST = {
    "MXTensor": "MXFP4 of compressed-tensors or MXFP8 of ModelOpt", "NVFP4Tensor": "NVFP4 of compressed-tensors",
    "Int4PlainInt32Tensor": "Int4Tensor", "Int4PreshuffledTensor": "Int4Tensor",
}  # fmt: skip


class _Note(NamedTuple):
    """What the metadata says of one parameter."""

    kind: str
    data: Mapping[str, Any]
    tensors: tuple[str, ...]


def plan(directory: Directory, metadata: Mapping[str, str]) -> Iterator[MatrixPlan]:
    parameters: dict[tuple[str, str], dict[str, str]] = {}
    for name in directory:
        if match := _NAME.match(name):
            key = match["module"] or "", match["leaf"]
            parameters.setdefault(key, {})[match["role"]] = name
    for (module, leaf), names in parameters.items():
        parts = Parts(f"{module}.{leaf}" if leaf != "weight" else module, names, directory)
        note = _note(parts, metadata, f"{module}.{leaf}".lstrip("."))
        parts.need(*dict.fromkeys(("qdata", *(role for role in note.tensors if role in _ROLES))))
        if "act_pre_scale" in parts:
            raise parts.wrong("act_pre_scale", "inputs scaled before a matmul are not built")
        if leaf != "weight":
            raise parts.wrong(
                "qdata", f"torchao's {leaf} of all experts in one tensor is not built; one by one they are"
            )
        make = _PLANS.get(note.kind)
        if make is None:
            nearest = _NEAREST.get(note.kind)
            raise NotBuiltError(
                f"torchao's {note.kind} ({module}) is not built; "
                + (f"the nearest supported is {nearest}" if nearest else f"{', '.join(_PLANS)} are"),
                param="quantization",
                value=note.kind,
            )
        yield MatrixPlan(parts.module, names, make(parts, note))


def _note(parts: Parts, metadata: Mapping[str, str], name: str) -> _Note:
    text = metadata.get(name)
    if text is None:
        raise CheckpointError(
            f"tensor {min(parts.names.values())!r} is one of torchao's, but the files' metadata has no {name!r}",
            param=name,
        )
    try:
        about = json.loads(text) if len(text) <= _MOST_JSON else None
    except (ValueError, RecursionError):
        about = None
    if isinstance(about, dict):
        kind, data, tensors = about.get("_type"), about.get("_data"), about.get("_tensor_data_names", [])
        if isinstance(kind, str) and isinstance(data, dict) and isinstance(tensors, list):
            return _Note(kind, data, tuple(each for each in tensors if isinstance(each, str)))
    raise CheckpointError(f"the metadata of {name!r} does not describe a tensor: {shown(text)}", param=name)


def _pair(parts: Parts, note: _Note, key: str) -> tuple[int, int]:
    """Two numbers of a note, such as its shape."""
    value = note.data.get(key)
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < _MOST for n in value):
        return value[0], value[1]
    raise CheckpointError(
        f"the metadata of {parts.module!r} says {key} = {shown(value)}; expected two numbers above 0", param=key
    )


def _block(parts: Parts, note: _Note, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if not note.data.get("block_size"):
        return shape
    block = _pair(parts, note, "block_size")
    for size, whole, what in zip(block, shape, ("rows", "columns"), strict=True):
        if whole % size:
            raise parts.wrong("qdata", f"its block_size {list(block)} does not divide the {whole} {what}")
    return block


def _expect_grid(parts: Parts, role: str, shape: tuple[int, int], block: tuple[int, int]) -> None:
    grid = shape[0] // block[0], shape[1] // block[1]
    stored = parts[role].shape
    if stored != grid and not (grid == (1, 1) and stored in ((), (1,))) and not (grid[1] == 1 and stored == grid[:1]):
        raise parts.wrong(role, f"expected {list(grid)}: {list(shape)} in blocks of {list(block)}")


def _grid(values: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Grid:
    return Grid(values.reshape(shape[0] // block[0], shape[1] // block[1]), *block)


def _inputs(note: _Note, form: str) -> InputCoding:
    settings = note.data.get("act_quant_kwargs")
    if not isinstance(settings, dict):
        return PLAIN_INPUT
    inner = settings.get("_data")
    by = inner.get("granularity") if isinstance(inner, dict) else None
    kind = by.get("_type") if isinstance(by, dict) else None
    return InputCoding(form, {"PerTensor": "tensor", "PerBlock": "group", "PerGroup": "group"}.get(str(kind), "token"))


def _plan_float8(parts: Parts, note: _Note) -> partial[Made]:
    parts.need("scale")
    shape = parts.matrix("qdata")
    parts.expect_dtype("qdata", *FP8)
    parts.expect_dtype("scale", *FLOATS)
    block = _block(parts, note, shape)
    _expect_grid(parts, "scale", shape, block)
    return partial(_make_float8, parts, block, _inputs(note, "fp8"))


def _make_float8(parts: Parts, block: tuple[int, int], inputs: InputCoding, tensors: Mapping[str, Tensor]) -> Made:
    codes, scale = tensors["qdata"], tensors["scale"]
    check_finite(parts, "scale", scale)
    shape = codes.shape[0], codes.shape[1]
    yield f"{parts.module}.weight", FloatCodes(codes, FP8[codes.dtype], _grid(scale, shape, block), inputs=inputs)


def _plan_integers(parts: Parts, note: _Note) -> partial[Made]:
    parts.need("scale")
    shape = parts.matrix("qdata")
    parts.expect_dtype("qdata", torch.int8)
    parts.expect_dtype("scale", *FLOATS)
    block = _block(parts, note, shape)
    _expect_grid(parts, "scale", shape, block)
    if "zero_point" in parts:
        parts.expect_dtype("zero_point", torch.int8, *FLOATS)
        _expect_grid(parts, "zero_point", shape, block)
    bits, inputs = 8, _inputs(note, "int8")
    if note.kind == "IntxUnpackedToInt8Tensor":
        bits = _bits(parts, note)
        if note.data.get("activation_quantization") is not None:
            inputs = InputCoding("int8", "token")
    return partial(_make_integers, parts, block, bits, inputs)


def _bits(parts: Parts, note: _Note) -> int:
    stored = note.data.get("target_dtype")
    name = stored.get("_data") if isinstance(stored, dict) else None
    match = re.fullmatch(r"int([1-8])", name) if isinstance(name, str) else None
    if match is None:
        raise CheckpointError(
            f"the metadata of {parts.module!r} says target_dtype = {shown(stored)}; expected int1 to int8",
            param="target_dtype",
        )
    return int(match[1])


def _make_integers(
    parts: Parts, block: tuple[int, int], bits: int, inputs: InputCoding, tensors: Mapping[str, Tensor]
) -> Made:
    codes, scale, middle = tensors["qdata"], tensors["scale"], 1 << bits - 1
    shape = codes.shape[0], codes.shape[1]
    low, high = (int(end) for end in torch.aminmax(codes))
    if low < -middle or high >= middle:
        raise parts.wrong("qdata", f"it holds {low} to {high}; codes of {bits} bits are {-middle} to {middle - 1}")
    check_finite(parts, "scale", scale)
    zero: Grid | int = middle
    if "zero_point" in tensors:
        stored = tensors["zero_point"]
        check_finite(parts, "zero_point", stored)
        if bool((stored != 0).any()):
            wide = (stored.float() if stored.is_floating_point() else stored.to(torch.int16)) + middle
            if bool((wide < 0).any()):  # whole zero points of few bits are stored without a sign
                wide = wide.float()
            zero = _grid(wide, shape, block)
    shifted = (codes.view(torch.uint8) ^ 128) - (128 - middle)
    yield f"{parts.module}.weight", AffineCodes(shifted, bits, _grid(scale, shape, block), zero, inputs=inputs)


def _plan_int4(parts: Parts, note: _Note) -> partial[Made]:
    parts.need("scale", "zero_point")
    rows, half = parts.matrix("qdata")
    parts.expect_dtype("qdata", torch.int8, torch.uint8)
    size = _pair(parts, note, "block_size")[1]
    groups = parts.group(half * 2, size, parts.matrix("scale")[0], "scale")
    for role in ("scale", "zero_point"):
        parts.expect_dtype(role, *FLOATS)
        parts.expect(role, (half * 2 // groups, rows), f"one for each {groups} columns of {rows} rows")
    form = note.data.get("activation_dtype")
    rounds = isinstance(form, dict) and str(form.get("_data")).startswith("float8")
    return partial(_make_int4, parts, groups, InputCoding("fp8", "token") if rounds else PLAIN_INPUT)


def _make_int4(parts: Parts, size: int, inputs: InputCoding, tensors: Mapping[str, Tensor]) -> Made:
    codes = open_halves(tensors["qdata"].view(torch.uint8)) ^ _MIDDLE  # signed, so half their range is added
    yield f"{parts.module}.weight", _with_minima(parts, codes, tensors["scale"], tensors["zero_point"], size, inputs)


def _with_minima(
    parts: Parts, codes: Tensor, scale: Tensor, added: Tensor, size: int, inputs: InputCoding = PLAIN_INPUT
) -> AffineCodes:
    """scale * (code - 8) + added; both [groups, rows]."""
    scale, added = (each.t().float() for each in (scale, added))
    for what, values in (("scales", scale), ("zero points", added)):
        if not bool(values.isfinite().all()):
            raise CheckpointError(f"tensor {parts.names['qdata']!r} has {what} that are not finite", param=parts.module)
    if bool(((scale == 0) & (added != 0)).any()):
        raise CheckpointError(f"tensor {parts.names['qdata']!r} has scales that are 0", param=parts.module)
    zero = _MIDDLE - added / torch.where(scale == 0, 1, scale)
    return AffineCodes(codes, 4, Grid(scale.contiguous(), 1, size), Grid(zero.contiguous(), 1, size), inputs=inputs)


def _plan_tiles(parts: Parts, note: _Note) -> partial[Made]:
    parts.need("scale_and_zero")
    parts.expect_dtype("qdata", torch.int32)
    parts.expect_dtype("scale_and_zero", *FLOATS)
    rows, width = _pair(parts, note, "shape")
    size, tiles = _pair(parts, note, "block_size")[1], parts["qdata"].shape
    if len(tiles) != 4 or tiles[2:] != (_LANES, _WORDS):
        raise parts.wrong("qdata", f"expected [rows / 8, columns / 128, {_LANES}, {_WORDS}]")
    padded = tiles[0] * _TILE_ROWS, tiles[1] * _TILE_COLUMNS
    if padded[0] < rows or padded[1] < width:
        raise parts.wrong("qdata", f"it holds {list(padded)} codes, but the matrix is {[rows, width]}")
    if width % size or padded[1] % size:
        raise parts.wrong("qdata", f"its group size {size} does not divide {width} and {padded[1]} columns")
    parts.expect("scale_and_zero", (padded[1] // size, padded[0], 2), f"a pair for each {size} columns")
    return partial(_make_tiles, parts, (rows, width), size)


def _make_tiles(parts: Parts, shape: tuple[int, int], size: int, tensors: Mapping[str, Tensor]) -> Made:
    (rows, width), pairs = shape, tensors["scale_and_zero"]
    codes = open_tiles(tensors["qdata"])[:rows, :width].contiguous()
    scale, added = pairs[: width // size, :rows].unbind(2)
    yield f"{parts.module}.weight", _with_minima(parts, codes, scale, added, size)


def open_tiles(words: Tensor) -> Tensor:
    """int32 [n, k, 32, 4] -> uint8 [n * 8, k * 128].

    Lane l has row l / 4 of a tile and, in each word, columns (l % 4) * 2 + {0, 1, 8, 9, 16, 17, 24, 25} of 32: the even
    ones of these in the lower half of the word, the odd ones in the upper.
    """
    n, k = words.shape[:2]
    raw = words.contiguous().view(torch.uint8).view(n, k, _LANES, _WORDS, 2, 2)  # word: odd or even, bytes of two codes
    codes = open_halves(raw.unsqueeze(-1))  # [n, k, lane, word, odd, byte, half]
    codes = codes.view(n, k, 8, 4, _WORDS, 2, 4)  # [n, k, row, pair, word, odd, eighth]
    return codes.permute(0, 2, 1, 4, 6, 3, 5).reshape(n * _TILE_ROWS, k * _TILE_COLUMNS)


_PLANS: dict[str, Callable[[Parts, _Note], partial[Made]]] = {
    "Float8Tensor": _plan_float8,
    "Int8Tensor": _plan_integers,
    "IntxUnpackedToInt8Tensor": _plan_integers,
    "Int4Tensor": _plan_int4,
    "Int4TilePackedTo4dTensor": _plan_tiles,
}
