"""Matmuls with weights kept as codes of 4 or 8 bits in a device's memory.

A `CodedWeight` is a matrix [rows, width] as kernels read it: small floats or whole numbers, and a scale for each group
of neighbouring columns. With few rows of inputs a matmul costs one read of the codes, so inputs keep their dtype; with
many, a weight that `rounds` has its inputs rounded to 8 bits too, token by token, and multiplied as such. References
decode. Must not know: checkpoints, layers, which device this is.

    kind     codes                                              numbers
    fp8      float8_e4m3fn [rows, width]                        scale * code
    int8     int8 [rows, width]                                 scale * (code - zero)
    int4     uint8 [chunks, rows, chunk / 2]                    scale * (code - zero); without zeros, zero is 8
    fp4      as int4                                            scale * e2m1 code

Chunks of 4-bit codes: a byte holds column j of its chunk in the low half and column j + chunk / 2 in the high one, so
both halves of a tile of bytes are neighbouring columns; and a tile of rows of one chunk is one piece of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import op

MIDDLE = 8  # the zero of int4 codes that have none of their own
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class CodedWeight(NamedTuple):
    kind: str
    codes: Tensor
    scale: Tensor  # [groups, rows], float32 or float16
    zero: Tensor | None  # [groups, rows], of int4 uint8 or float32 (they may lie between codes), of int8 int16
    rows: int
    width: int
    group: int  # columns that share a scale; `width`: all of a row
    rounds: bool = False  # whether many inputs may be rounded to 8 bits

    @property
    def half(self) -> int:
        """Bytes of a row in a chunk of 4-bit codes."""
        return self.codes.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """By the names that parameters get."""
        tensors = {"codes": self.codes, "scale": self.scale}
        return tensors if self.zero is None else tensors | {"zero": self.zero}


def is_packed(kind: str) -> bool:
    return kind in ("int4", "fp4")


def is_simple(weight: CodedWeight) -> bool:
    """Small floats in rows with one scale each: a row of results times that scale is all that decoding adds."""
    return weight.kind == "fp8" and weight.group == weight.width and weight.zero is None


def chunk_of(width: int, group: int) -> int:
    """Columns of a chunk of 4-bit codes, at most 128: of one group, or two of 16. 0: these codes fit none."""
    for chunk in (128, 64, 32):
        if width % chunk == 0 and (group % chunk == 0 or group == chunk // 2):
            return chunk
    return 0


def pack_halves(codes: Tensor, chunk: int) -> Tensor:
    """uint8 [rows, width] of 4 bits each -> [chunks, rows, chunk / 2]."""
    rows, width = codes.shape
    low, high = codes.view(rows, width // chunk, 2, chunk // 2).unbind(2)
    return (low | high << 4).transpose(0, 1).contiguous()


def open_chunks(packed: Tensor) -> Tensor:
    """The reverse of `pack_halves`."""
    both = torch.stack((packed & 15, packed >> 4), 2)  # [chunks, rows, 2, half]
    return both.transpose(0, 1).reshape(packed.shape[1], -1)


@op
def decode_weight(weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """[rows, width] numbers."""
    if weight.kind == "fp4":
        table = torch.tensor([*_E2M1, *(-n for n in _E2M1)], device=weight.codes.device)
        values = table[open_chunks(weight.codes).long()]
    elif weight.kind == "int4":
        values = open_chunks(weight.codes).float() - (MIDDLE if weight.zero is None else 0)
    else:
        values = weight.codes.float()
    values = values.view(weight.rows, -1, weight.group)
    if weight.zero is not None:
        values = values - weight.zero.t().float()[:, :, None]
    return (values * weight.scale.t().float()[:, :, None]).view(weight.rows, weight.width).to(dtype)


@op
def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; x [T, width]."""
    numbers = decode_weight.reference(weight, torch.float32)
    return F.linear(x.float(), numbers, None if bias is None else bias.float()).to(x.dtype)


@op
def quantize_rows(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """x [T, width] as codes of 8 bits (float8_e4m3fn or int8) and scales float32 [width / group, T]: the largest of a
    group is the largest code."""
    parts = x.float().unflatten(1, (-1, group))
    scale = parts.abs().amax(-1).clamp(min=1e-12) / LARGEST[dtype]
    codes = (parts / scale[:, :, None]).flatten(1)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scale.t().contiguous()
