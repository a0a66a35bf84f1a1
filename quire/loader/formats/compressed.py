"""compressed-tensors whose codes are packed: integers in words of 32 bits, or floats of 4 bits in bytes.

weight_packed int32 [rows, words]  codes from the low end, half the range added to each; bits follow each other over
                                   words, or (older files of 3, 5, 6, 7 bits) a word holds whole codes only
weight_scale [rows, groups]        weight_zero_point int32 [words of rows, groups], packed alike, or int8 as it is
weight_shape int64 [2]             weight_g_idx int32 [width]: the group of each column
weight_packed uint8 [rows, width/2]  e2m1, weight_scale float8 per 16 and weight_global_scale, which divides (NVFP4),
                                     or weight_scale uint8 per 32, powers of two (MXFP4)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats import scaled
from quire.loader.formats.gptq import column_order
from quire.loader.formats.parts import FLOATS, Directory, Made, MatrixPlan, Parts, by_module
from quire.loader.formats.scaled import check_finite
from quire.loader.formats.schemes import input_coding, weight_schemes
from quire.quant.coded import AffineCodes, FloatCodes, Grid, InputCoding, open_words
from quire.schema.errors import CheckpointError

ROLES = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
    "input_global_scale", "input_scale", "input_zero_point",
)  # fmt: skip
_GROUP = {torch.float8_e4m3fn: 16, torch.uint8: 32}  # columns of a scale of e2m1
_MOST_BITS = 8


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    packed = {name.removesuffix(".weight_packed") for name in directory if name.endswith(".weight_packed")}
    for parts in by_module(directory, ROLES):
        if parts.module not in packed:
            continue  # its codes are a `weight`
        parts.need("weight_scale")
        make = _plan_floats if parts["weight_packed"].dtype == torch.uint8 else _plan_integers
        yield MatrixPlan(parts.module, parts.names, make(parts, about))
    rest = {name: info for name, info in directory.items() if _module(name) not in packed}
    yield from scaled.plan(rest, about)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _plan_floats(parts: Parts, about: Quantization) -> partial[Made]:
    rows, half = parts.matrix("weight_packed")
    parts.expect_dtype("weight_scale", *_GROUP)
    kind = parts["weight_scale"].dtype
    group = _GROUP[kind]
    if half * 2 % group:
        raise parts.wrong("weight_packed", f"{half * 2} codes of a row are not groups of {group}")
    parts.expect("weight_scale", (rows, half * 2 // group), f"one for each {group} columns")
    if kind != torch.uint8:
        parts.need("weight_global_scale")
        parts.expect_dtype("weight_global_scale", *FLOATS)
        if parts["weight_global_scale"].shape not in ((), (1,)):
            raise parts.wrong("weight_global_scale", "expected one number")
    inputs = InputCoding()
    if weight_schemes(about, "fp4") and any(s.get("input_activations") for s in weight_schemes(about, "fp4")):
        inputs = InputCoding("fp4", "static" if "input_global_scale" in parts else "group")
    return partial(_make_floats, parts, group, inputs)


def _make_floats(parts: Parts, group: int, inputs: InputCoding, tensors: Mapping[str, Tensor]) -> Made:
    scales = tensors["weight_scale"]
    check_finite(parts, "weight_scale", scales)
    whole = None
    if "weight_global_scale" in tensors:
        whole = 1 / tensors["weight_global_scale"].reshape(()).float()
        if not bool(whole.isfinite()):
            raise CheckpointError(f"tensor {parts.names['weight_global_scale']!r} is zero", param=parts.module)
    inputs = inputs._replace(scale=tensors.get("input_global_scale"))
    yield f"{parts.module}.weight", FloatCodes(tensors["weight_packed"], "e2m1", Grid(scales, 1, group), whole, inputs)


def _plan_integers(parts: Parts, about: Quantization) -> partial[Made]:
    parts.need("weight_shape")
    parts.expect_dtype("weight_packed", torch.int32)
    parts.expect_dtype("weight_scale", *FLOATS)
    parts.expect_dtype("weight_shape", torch.int32, torch.int64)
    parts.expect("weight_shape", (2,), "rows and columns")
    rows = parts.matrix("weight_packed")[0]
    scales = parts["weight_scale"].shape
    if len(scales) == 2 and scales[0] == rows and scales[1]:
        groups = scales[1]
    elif scales in ((), (1,), (1, 1)):
        groups = 0
    else:
        raise parts.wrong("weight_scale", f"expected one number, or [{rows}, groups]")
    bits = sorted({
        bits for scheme in about.schemes
        if isinstance(bits := (scheme.get("weights") or {}).get("num_bits"), int) and 1 < bits <= _MOST_BITS
    })  # fmt: skip
    if not bits:
        raise parts.wrong("weight_packed", "no scheme of the configuration says how many bits a code has")
    inputs = input_coding(parts, about, "int8" if bits == [8] else "int")
    return partial(_make_integers, parts, tuple(bits), groups, inputs)


def _make_integers(
    parts: Parts, known: tuple[int, ...], groups: int, inputs: InputCoding, tensors: Mapping[str, Tensor]
) -> Made:
    packed, shape = tensors["weight_packed"], [int(n) for n in tensors["weight_shape"]]
    rows, words = packed.shape
    fitting = [bits for bits in known if shape[0] == rows and shape[1] > 0 and words in _words_of(shape[1], bits)]
    if not fitting:
        raise CheckpointError(
            f"tensor {parts.names['weight_packed']!r} has {rows} rows of {words} words, which do not hold a matrix of "
            f"{shape} in codes of {' or '.join(map(str, known))} bits",
            param=parts.names["weight_packed"],
        )
    bits, width = fitting[0], shape[1]
    codes = _opened(packed, bits, width).contiguous()
    scales = tensors["weight_scale"]
    check_finite(parts, "weight_scale", scales)
    order = None
    if groups == 0:
        scale = Grid(scales.reshape(1, 1), rows, width)
    else:
        if width % groups:
            raise parts.wrong("weight_scale", f"{groups} groups do not divide the {width} columns of {parts.module!r}")
        scale = Grid(scales, 1, width // groups)
        if "weight_g_idx" in tensors:
            parts.expect("weight_g_idx", (width,), "one for each column")
            order = column_order(parts, tensors["weight_g_idx"], width // groups, groups, "weight_g_idx")
    zero: Grid | int = 1 << bits - 1
    if "weight_zero_point" in tensors:
        zero = scale._replace(values=_zeros(parts, tensors["weight_zero_point"], bits, tuple(scale.values.shape)))
    yield f"{parts.module}.weight", AffineCodes(codes, bits, scale, zero, order, inputs)


def _zeros(parts: Parts, stored: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Zero points as codes, int16 [rows, groups]."""
    rows, groups = shape
    is_packed = stored.dtype == torch.int32 and stored.dim() == 2 and stored.shape[1] == groups
    if is_packed and stored.shape[0] in _words_of(rows, bits):
        return _opened(stored.t(), bits, rows).t().to(torch.int16).contiguous()
    if stored.dtype == torch.int8 and tuple(stored.shape) == shape:
        return stored.to(torch.int16) + (1 << bits - 1)
    raise parts.wrong("weight_zero_point", f"expected {bits} bits for each of the scales {list(shape)}")


def _words_of(count: int, bits: int) -> tuple[int, int]:
    """Words that so many codes take: packed without a gap, and with whole codes in each word."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _opened(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [n, words] -> uint8 [n, count]."""
    if words.shape[1] == _words_of(count, bits)[0]:
        return open_words(words, bits)[:, :count]
    shifts = torch.arange(32 // bits, device=words.device, dtype=torch.int32) * bits
    return (words[:, :, None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)[:, :count]
