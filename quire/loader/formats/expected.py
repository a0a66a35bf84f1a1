"""The layout that experts of a quantized checkpoint would have, from its configuration alone: for dummy weights.

With files, tensors say it. Must not know: tensors, models.
"""

from __future__ import annotations

import torch

from quire.checkpoint.quantization import Quantization
from quire.ops.coded_experts import CHUNK
from quire.quant.coded_experts import FP8_ROWS, MXFP4, CodeLayout

_NVFP4 = CodeLayout("e2m1", by_row=True, block=(1, 16), scale=torch.float8_e4m3fn)


def expected_layout(about: Quantization) -> CodeLayout | None:
    """None: none that kernels read, so that experts are plain."""
    if about.family == "mxfp4":
        return MXFP4
    if about.family == "fp8":
        if about.block is None:
            return FP8_ROWS
        fits = about.block[1] % CHUNK == 0
        return CodeLayout("e4m3", block=about.block, scale=torch.float32) if fits else None
    if about.family in ("gptq", "awq"):
        numbers = about.codes
        return _integers(numbers.bits, numbers.group, numbers.symmetric) if not numbers.by_activation else None
    if about.family == "modelopt":
        return _NVFP4 if about.input_form == "fp4" else FP8_ROWS if about.input_form == "fp8" else None
    for scheme in about.schemes:
        weights = scheme.get("weights") or {}
        bits, group = weights.get("num_bits", 8), weights.get("group_size")
        if weights.get("type", "int") == "float":
            if bits in (6, 8):
                return FP8_ROWS if bits == 8 and group in (None, -1) else None
            return _NVFP4 if group == 16 else MXFP4
        if isinstance(bits, int) and (group is None or isinstance(group, int)):
            return _integers(bits, -1 if group is None else group, bool(weights.get("symmetric", True)))
    return None


def _integers(bits: int, group: int, symmetric: bool) -> CodeLayout | None:
    """Whole rows would need their width: such weights are plain."""
    zeros = None if symmetric else torch.uint8
    fits = bits <= 4 and (group in (16, 32, 64) or (group > 0 and group % CHUNK == 0))
    return CodeLayout("int4", block=(1, group), scale=torch.bfloat16, zeros=zeros) if fits else None
