"""Low-rank additions on CUDA, for steps of few rows: each row reads A and B of its own slot from the stacks.

Two kernels: shrink computes x A^T of every row and piece, in float32; expand adds scale * (that B^T) to y. Rows
without an adapter return early; ranks are padded with zeros. Nothing here waits for the device, so a step may be
captured in a graph whose rows change slots from replay to replay. Floor: A and B of every row are read once per row
(rank * (width + rows) numbers), so from `MOST_ROWS` on matmuls by slot (ops/lora.py) read less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops import lora
from quire.ops.op import FormTable
from quire.ops.triton.sizes import cdiv

MOST_ROWS = 64
_WIDTH, _ROWS = 256, 128  # of a tile


@triton.jit(do_not_specialize=["width", "x_stride"])
def _shrink_kernel(
    x, index, a, h, width, x_stride, PIECES: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    t, piece = tl.program_id(0), tl.program_id(1)
    slot = tl.load(index + t)
    if slot > 0:
        ranks = tl.arange(0, RANK_TILE)
        matrix = a + ((slot - 1).to(tl.int64) * PIECES + piece) * RANK * width
        total = tl.zeros([RANK_TILE], tl.float32)
        for start in range(0, width, WIDTH):
            columns = start + tl.arange(0, WIDTH)
            own = tl.load(x + t.to(tl.int64) * x_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
            inside = (ranks[:, None] < RANK) & (columns[None, :] < width)
            tile = tl.load(matrix + ranks[:, None] * width + columns[None, :], mask=inside, other=0.0)
            total += tl.sum(tile.to(tl.float32) * own[None, :], 1)
        tl.store(h + (t * PIECES + piece) * RANK + ranks, total, mask=ranks < RANK)


@triton.jit(do_not_specialize=["num_rows", "y_stride"])
def _expand_kernel(
    y, index, h, b, spans, scales, num_rows, y_stride, PIECES: tl.constexpr, RANK: tl.constexpr,
    RANK_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    slot = tl.load(index + t)
    if slot > 0:
        rows, ranks = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK_TILE)
        entry = (slot - 1).to(tl.int64)
        inside = (rows[:, None] < num_rows) & (ranks[None, :] < RANK)
        tile = tl.load(b + (entry * num_rows + rows[:, None]) * RANK + ranks[None, :], mask=inside, other=0.0)
        total = tl.zeros([ROWS], tl.float32)
        for piece in tl.static_range(PIECES):
            first = tl.load(spans + (entry * PIECES + piece) * 2)
            last = tl.load(spans + (entry * PIECES + piece) * 2 + 1)
            own = tl.load(h + (t * PIECES + piece) * RANK + ranks, mask=ranks < RANK, other=0.0)
            scale = tl.load(scales + entry * PIECES + piece)
            part = tl.sum(tile.to(tl.float32) * own[None, :], 1) * scale
            total += tl.where((rows >= first) & (rows < last), part, 0.0)
        where = y + t.to(tl.int64) * y_stride + rows
        before = tl.load(where, mask=rows < num_rows, other=0.0)
        tl.store(where, (before.to(tl.float32) + total).to(before.dtype), mask=rows < num_rows)


def add_low_rank(y: Tensor, x: Tensor, rows: lora.AdapterRows, low: lora.LowRank) -> Tensor:
    stacks = low.stacks
    num_tokens = x.shape[0]
    if stacks is None or num_tokens > MOST_ROWS or x.stride(-1) != 1 or y.stride(-1) != 1:
        return lora.add_low_rank.reference(y, x, rows, low)
    _, pieces, rank, width = stacks.a.shape
    num_rows, tile = stacks.b.shape[1], triton.next_power_of_2(rank)
    h = torch.empty((num_tokens, pieces, rank), dtype=torch.float32, device=x.device)
    _shrink_kernel[(num_tokens, pieces)](
        x, rows.index, stacks.a, h, width, x.stride(0), PIECES=pieces, RANK=rank, RANK_TILE=tile, WIDTH=_WIDTH
    )
    _expand_kernel[(num_tokens, cdiv(num_rows, _ROWS))](
        y, rows.index, h, stacks.b, stacks.spans, stacks.scales, num_rows, y.stride(0), PIECES=pieces, RANK=rank,
        RANK_TILE=tile, ROWS=_ROWS,
    )  # fmt: skip
    return y


def add_forms(table: FormTable) -> None:
    table.form(lora.add_low_rank)(add_low_rank)
