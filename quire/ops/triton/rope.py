"""Between the fused qkv projection and attention on CUDA, in one pass: head norms, rotary embedding, cache write.

`prepare_qkv` reads [q | k | v] once, writes queries to a new tensor, keys and values to their slots. A program takes
one token and a few heads; a head is read as the two entries of each rotated pair, and the unrotated rest.
`rope_tables` computes a step's cosines and signed sines in one launch.

Floor: 2 (Hq + 2 Hkv) D b bytes a token (all read, all written) plus 2 dim b of tables. 8192 tokens of (32 + 16) x 128
bf16: 201 MB, 47 us at 4.3 TB/s. A decode of 256 tokens: 6 MB, 1.5 us, so a launch (about 2 us).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.kv_codes import CacheScales
from quire.ops.parts import PartialSums
from quire.ops.qkv import QkvPrep
from quire.ops.triton.attention_cache import BY_LAYER, BY_TOKEN, SCALES, Coding, encode, meant, size_of, token_scale
from quire.ops.triton.sizes import cdiv, next_power_of_2

_TILES = ((4096, 4), (2048, 4), (1024, 2))  # entries and warps of a program: the first that divides the heads evenly


@triton.jit
def _weighted(x, scale, weights, q_at, k_at, column, is_q, is_k, offset, WIDE: tl.constexpr, NARROW: tl.constexpr):
    """x * scale * weight, rounded to the dtype NARROW as ops/norm.py rounds; x is float32 and so is the result."""
    q_weight, k_weight = weights
    h = x * scale[:, None]
    if not WIDE:
        h = h.to(NARROW).to(tl.float32)
    w = tl.load(q_weight + q_at[:, None] + column, mask=is_q, other=0.0).to(tl.float32)
    w += tl.load(k_weight + k_at[:, None] + column, mask=is_k, other=0.0).to(tl.float32)
    return tl.where(is_q | is_k, (h * (w + offset)).to(NARROW).to(tl.float32), x)


@triton.jit
def _put(bases, x, column, is_q, is_k, is_v, KEEP: tl.constexpr):
    """Store a tile of every head: q to the result, k and v to the cache."""
    own, q_base, k_base, v_base = bases
    tl.store(q_base[:, None] + column, x.to(q_base.dtype.element_ty), mask=is_q)
    if KEEP:
        tl.store(own[:, None] + column, x.to(own.dtype.element_ty), mask=is_k[0])
    tl.store(k_base[:, None] + column, x.to(k_base.dtype.element_ty), mask=is_k[1])
    tl.store(v_base[:, None] + column, x.to(v_base.dtype.element_ty), mask=is_v)


@triton.jit
def _put_codes(
    bases, x, scale, column, is_q, is_k, is_v, LARGEST: tl.constexpr, CODING: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """As _put, with keys and values as codes; what is kept are the numbers that these mean."""
    own, q_base, k_base, v_base = bases
    tl.store(q_base[:, None] + column, x.to(q_base.dtype.element_ty), mask=is_q)
    scale = tl.zeros(x.shape, tl.float32) + scale[:, None]
    code = encode(x, scale, LARGEST, CODING)
    if KEEP:
        kept = (meant(code, LARGEST) * scale).to(own.dtype.element_ty)
        tl.store(own[:, None] + column, kept, mask=is_k[0] | is_v[0])
    code = code.to(k_base.dtype.element_ty)
    tl.store(k_base[:, None] + column, code, mask=is_k[1])
    tl.store(v_base[:, None] + column, code, mask=is_v[1])


@triton.jit
def _read(own, column, mask, part_stride, PARTS: tl.constexpr, NARROW: tl.constexpr):
    """A tile of every head as float32: the sum of PARTS, rounded to the dtype NARROW."""
    x = tl.load(own[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(own[:, None] + part * part_stride + column, mask=mask, other=0.0).to(tl.float32)
    return x.to(NARROW).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", *SCALES])
def _prepare_kernel(
    qkv, q_out, keys, values, k_scales, v_scales, scale_page, scale_head, slots, q_weight, k_weight, cos, sin, stride,
    part_stride, k_block, k_slot, k_head, v_block, v_slot, v_head, q_weight_stride, k_weight_stride, eps, offset,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BH: tl.constexpr, PAIR_TILE: tl.constexpr, REST_TILE: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, KEEP: tl.constexpr, PARTS: tl.constexpr,
    LARGEST: tl.constexpr, CODING: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    is_q, is_k, is_v = head < HQ, (head >= HQ) & (head < HQ + HKV), (head >= HQ + HKV) & (head < HQ + 2 * HKV)
    slot = tl.load(slots + token).to(tl.int64)
    block, block_offset, kv = slot // BLOCK_SIZE, slot % BLOCK_SIZE, tl.where(is_k, head - HQ, head - HQ - HKV)
    there = slot >= 0
    own = qkv + token * stride + head * D
    bases = (
        own,
        q_out + (token * HQ + head) * D,
        keys + block * k_block + block_offset * k_slot + kv * k_head,
        values + block * v_block + block_offset * v_slot + kv * v_head,
    )
    kind: tl.constexpr = q_out.dtype.element_ty
    i, j = tl.arange(0, PAIR_TILE)[None, :], tl.arange(0, REST_TILE)[None, :]
    first = i * 2 if PAIRS else i
    second = first + 1 if PAIRS else first + HALF
    rest = j + 2 * HALF
    live, paired, left = (head < HQ + 2 * HKV)[:, None], i < HALF, rest < D
    a = _read(own, first, live & paired, part_stride, PARTS, kind)
    b = _read(own, second, live & paired, part_stride, PARTS, kind)
    c = _read(own, rest, live & left, part_stride, PARTS, kind)
    q2, k2, v2 = is_q[:, None], is_k[:, None], is_v[:, None]
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / D + eps)
        weights, q_at, k_at = (q_weight, k_weight), head * q_weight_stride, kv * k_weight_stride
        a = _weighted(a, scale, weights, q_at, k_at, first, q2 & paired, k2 & paired, offset, WIDE, kind)
        b = _weighted(b, scale, weights, q_at, k_at, second, q2 & paired, k2 & paired, offset, WIDE, kind)
        c = _weighted(c, scale, weights, q_at, k_at, rest, q2 & left, k2 & left, offset, WIDE, kind)
    if HALF > 0:
        cosine = tl.load(cos + token * (2 * HALF) + first, mask=paired, other=0.0).to(tl.float32)
        sine = tl.load(sin + token * (2 * HALF) + second, mask=paired, other=0.0).to(tl.float32)
        a, b = tl.where(v2, a, a * cosine - b * sine), tl.where(v2, b, b * cosine + a * sine)
    if CODING:  # what is coded are numbers of the model's dtype
        a, b, c = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32), c.to(kind).to(tl.float32)
    if CODING == BY_LAYER:
        scale = tl.where(is_v, tl.load(v_scales), tl.load(k_scales))
    if CODING == BY_TOKEN:
        scale = token_scale(tl.maximum(tl.maximum(size_of(a), size_of(b)), size_of(c)), LARGEST)
        scale_at = block * scale_page + block_offset + kv * scale_head
        tl.store(k_scales + scale_at, scale, mask=is_k & there)
        tl.store(v_scales + scale_at, scale, mask=is_v & there)
    if CODING:
        k_pair, v_pair = (k2 & paired, k2 & paired & there), (v2 & paired, v2 & paired & there)
        k_left, v_left = (k2 & left, k2 & left & there), (v2 & left, v2 & left & there)
        if HALF > 0:
            _put_codes(bases, a, scale, first, q2 & paired, k_pair, v_pair, LARGEST, CODING, KEEP)
            _put_codes(bases, b, scale, second, q2 & paired, k_pair, v_pair, LARGEST, CODING, KEEP)
        if 2 * HALF < D:
            _put_codes(bases, c, scale, rest, q2 & left, k_left, v_left, LARGEST, CODING, KEEP)
    else:
        if HALF > 0:
            _put(bases, a, first, q2 & paired, (k2 & paired, k2 & paired & there), v2 & paired & there, KEEP)
            _put(bases, b, second, q2 & paired, (k2 & paired, k2 & paired & there), v2 & paired & there, KEEP)
        if 2 * HALF < D:
            _put(bases, c, rest, q2 & left, (k2 & left, k2 & left & there), v2 & left & there, KEEP)


def prepare_qkv(
    qkv: Tensor | PartialSums, prep: QkvPrep, keys: Tensor, values: Tensor, slots: Tensor, keep: bool = False,
    scales: CacheScales | None = None, *, tile: tuple[int, int] | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    parts, dtype = (qkv.sums, qkv.dtype) if isinstance(qkv, PartialSums) else (qkv[None], qkv.dtype)
    if keep and isinstance(qkv, PartialSums):
        raise ValueError("keys cannot be written back to partial sums")
    tokens, total = parts.shape[1], prep.heads + 2 * prep.kv_heads
    size, half = parts.shape[2] // total, 0 if prep.cos is None else prep.cos.shape[-1] // 2
    behind = tokens // 16 + 1 if keep else 0  # padding for library.py to read a little past the last prompt
    q = torch.empty((tokens + behind, prep.heads, size), dtype=dtype, device=parts.device)[:tokens]
    if not tokens:
        return q
    entries, warps = tile or next((t for t in _TILES if total * size % t[0] == 0), _TILES[1])
    pair_tile = next_power_of_2(max(half, 1))
    rest_tile = next_power_of_2(max(size - 2 * half, 1))
    tile_heads = max(1, min(entries // size, next_power_of_2(total)))
    tile_heads = 1 << (tile_heads.bit_length() - 1)
    qw, kw = prep.q_weight, prep.k_weight
    codes = Coding.of(scales, keys.dtype)
    _prepare_kernel[(tokens, cdiv(total, tile_heads))](
        parts, q, keys, values, codes.keys, codes.values, codes.page, codes.head, slots, qw, kw, prep.cos, prep.sin,
        parts.stride(1), parts.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        size if qw is not None and qw.ndim == 2 else 0, size if kw is not None and kw.ndim == 2 else 0,
        prep.eps, prep.offset,
        HQ=prep.heads, HKV=prep.kv_heads, D=size, HALF=half, BLOCK_SIZE=keys.shape[1], BH=tile_heads,
        PAIR_TILE=pair_tile, REST_TILE=rest_tile, NORM=qw is not None, WIDE=prep.wide or bool(prep.offset),
        PAIRS=prep.pairs, KEEP=keep, PARTS=len(parts), LARGEST=codes.largest, CODING=codes.coding, EARLY=early,
        num_warps=warps,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _tables_kernel(positions, inv_freq, cos, sin, gain, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    first = i * 2 if PAIRS else i
    second = first + 1 if PAIRS else first + HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + i, mask=inside, other=0.0)
    c, s = tl.cos(angle) * gain, tl.sin(angle) * gain
    kind = cos.dtype.element_ty
    base = token * (2 * HALF)
    tl.store(cos + base + first, c.to(kind), mask=inside)
    tl.store(cos + base + second, c.to(kind), mask=inside)
    tl.store(sin + base + first, (-s).to(kind), mask=inside)
    tl.store(sin + base + second, s.to(kind), mask=inside)


def rope_tables(
    positions: Tensor, inv_freq: Tensor, gain: float, pairs: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    tokens, half = positions.shape[0], inv_freq.shape[0]
    cos, sin = torch.empty((2, tokens, 1, 2 * half), dtype=dtype, device=positions.device)
    if tokens:
        block = next_power_of_2(half)
        _tables_kernel[(tokens,)](
            positions, inv_freq, cos, sin, gain, HALF=half, BLOCK=block, PAIRS=pairs, num_warps=max(1, block // 64)
        )
    return cos, sin


@triton.jit
def _turn_kernel(
    x, cos, sin, x_token, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    """grid (tokens): all heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    table = token * (2 * HALF) + d
    inside = d < HALF
    cos_low, cos_high = tl.load(cos + table, mask=inside), tl.load(cos + table + HALF, mask=inside)
    sin_low, sin_high = tl.load(sin + table, mask=inside), tl.load(sin + table + HALF, mask=inside)
    at = x + token * x_token + head[:, None] * (2 * HALF) + d[None, :]
    mask = (head < HEADS)[:, None] & inside[None, :]
    low, high = (
        tl.load(at, mask=mask, other=0.0).to(tl.float32),
        tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32),
    )
    turned_low = low * cos_low[None, :] - high * sin_low[None, :]
    turned_high = high * cos_high[None, :] + low * sin_high[None, :]
    tl.store(at, turned_low.to(x.dtype.element_ty), mask=mask)
    tl.store(at + HALF, turned_high.to(x.dtype.element_ty), mask=mask)


def turn_heads_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Floor: 2 H D b bytes a token. 5476 tokens of 32 x 80 bf16: 56 MB, 13 us."""
    tokens, heads, size = x.shape
    if tokens:
        _turn_kernel[(tokens,)](
            x, cos.float().contiguous(), sin.float().contiguous(), x.stride(0), HEADS=heads, HALF=size // 2,
            BLOCK_H=next_power_of_2(heads), BLOCK=next_power_of_2(size // 2), num_warps=4,
        )  # fmt: skip


def turns(x: Tensor) -> bool:
    """Whether heads lie one after another."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
