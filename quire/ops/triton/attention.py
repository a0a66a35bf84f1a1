"""Paged attention in Triton: one kernel for prompt chunks and decodes alike, a merge, and a planner on the device.

The queries of a row that share a kv head are one list, "flats": flat = token * group + head in group. A tile is BLOCK_M
flats, so a decode fills a tensor-core tile with its heads and a chunk with tokens x heads, whatever the group size.

    item (int32 x 8)   row | start | count | context | flat | split | splits | base      one program per kv head
        row      of the block table; start: its first token in q; count 0: nothing to do; context 0: write zeros
        flat     first flat of the tile; split of splits: which part of the tile's keys; base: its first partial result

With splits > 1 a program leaves (acc / sum, log2 of the sum) in the workspace and `merge` joins the parts. Softmax runs
in base 2. Keys are read in BLOCK_N tiles counted from position 0, so results do not depend on where a chunk began.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
FIELDS = tl.constexpr(8)
MERGE_WIDTH = 128  # value entries per program of the merge
MAX_SPLITS = 64  # parts of one tile


class Tiles(NamedTuple):
    """Shape of the work of one program, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    two_loops: bool = False  # keys that every query of the tile sees go without a mask, in a loop of their own


class Work(NamedTuple):
    """What one launch of `attend` does."""

    items: Tensor  # [n, 8] int32
    merges: Tensor | None  # [m, 8] int32: one per tile that may be split; None: no tile is
    partials: int  # partial results to keep room for, per kv head and flat
    held: int  # flats of a tile that can be in use
    tiles: Tiles
    splittable: bool = True  # False: compiled without parts, for lists that never have any


class Shape(NamedTuple):
    """What all layers of a launch share. Sizes are entries per head."""

    page: int  # tokens per block
    window: int = 0
    chunk: int = 0


@triton.jit
def _rows(base, at, held, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """[len(at), WIDTH]: SIZE entries from each address; zero past SIZE and, if MASKED, in rows not held."""
    d = tl.arange(0, WIDTH)
    where = base + at[:, None] + d[None, :]
    if MASKED:
        if SIZE == WIDTH:
            return tl.load(where, mask=held[:, None], other=0.0)
        return tl.load(where, mask=held[:, None] & (d < SIZE)[None, :], other=0.0)
    if SIZE == WIDTH:
        return tl.load(where)
    return tl.load(where, mask=(d < SIZE)[None, :], other=0.0)


@triton.jit
def _scan(
    acc, top, total, q, q_rest, keys, values, table, positions, slope, begin, end, first, last, page_stride, scale, cap,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, LATENT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over keys [begin, end). `top` is the running maximum of the scores (times log2 e), `total` the sum of weights.

    Not MASKED: every query sees every key of the range. Keys outside [first, last) are never read.
    """
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        held = (n >= first) & (n < last)
        if MASKED:
            block = tl.load(table + n // PAGE, mask=held, other=0)
        else:
            block = tl.load(table + n // PAGE)
        page = block.to(tl.int64) * page_stride
        at = page + (n % PAGE) * DK
        if LATENT:
            k = _rows(keys, at, held, DV, BLOCK_V, MASKED).to(q.dtype)
            rest = _rows(keys + DV, at, held, DK - DV, BLOCK_R, MASKED).to(q.dtype)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            s = tl.dot(q_rest, tl.trans(rest), s, input_precision=PRECISION)
        else:
            k = _rows(keys, at, held, DK, BLOCK_D, MASKED).to(q.dtype)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor = scale
        if SOFTCAP or ALIBI:
            factor = 1.0
            s = s * scale
            if SOFTCAP:
                s = (2.0 * tl.sigmoid(2.0 * s) - 1.0) * cap
            if ALIBI:
                s -= slope[:, None] * (positions[:, None] - n[None, :]).to(tl.float32)
        if MASKED:
            seen = n[None, :] <= positions[:, None]
            if WINDOW:
                seen &= n[None, :] > positions[:, None] - WINDOW
            if CHUNK:
                seen &= n[None, :] >= positions[:, None] // CHUNK * CHUNK
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * factor)
        pivot = new
        if MASKED:  # a query that has seen no key yet keeps weights of zero
            pivot = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s * factor - pivot[:, None])
        alpha = tl.exp2(top - pivot)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if LATENT:
            v = k
        else:
            v = _rows(values, page + (n % PAGE) * DV, held, DV, BLOCK_V, MASKED).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit(do_not_specialize=["table_stride", "held"])
def _attend_kernel(
    out, q, keys, values, tables, items, partial, sums, sinks, slopes,
    q_token, q_head, page_stride, k_head, v_head, table_stride, held, scale, cap,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, LATENT: tl.constexpr,
    TWO_LOOPS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (kv heads, items)."""
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    row, begin_token, count, context = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    flat0, split, splits, base = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    if count == 0:
        return
    flat = flat0 + tl.arange(0, BLOCK_M)
    token = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    used = token < count
    e = tl.arange(0, BLOCK_V)
    wide = used[:, None] & (e < DV)[None, :]
    out_at = ((begin_token + token).to(tl.int64) * (GROUP * tl.num_programs(0)) + head) * DV
    if context == 0:
        tl.store(out + out_at[:, None] + e[None, :], tl.zeros((BLOCK_M, BLOCK_V), out.dtype.element_ty), mask=wide)
        return

    # the keys of this tile, and of this program's part of it
    before = context - count
    low = before + flat0 // GROUP
    high = before + tl.minimum((flat0 + BLOCK_M - 1) // GROUP, count - 1)
    positions = before + tl.minimum(token, count - 1)
    first = low * 0
    if WINDOW:
        first = tl.maximum(low - WINDOW + 1, 0)
    if CHUNK:
        first = low // CHUNK * CHUNK
    last = high + 1
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
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=used, other=0.0).to(tl.float32) * LOG2E
    k_base, v_base, table = keys + kv_head * k_head, values + kv_head * v_head, tables + row.to(tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    cut = begin
    if TWO_LOOPS:
        cut = tl.maximum(begin, tl.minimum((low + 1) // BLOCK_N * BLOCK_N, end))
        acc, top, total = _scan(
            acc, top, total, queries, q_rest, k_base, v_base, table, positions, slope, begin, cut, first, last,
            page_stride, scale, cap, DK, DV, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R, PAGE, WINDOW, CHUNK, SOFTCAP, ALIBI,
            LATENT, False, PRECISION,
        )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, queries, q_rest, k_base, v_base, table, positions, slope, cut, end, first, last,
        page_stride, scale, cap, DK, DV, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R, PAGE, WINDOW, CHUNK, SOFTCAP, ALIBI,
        LATENT, True, PRECISION,
    )  # fmt: skip

    if SPLIT:
        if splits > 1:
            total = tl.where(total == 0.0, 1.0, total)  # a query with no key in this part: top is -inf
            place = ((base + split).to(tl.int64) * tl.num_programs(0) + kv_head) * held + flat - flat0
            tl.store(sums + place, top + tl.log2(total), mask=used)
            tl.store(partial + place[:, None] * DV + e[None, :], acc / total[:, None], mask=wide)
            return
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        alpha = tl.exp2(top - new)
        total = total * alpha + tl.exp2(sink - new)
        acc = acc * alpha[:, None]
    tl.store(out + out_at[:, None] + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=wide)


@triton.jit(do_not_specialize=["held"])
def _merge_kernel(
    out, partial, sums, merges, sinks, held,
    GROUP: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """grid (kv heads * held, merges, value entries / WIDTH): one query head of one token each."""
    column = tl.program_id(0)
    merge = merges + tl.program_id(1) * FIELDS
    begin_token, count, flat0 = tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 4)
    splits, base = tl.load(merge + 6), tl.load(merge + 7)
    if splits <= 1:
        return
    flat = flat0 + column % held
    token, head = flat // GROUP, column // held * GROUP + flat % GROUP
    if token >= count:
        return
    s = tl.arange(0, BLOCK_S)
    e = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    place = (base + s).to(tl.int64) * tl.num_programs(0) + column
    part = s < splits
    mask = part[:, None] & (e < DV)[None, :]
    value = tl.load(partial + place[:, None] * DV + e[None, :], mask=mask, other=0.0)
    sum2 = tl.load(sums + place, mask=part, other=float("-inf"))
    top = tl.max(sum2, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    weight = tl.exp2(sum2 - top)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    value = tl.sum(value * weight[:, None], 0) / total
    heads = tl.num_programs(0) // held * GROUP
    at = ((begin_token + token).to(tl.int64) * heads + head) * DV
    tl.store(out + at + e, value.to(out.dtype.element_ty), mask=e < DV)


@triton.jit(do_not_specialize=["num", "capacity", "target", "least", "most"])
def _split_kernel(
    items, merges, row_index, contexts, num, capacity, target, least, most,
    COUNT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, M_TILES: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program. Cut the tiles of `num` = entries * M_TILES into parts of about equal numbers of key tiles."""
    v = tl.arange(0, BLOCK)
    inside = v < num
    entry, flat = v // M_TILES, v % M_TILES * BLOCK_M
    context = tl.load(contexts + entry, mask=inside, other=0)
    row = tl.load(row_index + entry, mask=inside, other=0)
    low = context - COUNT + flat // GROUP
    high = context - COUNT + tl.minimum((flat + BLOCK_M - 1) // GROUP, COUNT - 1)
    first = low * 0
    if WINDOW:
        first = tl.maximum(low - WINDOW + 1, 0)
    if CHUNK:
        first = low // CHUNK * CHUNK
    tiles = tl.where(context > 0, (high + BLOCK_N) // BLOCK_N - first // BLOCK_N, 0)
    length = tl.maximum((tl.sum(tiles, 0) + target - 1) // target, least)
    splits = tl.minimum(tl.maximum((tiles + length - 1) // length, 1), most)
    splits = tl.where(inside, splits, 0)
    base = tl.cumsum(splits, 0) - splits
    merge = merges + v * FIELDS
    for s in range(0, tl.max(splits, 0)):
        item = items + (base + s) * FIELDS
        here = s < splits
        tl.store(item, row, mask=here)
        tl.store(item + 1, entry * COUNT, mask=here)
        tl.store(item + 2, tl.full((BLOCK,), COUNT, tl.int32), mask=here)
        tl.store(item + 3, context, mask=here)
        tl.store(item + 4, flat, mask=here)
        tl.store(item + 5, tl.full((BLOCK,), 0, tl.int32) + s, mask=here)
        tl.store(item + 6, splits, mask=here)
        tl.store(item + 7, base, mask=here)
    tl.store(merge + 1, entry * COUNT, mask=inside)
    tl.store(merge + 2, tl.full((BLOCK,), COUNT, tl.int32), mask=inside)
    tl.store(merge + 4, flat, mask=inside)
    tl.store(merge + 6, splits, mask=inside)
    tl.store(merge + 7, base, mask=inside)
    for start in range(tl.sum(splits, 0), capacity, BLOCK):  # what is left over does nothing
        tl.store(items + (start + v) * FIELDS + 2, tl.zeros((BLOCK,), tl.int32), mask=start + v < capacity)


def width_of(size: int) -> int:
    """Entries of a tile that holds `size`: a power of two, at least what a tensor core takes."""
    return max(16, triton.next_power_of_2(size))


def attend(
    q: Tensor,  # [T, Hq, D], last stride 1
    keys: Tensor,  # [num_blocks, page, Hkv, D]; the tokens of one head lie side by side: stride(1) == D
    values: Tensor | None,  # [num_blocks, page, Hkv, Dv], likewise; None: the first Dv entries of the keys
    tables: Tensor,  # [rows, blocks] int32
    work: Work,
    out: Tensor,  # [T, Hq, Dv], contiguous
    workspace: Tensor,  # float32, `workspace_floats` of it
    shape: Shape,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
) -> None:
    """Run one work list: attention of its tiles, then the merge of those that were split."""
    num_items, kv_heads, dk, dv = len(work.items), keys.shape[2], keys.shape[3], out.shape[2]
    if not num_items:
        return
    latent, group, tiles = values is None, q.shape[1] // kv_heads, work.tiles
    stored = keys if values is None else values
    room = _aligned(work.partials * kv_heads * work.held)
    sums, partial = workspace[:room], workspace[room:]
    _attend_kernel[(kv_heads, num_items)](
        out, q, keys, stored, tables, work.items, partial, sums, sinks, alibi,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(2), stored.stride(2), tables.stride(0), work.held,
        scale / softcap if softcap else scale * LOG2E.value, softcap * LOG2E.value,
        GROUP=group, DK=dk, DV=dv, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_D=width_of(dv if latent else dk), BLOCK_V=width_of(dv), BLOCK_R=width_of(dk - dv) if latent else 16,
        PAGE=shape.page, WINDOW=shape.window, CHUNK=shape.chunk, SOFTCAP=softcap > 0, SINKS=sinks is not None,
        ALIBI=alibi is not None, LATENT=latent, SPLIT=work.splittable,
        TWO_LOOPS=tiles.two_loops and not (shape.window or shape.chunk),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    if work.merges is not None:
        width = min(MERGE_WIDTH, width_of(dv))
        grid = (kv_heads * work.held, len(work.merges), triton.cdiv(dv, width))
        _merge_kernel[grid](
            out, partial, sums, work.merges, sinks, work.held, GROUP=group, DV=dv, WIDTH=width,
            BLOCK_S=MAX_SPLITS, SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip


def workspace_floats(work: Work, kv_heads: int, dv: int) -> int:
    room = work.partials * kv_heads * work.held
    return _aligned(room) + room * dv


def _aligned(floats: int) -> int:
    """Round up, so that what lies behind starts where wide loads and stores want it."""
    return -(-floats // 32) * 32


def plan_splits(
    items: Tensor,  # [capacity, 8] int32, written
    merges: Tensor,  # [num tiles, 8] int32, written
    row_index: Tensor,  # [B] int32
    contexts: Tensor,  # [B] int32; 0: a padded entry
    shape: Shape,
    *,
    count: int,  # queries of every entry
    group: int,
    tiles: Tiles,
    target: int,  # parts wanted in all; items has room for target + num tiles
    least: int,  # key tiles of a part
    most: int,  # parts of a tile, up to MAX_SPLITS
) -> None:
    num = len(merges)
    _split_kernel[(1,)](
        items, merges, row_index, contexts, num, len(items), target, least, most,
        COUNT=count, GROUP=group, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, M_TILES=num // len(contexts),
        WINDOW=shape.window, CHUNK=shape.chunk, BLOCK=max(1024, triton.next_power_of_2(num)), FIELDS=FIELDS.value,
        num_warps=4,
    )  # fmt: skip
