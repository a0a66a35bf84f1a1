"""Experts of a mixture in one coded tensor for each side, with scales beside it: fp8, and NVFP4 of ModelOpt.

    EXPERTS.gate_up_proj, EXPERTS.down_proj     float8, or uint8 with two codes of e2m1 in a byte (along the inputs)
        [experts, 2 * ffn, width] and [experts, width, ffn]: as transformers' fp8 has them
        [experts, width, 2 * ffn] and [experts, ffn, width]: as Llama 4 and Qwen3-VL have them
    ..._scale_inv, ..._scale, ..._weight_scale  one, one per expert, per row of results, or per block; axes as above;
                                                floats, or uint8: powers of two
    ..._weight_scale_2                          NVFP4: of the whole, or of each expert

Which of the two orders it is follows from the shapes of both tensors. Rows of gate come first, then those of up; in
gpt-oss they take turns. Each expert's gate, up and down become matrices of their own. Scales of inputs are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats.parts import FLOATS, FP8, Directory, Made, MatrixPlan, Parts
from quire.quant.coded import FloatCodes, Grid, power_of_two
from quire.quant.shard import Cut
from quire.schema.errors import CheckpointError

SIDES = ("gate_up_proj", "down_proj")
FAMILIES = ("fp8", "modelopt", "compressed-tensors")
_SCALES = ("scale_inv", "scale", "weight_scale", "weight_scale_inv")
_INPUTS = ("activation_scale", "input_scale", "input_scale_ub")
_ROLES = (*_SCALES, "weight_scale_2", *_INPUTS)
_NVFP4_GROUP = 16


class _Stack(NamedTuple):
    rows: int
    width: int
    inputs_first: bool  # [experts, width, rows]
    scale: str  # the role that holds it
    block: tuple[int, int]  # rows and columns that share one


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    for name in directory:
        prefix, _, side = name.rpartition(".")
        if side == SIDES[0] and _is_coded(directory, name):
            down = f"{prefix}.{SIDES[1]}"
            if down not in directory:
                raise CheckpointError(f"tensor {name!r} is coded, but there is no {down!r}", param=down)
            first = _inputs_first(directory, name, down)
            for module in (name, down):
                parts = _parts(directory, module)
                stack = _stack(parts, about, first)
                yield MatrixPlan(module, parts.names, partial(_make, parts, stack, about.rows_in_turn))


def _is_coded(directory: Directory, name: str) -> bool:
    about = directory[name]
    return len(about.shape) == 3 and (about.dtype in FP8 or about.dtype == torch.uint8)


def _parts(directory: Directory, module: str) -> Parts:
    names = {role: f"{module}_{role}" for role in _ROLES if f"{module}_{role}" in directory}
    return Parts(module, {"weight": module, **names}, directory)


def _inputs_first(directory: Directory, up: str, down: str) -> bool:
    """CheckpointError: the two tensors do not belong together."""
    first, second = (directory[name] for name in (up, down))
    if first.dtype == second.dtype and len(second.shape) == 3 and first.shape[0] == second.shape[0]:
        a, b, c, d = *first.shape[1:], *second.shape[1:]
        pack = 2 if first.dtype == torch.uint8 else 1  # codes in a byte, along the inputs
        if a == 2 * d * pack and b * pack == c:
            return False
        if b == 2 * c * pack and a * pack == d:
            return True
    raise CheckpointError(
        f"tensors {up!r} {list(first.shape)} and {down!r} {list(second.shape)} are neither [experts, 2 * ffn, width] "
        "and [experts, width, ffn] nor [experts, width, 2 * ffn] and [experts, ffn, width] of one type",
        param=up,
        value=list(first.shape),
    )


def _stack(parts: Parts, about: Quantization, inputs_first: bool) -> _Stack:
    experts, a, b = parts["weight"].shape
    rows, width = (b, a) if inputs_first else (a, b)
    role = next((role for role in _SCALES if role in parts), None)
    if role is None:
        raise CheckpointError(f"tensor {parts.module!r} is coded, but has no scales beside it", param=parts.module)
    if parts["weight"].dtype == torch.uint8:
        width *= 2
        parts.expect_dtype(role, torch.float8_e4m3fn)
        if width % _NVFP4_GROUP:
            raise parts.wrong("weight", f"{width} codes of a row are not groups of {_NVFP4_GROUP}")
        block = (1, _NVFP4_GROUP)
        parts.expect(role, _stored(experts, rows, width, block, inputs_first), f"one for each {_NVFP4_GROUP} columns")
        parts.need("weight_scale_2")
        if parts["weight_scale_2"].shape not in ((), (1,), (experts,), (experts, 1), (experts, 1, 1)):
            raise parts.wrong("weight_scale_2", f"expected one number, or one for each of {experts} experts")
        return _Stack(rows, width, inputs_first, role, block)
    parts.expect_dtype(role, *FLOATS, torch.uint8)
    known = [(rows, width), (1, width), *([about.block] if about.block is not None else [(128, 128)])]
    stored = parts[role].shape
    for block in known:
        if stored == _stored(experts, rows, width, block, inputs_first):
            return _Stack(rows, width, inputs_first, role, block)
    if stored in ((), (1,), (experts,), (experts, 1)):
        return _Stack(rows, width, inputs_first, role, (rows, width))
    if stored in ((experts, rows), (experts, rows, 1)):  # the second whichever comes first: Llama 4's down_proj
        return _Stack(rows, width, inputs_first, role, (1, width))
    raise parts.wrong(role, f"expected one, one per expert, per row ({rows}) or per block of {list(known[-1])}")


def _stored(experts: int, rows: int, width: int, block: tuple[int, int], inputs_first: bool) -> tuple[int, ...]:
    grid = -(-rows // block[0]), -(-width // block[1])
    return (experts, *(reversed(grid) if inputs_first else grid))


def _make(parts: Parts, stack: _Stack, in_turn: bool, tensors: Mapping[str, Tensor]) -> Made:
    prefix, _, side = parts.module.rpartition(".")
    weight, scales = tensors["weight"], tensors[stack.scale]
    rows, width, block = stack.rows, stack.width, stack.block
    count, grid = weight.shape[0], (-(-rows // block[0]), -(-width // block[1]))
    if scales.dtype == torch.uint8:
        scales = power_of_two(scales)
    if not bool(scales.float().isfinite().all()):
        raise parts.wrong(stack.scale, "it holds scales that are not finite")
    spread = scales.reshape(-1, 1, 1).expand(count, 1, 1) if scales.numel() in (1, count) and grid == (1, 1) else scales
    wholes = tensors["weight_scale_2"].float().reshape(-1).expand(count) if "weight_scale_2" in tensors else None
    for expert in range(count):
        codes, scale = weight[expert], spread[expert]
        if stack.inputs_first:
            codes, scale = codes.t(), scale.t() if scale.dim() == 2 else scale
        kind = "e2m1" if weight.dtype == torch.uint8 else FP8[weight.dtype]
        whole = None if wholes is None else wholes[expert]
        made = FloatCodes(codes.contiguous(), kind, Grid(scale.reshape(grid).contiguous(), *block), whole)
        if side == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", made
            continue
        for at, part in enumerate(("gate_proj", "up_proj")):
            yield f"{prefix}.{expert}.{part}.weight", _in_turn(made, at) if in_turn else _half(made, at)


def _half(made: FloatCodes, at: int) -> FloatCodes:
    """The first rows or the last."""
    rows, half = made.shape[0], made.shape[0] // 2
    cut = Cut(0, rows, ((at * half, (at + 1) * half),))
    share = made.cut(cut)
    if share is None:  # a block has rows of both
        share = replace(made, scale=Grid(made.scale.spread(made.shape), 1, made.scale.columns)).cut(cut)
    assert share is not None  # rows of their own can be cut anywhere
    return share


def _in_turn(made: FloatCodes, at: int) -> FloatCodes:
    """Every other row."""
    scale = made.scale
    if scale.values.shape[0] == 1:
        mine = scale._replace(rows=made.shape[0] // 2)
    else:
        mine = Grid(scale.spread(made.shape)[at::2].contiguous(), 1, scale.columns)
    return replace(made, codes=made.codes[at::2].contiguous(), scale=mine)
