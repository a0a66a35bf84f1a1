"""Decode attention of a few rows in one launch: head norms, rotary embedding, cache write and attention.

For steps with so few rows that they take as long as memory takes to answer, a few times one after the other. A program
has the query heads of one kv head and some tiles of the row's keys. What earlier steps left (contexts, block tables,
keys and values) it loads while the kernel before, the projection, still runs (`early`, see few.py); once that has
ended, it reads its query heads, its new key and value from the projection. The new key is not read from the cache: the
program of the last split has it in registers, and stores it. How many splits there are follows from the context, on the
device, so there is no list of work; the last program of a head merges its splits.

    grid (kv heads, most splits, rows)        split s of n has tiles s, s + n, s + 2n ..

Contexts, tables and slots are read before the wait, so no kernel that writes them may let the next one start early.

Keys and values may be float8 with a scale per layer (CODING): codes are multiplied in float16, as attention.py does,
and the new key and value count as what their codes mean.

Floor for one row of 32 + 16 heads of 128 and 384 keys: 1.6 MB, 0.4 us.
Must not know: layers, requests. Needs: heads that rotate as halves, in full; 16 bits everywhere but in the cache; no
masks, no score modifications. Everything else goes through rope.py and attention.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.kv_codes import PER_LAYER, PLAIN, CacheScales, is_coded
from quire.ops.qkv import QkvPrep
from quire.ops.triton.attention import LOG2E, Space, _beside_codes
from quire.ops.triton.attention_cache import BY_LAYER, SCALES, Coding, encode, meant
from quire.ops.triton.sizes import cdiv, next_power_of_2

DTYPES = (torch.bfloat16, torch.float16)
_LISTS = ["tables", "row_index", "contexts", "slots", *SCALES]  # may start at any address


class OneRowTile(NamedTuple):
    block_n: int  # keys
    warps: int
    least: int  # tiles of a split
    registers: int | None = None  # of a thread at most, so that programs fit beside those of the projection


# By the size of a head. As measured on an H200 with 8B's shape; those of other sizes were not tuned.
TILES = {64: OneRowTile(64, 4, 1), 128: OneRowTile(64, 8, 1), 256: OneRowTile(64, 4, 1)}


@triton.jit
def _weights(weight, i, offset, D: tl.constexpr, NORM: tl.constexpr):
    """Of both halves of a head."""
    if NORM:
        a, b = tl.load(weight + i).to(tl.float32) + offset, tl.load(weight + D // 2 + i).to(tl.float32) + offset
    else:
        a, b = i.to(tl.float32), i.to(tl.float32)  # not used
    return a, b


@triton.jit
def _normed(a, b, weights, eps, D: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr):
    """Both halves of heads [.., D / 2], normalized as rope.py does."""
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a, b = a * scale, b * scale
        if not WIDE:
            a, b = a.to(KIND).to(tl.float32), b.to(KIND).to(tl.float32)
        a, b = (a * weights[0]).to(KIND).to(tl.float32), (b * weights[1]).to(KIND).to(tl.float32)
    return a, b


@triton.jit
def _turned(a, b, cosine, sine, KIND: tl.constexpr):
    return (a * cosine - b * sine).to(KIND), (b * cosine + a * sine).to(KIND)


@triton.jit
def _tile(k_base, v_base, table, start, end, page_stride, D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Both halves of keys and of values, [BLOCK_N, D / 2] each."""
    HALF: tl.constexpr = D // 2
    n, i = start + tl.arange(0, BLOCK_N), tl.arange(0, HALF)
    present = n < end
    if PAGE % BLOCK_N == 0:  # a tile is within one block
        block = tl.load(table + start // PAGE, volatile=True)  # at once, not only when something is known to be there
    else:
        block = tl.load(table + n // PAGE, mask=present, other=0)
    at = (block.to(tl.int64) * page_stride + n % PAGE * D)[:, None] + i[None, :]
    inside = present[:, None]
    return (
        tl.load(k_base + at, mask=inside, other=0.0), tl.load(k_base + at + HALF, mask=inside, other=0.0),
        tl.load(v_base + at, mask=inside, other=0.0), tl.load(v_base + at + HALF, mask=inside, other=0.0),
    )  # fmt: skip


# Four words of numbers, as they are: no load of them can come after the first of them is used.
_AS_THEY_ARE = tl.constexpr("mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;")


@triton.jit
def _loaded(tile, ASM: tl.constexpr, CODING: tl.constexpr):
    """In registers, in the dtype in which they are multiplied."""
    ka, kb, va, vb = tile
    if ASM:
        kind: tl.constexpr = ka.dtype
        if CODING == BY_LAYER:
            bits = [
                ka.to(tl.int8, bitcast=True), kb.to(tl.int8, bitcast=True), va.to(tl.int8, bitcast=True),
                vb.to(tl.int8, bitcast=True),
            ]  # fmt: skip
            ka, kb, va, vb = tl.inline_asm_elementwise(
                _AS_THEY_ARE, "=r,=r,=r,=r,r,r,r,r", bits, dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=False,
                pack=4,
            )  # fmt: skip
        else:
            bits = [
                ka.to(tl.int16, bitcast=True), kb.to(tl.int16, bitcast=True), va.to(tl.int16, bitcast=True),
                vb.to(tl.int16, bitcast=True),
            ]  # fmt: skip
            ka, kb, va, vb = tl.inline_asm_elementwise(
                _AS_THEY_ARE, "=r,=r,=r,=r,r,r,r,r", bits, dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=False, pack=2,
            )  # fmt: skip
        ka, kb = ka.to(kind, bitcast=True), kb.to(kind, bitcast=True)
        va, vb = va.to(kind, bitcast=True), vb.to(kind, bitcast=True)
    if CODING == BY_LAYER:
        ka, kb, va, vb = ka.to(tl.float16), kb.to(tl.float16), va.to(tl.float16), vb.to(tl.float16)
    return ka, kb, va, vb


@triton.jit
def _stored(x, scale, to, mask, LARGEST: tl.constexpr, CODING: tl.constexpr):
    """Store half of a new key or value; what its code means, in the dtype in which it is multiplied."""
    if CODING == BY_LAYER:
        code = encode(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + scale, LARGEST, CODING)
        x = meant(code, LARGEST).to(tl.float16)
        tl.store(to, code.to(to.dtype.element_ty), mask=mask)
    else:
        tl.store(to, x, mask=mask)
    return x


@triton.jit
def _added(acc, top, total, queries, tile, present, scale):
    """One tile of keys and values. No query of it is without a key."""
    qa, qb = queries
    ka, kb, va, vb = tile
    s = tl.dot(qa, tl.trans(ka))
    s = tl.dot(qb, tl.trans(kb), s)
    s = tl.where(present[None, :], s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new[:, None])
    alpha = tl.exp2(top - new)
    weights = p.to(va.dtype)
    acc = tl.dot(weights, va, acc[0] * alpha[:, None]), tl.dot(weights, vb, acc[1] * alpha[:, None])
    return acc, new, total * alpha + tl.sum(p, 1)


@triton.jit
def _merge(
    partial, sums, place, splits, GROUP: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """[GROUPS, D]: the splits of the heads from `place` on, AT_ONCE of them in flight. There is the sum of a
    split for every entry, so that threads exchange nothing."""
    g, e = tl.arange(0, GROUPS)[:, None], tl.arange(0, D)[None, :]
    acc = tl.zeros((GROUPS, D), tl.float32)
    top = tl.full((GROUPS, D), float("-inf"), tl.float32)
    total = tl.zeros((GROUPS, D), tl.float32)
    for start in range(0, splits, AT_ONCE):
        values, logs = (), ()
        for s in tl.static_range(AT_ONCE):
            at = ((place + start + s) * GROUP + g) * D + e
            there = (g < GROUP) & (start + s < splits)
            log = tl.load(sums + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            value = tl.load(partial + at, mask=there, other=0.0, cache_modifier=".cg")
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
            logs = logs + (log,)  # type: ignore[assignment]  # noqa: RUF005
        new = top
        for s in tl.static_range(AT_ONCE):
            new = tl.maximum(new, logs[s])
        pivot = tl.where(new == float("-inf"), 0.0, new)  # of heads that there are not
        mine = tl.exp2(top - pivot)
        acc, total, top = acc * mine, total * mine, new
        for s in tl.static_range(AT_ONCE):
            its = tl.exp2(logs[s] - pivot)
            acc += values[s] * its
            total += its
    return acc / total


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_LISTS)
def _one_kernel(
    out, qkv, keys, values, k_scales, v_scales, tables, row_index, contexts, slots, q_weight, k_weight, cos, sin,
    partial, sums, counters, qkv_stride, page_stride, k_head, v_head, table_stride, eps, offset, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr,
    LEAST: tl.constexpr, AT_ONCE: tl.constexpr, LARGEST: tl.constexpr, CODING: tl.constexpr, ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """grid (kv heads, MOST, rows)."""
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HQ // HKV
    kind: tl.constexpr = qkv.dtype.element_ty
    if EARLY:
        gdc_launch_dependents()
    kv_head, split, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + entry, volatile=True)
    row = tl.load(row_index + entry, volatile=True).to(tl.int64)
    slot = tl.load(slots + entry, volatile=True).to(tl.int64)
    before = tl.maximum(context - 1, 0)  # keys of earlier steps
    tiles = (before + BLOCK_N - 1) // BLOCK_N
    splits = tl.minimum(tl.maximum((tiles + LEAST - 1) // LEAST, 1), MOST)
    if split >= splits:
        return
    is_last = split == splits - 1
    table = tables + row * table_stride
    i, m = tl.arange(0, HALF), tl.arange(0, BLOCK_M)
    k_base, v_base = keys + kv_head * k_head, values + kv_head * v_head
    tile = _tile(k_base, v_base, table, split * BLOCK_N, before, page_stride, D, BLOCK_N, PAGE)
    cosine = tl.load(cos + entry * D + i).to(tl.float32)[None, :]
    sine = tl.load(sin + entry * D + HALF + i).to(tl.float32)[None, :]
    q_weights = _weights(q_weight, i[None, :], offset, D, NORM)
    k_weights = _weights(k_weight, i[None, :], offset, D, NORM)
    tile = _loaded(tile, ASM, CODING)
    k_scale, v_scale = 1.0, 1.0
    if CODING == BY_LAYER:
        k_scale, v_scale = tl.load(k_scales), tl.load(v_scales)
        scale *= k_scale
    if EARLY:
        gdc_wait()

    own = qkv + entry.to(tl.int64) * qkv_stride
    used, columns = (m < GROUP)[:, None], i[None, :]
    q_at = own + (kv_head * GROUP + m)[:, None] * D + columns
    k_at = own + (m * 0 + HQ + kv_head)[:, None] * D + columns  # the new key in every row, so that none is exchanged
    v_at = own + (HQ + HKV + kv_head) * D + i
    qa, qb = tl.load(q_at, mask=used, other=0.0), tl.load(q_at + HALF, mask=used, other=0.0)
    new_a, new_b = tl.load(k_at), tl.load(k_at + HALF)
    new_va, new_vb = tl.load(v_at), tl.load(v_at + HALF)
    queries = _normed(qa.to(tl.float32), qb.to(tl.float32), q_weights, eps, D, NORM, WIDE, kind)
    queries = _turned(queries[0], queries[1], cosine, sine, kind)
    new_key = _normed(new_a.to(tl.float32), new_b.to(tl.float32), k_weights, eps, D, NORM, WIDE, kind)
    new_key = _turned(new_key[0], new_key[1], cosine, sine, kind)
    is_stored = is_last & (slot >= 0)
    new_at = slot // PAGE * page_stride + slot % PAGE * D
    once = (m == 0)[:, None] & is_stored
    new_k_at = k_base + new_at + m[:, None] * 0 + columns
    new_a = _stored(new_key[0], k_scale, new_k_at, once, LARGEST, CODING)
    new_b = _stored(new_key[1], k_scale, new_k_at + HALF, once, LARGEST, CODING)
    new_va = _stored(new_va, v_scale, v_base + new_at + i, is_stored, LARGEST, CODING)
    new_vb = _stored(new_vb, v_scale, v_base + new_at + HALF + i, is_stored, LARGEST, CODING)
    queries = _beside_codes(queries[0], CODING), _beside_codes(queries[1], CODING)

    products = queries[0].to(tl.float32) * new_a.to(tl.float32)
    products += queries[1].to(tl.float32) * new_b.to(tl.float32)
    top = tl.where(is_last, tl.sum(products, 1) * scale, float("-inf"))
    total = tl.where(is_last, 1.0, 0.0) + tl.zeros((BLOCK_M,), tl.float32)
    nothing = tl.zeros((BLOCK_M, HALF), tl.float32)
    acc = (
        nothing + tl.where(is_last, new_va.to(tl.float32), 0.0)[None, :],
        nothing + tl.where(is_last, new_vb.to(tl.float32), 0.0)[None, :],
    )
    present = split * BLOCK_N + tl.arange(0, BLOCK_N) < before
    acc, top, total = _added(acc, top, total, queries, tile, present, scale)
    if (split + splits) * BLOCK_N < before:  # around a loop that would begin by waiting for its first loads
        for start in tl.range((split + splits) * BLOCK_N, before, splits * BLOCK_N):
            tile = _tile(k_base, v_base, table, start, before, page_stride, D, BLOCK_N, PAGE)
            if CODING == BY_LAYER:  # through registers: a matmul cannot read codes from shared memory
                tile = _loaded(tile, ASM, CODING)
            acc, top, total = _added(acc, top, total, queries, tile, start + tl.arange(0, BLOCK_N) < before, scale)

    out_at = out + entry.to(tl.int64) * (HQ * D) + kv_head * GROUP * D
    halves = m[:, None] * D + columns
    by = v_scale / total[:, None]
    if splits == 1:
        by = tl.where(context > 0, by, 0.0)
        tl.store(out_at + halves, (acc[0] * by).to(kind), mask=used)
        tl.store(out_at + HALF + halves, (acc[1] * by).to(kind), mask=used)
        return
    counter = entry * HKV + kv_head
    place = counter * MOST
    here = (place + split) * (GROUP * D) + halves
    log = (top + tl.log2(total))[:, None] + nothing
    tl.store(partial + here, acc[0] * by, mask=used)
    tl.store(partial + here + HALF, acc[1] * by, mask=used)
    tl.store(sums + here, log, mask=used)
    tl.store(sums + here + HALF, log, mask=used)
    tl.debug_barrier()  # all of this program's stores come before its count
    if tl.atomic_add(counters + counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(counters + counter, 0)  # for the next launch
        y = _merge(partial, sums, place, splits, GROUP, D, GROUPS, AT_ONCE)
        g, e = tl.arange(0, GROUPS)[:, None], tl.arange(0, D)[None, :]
        tl.store(out_at + g * D + e, y.to(kind), mask=g < GROUP)


def fits(prep: QkvPrep, keys: Tensor, values: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the kernel computes this layer's attention."""
    size, group = keys.shape[3], prep.heads // prep.kv_heads
    weights = [weight for weight in (prep.q_weight, prep.k_weight) if weight is not None]
    return (
        values is not None
        and dtype in DTYPES
        and (keys.dtype is dtype or is_coded(keys.dtype))
        and keys.dtype is not torch.int8
        and values.shape[3] == size
        and size in TILES
        and keys.stride(0) == values.stride(0)
        and prep.cos is not None
        and prep.cos.shape[-1] == size
        and not prep.pairs
        and group <= 16
        and len(weights) != 1
        and all(weight.ndim == 1 for weight in weights)
    )


def most_splits(rows: int, kv_heads: int, sms: int) -> int:
    """Two programs on every multiprocessor."""
    return max(1, cdiv(2 * sms, rows * kv_heads))


def workspace_sizes(rows: int, heads: int, kv_heads: int, size: int, most: int) -> tuple[int, int]:
    """(floats, counters) of a Space."""
    return 2 * rows * heads * most * size, rows * kv_heads


def attend_one(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) * D]
    prep: QkvPrep,
    keys: Tensor,  # [num_blocks, page, Hkv, D]; the tokens of one head are adjacent
    values: Tensor,
    tables: Tensor,  # [rows, blocks] int32
    row_index: Tensor,  # [T] int32
    contexts: Tensor,  # [T] int32, with the token of this step; 0: a padded entry
    slots: Tensor,  # [T] int64; -1: keys and values are not stored
    out: Tensor,  # [T, Hq, D], contiguous
    space: Space,
    scale: float,
    most: int,  # splits of a row
    *,
    scales: CacheScales | None = None,  # of a float8 cache
    tile: OneRowTile | None = None,
    early: bool = False,
) -> None:
    codes = Coding.of(scales, keys.dtype)
    assert codes.coding in (PLAIN, PER_LAYER)
    rows, (page, kv_heads, size) = len(contexts), keys.shape[1:]
    tile = tile or TILES[size]
    partial, sums = space.floats[: 2 * rows * prep.heads * most * size].chunk(2)
    _one_kernel[(kv_heads, most, rows)](
        out, qkv, keys, values, codes.keys, codes.values, tables, row_index, contexts, slots, prep.q_weight,
        prep.k_weight, prep.cos, prep.sin, partial, sums, space.counters, qkv.stride(0), keys.stride(0),
        keys.stride(2), values.stride(2), tables.stride(0), prep.eps, prep.offset, scale * LOG2E.value,
        HQ=prep.heads, HKV=kv_heads, D=size, BLOCK_M=16, BLOCK_N=tile.block_n, PAGE=page,
        GROUPS=next_power_of_2(prep.heads // kv_heads), NORM=prep.q_weight is not None,
        WIDE=prep.wide or bool(prep.offset), MOST=most, LEAST=tile.least, AT_ONCE=min(8, next_power_of_2(most)),
        LARGEST=codes.largest, CODING=codes.coding, ASM=qkv.is_cuda, EARLY=early,
        num_warps=tile.warps, maxnreg=tile.registers,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
