"""Blocks of GGUF files as codes that a device's kernels multiply, without a loss.

In: bytes as they lie in the file, [rows, bytes of a row], on any device. Out: OpenBlocks, one byte for each code, with
the scales as the file has them (two levels of them stay two). Types built on codebooks are decoded by the gguf package:
their numbers, less the scales, are few, and 4 bits say which one it is. Must not know: files, names, kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.loader.gguf_types import (
    add_fifth_bits,
    dequantize,
    fill_half_bytes,
    fill_nibbles,
    fill_quarters,
    shifts,
    six_bit_pairs,
    tensor_type,
)
from quire.ops.coded import TABLES
from quire.quant.coded import OpenBlocks, power_of_two


def open_blocks(raw: Tensor, type_id: int) -> OpenBlocks:
    """[rows, bytes of a row] of a type that `opens` says yes to."""
    kind, rows = tensor_type(type_id), raw.shape[0]
    raw = raw.contiguous()
    if raw.storage_offset() % 8:
        raw = raw.clone()  # numbers at odd addresses
    blocks = raw.view(-1, kind.num_bytes)
    made = _OPENERS[kind.name](blocks)
    coarse = made.coarse
    return made._replace(
        codes=made.codes.view(rows, -1),
        scale=made.scale.reshape(rows, -1),
        least=None if made.least is None else made.least.reshape(rows, -1),
        coarse=None if coarse is None else coarse.reshape(len(coarse), rows, -1),
    )


def opens(type_id: int) -> bool:
    return tensor_type(type_id).name in _OPENERS


def _room(b: Tensor, elements: int) -> Tensor:
    return torch.empty((len(b), elements), dtype=torch.uint8, device=b.device)


def _f16(b: Tensor, at: int) -> Tensor:
    return b[:, at : at + 2].contiguous().view(torch.float16)


def _q4_0(b: Tensor) -> OpenBlocks:
    fill_nibbles(b[:, 2:], q := _room(b, 32))
    return OpenBlocks(q, "int4", 32, _f16(b, 0), 8)


def _q4_1(b: Tensor) -> OpenBlocks:
    fill_nibbles(b[:, 4:], q := _room(b, 32))
    return OpenBlocks(q, "int4", 32, _f16(b, 0), 0, -_f16(b, 2))


def _q5_0(b: Tensor) -> OpenBlocks:
    fill_nibbles(b[:, 6:], q := _room(b, 32))
    add_fifth_bits(b[:, 2:6], q)
    return OpenBlocks(q + 16, "int6", 32, _f16(b, 0), 32)


def _q5_1(b: Tensor) -> OpenBlocks:
    fill_nibbles(b[:, 8:], q := _room(b, 32))
    add_fifth_bits(b[:, 4:8], q)
    return OpenBlocks(q + 16, "int6", 32, _f16(b, 0), 16, -_f16(b, 2))


def _q8_0(b: Tensor) -> OpenBlocks:
    return OpenBlocks(b[:, 2:].contiguous().view(torch.int8), "int8", 32, _f16(b, 0))


def _q2_k(b: Tensor) -> OpenBlocks:
    fill_quarters(b[:, 16:80], q := _room(b, 256))
    scales = b[:, :16].contiguous()
    return OpenBlocks(q + 6, "int4", 16, scales & 15, 6, scales >> 4, torch.stack((_f16(b, 80), _f16(b, 82))))


def _q3_k(b: Tensor) -> OpenBlocks:
    fill_quarters(b[:, 32:96], q := _room(b, 256))
    high = (b[:, None, :32] >> shifts(8, 1, b.device)[:, None]) & 1  # [n, 8, 32]
    q.view(-1, 8, 32).add_(4 * high + 4)  # less 4 where the bit is clear, plus 8
    packed = b[:, 96:108].contiguous()
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    top = ((packed[:, None, 8:] >> shifts(4, 2, b.device)[:, None]) & 3).view(-1, 16)
    scales = (low | (top << 4)).view(torch.int8) - 32
    return OpenBlocks(q, "int4", 16, scales, 8, None, _f16(b, 108)[None])


def _q4_k(b: Tensor) -> OpenBlocks:
    fill_half_bytes(b[:, 16:], q := _room(b, 256))
    return _two_levels(q, "int4", 0, b)


def _q5_k(b: Tensor) -> OpenBlocks:
    fill_half_bytes(b[:, 48:], q := _room(b, 256))
    fifth = (b[:, None, 16:48] >> shifts(8, 1, b.device)[:, None]) & 1
    q.view(-1, 8, 32).add_(fifth, alpha=16)
    return _two_levels(q + 16, "int6", 16, b)


def _two_levels(q: Tensor, kind: str, middle: int, b: Tensor) -> OpenBlocks:
    scales, mins = six_bit_pairs(b[:, 4:16])
    return OpenBlocks(q, kind, 32, scales, middle, mins, torch.stack((_f16(b, 0), _f16(b, 2))))


def _q6_k(b: Tensor) -> OpenBlocks:
    q = _room(b, 256)
    low, halves = b[:, :128].contiguous().view(-1, 2, 64), q.view(-1, 2, 2, 64)
    halves[:, :, 0] = low & 15
    halves[:, :, 1] = low >> 4
    top = b[:, 128:192].contiguous().view(-1, 2, 1, 32) >> shifts(4, 2, b.device)[:, None]
    q.view(-1, 2, 4, 32).add_(top & 3, alpha=16)
    return OpenBlocks(q, "int6", 16, b[:, 192:208].contiguous().view(torch.int8), 32, None, _f16(b, 208)[None])


def _tq1_0(b: Tensor) -> OpenBlocks:
    return _three_numbers(b, "TQ1_0", _f16(b, 52))


def _tq2_0(b: Tensor) -> OpenBlocks:
    return _three_numbers(b, "TQ2_0", _f16(b, 64))


def _three_numbers(b: Tensor, name: str, scale: Tensor) -> OpenBlocks:
    """Of -1, 0 and 1."""
    ones = b.clone()
    at = tensor_type(_IDS[name]).num_bytes - 2
    ones[:, at:] = torch.tensor((0x00, 0x3C), dtype=torch.uint8, device=b.device)  # a scale of 1
    numbers = dequantize(ones.view(-1), _IDS[name], (len(b), 256), torch.float32)
    return OpenBlocks((numbers + 8).to(torch.uint8), "int4", 256, scale, 8)


def _mxfp4(b: Tensor) -> OpenBlocks:
    fill_nibbles(b[:, 1:], q := _room(b, 32))
    return OpenBlocks(q, "fp4", 32, power_of_two(b[:, :1].clamp(max=254)))


def _nvfp4(b: Tensor) -> OpenBlocks:
    """4 scales: e4m3, whose sign is not looked at (127 is 0, 255 is 480) | 4 × 8 nibble pairs"""
    pairs, scales = b[:, 4:].contiguous().view(-1, 4, 8), b[:, :4].contiguous()
    numbers = (scales & 127).view(torch.float8_e4m3fn).half()
    numbers = numbers.masked_fill(scales == 127, 0).masked_fill(scales == 255, 480)
    return OpenBlocks(torch.cat((pairs & 15, pairs >> 4), -1), "fp4", 16, numbers)


def _iq4_nl(b: Tensor) -> OpenBlocks:
    fill_nibbles(b[:, 2:], q := _room(b, 32))
    return OpenBlocks(q, "iq4", 32, _f16(b, 0))


def _iq4_xs(b: Tensor) -> OpenBlocks:
    fill_nibbles(b[:, 8:].reshape(-1, 16), (q := _room(b, 256)).view(-1, 32))
    low = (b[:, 4:8, None] >> shifts(2, 4, b.device)) & 15
    top = (b[:, 2:4, None] >> shifts(4, 2, b.device)) & 3
    scales = (low.reshape(-1, 8) | (top.reshape(-1, 8) << 4)).view(torch.int8) - 32
    return OpenBlocks(q, "iq4", 32, scales, 0, None, _f16(b, 0)[None])


def _by_numbers(b: Tensor, name: str, kind: str, group: int, scale: Tensor, coarse: Tensor) -> OpenBlocks:
    """`scale` uint8 [blocks, groups], `coarse` float16 [blocks, 1]: numbers less both are those of a table."""
    numbers = dequantize(b.reshape(-1), _IDS[name], (len(b), 256), torch.float32)
    by = (coarse.float() * scale)[:, :, None]
    relative = (numbers.view(len(b), -1, group) / by).view(-1)
    table, order = torch.tensor(TABLES[kind], device=b.device).sort()
    between = (table[1:] + table[:-1]) / 2
    codes = order.to(torch.uint8)[torch.bucketize(relative.nan_to_num(0.0), between)]  # 0 / 0: any code is right
    return OpenBlocks(codes.view(len(b), 256), kind, group, scale, 0, None, coarse[None])


def _iq2_xxs(b: Tensor) -> OpenBlocks:
    top = b[:, 2:].contiguous().view(-1, 8, 8)[:, :, 7]  # of 32 bits: 28 of signs and the scale
    return _by_numbers(b, "IQ2_XXS", "iq2", 32, _odd(top >> 4), _f16(b, 0))


def _iq2_xs(b: Tensor) -> OpenBlocks:
    return _by_numbers(b, "IQ2_XS", "iq2", 16, _odd(_pairs(b[:, 66:74])), _f16(b, 0))


def _iq2_s(b: Tensor) -> OpenBlocks:
    return _by_numbers(b, "IQ2_S", "iq2", 16, _odd(_pairs(b[:, 74:82])), _f16(b, 0))


def _iq3_xxs(b: Tensor) -> OpenBlocks:
    top = b[:, 66:].contiguous().view(-1, 8, 4)[:, :, 3]
    return _by_numbers(b, "IQ3_XXS", "iq3x", 32, _odd(top >> 4), _f16(b, 0))


def _iq3_s(b: Tensor) -> OpenBlocks:
    return _by_numbers(b, "IQ3_S", "iq3", 32, _odd(_pairs(b[:, 106:110])), _f16(b, 0))


def _iq1_s(b: Tensor) -> OpenBlocks:
    high = b[:, 34:].contiguous().view(-1, 8, 2)[:, :, 1]
    return _by_numbers(b, "IQ1_S", "iq1", 32, _odd((high >> 4) & 7), _f16(b, 0))


def _iq1_m(b: Tensor) -> OpenBlocks:
    """The last 8 bytes: 4 words of four 3-bit scales, and in their top 4 bits the float16."""
    low, high = b[:, 48:].contiguous().view(-1, 4, 2).int().unbind(-1)
    words = low | high << 8
    parts = words >> 12
    bits = parts[:, 0] | parts[:, 1] << 4 | parts[:, 2] << 8 | parts[:, 3] << 12
    coarse = bits.to(torch.int16).view(torch.float16)[:, None]
    scales = (words[:, :, None] >> shifts(4, 3, b.device).int() & 7).view(-1, 16)
    return _by_numbers(b, "IQ1_M", "iq1", 16, _odd(scales.to(torch.uint8)), coarse)


def _odd(scales: Tensor) -> Tensor:
    return 2 * scales + 1


def _pairs(packed: Tensor) -> Tensor:
    """Scales of 4 bits, the low one first."""
    return ((packed[:, :, None] >> shifts(2, 4, packed.device)) & 15).flatten(1)


_OPENERS: dict[str, Callable[[Tensor], OpenBlocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
}  # fmt: skip
_IDS = {
    "TQ1_0": 34, "TQ2_0": 35, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ3_S": 21, "IQ2_S": 22,
    "IQ1_M": 29,
}  # fmt: skip
