"""Paged attention in Triton: one kernel for both prefill chunks and decodes, and one for a prefix shared by many rows.

The queries of a row that share a kv head are one list, "flats": flat = token * group + head in group. A tile is BLOCK_M
flats, so a decode fills a tensor-core tile with its heads and a chunk with tokens x heads, whatever the group size.

    item (int32 x 10)   row | start | count | context | flat | split | splits | base | skip | member
        row      of the block table; start: its first token in q; count 0: nothing to do; context 0: write zeros
        flat     first flat of the tile; split of splits: which share of the tile's keys
        base     of the tile's partial results, -1: there is only this split; skip: leading keys that are skipped
        member   index of the row's first query among those that share a prefix, or -1

There is a program per item and kv head. One with only a split of the keys stores (acc / sum, log2 of the sum) in the
workspace and increments a counter; the last of a tile merges all splits, including those of the shared kernel, and
writes the result. Softmax is computed in base 2. Keys are read in BLOCK_N tiles counted from position 0, so results do
not depend on where a chunk starts. Lists of items are made by the host or on the device (attention_plan.py).

A cache in 8 bits (ops/kv_codes.py) is multiplied as its codes, in a dtype that represents them all exactly: float8 in
float16, to which it is widened by one instruction for two codes, int8 in the dtype of the queries. A scale per layer is
a factor of the scores and of the result; scales per token are factors of the columns of the scores and of the weights.

Where ranks divide every context (RANKS), items and positions are those of whole contexts, and keys are numbered as this
rank keeps them (divided.py). The result is then in float32, of these keys alone, and the logarithm of their weight is
stored beside it, by which ranks merge their results: zeros and -inf where a query sees no key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.kv_codes import PER_LAYER, CacheScales
from quire.ops.triton.attention_cache import BY_LAYER, BY_TOKEN, SCALES, Coding
from quire.ops.triton.divided import kept, position

LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
FIELDS = tl.constexpr(10)
MAX_SPLITS = 64  # of one tile
_PAIR_STAGES = 5  # at least, of tiles whose values are read as pairs of codes
_LISTS = ["tables", "items", "info", "members", "starts", "contexts", *SCALES]  # may start at any address


class AttentionTile(NamedTuple):
    """The tile shape of one program, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    two_loops: bool = False  # keys that every query of the tile attends to are unmasked, in a separate loop
    ahead: bool = False  # and multiplies the next tile of keys during the softmax of this one
    tma: bool = False  # and loads full blocks by TMA, if blocks allow it
    max_regs: int | None = None  # per thread, to fit more programs on a multiprocessor
    has_roles: bool = False  # warps that load and warps that multiply: attention_prompts.py; its lists have no splits


class SharedPrefix(NamedTuple):
    """A prefix that many rows of a step share, detected on the device: their queries read it together, in tiles."""

    info: Tensor  # [5] int32: tokens of the prefix (0: none) | queries | row that has it | tiles | splits of a tile
    members: Tensor  # [n] int32: which entries share it
    starts: Tensor  # [n] int32: the token of an entry in q
    contexts: Tensor  # [n] int32, of entries
    programs: int  # per kv head; tiles * splits of a tile never exceeds it. 0: there is no prefix, info is all zero
    tiles: AttentionTile


class AttentionWorkList(NamedTuple):
    """The work of one call of `attend`."""

    items: Tensor  # [n, 10] int32
    partials: int  # partial results to allocate, per kv head and flat
    flats_in_use: int  # flats of a tile that can be in use
    tiles: AttentionTile
    splittable: bool = True  # False: compiled without splits, for lists that never have any
    shared: SharedPrefix | None = None


class Shape(NamedTuple):
    """What all layers of a launch share. Sizes are entries per head."""

    page: int  # tokens per block, of this rank
    window: int = 0
    chunk: int = 0
    ranks: int = 1  # that divide every context
    rank: int = 0
    interleave: int = 1  # tokens in a row that a rank keeps

    def most_kept(self, lengths: np.ndarray) -> np.ndarray:
        """How many of so many first tokens of a row the first rank keeps; no other one keeps more. The host goes by it
        on all ranks: which steps fit a graph, which pads them, must not differ from one to another."""
        if self.ranks == 1:
            return lengths
        turns, rest = np.divmod(lengths, self.ranks * self.interleave)
        return turns * self.interleave + np.minimum(rest, self.interleave)


@triton.jit
def _rows(base, at, valid, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """[len(at), WIDTH]: SIZE entries from each address; zero past SIZE and, if MASKED, in rows that are not `valid`."""
    d = tl.arange(0, WIDTH)
    where = base + at[:, None] + d[None, :]
    if MASKED:
        if SIZE == WIDTH:
            return tl.load(where, mask=valid[:, None], other=0.0)
        return tl.load(where, mask=valid[:, None] & (d < SIZE)[None, :], other=0.0)
    if SIZE == WIDTH:
        return tl.load(where)
    return tl.load(where, mask=(d < SIZE)[None, :], other=0.0)


@triton.jit
def _beside_codes(q, CODING: tl.constexpr):
    """Queries in the dtype in which they are multiplied with a cache."""
    if CODING == BY_LAYER and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return q


# Two pairs of neighbouring codes -> the first of each, and the second of each, in float16.
_E4M3_PAIRS = tl.constexpr("""
    {
    .reg .b32 a;
    .reg .b16 low, high;
    prmt.b32 a, $2, 0, 0x3120;
    mov.b32 {low, high}, a;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
""")
_E5M2_PAIRS = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xFF00FF00;")


@triton.jit
def _each_of(pairs, CODE: tl.constexpr, ASM: tl.constexpr):
    """Pairs of neighbouring codes, as 16 bits -> the first and the second ones in float16."""
    if ASM and tl.float8e4nv == CODE:
        first, second = tl.inline_asm_elementwise(
            _E4M3_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif ASM:
        first, second = tl.inline_asm_elementwise(
            _E5M2_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first = (pairs & 255).to(tl.uint8).to(CODE, bitcast=True).to(tl.float16)
        second = ((pairs >> 8) & 255).to(tl.uint8).to(CODE, bitcast=True).to(tl.float16)
    return first, second


@triton.jit
def _scan(
    acc, top, total, q, q_rest, keys, values, k_scales, v_scales, k_pages, v_pages, head_row, page_rows, table,
    positions, slopes, slope, begin, end, first, last, page_stride, scale_page, scale, cap, rank,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, LATENT: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, CODING: tl.constexpr,
    PRECISION: tl.constexpr, PAIRS: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Iterate over keys [begin, end). `top`: running maximum of the scores (times log2 e), `total`: sum of weights.

    Not MASKED: every query attends to every key of the range. Keys outside [first, last) are never read. PAIRS: values
    are read as pairs of codes, because a matmul wants neighbouring keys beside each other, for which there is no
    instruction with 8 bits; even and odd entries are summed apart (2: by instructions of the device).
    """
    even, odd = acc, acc
    if PAIRS:
        even, odd = tl.split(tl.reshape(acc, (acc.shape[0], BLOCK_V // 2, 2)))
    for start in tl.range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at_position = position(n, rank, RANKS, INTERLEAVE)
        present = (n >= first) & (n < last)
        if PAGE % BLOCK_N == 0:  # a tile is within one block
            block = tl.load(table + start // PAGE)
            offset = start % PAGE + tl.arange(0, BLOCK_N)
        elif MASKED:
            block = tl.load(table + n // PAGE, mask=present, other=0)
            offset = n % PAGE
        else:
            block = tl.load(table + n // PAGE)
            offset = n % PAGE
        page = block.to(tl.int64) * page_stride
        at = page + offset * DK
        if TMA:
            k = k_pages.load([block * page_rows + head_row + start % PAGE, 0])
            s = tl.dot(q, tl.trans(k))
        elif LATENT:
            k = _rows(keys, at, present, DV, BLOCK_V, MASKED).to(q.dtype)
            rest = _rows(keys + DV, at, present, DK - DV, BLOCK_R, MASKED).to(q.dtype)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            s = tl.dot(q_rest, tl.trans(rest), s, input_precision=PRECISION)
        else:
            k = _rows(keys, at, present, DK, BLOCK_D, MASKED).to(q.dtype)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CODING == BY_TOKEN:
            scales_at = block.to(tl.int64) * scale_page + offset
            s *= tl.load(k_scales + scales_at, mask=present, other=0.0)[None, :]
        factor = scale
        if SOFTCAP or ALIBI:
            factor = 1.0
            s = s * scale
            if SOFTCAP:
                s = (2.0 * tl.sigmoid(2.0 * s) - 1.0) * cap
            if ALIBI == 1:
                s -= slope[:, None] * (positions[:, None] - at_position[None, :]).to(tl.float32)
            if ALIBI > 1:
                gap = tl.minimum(tl.maximum(positions[:, None] - at_position[None, :], 0), ALIBI - 1)
                s += tl.load(slopes + slope[:, None] + gap).to(tl.float32) * LOG2E
        if MASKED:
            seen = at_position[None, :] <= positions[:, None]
            if WINDOW:
                seen &= at_position[None, :] > positions[:, None] - WINDOW
            if CHUNK:
                seen &= at_position[None, :] >= positions[:, None] // CHUNK * CHUNK
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * factor)
        pivot = new
        if MASKED:  # a query without any key so far has weights of zero
            pivot = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s * factor - pivot[:, None])
        alpha = tl.exp2(top - pivot)
        total = total * alpha + tl.sum(p, 1)
        even = even * alpha[:, None]
        if PAIRS:
            pairs = _rows(values, (page + offset * DV) // 2, present, DV // 2, BLOCK_V // 2, MASKED)
            v, v_odd = _each_of(pairs, keys.dtype.element_ty, PAIRS == 2)
            odd = tl.dot(p.to(q.dtype), v_odd, odd * alpha[:, None])
        elif LATENT:
            v = k
        elif TMA:
            v = v_pages.load([block * page_rows + head_row + start % PAGE, 0])
        else:
            v = _rows(values, page + offset * DV, present, DV, BLOCK_V, MASKED).to(q.dtype)
        if CODING == BY_TOKEN:
            p *= tl.load(v_scales + scales_at, mask=present, other=0.0)[None, :]
        even = tl.dot(p.to(q.dtype), v, even, input_precision=PRECISION)
        top = new
    if PAIRS:
        even = tl.interleave(even, odd)
    return even, top, total


@triton.jit
def _blocks(table, start, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """The block of each key of a tile; a single one if a tile is within one block."""
    if PAGE % BLOCK_N == 0:
        block = tl.load(table + start // PAGE)
    else:
        block = tl.load(table + (start + tl.arange(0, BLOCK_N)) // PAGE)
    return block


@triton.jit
def _tile(
    base, pages, block, start, head_row, page_rows, page_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, WIDTH]: a tile of keys or values, unmasked."""
    if TMA:
        tile = pages.load([block * page_rows + head_row + start % PAGE, 0])
    else:
        n = start + tl.arange(0, BLOCK_N)
        tile = _rows(base, block.to(tl.int64) * page_stride + n % PAGE * SIZE, n, SIZE, WIDTH, False)
    return tile


@triton.jit
def _weigh(acc, top, total, s, v, scale):
    """One tile of scores, unmasked."""
    new = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new[:, None])
    alpha = tl.exp2(top - new)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, new, total * alpha + tl.sum(p, 1)


@triton.jit
def _scan_ahead(
    acc, top, total, q, keys, values, k_pages, v_pages, head_row, page_rows, table, begin, end, page_stride, scale,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """As _scan without masks and score modifications, but the scores of a tile are computed one iteration ahead:
    the tensor cores work on the next tile during the exponentials of this one."""
    if begin < end:
        block = _blocks(table, begin, BLOCK_N, PAGE)
        k = _tile(keys, k_pages, block, begin, head_row, page_rows, page_stride, DK, BLOCK_D, BLOCK_N, PAGE, TMA)
        s = tl.dot(q, tl.trans(k))
        for start in tl.range(begin + BLOCK_N, end, BLOCK_N):
            other = _blocks(table, start, BLOCK_N, PAGE)
            k = _tile(keys, k_pages, other, start, head_row, page_rows, page_stride, DK, BLOCK_D, BLOCK_N, PAGE, TMA)
            ahead = tl.dot(q, tl.trans(k))
            before = start - BLOCK_N
            block = _blocks(table, before, BLOCK_N, PAGE)
            v = _tile(values, v_pages, block, before, head_row, page_rows, page_stride, DV, BLOCK_V, BLOCK_N, PAGE, TMA)
            acc, top, total = _weigh(acc, top, total, s, v, scale)
            s = ahead
        block = _blocks(table, end - BLOCK_N, BLOCK_N, PAGE)
        v = _tile(
            values, v_pages, block, end - BLOCK_N, head_row, page_rows, page_stride, DV, BLOCK_V, BLOCK_N, PAGE, TMA
        )
        acc, top, total = _weigh(acc, top, total, s, v, scale)
    return acc, top, total


@triton.jit
def _join(
    acc, top, total, partial, sums, place, step, parts, used, e, DV: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Merge the splits of these flats: split 0 is at `place` [BLOCK_M], the next ones `step` apart."""
    wide = used[:, None] & (e < DV)[None, :]
    for part in tl.range(0, parts, loop_unroll_factor=AT_ONCE):
        at = place + part * step
        other = tl.load(sums + at, mask=used, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(partial + at[:, None] * DV + e[None, :], mask=wide, other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, other)
        pivot = tl.where(new == float("-inf"), 0.0, new)
        mine, its = tl.exp2(top - pivot), tl.exp2(other - pivot)
        acc = acc * mine[:, None] + value * its[:, None]
        total = total * mine + its
        top = new
    return acc, top, total


@triton.jit
def _stored_weight(totals, row_at, top, total, used):
    """Store the logarithm of the weight of all keys; the sum by which the result is divided."""
    total = tl.where(total == 0.0, 1.0, total)  # of a query without a key, whose `top` is -inf
    tl.store(totals + row_at, (top + tl.log2(total)) * _LN2, mask=used)
    return total


@triton.jit
def _finish(
    out, totals, row_at, partial, sums, place, step, splits, partial2, sums2, place2, step2, parts2, sink, used,
    BLOCK_M: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, SHARED_M: tl.constexpr, SINKS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Merge a tile's splits and those of the shared prefix, some columns at a time, and write the result."""
    WIDTH: tl.constexpr = 128 if BLOCK_V > 128 else BLOCK_V
    AT_ONCE: tl.constexpr = 4 if BLOCK_M == 16 else 1  # splits whose loads are in flight together
    for column in range(0, BLOCK_V, WIDTH):
        e = column + tl.arange(0, WIDTH)
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc, top, total = _join(acc, top, total, partial, sums, place, step, splits, used, e, DV, AT_ONCE)
        if SHARED_M:
            acc, top, total = _join(acc, top, total, partial2, sums2, place2, step2, parts2, used, e, DV, AT_ONCE)
        if SINKS:
            new = tl.maximum(top, sink)
            alpha = tl.exp2(top - new)
            total = total * alpha + tl.exp2(sink - new)
            acc = acc * alpha[:, None]
        if RANKS > 1:
            total = _stored_weight(totals, row_at, top, total, used)
        mask = used[:, None] & (e < DV)[None, :]
        y = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + row_at[:, None] * DV + e[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "held", "rank"], do_not_specialize_on_alignment=_LISTS)
def _attend_kernel(
    out, totals, q, keys, values, k_scales, v_scales, k_pages, v_pages, tables, items, partial, sums, counters, info,
    partial2, sums2, sinks, slopes, q_token, q_head, page_stride, k_head, v_head, scale_page, scale_head, table_stride,
    held, scale, cap, rank,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, LATENT: tl.constexpr,
    TWO_LOOPS: tl.constexpr, AHEAD: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr, SHARED_M: tl.constexpr,
    CODING: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr, RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """grid (kv heads, items). SHARED_M: flats of a tile of the shared kernel; 0: no item uses it."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    row, begin_token, count, context = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    flat0, split, splits, base = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    skip = tl.load(item + 8)
    if count == 0:
        return
    flat = flat0 + tl.arange(0, BLOCK_M)
    token = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    used = token < count
    e = tl.arange(0, BLOCK_V)
    wide = used[:, None] & (e < DV)[None, :]
    row_at = (begin_token + token).to(tl.int64) * (GROUP * tl.num_programs(0)) + head
    out_at = row_at * DV
    if context == 0:
        tl.store(out + out_at[:, None] + e[None, :], tl.zeros((BLOCK_M, BLOCK_V), out.dtype.element_ty), mask=wide)
        if RANKS > 1:
            tl.store(totals + row_at, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=used)
        return

    # the keys of this tile, and of this program's split
    before = context - count
    low = before + flat0 // GROUP
    high = before + tl.minimum((flat0 + BLOCK_M - 1) // GROUP, count - 1)
    positions = before + tl.minimum(token, count - 1)
    first = skip
    if WINDOW:
        first = kept(tl.maximum(low - WINDOW + 1, 0), rank, RANKS, INTERLEAVE)
    if CHUNK:
        first = kept(low // CHUNK * CHUNK, rank, RANKS, INTERLEAVE)
    last = kept(high + 1, rank, RANKS, INTERLEAVE)
    tile0 = first // BLOCK_N
    begin, end = tile0 * BLOCK_N, last
    if SPLIT:
        tiles = (last + BLOCK_N - 1) // BLOCK_N - tile0
        begin = (tile0 + split * tiles // splits) * BLOCK_N
        end = tl.minimum((tile0 + (split + 1) * tiles // splits) * BLOCK_N, last)

    q_at = q + (begin_token + token).to(tl.int64) * q_token + head * q_head
    d = tl.arange(0, BLOCK_D)
    if LATENT:
        r = tl.arange(0, BLOCK_R)
        queries = tl.load(q_at[:, None] + e[None, :], mask=wide, other=0.0)
        q_rest = tl.load(q_at[:, None] + DV + r[None, :], mask=used[:, None] & (r < DK - DV)[None, :], other=0.0)
    else:
        queries = tl.load(q_at[:, None] + d[None, :], mask=used[:, None] & (d < DK)[None, :], other=0.0)
        q_rest = queries
    queries, q_rest = _beside_codes(queries, CODING), _beside_codes(q_rest, CODING)
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if ALIBI == 1:
        slope = tl.load(slopes + head, mask=used, other=0.0).to(tl.float32) * LOG2E
    if ALIBI > 1:
        slope = head * ALIBI  # where the head's scores begin
    k_base, v_base, table = keys + kv_head * k_head, values + kv_head * v_head, tables + row.to(tl.int64) * table_stride
    if PAIRS:
        v_base = values + kv_head * v_head // 2
    page_rows, head_row = (page_stride // DK).to(tl.int32), kv_head * PAGE
    if CODING == BY_LAYER:
        scale = scale * tl.load(k_scales)
    if CODING == BY_TOKEN:
        k_scales += kv_head * scale_head
        v_scales += kv_head * scale_head
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    cut = begin
    if TWO_LOOPS:
        cut = tl.maximum(begin, tl.minimum(kept(low + 1, rank, RANKS, INTERLEAVE) // BLOCK_N * BLOCK_N, end))
        if not AHEAD:
            acc, top, total = _scan(
                acc, top, total, queries, q_rest, k_base, v_base, k_scales, v_scales, k_pages, v_pages, head_row,
                page_rows, table, positions, slopes, slope, begin, cut, first, last, page_stride, scale_page, scale,
                cap, rank, DK, DV, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R, PAGE, WINDOW, CHUNK, SOFTCAP, ALIBI, LATENT,
                False, TMA, CODING, PRECISION, PAIRS, RANKS, INTERLEAVE,
            )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, queries, q_rest, k_base, v_base, k_scales, v_scales, k_pages, v_pages, head_row, page_rows,
        table, positions, slopes, slope, cut, end, first, last, page_stride, scale_page, scale, cap, rank, DK, DV,
        BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R, PAGE, WINDOW, CHUNK, SOFTCAP, ALIBI, LATENT, True, False, CODING, PRECISION,
        PAIRS, RANKS, INTERLEAVE,
    )  # fmt: skip
    if AHEAD:  # last: ptxas does not overlap matmuls if another loop follows
        acc, top, total = _scan_ahead(
            acc, top, total, queries, k_base, v_base, k_pages, v_pages, head_row, page_rows, table, begin, cut,
            page_stride, scale, DK, DV, BLOCK_N, BLOCK_D, BLOCK_V, PAGE, TMA,
        )  # fmt: skip
    if CODING == BY_LAYER:
        acc *= tl.load(v_scales)

    sink = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
    if SPLIT:
        if base >= 0:
            kv_heads = tl.num_programs(0)
            first_part = base.to(tl.int64) * kv_heads + kv_head
            place, step = first_part * held + flat - flat0, kv_heads.to(tl.int64) * held
            here = place + split * step
            total = tl.where(total == 0.0, 1.0, total)  # a query with no key in this split: top is -inf
            tl.store(sums + here, top + tl.log2(total), mask=used)
            tl.store(partial + here[:, None] * DV + e[None, :], acc / total[:, None], mask=wide)
            tl.debug_barrier()  # all of this program's stores come before its count
            arrived = splits - 1
            if splits > 1:
                arrived = tl.atomic_add(counters + first_part, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                if splits > 1:
                    tl.store(counters + first_part, 0)  # reset for the next launch
                place2, step2, parts2 = place, step, splits * 0
                if SHARED_M:
                    member = tl.load(item + 9)
                    at = tl.maximum(member, 0) * GROUP + flat
                    place2 = ((at // SHARED_M).to(tl.int64) * kv_heads + kv_head) * SHARED_M + at % SHARED_M
                    step2 = tl.load(info + 3).to(tl.int64) * kv_heads * SHARED_M
                    parts2 = tl.where(member >= 0, tl.load(info + 4), 0)
                _finish(
                    out, totals, row_at, partial, sums, place, step, splits, partial2, sums2, place2, step2, parts2,
                    sink, used, BLOCK_M, DV, BLOCK_V, SHARED_M, SINKS, RANKS,
                )  # fmt: skip
            return
    if SINKS:
        new = tl.maximum(top, sink)
        alpha = tl.exp2(top - new)
        total = total * alpha + tl.exp2(sink - new)
        acc = acc * alpha[:, None]
    if RANKS > 1:
        total = _stored_weight(totals, row_at, top, total, used)
    tl.store(out + out_at[:, None] + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=wide)


@triton.jit(do_not_specialize=["table_stride", "rank"], do_not_specialize_on_alignment=_LISTS)
def _shared_kernel(
    q, keys, values, k_scales, v_scales, k_pages, v_pages, tables, info, members, starts, contexts, partial, sums,
    slopes, q_token, q_head, page_stride, k_head, v_head, scale_page, scale_head, table_stride, scale, cap, rank,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, LATENT: tl.constexpr, AHEAD: tl.constexpr, TMA: tl.constexpr, CODING: tl.constexpr,
    EARLY: tl.constexpr, PRECISION: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """grid (kv heads, programs): tiles of the queries of all members against the shared keys."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    kv_head, program = tl.program_id(0), tl.program_id(1)
    length, queries, row, tiles, splits = (
        tl.load(info), tl.load(info + 1), tl.load(info + 2), tl.load(info + 3), tl.load(info + 4)
    )  # fmt: skip
    split = program // tiles
    if split >= splits:
        return
    flat = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    used = flat // GROUP < queries
    head = kv_head * GROUP + flat % GROUP
    entry = tl.load(members + flat // GROUP, mask=used, other=0)
    token = tl.load(starts + entry, mask=used, other=0)
    e = tl.arange(0, BLOCK_V)
    wide = used[:, None] & (e < DV)[None, :]
    q_at = q + token.to(tl.int64) * q_token + head * q_head
    if LATENT:
        r = tl.arange(0, BLOCK_R)
        x = tl.load(q_at[:, None] + e[None, :], mask=wide, other=0.0)
        rest = tl.load(q_at[:, None] + DV + r[None, :], mask=used[:, None] & (r < DK - DV)[None, :], other=0.0)
    else:
        d = tl.arange(0, BLOCK_D)
        x = tl.load(q_at[:, None] + d[None, :], mask=used[:, None] & (d < DK)[None, :], other=0.0)
        rest = x
    x, rest = _beside_codes(x, CODING), _beside_codes(rest, CODING)
    slope = tl.zeros((BLOCK_M,), tl.float32)
    positions = tl.zeros((BLOCK_M,), tl.int32)
    if ALIBI == 1:
        slope = tl.load(slopes + head, mask=used, other=0.0).to(tl.float32) * LOG2E
    if ALIBI > 1:
        slope = head * ALIBI
    if ALIBI:
        positions = tl.load(contexts + entry, mask=used, other=1) - 1
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    key_tiles = length // BLOCK_N
    begin, end = split * key_tiles // splits * BLOCK_N, (split + 1) * key_tiles // splits * BLOCK_N
    k_base, v_base, table = keys + kv_head * k_head, values + kv_head * v_head, tables + row.to(tl.int64) * table_stride
    page_rows, head_row = (page_stride // DK).to(tl.int32), kv_head * PAGE
    if CODING == BY_LAYER:
        scale = scale * tl.load(k_scales)
    if CODING == BY_TOKEN:
        k_scales += kv_head * scale_head
        v_scales += kv_head * scale_head
    if AHEAD:
        acc, top, total = _scan_ahead(
            acc, top, total, x, k_base, v_base, k_pages, v_pages, head_row, page_rows, table, begin, end, page_stride,
            scale, DK, DV, BLOCK_N, BLOCK_D, BLOCK_V, PAGE, TMA,
        )  # fmt: skip
    else:
        acc, top, total = _scan(
            acc, top, total, x, rest, k_base, v_base, k_scales, v_scales, k_pages, v_pages, head_row, page_rows, table,
            positions, slopes, slope, begin, end, 0, end, page_stride, scale_page, scale, cap, rank, DK, DV, BLOCK_N,
            BLOCK_D, BLOCK_V, BLOCK_R, PAGE, 0, 0, SOFTCAP, ALIBI, LATENT, False, TMA, CODING, PRECISION, 0, RANKS,
            INTERLEAVE,
        )  # fmt: skip
    if CODING == BY_LAYER:
        acc *= tl.load(v_scales)
    place = (program.to(tl.int64) * tl.num_programs(0) + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(sums + place, top + tl.log2(total), mask=used)
    tl.store(partial + place[:, None] * DV + e[None, :], acc / total[:, None], mask=wide)


def num_distances(alibi: Tensor | None) -> int:
    """Kernels' ALIBI: 0 for none, 1 for slopes, else how many distances have learned scores. One score for every
    distance changes no weight of attention."""
    if alibi is None or alibi.shape[1:] == (1,):
        return 0
    return alibi[0].numel()


def width_of(size: int) -> int:
    """Entries of a tile for `size`: a power of two, at least the tensor core's minimum."""
    return max(16, 1 << (size - 1).bit_length())


class Rule(NamedTuple):
    """How scores become weights."""

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None  # [Hq]
    alibi: Tensor | None = None  # [Hq] slopes, or [Hq, G] learned scores of distances, the last for all longer ones


class Space(NamedTuple):
    """Memory for partial results, reused by every launch."""

    floats: Tensor  # float32
    counters: Tensor  # int32, all zero between launches


class Rooms(NamedTuple):
    """A workspace, split up: partial results and the logarithms of their sums, of rows and of the shared prefix."""

    sums: Tensor
    partial: Tensor
    shared_sums: Tensor
    shared_partial: Tensor


def attend(
    q: Tensor,  # [T, Hq, D], last stride 1
    keys: Tensor,  # [num_blocks, page, Hkv, D]; the tokens of one head are adjacent: stride(1) == D
    values: Tensor | None,  # [num_blocks, page, Hkv, Dv], likewise; None: the first Dv entries of the keys
    tables: Tensor,  # [rows, blocks] int32
    work: AttentionWorkList,
    out: Tensor,  # [T, Hq, Dv], contiguous
    space: Space,
    shape: Shape,
    rule: Rule,
    *,
    scales: CacheScales | None = None,  # of a cache in 8 bits
    totals: Tensor | None = None,  # [T, Hq] float32: logarithm of the weight of all keys; where ranks divide contexts
    early: bool = False,  # programs may start while the previous kernel still runs (few.py)
) -> None:
    """Run one work list: the shared prefix if there may be one, then the tiles."""
    num_items, kv_heads, dv, tiles = len(work.items), keys.shape[2], out.shape[2], work.tiles
    if not num_items:
        return
    stored, shared = keys if values is None else values, work.shared
    rooms = _rooms(space.floats, work, kv_heads, dv)
    if shared is not None and shared.programs:
        _attend_shared(q, keys, values, scales, tables, shared, rooms, shape, rule, dv, early)
    codes = Coding.of(scales, keys.dtype)
    pairs = _pairs(q, values, tiles, codes)
    if pairs and work.splittable:  # tiles of codes are small, and take more instructions
        tiles = tiles._replace(two_loops=True, num_stages=max(tiles.num_stages, _PAIR_STAGES))
    two_loops = tiles.two_loops and not (shape.window or shape.chunk)
    pages = _pages(q, keys, values, tiles) if two_loops else None
    k_pages, v_pages = pages or (None, None)
    read = stored.view(torch.int16) if pairs else stored
    _attend_kernel[(kv_heads, num_items)](
        out, totals, q, keys, read, codes.keys, codes.values, k_pages, v_pages, tables, work.items, rooms.partial,
        rooms.sums, space.counters, None if shared is None else shared.info, rooms.shared_partial, rooms.shared_sums,
        rule.sinks, rule.alibi, q.stride(0), q.stride(1), keys.stride(0), keys.stride(2), stored.stride(2), codes.page,
        codes.head, tables.stride(0), work.flats_in_use, *_factors(rule), shape.rank,
        **_shapes(q, keys, values, tiles, dv), PAGE=shape.page, WINDOW=shape.window, CHUNK=shape.chunk,
        SOFTCAP=rule.softcap > 0, SINKS=rule.sinks is not None, ALIBI=num_distances(rule.alibi), LATENT=values is None,
        TWO_LOOPS=two_loops, AHEAD=two_loops and _ahead(q, keys, values, tiles, rule), TMA=pages is not None,
        SPLIT=work.splittable, SHARED_M=0 if shared is None else shared.tiles.block_m, CODING=codes.coding,
        EARLY=early, PAIRS=pairs, RANKS=shape.ranks, INTERLEAVE=shape.interleave, **_early(early),
    )  # fmt: skip


def _pairs(q: Tensor, values: Tensor | None, tiles: AttentionTile, codes: Coding) -> int:
    """Whether values are read as pairs of codes (1), and by instructions of the device (2)."""
    if values is None or codes.coding != PER_LAYER or tiles.block_m != 16 or q.element_size() != 2:
        return 0
    odd = (values.shape[3], values.storage_offset(), *values.stride()[:3])
    fits = not any(number % 2 for number in odd)
    return (2 if q.is_cuda else 1) if fits else 0


def _early(early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}


def _attend_shared(
    q: Tensor, keys: Tensor, values: Tensor | None, scales: CacheScales | None, tables: Tensor, shared: SharedPrefix,
    rooms: Rooms, shape: Shape, rule: Rule, dv: int, early: bool,
) -> None:  # fmt: skip
    stored, kv_heads = keys if values is None else values, keys.shape[2]
    pages = _pages(q, keys, values, shared.tiles)
    k_pages, v_pages = pages or (None, None)
    codes = Coding.of(scales, keys.dtype)
    _shared_kernel[(kv_heads, shared.programs)](
        q, keys, stored, codes.keys, codes.values, k_pages, v_pages, tables, shared.info, shared.members, shared.starts,
        shared.contexts, rooms.shared_partial, rooms.shared_sums, rule.alibi, q.stride(0), q.stride(1),
        keys.stride(0), keys.stride(2), stored.stride(2), codes.page, codes.head, tables.stride(0), *_factors(rule),
        shape.rank, **_shapes(q, keys, values, shared.tiles, dv),
        PAGE=shape.page, SOFTCAP=rule.softcap > 0, ALIBI=num_distances(rule.alibi), LATENT=values is None,
        AHEAD=_ahead(q, keys, values, shared.tiles, rule), TMA=pages is not None, CODING=codes.coding,
        EARLY=early, RANKS=shape.ranks, INTERLEAVE=shape.interleave, **_early(early),
    )  # fmt: skip


def _ahead(q: Tensor, keys: Tensor, values: Tensor | None, tiles: AttentionTile, rule: Rule) -> bool:
    """Only for plain scores, and if nothing is cast between loading and multiplying."""
    plain = not rule.softcap and rule.alibi is None and values is not None
    return tiles.ahead and plain and q.dtype == keys.dtype and q.dtype != torch.float32


def _factors(rule: Rule) -> tuple[float, float]:
    """(scale, cap) as the kernels expect them: resulting scores are times log2 e."""
    if rule.softcap:
        return rule.scale / rule.softcap, rule.softcap * LOG2E.value
    return rule.scale * LOG2E.value, 0.0


def _shapes(
    q: Tensor, keys: Tensor, values: Tensor | None, tiles: AttentionTile, dv: int
) -> dict[str, int | str | None]:
    dk, latent = keys.shape[3], values is None
    return {
        "GROUP": q.shape[1] // keys.shape[2], "DK": dk, "DV": dv, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "BLOCK_D": width_of(dv if latent else dk), "BLOCK_V": width_of(dv),
        "BLOCK_R": width_of(dk - dv) if latent else 16, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "maxnreg": tiles.max_regs,
    }  # fmt: skip


def _pages(
    q: Tensor, keys: Tensor, values: Tensor | None, tiles: AttentionTile
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """TMA descriptors of keys and values; None if a tile of keys is not one box of memory."""
    if not tiles.tma or values is None or keys.element_size() != 2 or q.dtype != keys.dtype:
        return None
    (blocks, page, heads, size), stride = keys.shape, keys.stride(0)
    if page % tiles.block_n or stride % size or values.shape[3] != size or size & (size - 1):
        return None
    shape, strides, box = [(blocks - 1) * (stride // size) + heads * page, size], [size, 1], [tiles.block_n, size]
    return TensorDescriptor(keys, shape, strides, box), TensorDescriptor(values, shape, strides, box)


def workspace_sizes(work: AttentionWorkList, kv_heads: int, dv: int) -> tuple[int, int]:
    """(floats, counters) of a Space."""
    return sum(_lengths(work, kv_heads, dv)), work.partials * kv_heads


def _rooms(workspace: Tensor, work: AttentionWorkList, kv_heads: int, dv: int) -> Rooms:
    lengths = _lengths(work, kv_heads, dv)
    return Rooms(*workspace[: sum(lengths)].split(lengths))


def _lengths(work: AttentionWorkList, kv_heads: int, dv: int) -> list[int]:
    """Sizes of a workspace. Rounded up, so what follows is aligned for wide loads and stores."""
    own, shared = work.partials * work.flats_in_use, work.shared
    joint = 0 if shared is None else shared.programs * shared.tiles.block_m
    return [-(-results * kv_heads * entries // 32) * 32 for results in (own, joint) for entries in (1, dv)]
