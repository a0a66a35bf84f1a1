"""Quark (AMD): what scaled.py reads (fp8, int8, MXFP4), codes of 6 bits, and codes of 4 bits packed as AWQ's are.

    weight uint8 [rows, width*3/4]  e2m3 or e3m2, codes from the low end of three bytes; weight_scale uint8
                                    [rows, width/32]: powers of two
    weight int32 [width, rows/8]    weight_scale [width/group, rows], weight_zero_point int32 [width/group, rows/8];
                                    signed (int4) or not (uint4)

What 6 bits mean, whether 4 have a sign, and the order of eight codes in a word, the configuration says for each module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats import scaled
from quire.loader.formats.awq import open_eights
from quire.loader.formats.parts import FLOATS, Directory, Made, MatrixPlan, Parts, by_module
from quire.loader.formats.scaled import check_finite
from quire.loader.formats.schemes import covers
from quire.quant.coded import AffineCodes, Grid, TableCodes, open_words, power_of_two

_EXPONENT_BITS = {"fp6_e2m3": 2, "fp6_e3m2": 3}
_SIGNED = {"int4": 8, "uint4": 0}  # what turns a code into one that counts from 0
_GROUP, _PER_WORD = 32, 8


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    taken: set[str] = set()
    for parts in by_module(directory, scaled.ROLES):
        if "weight" not in parts or len(parts["weight"].shape) != 2:
            continue
        six = _weights_in(parts, about, _EXPONENT_BITS) if _may_have_six_bits(parts) else None
        if parts["weight"].dtype == torch.int32:
            make = _plan_words(parts, about)
        elif six is not None:
            make = _plan_six(parts, _EXPONENT_BITS[six["dtype"]])
        else:
            continue
        taken.update(parts.names.values())
        yield MatrixPlan(parts.module, parts.names, make)
    yield from scaled.plan({name: info for name, info in directory.items() if name not in taken}, about)


def _weights_in(parts: Parts, about: Quantization, dtypes: Mapping[str, int]) -> Mapping[str, Any] | None:
    """What the configuration says about this module's weights of these types; None: it has none."""
    for scheme in about.schemes:
        if covers(scheme, parts) and scheme["weights"]["dtype"] in dtypes:
            return dict(scheme["weights"])
    return None


def _may_have_six_bits(parts: Parts) -> bool:
    """By the shapes: codes of 4 bits with scales that are missing in part look like that too."""
    if parts["weight"].dtype != torch.uint8 or "weight_scale" not in parts:
        return False
    scales = parts["weight_scale"]
    return scales.dtype == torch.uint8 and scales.shape == (parts["weight"].shape[0], parts["weight"].shape[1] // 24)


def _plan_six(parts: Parts, exponent_bits: int) -> partial[Made]:
    if parts.matrix("weight")[1] % (_GROUP * 3 // 4):
        raise parts.wrong("weight", f"its bytes are not whole groups of {_GROUP} codes of 6 bits")
    return partial(_make_six, parts, exponent_bits)


def _make_six(parts: Parts, exponent_bits: int, tensors: Mapping[str, Tensor]) -> Made:
    raw, exponents = tensors["weight"].int(), tensors["weight_scale"]
    first, second, third = raw.unflatten(1, (-1, 3)).unbind(2)
    word = first | second << 8 | third << 16
    codes = torch.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], 2).flatten(1).to(torch.uint8)
    scale = power_of_two(exponents).reshape(-1)
    check_finite(parts, "weight_scale", scale)
    yield f"{parts.module}.weight", TableCodes(codes, _small_float_table(exponent_bits).to(raw.device), scale, _GROUP)


def _small_float_table(exponent_bits: int) -> Tensor:
    """The numbers of 64 codes: a sign, so many bits of exponent, the rest mantissa."""
    mantissa_bits = 5 - exponent_bits
    bias, ones = (1 << exponent_bits - 1) - 1, 1 << mantissa_bits
    table = []
    for code in range(32):
        exponent, mantissa = divmod(code, ones)
        whole = mantissa + ones if exponent else mantissa
        table.append(whole / ones * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor([*table, *(-number for number in table)])


def _plan_words(parts: Parts, about: Quantization) -> partial[Made]:
    parts.need("weight_scale")
    numbers = _weights_in(parts, about, _SIGNED)
    if numbers is None:
        raise parts.wrong("weight", f"the configuration has no weights in {' or '.join(_SIGNED)} for it")
    parts.expect_dtype("weight_scale", *FLOATS)
    width, words = parts.matrix("weight")
    groups, rows = parts.matrix("weight_scale")[0], words * _PER_WORD
    parts.expect("weight_scale", (groups, rows), f"one for each of {rows} rows")
    group = parts.group(width, numbers["group_size"], groups, "weight_scale")
    if "weight_zero_point" in parts:
        parts.expect_dtype("weight_zero_point", torch.int32)
        parts.expect("weight_zero_point", (groups, words), "eight zero points in a word")
    elif not numbers["symmetric"] or numbers["dtype"] == "uint4":
        parts.need("weight_zero_point")
    return partial(_make_words, parts, group, _SIGNED[numbers["dtype"]], numbers["in_order"])


def _make_words(parts: Parts, group: int, sign: int, in_order: bool, tensors: Mapping[str, Tensor]) -> Made:
    opened = partial(open_words, bits=4) if in_order else open_eights
    scale = tensors["weight_scale"].t().contiguous()
    check_finite(parts, "weight_scale", scale)
    zero: Grid | int = sign
    if "weight_zero_point" in tensors:
        zeros = (opened(tensors["weight_zero_point"]) ^ sign).t().to(torch.int16)
        zero = Grid(zeros.contiguous(), 1, group)
        if torch.equal(zeros, zeros[:1, :1].expand_as(zeros)):
            zero = int(zeros[0, 0])
    codes = (opened(tensors["weight"]) ^ sign).t().contiguous()
    yield f"{parts.module}.weight", AffineCodes(codes, 4, Grid(scale, 1, group), zero)
