"""Writing keys and values into paged caches.

A cache is viewed as [num_blocks, tokens per block, kv heads, entries]; in memory the tokens of one block and head are
adjacent, so a tile of keys is read in long runs. A slot is block * tokens per block + offset; nothing is written to a
negative slot. Caches in 8 bits are rounded as ops/kv_codes.py does: CODING says whether there is a scale per layer or
one per token and head, which is written beside the codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kv_codes import LARGEST, PER_LAYER, PER_TOKEN, PLAIN, CacheScales
from quire.ops.triton.sizes import next_power_of_2

BY_LAYER = tl.constexpr(PER_LAYER)
BY_TOKEN = tl.constexpr(PER_TOKEN)
SCALES = ["k_scales", "v_scales"]  # may start at any address


@triton.jit
def size_of(x):
    """[H] the largest absolute value of each row; infinite if anything is not a number."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def token_scale(top, LARGEST: tl.constexpr):
    return tl.where(top > 0, tl.div_rn(top, tl.full(top.shape, LARGEST, tl.float32)), 1.0)


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr, CODING: tl.constexpr):
    """x and scale float32 of one shape -> codes, still float32."""
    code = tl.div_rn(x, scale)
    if CODING == BY_TOKEN:
        code = tl.where(scale < float("inf"), code, 0.0)
        code = (code + 12582912.0) - 12582912.0  # to the nearest whole number, ties to even
    return tl.clamp(code, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def meant(code, LARGEST: tl.constexpr):
    """The number that a code from `encode` is rounded to where it is stored, computed in float32: of codes that were
    narrowed to float8 and widened again in one kernel, half were lost on an H200 where a thread has four or more."""
    if LARGEST == 127.0:
        return code  # whole already
    bits = code.to(tl.int32, bitcast=True)
    if LARGEST == 448.0:  # e4m3: three bits after the leading one, multiples of 2 ** -9 at least
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        small, least = (code + 24576.0) - 24576.0, 0.015625
    else:  # e5m2: two, and 2 ** -16
        normal = (bits + 0xFFFFF + ((bits >> 21) & 1)) & ~0x1FFFFF
        small, least = (code + 192.0) - 192.0, 6.103515625e-05
    y = tl.where(tl.abs(code) < least, small, normal.to(tl.float32, bitcast=True))
    return tl.where(code == code, y, code)  # the carry would make a zero of a GPU's NaN, whose bits are all set


@triton.jit
def _write_head(x, to, scales, scales_at, mask, h, HEADS: tl.constexpr, LARGEST: tl.constexpr, CODING: tl.constexpr):
    """x [H, D] to addresses of one shape, as codes if CODING says so."""
    if CODING == BY_LAYER:
        x = encode(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + tl.load(scales), LARGEST, CODING)
    if CODING == BY_TOKEN:
        x = x.to(tl.float32)
        scale = token_scale(size_of(x), LARGEST)[:, None]
        tl.store(scales + scales_at, scale, mask=h < HEADS)
        x = encode(x, tl.zeros(x.shape, tl.float32) + scale, LARGEST, CODING)
    tl.store(to, x.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=SCALES)
def _write_kernel(
    k, v, keys, values, k_scales, v_scales, slots, scale_page, scale_head, k_token, k_head, v_token, v_head,
    page_stride, cache_k_head, cache_v_head,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, LARGEST: tl.constexpr, CODING: tl.constexpr,
):  # fmt: skip
    """grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page, offset = slot // PAGE * page_stride, slot % PAGE
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (h < HEADS) & (d < DK)
    scales_at = slot // PAGE * scale_page + offset + h * scale_head
    key = tl.load(k + token * k_token + h * k_head + d, mask=mask, other=0.0)
    to = keys + page + offset * DK + h * cache_k_head + d
    _write_head(key, to, k_scales, scales_at, mask, h, HEADS, LARGEST, CODING)
    if DV:
        e = tl.arange(0, BLOCK_V)[None, :]
        mask = (h < HEADS) & (e < DV)
        value = tl.load(v + token * v_token + h * v_head + e, mask=mask, other=0.0)
        to = values + page + offset * DV + h * cache_v_head + e
        _write_head(value, to, v_scales, scales_at, mask, h, HEADS, LARGEST, CODING)


class Coding(NamedTuple):
    """What kernels have to know of a cache in 8 bits; all None and 0 for any other."""

    keys: Tensor | None
    values: Tensor | None
    page: int  # stride of scales from block to block; 0 if there is one for all
    head: int
    largest: float
    coding: int

    @classmethod
    def of(cls, scales: CacheScales | None, dtype: torch.dtype) -> Coding:
        if scales is None:
            return cls(None, None, 0, 0, 0.0, PLAIN)
        strides = (0, 0) if scales.coding == PER_LAYER else (scales.keys.stride(0), scales.keys.stride(2))
        return cls(scales.keys, scales.values, *strides, LARGEST[dtype], scales.coding)


def write_pages(
    k: Tensor, v: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor, scales: CacheScales | None = None
) -> None:
    """k [T, Hkv, D], v [T, Hkv, Dv] (last stride 1) into keys and values [num_blocks, page, Hkv, size] at slots [T]."""
    tokens, heads, dk = k.shape
    if not tokens:
        return
    dv = 0 if v is None else v.shape[2]
    source, stored = (k, keys) if v is None or values is None else (v, values)
    codes = Coding.of(scales, keys.dtype)
    _write_kernel[(tokens,)](
        k, source, keys, stored, codes.keys, codes.values, slots, codes.page, codes.head, k.stride(0), k.stride(1),
        source.stride(0), source.stride(1),
        keys.stride(0), keys.stride(2), stored.stride(2), HEADS=heads, DK=dk, DV=dv, PAGE=keys.shape[1],
        BLOCK_H=next_power_of_2(heads), BLOCK_D=next_power_of_2(dk),
        BLOCK_V=next_power_of_2(max(1, dv)), LARGEST=codes.largest, CODING=codes.coding, num_warps=4,
    )  # fmt: skip
