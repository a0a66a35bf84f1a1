"""MXFP4 as gpt-oss stores it: all experts of a mixture in one tensor, rows of gate and up in turn.

    gate_up_proj_blocks uint8 [experts, 2 * ffn, width/32, 16]   gate_up_proj_scales uint8 [experts, 2 * ffn, width/32]
    down_proj_blocks uint8 [experts, width, ffn/32, 16]          down_proj_scales uint8 [experts, width, ffn/32]

Two codes of e2m1 in a byte, the first in the low half; scales are powers of two. Each expert's gate, up and down become
matrices of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.formats.parts import Directory, Made, MatrixPlan, Parts
from quire.quant.coded import FloatCodes, Grid
from quire.schema.errors import CheckpointError

_BYTES, _GROUP = 16, 32  # of a block
_ENDINGS = ("blocks", "scales")


def plan(directory: Directory, about: Quantization) -> Iterator[MatrixPlan]:
    modules: dict[str, dict[str, str]] = {}
    for name in directory:
        base, _, ending = name.rpartition("_")
        if ending in _ENDINGS:
            modules.setdefault(base, {})[ending] = name
    for base, names in modules.items():
        parts = Parts(base, names, directory)
        parts.need(*_ENDINGS)
        for role in _ENDINGS:
            parts.expect_dtype(role, torch.uint8)
        shape = parts["blocks"].shape
        if len(shape) != 4 or shape[3] != _BYTES or 0 in shape:
            raise parts.wrong("blocks", f"expected [experts, rows, blocks, {_BYTES}]")
        parts.expect("scales", shape[:3], "one for each block")
        if base.endswith(".gate_up_proj") and shape[1] % 2:
            raise parts.wrong("blocks", "expected as many rows of gate as of up")
        if not base.endswith((".gate_up_proj", ".down_proj")):
            raise CheckpointError(
                f"tensors of {base!r} are coded as experts, but it is neither gate_up_proj nor down_proj"
            )
        yield MatrixPlan(base, names, partial(_make, base))


def _make(base: str, tensors: Mapping[str, Tensor]) -> Made:
    prefix, _, side = base.rpartition(".")
    sides = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    for expert, (blocks, scales) in enumerate(zip(tensors["blocks"], tensors["scales"], strict=True)):
        for part, rows in (sides if side == "gate_up_proj" else {side: slice(None)}).items():
            made = FloatCodes(blocks[rows].flatten(1), "e2m1", Grid(scales[rows], 1, _GROUP))
            yield f"{prefix}.{expert}.{part}.weight", made
