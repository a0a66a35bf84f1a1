"""bitsandbytes: 4-bit codes of a table with scales for runs of the flat matrix, and int8 with a scale for each row.

weight uint8 [numbers / 2, 1]  the first of two codes in the high half; weight.quant_state.bitsandbytes__nf4 (or fp4):
                               JSON with shape and blocksize; weight.quant_map float32 [16]; weight.absmax: one for
                               each run, float32, or uint8 with weight.nested_absmax and weight.nested_quant_map
weight int8 [rows, width]      SCB float32 [rows]: the largest of each row, which code 127 stands for; weight_format
                               uint8: 0 is row by row, others are tiles of the library's former kernels
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats.parts import FLOATS, Directory, Made, MatrixPlan, Parts, by_module
from quire.quant.coded import AffineCodes, Grid, InputCoding, TableCodes, open_halves
from quire.schema.errors import CheckpointError

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
ROLES = (
    *_STATES, "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "SCB",
    "weight_format", "weight",
)  # fmt: skip
_MOST_STATE = 1 << 16  # bytes of JSON
_CODES = 16
_ROW_BY_ROW = 0  # of weight_format


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    for parts in by_module(directory, ROLES):
        if set(parts.names) <= {"weight"} and parts["weight"].dtype not in (torch.uint8, torch.int8):
            continue
        parts.need("weight")
        if parts["weight"].dtype == torch.int8:
            parts.need("SCB")
            rows, _ = parts.matrix("weight")
            parts.expect_dtype("SCB", *FLOATS)
            parts.expect("SCB", (rows,), "one for each row")
            yield MatrixPlan(parts.module, parts.names, partial(_make_int8, parts))
            continue
        parts.expect_dtype("weight", torch.uint8)
        state = next((role for role in _STATES if role in parts), None)
        if state is None:
            parts.need(_STATES[0])
        assert state is not None
        parts.need("weight.absmax", "weight.quant_map")
        if parts["weight.absmax"].dtype == torch.uint8:
            parts.need("weight.nested_absmax", "weight.nested_quant_map")
            parts.expect("weight.nested_quant_map", (256,), "one for each code of 8 bits")
        parts.expect("weight.quant_map", (_CODES,), "one for each code of 4 bits")
        if parts[state].dtype != torch.uint8 or len(parts[state].shape) != 1 or parts[state].shape[0] > _MOST_STATE:
            raise parts.wrong(state, f"expected at most {_MOST_STATE} bytes of JSON")
        yield MatrixPlan(parts.module, parts.names, partial(_make_table, parts, state))


def _make_int8(parts: Parts, tensors: Mapping[str, Tensor]) -> Made:
    _check_row_by_row(parts, tensors)
    weight, most = tensors["weight"], tensors["SCB"].float()
    scale = Grid((most / 127)[:, None], 1, weight.shape[1])
    codes = weight.view(torch.uint8) ^ 128
    yield f"{parts.module}.weight", AffineCodes(codes, 8, scale, 128, inputs=InputCoding("int8", "token"))


def _check_row_by_row(parts: Parts, tensors: Mapping[str, Tensor]) -> None:
    layout = tensors.get("weight_format")
    if layout is None or not bool((layout != _ROW_BY_ROW).any()):
        return
    name = parts.names["weight_format"]
    raise CheckpointError(
        f"tensor {name!r} is {layout.flatten()[:1].item()}: int8 in tiles (1 col32, 2 col_turing, 3 col_ampere) is not "
        f"built; only {_ROW_BY_ROW} (row by row) is allowed",
        param=name,
    )


def _make_table(parts: Parts, state: str, tensors: Mapping[str, Tensor]) -> Made:
    about = _state(parts, state, tensors[state])
    (rows, width), run = _shape(parts, state, about), _count(parts, state, about, "blocksize")
    packed = tensors["weight"].reshape(-1)
    if packed.numel() != -(-rows * width // 2):
        raise parts.wrong("weight", f"a matrix of [{rows}, {width}] has {-(-rows * width // 2)} bytes")
    codes = open_halves(packed, high_first=True)[: rows * width].view(rows, width)
    scale = _scales(parts, state, about, tensors)
    if scale.numel() != -(-rows * width // run):
        raise parts.wrong("weight.absmax", f"[{rows}, {width}] in runs of {run} has {-(-rows * width // run)} of them")
    yield f"{parts.module}.weight", TableCodes(codes, tensors["weight.quant_map"].float(), scale, run)


def _scales(parts: Parts, state: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    absmax = tensors["weight.absmax"].reshape(-1)
    if absmax.dtype != torch.uint8:
        return absmax.float()
    run, offset = _count(parts, state, about, "nested_blocksize"), about.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise _wrong(parts, state, "nested_offset", offset)
    outer = tensors["weight.nested_absmax"].reshape(-1).float()
    if outer.numel() != -(-absmax.numel() // run):
        raise parts.wrong(
            "weight.nested_absmax", f"{absmax.numel()} scales in runs of {run} have another number of them"
        )
    inner = tensors["weight.nested_quant_map"].float()[absmax.long()]
    return inner * outer.repeat_interleave(run)[: absmax.numel()] + offset


def _state(parts: Parts, state: str, raw: Tensor) -> Mapping[str, Any]:
    try:
        settings = json.loads(bytes(raw.tolist()))
    except (ValueError, RecursionError) as wrong:
        raise CheckpointError(f"tensor {parts.names[state]!r} is not JSON: {wrong}", param=parts.names[state]) from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"tensor {parts.names[state]!r} is not a mapping", param=parts.names[state])
    return settings


def _shape(parts: Parts, state: str, about: Mapping[str, Any]) -> tuple[int, int]:
    shape = about.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
        raise _wrong(parts, state, "shape", shape)
    return shape[0], shape[1]


def _count(parts: Parts, state: str, about: Mapping[str, Any], key: str) -> int:
    value = about.get(key)
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise _wrong(parts, state, key, value)
    return value


def _wrong(parts: Parts, state: str, key: str, value: Any) -> CheckpointError:
    name = parts.names[state]
    return CheckpointError(f"tensor {name!r} says {key} = {value!r:.80}", param=name)
