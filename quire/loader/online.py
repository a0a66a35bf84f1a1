"""What plain numbers are rounded to while they are loaded on a device: as `quantization=` says; and dummy weights of a
quantized checkpoint, which its configuration describes. Must not know: models, files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.ops.coded import LARGEST, CodedWeight
from quire.quant.coded import AffineCodes, CodedMatrix
from quire.quant.coded_scheme import Coder
from quire.quant.device_codes import FP8, round_to_affine, round_to_fp8

_GROUP = 128  # columns that share a scale of 4 bits, where the width allows


def coder_of(form: str) -> Coder | None:
    """`form`: of ModelConfig.weight_form."""
    coders: dict[str, Coder] = {
        "fp8": round_to_fp8, "int8": partial(_whole, bits=8, group=-1), "int4": partial(_whole, bits=4, group=_GROUP),
    }  # fmt: skip
    return coders.get(form)


def head_coder(form: str, *, rounds: bool) -> Coder | None:
    """As `coder_of`, of the output matrix. `rounds`: many inputs may be rounded to 8 bits, as those of fp8 always."""
    return partial(_whole, bits=8, group=-1, inputs="int8") if rounds and form == "int8" else coder_of(form)


def dummy_coder(about: Quantization) -> Coder | None:
    """Codes such as a checkpoint of this format has; None: decoded as every such checkpoint would be."""
    if about.family in ("gptq", "awq"):
        return partial(_whole, bits=about.codes.bits, group=about.codes.group)
    if about.family == "fp8" or (about.family == "modelopt" and about.input_form == "fp8"):
        return round_to_fp8 if about.block is None else partial(_blocks, group=about.block[1])
    if about.family in ("compressed-tensors", "quark") and about.schemes:
        return _of_scheme(about.schemes[0])
    return None


def _of_scheme(scheme: Mapping[str, Any]) -> Coder | None:
    weights = scheme.get("weights") or {}
    bits, group = weights.get("num_bits", 8), weights.get("group_size") or -1
    if weights.get("type", "int") == "float":
        return round_to_fp8 if bits == 8 and group <= 0 else None
    rounds = isinstance(scheme.get("input_activations"), Mapping)
    return partial(_whole, bits=bits, group=group, inputs="int8" if rounds else "none")


def _whole(numbers: Tensor, *, bits: int, group: int, inputs: str = "none") -> CodedMatrix | Tensor:
    width = numbers.shape[1]
    size = width if group <= 0 else next((g for g in (group, 64, 32) if g <= group and width % g == 0), 0)
    if not size:
        return numbers
    made: AffineCodes = round_to_affine(numbers, bits, size, inputs)
    return made


def _blocks(numbers: Tensor, *, group: int) -> CodedWeight | Tensor:
    """fp8 with a scale for each row of a block."""
    rows, width = numbers.shape
    if width % group:
        return numbers
    parts = numbers.float().view(rows, -1, group)
    scale = parts.abs().amax(-1).clamp(min=1e-12) / LARGEST[FP8]
    codes = (parts / scale[:, :, None]).view(rows, width).to(FP8)
    return CodedWeight("fp8", codes, scale.t().contiguous(), None, rows, width, group, rounds=True)
