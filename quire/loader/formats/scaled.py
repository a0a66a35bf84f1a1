"""`weight` in a type of 8 bits (or two codes of 4 bits in a byte) with scales beside it: fp8 of all exporters, int8 of
compressed-tensors and Quark, NVFP4 and MXFP8 of ModelOpt, MXFP4 of Quark.

    weight float8 [rows, width]   weight_scale or weight_scale_inv: one, one per row, per group or per block
    weight int8 [rows, width]     weight_scale, and weight_zero_point where codes are not symmetric
    weight uint8 [rows, width/2]  e2m1, weight_scale float8 [rows, width/16], weight_scale_2 float32: of the whole;
                                  or weight_scale uint8 [rows, width/32]: powers of two
    weight float8                 weight_scale uint8 [rows, width/32], or one for each block: powers of two

Both spellings of the scale multiply. `input_scale` is kept for kernels that round inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats.parts import FLOATS, FP8, Directory, Made, MatrixPlan, Parts, by_module, grid_of, scale_grid
from quire.loader.formats.schemes import input_coding
from quire.quant.coded import AffineCodes, CodedMatrix, FloatCodes, Grid, InputCoding, power_of_two
from quire.schema.errors import CheckpointError

_SCALES = ("weight_scale", "weight_scale_inv")
ROLES = (
    *_SCALES, "weight_scale_2", "weight_zero_point", "input_scale", "input_zero_point", "activation_scale",
    "input_scale_ub", "pre_quant_scale", "weight",
)  # fmt: skip
_NVFP4_GROUP, _MX_GROUP = 16, 32
_CODED = (*FP8, torch.int8, torch.uint8)


class _Layout(NamedTuple):
    scale: str  # the role that holds it
    block: tuple[int, int]
    inputs: InputCoding


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    for parts in by_module(directory, ROLES):
        if set(parts.names) <= {"weight"} and (parts["weight"].dtype not in _CODED or len(parts["weight"].shape) < 2):
            continue
        if "weight" not in parts and set(parts.names) <= {"input_scale", "activation_scale", "input_zero_point"}:
            continue  # beside a matrix in a form of its own
        parts.need("weight")
        if parts["weight"].dtype not in _CODED:
            raise parts.wrong("weight", f"it has {', '.join(set(parts.names) - {'weight'})}, but is not coded")
        if "pre_quant_scale" in parts:
            raise parts.wrong("pre_quant_scale", "inputs scaled before a matmul are not built")
        yield MatrixPlan(parts.module, parts.names, partial(_make, parts, _layout(parts, about)))


def _layout(parts: Parts, about: Quantization) -> _Layout:
    rows, width = parts.matrix("weight")
    role = next((role for role in _SCALES if role in parts), None)
    if role is None:
        parts.need("weight_scale")
        raise AssertionError("need() raises")
    kind = parts["weight"].dtype
    if kind == torch.uint8 and parts[role].dtype == torch.uint8:
        if width * 2 % _MX_GROUP:
            raise parts.wrong("weight", f"{width * 2} codes of a row are not groups of {_MX_GROUP}")
        parts.expect(role, (rows, width * 2 // _MX_GROUP), f"one for each {_MX_GROUP} columns")
        return _Layout(role, (1, _MX_GROUP), input_coding(parts, about, "fp4"))
    if kind == torch.uint8:
        parts.need("weight_scale", "weight_scale_2")
        if width * 2 % _NVFP4_GROUP:
            raise parts.wrong("weight", f"{width * 2} codes of a row are not groups of {_NVFP4_GROUP}")
        parts.expect_dtype(role, torch.float8_e4m3fn)
        parts.expect(role, (rows, width * 2 // _NVFP4_GROUP), f"one for each {_NVFP4_GROUP} columns")
        _expect_one(parts, "weight_scale_2")
        return _Layout(role, (1, _NVFP4_GROUP), input_coding(parts, about, "fp4"))
    if parts[role].dtype == torch.uint8:
        return _Layout(role, _block_of_powers(parts, role, about.block), input_coding(parts, about, "fp8"))
    parts.expect_dtype(role, *FLOATS)
    block = scale_grid(parts, role, (rows, width), about.block or _scheme_block(about))
    if "weight_zero_point" in parts:
        if kind != torch.int8:
            raise parts.wrong("weight_zero_point", "only int8 has zero points")
        parts.expect_dtype("weight_zero_point", torch.int8, torch.int32, torch.int64)
        parts.expect("weight_zero_point", parts[role].shape, "as its scales")
    if kind == torch.int8 and about.family not in ("compressed-tensors", "modelopt", "quark"):
        raise parts.wrong("weight", f"{about.name} stores float8")
    return _Layout(role, block, input_coding(parts, about, "fp8" if kind in FP8 else "int8"))


def _block_of_powers(parts: Parts, role: str, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns that share a power of two: those that the configuration says, or groups of MXFP8."""
    rows, width = parts.matrix("weight")
    if parts["weight"].dtype in FP8:
        if block is not None and parts[role].shape == (-(-rows // block[0]), -(-width // block[1])):
            return block
        if width % _MX_GROUP == 0:
            parts.expect(role, (rows, width // _MX_GROUP), f"one for each {_MX_GROUP} columns")
            return 1, _MX_GROUP
    raise parts.wrong(role, f"scales that are powers of two belong to fp8 in blocks, or in groups of {_MX_GROUP}")


def _scheme_block(about: Quantization) -> tuple[int, int] | None:
    for scheme in about.schemes:
        size = (scheme.get("weights") or {}).get("block_structure")
        if isinstance(size, str) and "x" in size:
            size = [int(part) for part in size.split("x") if part.isdigit()]
        if isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
            return size[0], size[1]
    return (128, 128) if about.family == "modelopt" else None


def _expect_one(parts: Parts, role: str) -> None:
    parts.expect_dtype(role, *FLOATS)
    if parts[role].shape not in ((), (1,), (1, 1)):
        raise parts.wrong(role, "expected one number")


def _make(parts: Parts, layout: _Layout, tensors: Mapping[str, Tensor]) -> Made:
    weight, scales = tensors["weight"], tensors[layout.scale]
    static = tensors.get("input_scale", tensors.get("activation_scale"))
    inputs = layout.inputs._replace(scale=static, zero=tensors.get("input_zero_point"))
    made: CodedMatrix
    if weight.dtype == torch.uint8:
        shape = weight.shape[0], weight.shape[1] * 2
        whole = tensors["weight_scale_2"].reshape(()) if "weight_scale_2" in tensors else None
        made = FloatCodes(weight, "e2m1", grid_of(scales, shape, layout.block), whole, inputs)
    else:
        shape = weight.shape[0], weight.shape[1]
        if scales.dtype == torch.uint8 and layout.block != (1, _MX_GROUP):
            scales = power_of_two(scales)  # as kernels of blocks read them
        scale = grid_of(scales, shape, layout.block)
        if weight.dtype in FP8:
            made = FloatCodes(weight, FP8[weight.dtype], scale, inputs=inputs)
        else:
            zero: Grid | int = 128
            if "weight_zero_point" in tensors and bool((tensors["weight_zero_point"] != 0).any()):
                zero = grid_of(tensors["weight_zero_point"].to(torch.int16) + 128, shape, layout.block)
            made = AffineCodes(weight.view(torch.uint8) ^ 128, 8, scale, zero, inputs=inputs)
    check_finite(parts, layout.scale, scales)
    yield f"{parts.module}.weight", made


def check_finite(parts: Parts, role: str, scales: Tensor) -> None:
    if scales.is_floating_point() and not bool(scales.float().isfinite().all()):
        raise CheckpointError(f"tensor {parts.names[role]!r} holds scales that are not finite", param=parts.names[role])
