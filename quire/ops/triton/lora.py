"""Low-rank additions on CUDA: each row of a step of few rows reads A and B of its own slot from the stacks.

Two kernels: shrink computes x A^T of every row and piece, in float32 and in shares of the width, so that there are
programs enough to hide what a load takes; expand adds scale * (their sum B^T) to y. Rows
without an adapter return early, and columns that no piece of a row's slot covers are not written; ranks are padded with
zeros. Nothing here waits for the device, so a step may be captured in a graph whose rows change slots from replay to
replay. A row's sums do not depend on other rows. Floor: A and B of every row are read once per row (rank * (width +
rows) numbers), most of them from the L2 cache.

Where B of all slots are columns of one matrix (up to `MOST_COLUMNS`), more than `FEW_ROWS` are multiplied with A of all
slots at once, and what is not of a row's own slot is set to zero before it is multiplied with B of all slots: as many
times the work as there are slots, in few launches, none of which waits. Else, from `MOST_ROWS` on, matmuls by slot
(ops/lora.py).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops import lora
from quire.ops.op import Fits, FormTable, same_bits
from quire.ops.triton.sizes import cdiv

MOST_ROWS = 256
ANY_ROWS = 1 << 30  # where results must not depend on the number of rows
FEW_ROWS = 32  # up to which each row reads its own slot, whatever the form of B
MOST_COLUMNS = 512  # slots times rank that are multiplied at once
_TILE = 2048  # least entries of a program that sets others to zero
_SHARE = 1024  # columns of A that one program reads
_ENTRIES = 8192  # of A or B in a tile


@triton.jit(do_not_specialize=["width", "x_stride"])
def _shrink_kernel(
    x, index, a, spans, h, width, x_stride, PIECES: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (rows, pieces, shares of the width). h [rows, PIECES, shares, RANK]; nothing is written for a piece that the
    slot does not have."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    t, piece, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(index + t)
    if slot > 0:
        entry = (slot - 1).to(tl.int64) * PIECES + piece
        if tl.load(spans + entry * 2 + 1) > 0:
            ranks = tl.arange(0, RANK_TILE)
            matrix = a + entry * RANK * width
            total = tl.zeros([RANK_TILE], tl.float32)
            for start in tl.static_range(0, SHARE, WIDTH):
                columns = share * SHARE + start + tl.arange(0, WIDTH)
                own = tl.load(x + t.to(tl.int64) * x_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
                inside = (ranks[:, None] < RANK) & (columns[None, :] < width)
                tile = tl.load(matrix + ranks[:, None] * width + columns[None, :], mask=inside, other=0.0)
                total += tl.sum(tile.to(tl.float32) * own[None, :], 1)
            at = ((t * PIECES + piece) * tl.num_programs(2) + share) * RANK
            tl.store(h + at + ranks, total, mask=ranks < RANK)


@triton.jit(do_not_specialize=["num_rows", "y_stride", "b_row", "b_slot"])
def _expand_kernel(
    y, index, h, b, spans, scales, num_rows, y_stride, b_row, b_slot, PIECES: tl.constexpr, RANK: tl.constexpr,
    RANK_TILE: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, SHARE_TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (rows, tiles of the matrix's rows). Adds up the SHARES of what shrink made. `b_row`, `b_slot`: from one row
    or slot to the next, in ranks."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    slot = tl.load(index + t)
    if slot > 0:
        rows, ranks = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK_TILE)
        share = tl.arange(0, SHARE_TILE)
        entry = (slot - 1).to(tl.int64)
        inside = (rows[:, None] < num_rows) & (ranks[None, :] < RANK)
        at = b + (entry * b_slot + rows.to(tl.int64)[:, None] * b_row) * RANK + ranks[None, :]
        tile = tl.load(at, mask=inside, other=0.0)
        total = tl.zeros([ROWS], tl.float32)
        covered = rows < 0
        for piece in tl.static_range(PIECES):
            first = tl.load(spans + (entry * PIECES + piece) * 2)
            last = tl.load(spans + (entry * PIECES + piece) * 2 + 1)
            here = (rows >= first) & (rows < last)
            which = (t * PIECES + piece) * SHARES + share
            known = (share[:, None] < SHARES) & (ranks[None, :] < RANK)
            own = tl.sum(tl.load(h + which[:, None] * RANK + ranks[None, :], mask=known, other=0.0), 0)
            scale = tl.load(scales + entry * PIECES + piece)
            part = tl.sum(tile.to(tl.float32) * own[None, :], 1) * scale
            total += tl.where(here, part, 0.0)  # of a piece that the slot lacks, `own` is any number
            covered = covered | here
        where = y + t.to(tl.int64) * y_stride + rows
        before = tl.load(where, mask=covered, other=0.0)
        tl.store(where, (before.to(tl.float32) + total).to(before.dtype), mask=covered)


@triton.jit(do_not_specialize=["num_rows"])
def _own_kernel(
    h, index, scales, out, num_rows, SLOTS: tl.constexpr, PIECES: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, pieces). h [rows, SLOTS, PIECES, RANK] -> out [PIECES, rows, SLOTS, RANK], scaled: zeros but
    in a row's own slot."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    piece, t = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(index + t, mask=t < num_rows, other=0)
    scale = tl.load(scales + (slot - 1) * PIECES + piece, mask=slot > 0, other=0.0)
    column = tl.arange(0, COLUMNS)
    is_own = (column // RANK + 1)[None, :] == slot[:, None]
    where = (column // RANK * PIECES + piece) * RANK + column % RANK
    at = h + t.to(tl.int64)[:, None] * (SLOTS * PIECES * RANK) + where[None, :]
    own = tl.load(at, mask=is_own, other=0.0).to(tl.float32) * scale[:, None]
    to = out + (piece.to(tl.int64) * num_rows + t)[:, None] * (SLOTS * RANK) + column[None, :]
    tl.store(to, own.to(out.dtype.element_ty), mask=(t < num_rows)[:, None] & (column < SLOTS * RANK)[None, :])


def _add_at_once(y: Tensor, x: Tensor, rows: lora.AdapterRows, stacks: lora.LowRankStacks, *, early: bool) -> Tensor:
    slots, pieces, rank, width = stacks.a.shape
    h, num_rows = F.linear(x, stacks.a.view(-1, width)), x.shape[0]
    own = torch.empty((pieces, num_rows, slots * rank), dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(slots * rank)
    tile = max(1, _TILE // columns)
    _own_kernel[(cdiv(num_rows, tile), pieces)](
        h, rows.index, stacks.scales, own, num_rows, SLOTS=slots, PIECES=pieces, RANK=rank, ROWS=tile, COLUMNS=columns,
        EARLY=early, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    b = stacks.b.flatten(1)
    for part, (first, last) in zip(own, stacks.bounds, strict=True):
        y[:, first:last].addmm_(part, b[first:last].t())
    return y


def tiles_of(rank_tile: int) -> tuple[int, int, int]:
    """By the rank: columns that a program of shrink takes, how many of them at once, rows that one of expand takes."""
    at_once = max(32, min(_SHARE, _ENTRIES // rank_tile))
    return _SHARE, at_once, max(32, min(512, _ENTRIES // rank_tile))


def add_low_rank(
    y: Tensor, x: Tensor, rows: lora.AdapterRows, low: lora.LowRank, *, most_rows: int = MOST_ROWS, early: bool = False
) -> Tensor:
    """In a graph, a step has at most `most_rows` rows, and layers of a model on a GPU have stacks."""
    stacks = low.stacks
    num_tokens = x.shape[0]
    if stacks is None or x.ndim != 2:
        return lora.add_low_rank.reference(y, x, rows, low)
    if num_tokens > FEW_ROWS and stacks.b.is_contiguous() and x.dtype is y.dtype is stacks.a.dtype:
        return _add_at_once(y, x, rows, stacks, early=early)
    if num_tokens > most_rows:
        return lora.add_low_rank.reference(y, x, rows, low)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if y.stride(-1) != 1:
        return y.copy_(add_low_rank(y.contiguous(), x, rows, low, most_rows=most_rows, early=early))
    _, pieces, rank, width = stacks.a.shape
    num_rows, tile = stacks.b.shape[0], triton.next_power_of_2(rank)
    share, at_once, tile_rows = tiles_of(tile)
    shares = cdiv(width, share)
    h = torch.empty((num_tokens, pieces, shares, rank), dtype=torch.float32, device=x.device)
    launch = {"launch_pdl": True} if early else {}
    _shrink_kernel[(num_tokens, pieces, shares)](
        x, rows.index, stacks.a, stacks.spans, h, width, x.stride(0), PIECES=pieces, RANK=rank, RANK_TILE=tile,
        WIDTH=at_once, SHARE=share, EARLY=early, **launch,
    )  # fmt: skip
    _expand_kernel[(num_tokens, cdiv(num_rows, tile_rows))](
        y, rows.index, h, stacks.b, stacks.spans, stacks.scales, num_rows, y.stride(0),
        stacks.b.stride(0) // rank, stacks.b.stride(1) // rank,
        PIECES=pieces, RANK=rank, RANK_TILE=tile, ROWS=tile_rows, SHARES=shares,
        SHARE_TILE=triton.next_power_of_2(shares), EARLY=early, **launch,
    )  # fmt: skip
    return y


def add_forms(table: FormTable, free: Fits, *, early: bool) -> None:
    for fits, most_rows in ((free, MOST_ROWS), (same_bits, ANY_ROWS)):
        table.form(lora.add_low_rank, fits)(partial(add_low_rank, most_rows=most_rows, early=early))
        table.form(lora.captured_rows, fits)(partial(int, most_rows))
    table.form(lora.most_columns, free)(partial(int, MOST_COLUMNS))
