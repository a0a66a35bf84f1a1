"""Matmuls with weights kept as codes of 4 or 8 bits in a device's memory.

A `CodedWeight` is a matrix [rows, width] as kernels read it: small floats or whole numbers, and a scale for each group
of neighbouring columns. With few rows of inputs a matmul costs one read of the codes, so inputs keep their dtype; with
many, a weight that `rounds` has its inputs rounded to 8 bits too, token by token, and multiplied as such. References
decode. Must not know: checkpoints, layers, which device this is.

    kind     codes                                              numbers
    fp8      float8_e4m3fn [rows, width]                        scale * code
    int8     int8 [rows, width]                                 scale * (code - zero)
    int4     uint8 [chunks, rows, chunk / 2]                    scale * (code - zero); without zeros, zero is 8
    int6     as int4, and `high` uint8 [chunks, rows, chunk/4]  scale * (code - 32)
    fp4      as int4                                            scale * e2m1 code
    iq1-4    as int4                                            scale * TABLES[kind][code]

Chunks of 4-bit codes: a byte holds column j of its chunk in the low half and column j + chunk / 2 in the high one, so
both halves of a tile of bytes are neighbouring columns; and a tile of rows of one chunk is one piece of memory. A byte
of `high` holds the two upper bits of columns j, j + chunk / 4, j + chunk / 2 and j + 3 chunk / 4.

Blocks of GGUF files have small groups, whose scales lie as kernels read them: [chunks, rows, groups of a chunk]. With
`least`, numbers are scale * (code - middle) - least; with `coarse`, scales (and `least`) are whole numbers, times one
float16 for every COARSE columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import op

MIDDLE = 8  # the zero of int4 codes that have none of their own
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
COARSE = 256  # columns that share a factor of their scales
CENTRES = {"int4": MIDDLE, "int6": 32, "int8": 0}  # what kernels subtract from codes
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_NUMBERS = (*_E2M1, *(-n for n in _E2M1))
_ODD = tuple(float(n) for n in range(1, 16, 2))


def _both_signs(*numbers: float) -> tuple[float, ...]:
    """16 numbers for codes of 4 bits; the last places may be left over."""
    return tuple((*numbers, *(-n for n in numbers), *[0.0] * 16)[:16])


TABLES = {  # numbers of the codes, all of which bfloat16 and float16 have
    "iq4": (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
    "iq3": _both_signs(*_ODD),
    "iq3x": _both_signs(*_ODD[:7], 15.5),
    "iq2": _both_signs(1.0, 3.125, 5.375),
    "iq1": _both_signs(0.125, 0.875, 1.125),
}


class CodedWeight(NamedTuple):
    kind: str
    codes: Tensor
    scale: Tensor  # [groups, rows], float32 or float16; of blocks three axes, and with `coarse` uint8 or int8
    zero: Tensor | None  # [groups, rows], of int4 uint8 or float32 (they may lie between codes), of int8 int16
    rows: int
    width: int
    group: int  # columns that share a scale; `width`: all of a row
    rounds: bool = False  # whether many inputs may be rounded to 8 bits
    high: Tensor | None = None  # bits 4 and 5 of codes of 6 bits
    least: Tensor | None = None  # as `scale`
    coarse: Tensor | None = None  # float16 [width / COARSE, rows, 2]: of `scale` and of `least`
    middle: int = 0  # with `least`: the code of -least (of int8: less what kernels subtract, which is nothing)

    @property
    def is_blocked(self) -> bool:
        """Whether it is blocks of a GGUF file, which have kernels of their own."""
        return self.scale.ndim == 3

    @property
    def chunk(self) -> int:
        """Columns of a chunk of blocks."""
        return self.width // len(self.scale)

    @property
    def half(self) -> int:
        """Bytes of a row in a chunk of 4-bit codes."""
        return self.codes.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """By the names that parameters get."""
        named = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "high": self.high, "least": self.least,
                 "coarse": self.coarse}  # fmt: skip
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def taken(self, index: Tensor) -> CodedWeight:
        """Some of its rows."""
        return self._replace(
            codes=self.codes[:, index] if self.codes.ndim == 3 else self.codes[index],
            scale=self.scale[:, index],
            zero=None if self.zero is None else self.zero[:, index],
            rows=len(index),
            high=None if self.high is None else self.high[:, index],
            least=None if self.least is None else self.least[:, index],
            coarse=None if self.coarse is None else self.coarse[:, index],
        )


def is_packed(kind: str) -> bool:
    return kind in ("int4", "fp4", "int6") or kind in TABLES


def is_simple(weight: CodedWeight) -> bool:
    """Small floats in rows with one scale each: a row of results times that scale is all that decoding adds."""
    return weight.kind == "fp8" and weight.group == weight.width and weight.zero is None


def chunk_of(width: int, group: int) -> int:
    """Columns of a chunk of 4-bit codes, at most 128: of one group, or two of 16. 0: these codes fit none."""
    for chunk in (128, 64, 32):
        if width % chunk == 0 and (group % chunk == 0 or group == chunk // 2):
            return chunk
    return 0


def block_chunk(kind: str, width: int, group: int) -> int:
    """Columns of a chunk of blocks; 0: these fit none. A half (of codes of 6 bits, a quarter) is some whole groups, or
    a part of one."""
    smallest = 64 if kind == "int6" else 32
    return next((chunk for chunk in (128, 64, 32) if width % chunk == 0 and chunk >= max(smallest, group)), 0)


def pack_halves(codes: Tensor, chunk: int) -> Tensor:
    """uint8 [rows, width] of 4 bits each -> [chunks, rows, chunk / 2]."""
    rows, width = codes.shape
    low, high = codes.view(rows, width // chunk, 2, chunk // 2).unbind(2)
    return (low | high << 4).transpose(0, 1).contiguous()


def open_chunks(packed: Tensor) -> Tensor:
    """The reverse of `pack_halves`."""
    both = torch.stack((packed & 15, packed >> 4), 2)  # [chunks, rows, 2, half]
    return both.transpose(0, 1).reshape(packed.shape[1], -1)


def pack_quarters(codes: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """uint8 [rows, width] of 6 bits each -> low halves as pack_halves has them, and the two upper bits
    [chunks, rows, chunk / 4]."""
    rows, width = codes.shape
    upper = (codes >> 4).view(rows, width // chunk, 4, chunk // 4)
    first, second, third, fourth = upper.unbind(2)
    packed = first | second << 2 | third << 4 | fourth << 6
    return pack_halves(codes & 15, chunk), packed.transpose(0, 1).contiguous()


def open_quarters(packed: Tensor) -> Tensor:
    """The upper bits: [chunks, rows, chunk / 4] -> [rows, width]."""
    all_four = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    return all_four.transpose(0, 1).reshape(packed.shape[1], -1)


def _values_of(weight: CodedWeight) -> Tensor:
    """float32 [rows, width]: codes as numbers, less the zero that a kind has by itself."""
    table = E2M1_NUMBERS if weight.kind == "fp4" else TABLES.get(weight.kind)
    if table is not None:
        return torch.tensor(table, device=weight.codes.device)[open_chunks(weight.codes).long()]
    if not is_packed(weight.kind):
        return weight.codes.float()
    codes = open_chunks(weight.codes)
    if weight.high is not None:
        codes = codes | open_quarters(weight.high) << 4
    return codes.float() - (CENTRES[weight.kind] if weight.zero is None else 0)


def _factors(weight: CodedWeight, values: Tensor, level: int) -> Tensor:
    """float32 [rows, groups, 1] of `scale` (level 0) or `least` (1)."""
    spread = values.t() if values.ndim == 2 else values.transpose(0, 1).reshape(weight.rows, -1)
    if weight.coarse is None:
        return spread.float()[:, :, None]
    coarse = weight.coarse[:, :, level].t().float().repeat_interleave(COARSE // weight.group, 1)
    return (spread.float() * coarse)[:, :, None]


@op
def decode_weight(weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """[rows, width] numbers."""
    values = _values_of(weight).view(weight.rows, -1, weight.group)
    if weight.zero is not None:
        values = values - weight.zero.t().float()[:, :, None]
    if weight.least is not None:
        values = values + (CENTRES[weight.kind] - weight.middle)
    values = values * _factors(weight, weight.scale, 0)
    if weight.least is not None:
        values = values - _factors(weight, weight.least, 1)
    return values.view(weight.rows, weight.width).to(dtype)


@op
def decode_rows(weight: CodedWeight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows, as an embedding reads them: [*index, width]."""
    return decode_weight.reference(weight.taken(index.reshape(-1)), dtype).view(*index.shape, weight.width)


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
