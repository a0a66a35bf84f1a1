"""GGUF tensor types: how many bytes a tensor takes, and its numbers from those bytes.

Owns: one decoder per type, each a handful of whole-chunk tensor operations on [blocks, bytes] uint8 (on any device);
chunks keep the scratch memory small and in cache. In: bytes as they lie in the file. Out: a tensor in the wanted
dtype. Arithmetic is float32 in the order of the format's definition, so results equal the reference bit for bit.
Must not know: names of tensors, models, or files.

A block of 256 ("K" types) is cut into sub-blocks of 16 or 32 with scales of their own; pictures are at the decoders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.registry import load
from quire.schema.errors import CheckpointError, MissingExtraError

_CHUNK = 1 << 20  # elements decoded at a time: 4 MiB of float32 scratch

Decoder = Callable[[Tensor, Tensor], None]  # (blocks [n, bytes] uint8, values [n, elements] float32): fills values


class TensorType(NamedTuple):
    name: str
    elements: int  # per block
    num_bytes: int  # per block
    decode: Decoder | None = None  # None: `plain` says it all, or the gguf package decodes it
    plain: torch.dtype | None = None  # not blocked at all


def tensor_type(type_id: int, name: str = "") -> TensorType:
    """The type with this id; CheckpointError (naming the tensor) if there is none that a file may hold."""
    if (known := _TYPES.get(type_id)) is None:
        raise CheckpointError(f"GGUF tensor {name!r} has type {type_id}, which is not a known tensor type")
    return known


def num_bytes(type_id: int, shape: tuple[int, ...], name: str = "") -> int:
    """Bytes in the file. Rows are whole blocks."""
    kind = tensor_type(type_id, name)
    if shape and shape[-1] % kind.elements:
        raise CheckpointError(
            f"GGUF tensor {name!r} has rows of {shape[-1]}, but type {kind.name} needs multiples of {kind.elements}"
        )
    return math.prod(shape) // kind.elements * kind.num_bytes


def dequantize(raw: Tensor, type_id: int, shape: tuple[int, ...], dtype: torch.dtype, name: str = "") -> Tensor:
    """`raw` (uint8, flat) as numbers of `dtype`, on the device of `raw`. Plain types stay views in their own dtype."""
    kind = tensor_type(type_id, name)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # numbers at odd addresses
    if kind.plain is not None:
        return raw.view(kind.plain).view(shape)
    if kind.decode is None:
        return _by_package(raw, type_id, kind).to(dtype).view(shape)
    out = torch.empty(shape, dtype=dtype, device=raw.device)
    blocks = raw.view(-1, kind.num_bytes)
    flat = out.view(-1, kind.elements)
    step = max(1, _CHUNK // kind.elements)
    direct = dtype == torch.float32
    scratch = torch.empty(0 if direct else min(step, len(blocks)), kind.elements, device=raw.device)
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        target = flat[start : start + step]
        values = target if direct else scratch[: len(piece)]
        kind.decode(piece, values)
        if not direct:
            target.copy_(values)
    return out


def _by_package(raw: Tensor, type_id: int, kind: TensorType) -> Tensor:
    """Types built on large codebooks: the gguf package has the tables."""
    try:
        decode, known = load("gguf.quants:dequantize"), load("gguf:GGMLQuantizationType")
    except ImportError:
        raise MissingExtraError(f"the GGUF tensor type {kind.name}", "gguf", "gguf") from None
    return torch.from_numpy(decode(raw.cpu().numpy(), known(type_id))).to(raw.device)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def fill_nibbles(packed: Tensor, out: Tensor) -> None:
    """[n, 16] bytes -> [n, 32]: low halves first, then high halves."""
    packed = packed.contiguous()
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def add_fifth_bits(words: Tensor, out: Tensor) -> None:
    """Adds 16 where the bit of the element is set: bit i of the 32-bit word [n, 4 bytes] belongs to element i."""
    bits = (words.contiguous()[:, :, None] >> shifts(8, 1, words.device)) & 1
    out.add_(bits.view(-1, 32), alpha=16)


@cache
def shifts(count: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=device) * step


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _look_up(packed: Tensor, values: tuple[int, ...], out: Tensor) -> None:
    """As `fill_nibbles`, through a table of 16."""
    table, packed = _table(values, packed.device), packed.contiguous()
    out[:, :16] = table[(packed & 15).int()]
    out[:, 16:] = table[(packed >> 4).int()]


def _q4_0(b: Tensor, y: Tensor) -> None:  # d:f16 | 16 nibble pairs
    fill_nibbles(b[:, 2:], y)
    y.sub_(8).mul_(_half(b, 0))


def _q4_1(b: Tensor, y: Tensor) -> None:  # d:f16 m:f16 | 16 nibble pairs
    fill_nibbles(b[:, 4:], y)
    y.mul_(_half(b, 0)).add_(_half(b, 2))


def _q5_0(b: Tensor, y: Tensor) -> None:  # d:f16 | 32 fifth bits | 16 nibble pairs
    fill_nibbles(b[:, 6:], y)
    add_fifth_bits(b[:, 2:6], y)
    y.sub_(16).mul_(_half(b, 0))


def _q5_1(b: Tensor, y: Tensor) -> None:  # d:f16 m:f16 | 32 fifth bits | 16 nibble pairs
    fill_nibbles(b[:, 8:], y)
    add_fifth_bits(b[:, 4:8], y)
    y.mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: Tensor, y: Tensor) -> None:  # d:f16 | 32 × i8
    y.copy_(b[:, 2:].view(torch.int8))
    y.mul_(_half(b, 0))


def _q2_k(b: Tensor, y: Tensor) -> None:
    """16 × (scale:4, min:4) | 64 bytes of 2-bit quarters | d:f16 dmin:f16

    Each half of 128 lies in 32 bytes: bits 0-1 are its elements 0..31, bits 2-3 its elements 32..63, and so on.
    """
    scales = b[:, :16].contiguous()
    grouped = y.view(-1, 16, 16)
    fill_quarters(b[:, 16:80], y)
    grouped.mul_((_half(b, 80) * (scales & 15))[:, :, None])
    grouped.sub_((_half(b, 82) * (scales >> 4))[:, :, None])


def fill_quarters(packed: Tensor, y: Tensor) -> None:
    """64 bytes -> 256 two-bit numbers: two halves of 32 bytes, four shifts each."""
    pairs = packed.contiguous().view(-1, 2, 1, 32) >> shifts(4, 2, packed.device)[:, None]
    y.view(-1, 2, 4, 32).copy_(pairs & 3)


def _q3_k(b: Tensor, y: Tensor) -> None:
    """32 bytes of high bits | 64 bytes of 2-bit quarters | 12 bytes: 16 six-bit scales | d:f16

    High bit of element e = 128 h + 32 j + l is bit 4 h + j of byte l; clear means minus 4.
    Scale i: low nibble in byte i % 8 (its high half for i >= 8), top two bits in byte 8 + i % 4 at 2 (i // 4).
    """
    fill_quarters(b[:, 32:96], y)
    high = (b[:, None, :32] >> shifts(8, 1, b.device)[:, None]) & 1  # [n, 8, 32]
    y.view(-1, 8, 32).sub_(4 - 4 * high.float())
    packed = b[:, 96:108].contiguous()
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    top = ((packed[:, None, 8:] >> shifts(4, 2, b.device)[:, None]) & 3).view(-1, 16)
    scales = (low | (top << 4)).float().sub_(32)
    y.view(-1, 16, 16).mul_((_half(b, 108) * scales)[:, :, None])


def six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 mins of six bits.

    Numbers 0..3: the low six bits of bytes 0..3 (scales) and 4..7 (mins). Numbers 4..7: nibbles of bytes 8..11 (low
    for scales, high for mins), with the two left-over top bits of bytes 0..3 and 4..7 above them.
    """
    packed = packed.contiguous()
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    mins = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return scales, mins


def _q4_k(b: Tensor, y: Tensor) -> None:
    """d:f16 dmin:f16 | 12 bytes: 8 scales, 8 mins | 128 bytes: sub-blocks 2j (low) and 2j+1 (high) in 32 bytes"""
    fill_half_bytes(b[:, 16:], y)
    _scale_and_shift(b, y)


def fill_half_bytes(packed: Tensor, y: Tensor) -> None:
    packed, pairs = packed.contiguous().view(-1, 4, 32), y.view(-1, 4, 2, 32)
    pairs[:, :, 0] = packed & 15
    pairs[:, :, 1] = packed >> 4


def _scale_and_shift(b: Tensor, y: Tensor) -> None:
    scales, mins = six_bit_pairs(b[:, 4:16])
    grouped = y.view(-1, 8, 32)
    grouped.mul_((_half(b, 0) * scales)[:, :, None])
    grouped.sub_((_half(b, 2) * mins)[:, :, None])


def _q5_k(b: Tensor, y: Tensor) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit s of byte l is element l of sub-block s."""
    fill_half_bytes(b[:, 48:], y)
    fifth = (b[:, None, 16:48] >> shifts(8, 1, b.device)[:, None]) & 1
    y.view(-1, 8, 32).add_(fifth, alpha=16)
    _scale_and_shift(b, y)


def _q6_k(b: Tensor, y: Tensor) -> None:
    """128 bytes of low nibbles | 64 bytes of top two bits | 16 × i8 scales | d:f16

    Each half of 128 has 64 low bytes (low nibbles: elements 0..63, high nibbles: 64..127) and 32 top bytes
    (bits 0-1: elements 0..31, and so on).
    """
    low = b[:, :128].contiguous().view(-1, 2, 64)
    halves = y.view(-1, 2, 2, 64)
    halves[:, :, 0] = low & 15
    halves[:, :, 1] = low >> 4
    top = b[:, 128:192].contiguous().view(-1, 2, 1, 32) >> shifts(4, 2, b.device)[:, None]
    y.view(-1, 2, 4, 32).add_(top & 3, alpha=16).sub_(32)
    scales = _half(b, 208) * b[:, 192:208].view(torch.int8)
    y.view(-1, 16, 16).mul_(scales[:, :, None])


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the e2m1 values
_POWERS = tuple(2.0 ** (exponent - 128) for exponent in range(256))  # half of each scale, for the same reason


def _iq4_nl(b: Tensor, y: Tensor) -> None:  # d:f16 | 16 nibble pairs into the table
    _look_up(b[:, 2:], _IQ4, y)
    y.mul_(_half(b, 0))


def _iq4_xs(b: Tensor, y: Tensor) -> None:
    """d:f16 | u16: top two bits of 8 scales | 4 bytes: low nibbles of 8 scales | 8 × 16 nibble pairs"""
    _look_up(b[:, 8:].reshape(-1, 16), _IQ4, y.view(-1, 32))
    low = (b[:, 4:8, None] >> shifts(2, 4, b.device)) & 15
    top = (b[:, 2:4, None] >> shifts(4, 2, b.device)) & 3
    scales = (low.reshape(-1, 8) | (top.reshape(-1, 8) << 4)).float().sub_(32)
    y.view(-1, 8, 32).mul_((_half(b, 0) * scales)[:, :, None])


def _mxfp4(b: Tensor, y: Tensor) -> None:  # exponent:u8 (bias 127) | 16 nibble pairs into the table
    _look_up(b[:, 1:], _FP4, y)
    y.mul_(_table(_POWERS, b.device)[b[:, :1].int()])


def _tq2_0(b: Tensor, y: Tensor) -> None:  # 64 bytes of 2-bit quarters | d:f16
    fill_quarters(b[:, :64], y)
    y.sub_(1).mul_(_half(b, 64))


def _tq1_0(b: Tensor, y: Tensor) -> None:
    """48 + 4 bytes of base-3 digits | d:f16. A byte is a fraction of 256; times 3 per digit, the overflow is the digit.

    32 bytes give 5 digits each (elements 0..159, digit by digit), 16 bytes 5 each (160..239), 4 bytes 4 (240..255).
    """
    at = 0
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        rest, width = b[:, first:last].contiguous(), last - first
        for _ in range(digits):
            wide = rest.short() * 3
            y[:, at : at + width] = wide >> 8
            rest, at = (wide & 255).to(torch.uint8), at + width
    y.sub_(1).mul_(_half(b, 52))


_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, plain=torch.float32),
    1: TensorType("F16", 1, 2, plain=torch.float16),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    6: TensorType("Q5_0", 32, 22, _q5_0),
    7: TensorType("Q5_1", 32, 24, _q5_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    10: TensorType("Q2_K", 256, 84, _q2_k),
    11: TensorType("Q3_K", 256, 110, _q3_k),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18, _iq4_nl),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136, _iq4_xs),
    24: TensorType("I8", 1, 1, plain=torch.int8),
    25: TensorType("I16", 1, 2, plain=torch.int16),
    26: TensorType("I32", 1, 4, plain=torch.int32),
    27: TensorType("I64", 1, 8, plain=torch.int64),
    28: TensorType("F64", 1, 8, plain=torch.float64),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2, plain=torch.bfloat16),
    34: TensorType("TQ1_0", 256, 54, _tq1_0),
    35: TensorType("TQ2_0", 256, 66, _tq2_0),
    39: TensorType("MXFP4", 32, 17, _mxfp4),
    40: TensorType("NVFP4", 64, 36),
}
