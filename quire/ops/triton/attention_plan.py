"""Work lists of attention made on the device: how decodes are split, and which prefix many of them share.

One program reads the contexts and the block tables of a step's decodes and writes the items and the shared prefix
for ops/triton/attention.py. Nothing is read back: lists have a fixed size, unused entries are
marked as empty, so a captured step works for any contexts and any sharing.

A shared prefix is detected by block numbers. A block is in two rows only if all tokens up to its end agree, so rows
that have the same block at a column have the same keys and values in all columns before it. The rows that agree with
one of CANDIDATES entries at the column of `probe` are counted, the largest set is taken, and the last common column is
found by bisection.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.attention import FIELDS, MAX_SPLITS, AttentionTile, Shape, SharedPrefix
from quire.ops.triton.divided import kept
from quire.ops.triton.sizes import cdiv, next_power_of_2

PROBE = 256  # tokens: shorter prefixes are not detected
LEAST_ROWS = 4  # that share
LEAST_KEY_TILES = 2  # of a split of the shared prefix


def probe_column(page: int, probe: int = PROBE) -> int:
    """The column of a block table whose block tells whether rows agree in their first `probe` tokens."""
    return max(1, probe // page) - 1


class Sharing(NamedTuple):
    """When a common prefix is worth a separate kernel."""

    tiles: AttentionTile
    programs: int  # per kv head
    probe: int = PROBE
    rows: int = LEAST_ROWS
    saved: int = 1 << 15  # tokens that need not be read again: prefix times rows


@triton.jit
def _find_shared(
    tables, row_index, contexts, row, context, inside, num, table_stride, least_rows, worth, rank,
    M_TILES: tl.constexpr, PAGE: tl.constexpr, COLUMN: tl.constexpr, ALIGN: tl.constexpr, CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """(tokens, who shares them [BLOCK], a row that has them). `context`, and the result: what this rank keeps."""
    v = tl.arange(0, BLOCK)
    at = tables + row.to(tl.int64) * table_stride
    candidate = inside & (context > (COLUMN + 1) * PAGE)
    block = tl.load(at + COLUMN, mask=candidate, other=-1)
    pick = tl.arange(0, CANDIDATES) * num // CANDIDATES // M_TILES
    long = kept(tl.load(contexts + pick), rank, RANKS, INTERLEAVE) > (COLUMN + 1) * PAGE
    pick_at = tables + tl.load(row_index + pick).to(tl.int64) * table_stride + COLUMN
    expected = tl.load(pick_at, mask=long, other=-2)
    counts = tl.sum((block[:, None] == expected[None, :]).to(tl.int32), 0)
    best = tl.max(counts, 0)
    chosen = tl.max(tl.where(counts == best, expected, -2), 0)
    member = candidate & (block == chosen)
    rows = best // M_TILES
    leader = tl.sum(tl.where(v == tl.min(tl.where(member, v, BLOCK - 1), 0), row, 0), 0)
    low = num * 0 + COLUMN + 1  # columns known to be shared
    high = tl.min(tl.where(member, (context - 1) // PAGE, 1 << 30), 0)  # the last token is never shared
    high = tl.where(rows >= least_rows, high, low)
    of_leader = tables + leader.to(tl.int64) * table_stride
    while low < high:
        middle = (low + high + 1) // 2
        differ = member & (tl.load(at + middle - 1, mask=member, other=0) != tl.load(of_leader + middle - 1))
        equal = tl.sum(differ.to(tl.int32), 0) == 0
        low, high = tl.where(equal, middle, low), tl.where(equal, high, middle - 1)
    tokens = low * PAGE // ALIGN * ALIGN
    tokens = tl.where((rows >= least_rows) & (rows * tokens >= worth), tokens, 0)
    return tokens, member & (tokens > 0), leader


@triton.jit(
    do_not_specialize=[
        "num",
        "capacity",
        "target",
        "least",
        "most",
        "table_stride",
        "programs",
        "rows",
        "saved",
        "rank",
    ],
    do_not_specialize_on_alignment=["items", "info", "members", "tables", "row_index", "contexts", "starts"],
)
def _plan_kernel(
    items, info, members, tables, row_index, contexts, starts, num, capacity, target, least, most, table_stride,
    programs, rows, saved, rank,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, M_TILES: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PAGE: tl.constexpr, COLUMN: tl.constexpr, ALIGN: tl.constexpr, SHARED_M: tl.constexpr,
    SHARED_N: tl.constexpr, LEAST_KEYS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    RANKS: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """One program. Split the tiles of `num` = entries * M_TILES, one query each, into about equal numbers of key
    tiles. SHARED_M: tile of the shared kernel; 0: do not detect a prefix."""
    v = tl.arange(0, BLOCK)
    inside = v < num
    entry, flat = v // M_TILES, v % M_TILES * BLOCK_M
    context = tl.load(contexts + entry, mask=inside, other=0)
    keys = kept(context, rank, RANKS, INTERLEAVE)
    row = tl.load(row_index + entry, mask=inside, other=0)
    token = tl.load(starts + entry, mask=inside, other=0)
    first = tl.zeros((BLOCK,), tl.int32)
    member_at = tl.full((BLOCK,), -1, tl.int32)
    if SHARED_M:
        shared, member, leader = _find_shared(
            tables, row_index, contexts, row, keys, inside, num, table_stride, rows, saved, rank, M_TILES, PAGE, COLUMN,
            ALIGN, 16, BLOCK, RANKS, INTERLEAVE,
        )  # fmt: skip
        opens = member & (v % M_TILES == 0)
        member_at = tl.where(member, tl.cumsum(opens.to(tl.int32), 0) - 1, -1)
        tl.store(members + member_at, entry, mask=opens)
        queries = tl.sum(opens.to(tl.int32), 0)
        tiles = tl.maximum((queries * GROUP + SHARED_M - 1) // SHARED_M, 1)
        parts = tl.minimum(tl.minimum(programs // tiles, shared // (SHARED_N * LEAST_KEYS)), MOST)
        parts = tl.where(shared > 0, tl.maximum(parts, 1), 0)
        tl.store(info, shared)
        tl.store(info + 1, queries)
        tl.store(info + 2, leader)
        tl.store(info + 3, tiles)
        tl.store(info + 4, parts)
        first = tl.where(member, shared, 0)
    skip = first
    if WINDOW:
        first = kept(tl.maximum(context - WINDOW, 0), rank, RANKS, INTERLEAVE)
    if CHUNK:
        first = kept((context - 1) // CHUNK * CHUNK, rank, RANKS, INTERLEAVE)
    key_tiles = tl.where(context > 0, (keys - 1 + BLOCK_N) // BLOCK_N - first // BLOCK_N, 0)
    length = tl.maximum((tl.sum(key_tiles, 0) + target - 1) // target, least)
    splits = tl.minimum(tl.maximum((key_tiles + length - 1) // length, 1), most)
    splits = tl.where(inside, splits, 0)
    at = tl.cumsum(splits, 0) - splits
    base = tl.where((splits > 1) | (skip > 0), at, -1)
    one = tl.full((BLOCK,), 1, tl.int32)
    for s in range(0, tl.max(splits, 0)):
        item = items + (at + s) * FIELDS
        here = s < splits
        tl.store(item, row, mask=here)
        tl.store(item + 1, token, mask=here)
        tl.store(item + 2, one, mask=here)
        tl.store(item + 3, context, mask=here)
        tl.store(item + 4, flat, mask=here)
        tl.store(item + 5, one * s, mask=here)
        tl.store(item + 6, splits, mask=here)
        tl.store(item + 7, base, mask=here)
        tl.store(item + 8, skip, mask=here)
        tl.store(item + 9, member_at, mask=here)
    for start in range(tl.sum(splits, 0), capacity, BLOCK):  # mark unused entries as empty
        tl.store(items + (start + v) * FIELDS + 2, tl.zeros((BLOCK,), tl.int32), mask=start + v < capacity)


def plan_decodes(
    tables: Tensor,  # [rows, blocks] int32
    row_index: Tensor,  # [B] int32
    contexts: Tensor,  # [B] int32; 0: a padded entry
    starts: Tensor,  # [B] int32: token of an entry in q
    shape: Shape,
    *,
    group: int,
    tiles: AttentionTile,
    target: int,  # desired number of splits in total
    least: int,  # key tiles of a split
    most: int,  # splits of a tile, up to MAX_SPLITS
    sharing: Sharing | None,
) -> tuple[Tensor, SharedPrefix | None]:
    """(items, shared) of one query per entry. There are items for the largest number of splits: target + tiles."""
    device, entries = contexts.device, len(contexts)
    m_tiles = cdiv(group, tiles.block_m)
    num = entries * m_tiles
    items = torch.empty((target + num, FIELDS.value), dtype=torch.int32, device=device)
    shared = None
    if sharing is not None:
        info, members = torch.empty(8 + entries, dtype=torch.int32, device=device).split([8, entries])
        shared = SharedPrefix(info, members, starts, contexts, sharing.programs, sharing.tiles)
    used = sharing or Sharing(tiles, 0)
    align = math.lcm(shape.page, tiles.block_n, used.tiles.block_n)
    _plan_kernel[(1,)](
        items, None if shared is None else shared.info, None if shared is None else shared.members, tables,
        row_index, contexts, starts, num, len(items), max(1, target), least, most, tables.stride(0), used.programs,
        used.rows, used.saved, shape.rank, GROUP=group, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, M_TILES=m_tiles,
        WINDOW=shape.window, CHUNK=shape.chunk, PAGE=shape.page, COLUMN=probe_column(shape.page, used.probe),
        ALIGN=align, SHARED_M=0 if shared is None else used.tiles.block_m, SHARED_N=used.tiles.block_n,
        LEAST_KEYS=LEAST_KEY_TILES, MOST=MAX_SPLITS, BLOCK=max(1024, next_power_of_2(num)), FIELDS=FIELDS.value,
        RANKS=shape.ranks, INTERLEAVE=shape.interleave, num_warps=4,
    )  # fmt: skip
    return items, shared
