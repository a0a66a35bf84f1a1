"""Low-rank additions to a matmul: y += scale * (x A^T) B^T, each row of a step with the adapter of its own slot.

`AdapterRows` says which slot each row of a step has; `LowRank` holds what one matrix has in every slot. The reference
goes through the slots of a step one by one; a form for a device may take all rows at once from the stacks.
Where ranks divide both A and B among themselves, see lora_shards.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.linear import linear
from quire.ops.op import Kernels, op

SomeRows: TypeAlias = "slice | Tensor"
Multiply: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


class AdapterRows:
    """The slots of a step's rows."""

    def __init__(self, index: Tensor) -> None:
        self.index = index  # [T] int32, contiguous; 0: no adapter
        self._repeated: dict[int, AdapterRows] = {}

    def repeated(self, count: int) -> AdapterRows:
        """The slots of `count` rows in place of each."""
        if count == 1:
            return self
        if count not in self._repeated:
            self._repeated[count] = AdapterRows(self.index.repeat_interleave(count))
        return self._repeated[count]

    @cached_property
    def groups(self) -> tuple[tuple[int, SomeRows], ...]:
        """(slot, its rows) of every slot but 0; reads the index, so it waits for a device that has it."""
        slots = self.index.cpu()
        groups: list[tuple[int, SomeRows]] = []
        for slot in slots.unique().tolist():
            if slot:
                rows = (slots == slot).nonzero().flatten()
                first, last = int(rows[0]), int(rows[-1]) + 1
                is_run = last - first == len(rows)
                groups.append((slot, slice(first, last) if is_run else rows.to(self.index.device)))
        return tuple(groups)


class LowRankPiece(NamedTuple):
    """What an adapter adds to some rows of a matrix."""

    start: int
    stop: int
    a: Tensor  # [rank, width]
    b: Tensor  # [stop - start, rank]
    scale: float

    def on(self, device: torch.device) -> LowRankPiece:
        return self._replace(a=self.a.to(device), b=self.b.to(device))


class TablePiece(NamedTuple):
    """What an adapter adds to the rows of an embedding's table: row t gets scale * (rows[t] b^T)."""

    rows: Tensor  # [rows of the table, rank]
    b: Tensor  # [width, rank]
    scale: float

    def on(self, device: torch.device) -> TablePiece:
        return self._replace(rows=self.rows.to(device), b=self.b.to(device))


class LowRankStacks(NamedTuple):
    """The same in tensors that a kernel takes, part by part of the matrix: padded with zeros to the largest rank. A
    piece of several parts is there once for each of them."""

    a: Tensor  # [slots, parts, rank, width]
    b: Tensor  # [rows, slots, rank], in this order or slot by slot
    spans: Tensor  # [slots, parts, 2] int32: first row and last of each part, exclusive; zeros where the slot has none
    scales: Tensor  # [slots, parts] float32; zeros too
    bounds: tuple[tuple[int, int], ...]  # first row and last of each part


class SlotForm(Protocol):
    """The pieces of all slots in a form that compiled kernels read."""

    def put(self, slot: int, pieces: tuple[LowRankPiece, ...]) -> None: ...


class LowRank:
    """One matrix's part of the adapters in all slots, which are numbered from 1."""

    def __init__(self, num_slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.pieces: list[tuple[LowRankPiece, ...]] = [()] * num_slots
        self.dtype = dtype  # of every piece
        self.stacks: LowRankStacks | None = None
        self.form: SlotForm | None = None  # made by the first kernel that needs it

    def set_up_stacks(
        self, parts: Iterable[int], width: int, rank: int, like: Tensor, *, as_columns: bool = False
    ) -> None:
        """`parts`: rows of each part of the matrix. `as_columns`: B of all slots are columns of one matrix."""
        slots, device, ends = len(self.pieces), like.device, (0, *accumulate(parts))
        bounds, shape = tuple(pairwise(ends)), (ends[-1], slots, rank) if as_columns else (slots, ends[-1], rank)
        self.stacks = LowRankStacks(
            torch.zeros((slots, len(bounds), rank, width), dtype=like.dtype, device=device),
            torch.zeros(shape, dtype=like.dtype, device=device).transpose(0, 0 if as_columns else 1),
            torch.zeros((slots, len(bounds), 2), dtype=torch.int32, device=device),
            torch.zeros((slots, len(bounds)), dtype=torch.float32, device=device),
            bounds,
        )

    def put(self, slot: int, pieces: tuple[LowRankPiece, ...]) -> None:
        """What was in the slot is gone."""
        if self.stacks is None:
            self.pieces[slot - 1] = pieces
            if self.form is not None:
                self.form.put(slot, pieces)
            return
        stacks, at = self.stacks, slot - 1
        if self.pieces[at]:
            for stack in (stacks.b[:, at], stacks.spans[at], stacks.scales[at]):
                stack.zero_()
        self.pieces[at] = tuple(_placed(stacks, at, piece) for piece in pieces)


def _placed(stacks: LowRankStacks, at: int, piece: LowRankPiece) -> LowRankPiece:
    """The piece as it lies in the stacks of a slot once it has been copied there."""
    start, stop, a, b, scale = piece
    parts = [part for part, (first, last) in enumerate(stacks.bounds) if start <= first and last <= stop]
    if not parts or (stacks.bounds[parts[0]][0], stacks.bounds[parts[-1]][1]) != (start, stop):
        raise ValueError(f"an adapter of rows {start} to {stop} of a matrix whose parts are {stacks.bounds}")
    rank = a.shape[0]
    for part in parts:
        stacks.a[at, part, rank:].zero_()
        stacks.a[at, part, :rank].copy_(a)
        stacks.spans[at, part].copy_(torch.tensor(stacks.bounds[part], dtype=torch.int32))
        stacks.scales[at, part].fill_(scale)
    stacks.b[start:stop, at, :rank].copy_(b)
    return piece._replace(a=stacks.a[at, parts[0], :rank], b=stacks.b[start:stop, at, :rank])


class AddedLowRank(NamedTuple):
    """What adapters add to one matmul of a step."""

    rows: AdapterRows
    low: LowRank


@op
def most_columns() -> int:
    """Up to how many columns, slots times rank, B of all slots are better one matrix; 0: never."""
    return 0


@op
def captured_rows() -> int:
    """Up to how many rows `add_low_rank` launches the same whatever the slots hold and never waits for a device, so
    that a graph may hold it; 0: never."""
    return 0


@op
def add_low_rank(y: Tensor, x: Tensor, rows: AdapterRows, low: LowRank) -> Tensor:
    """y [T, rows of the matrix], to which every row's adapter adds its part of x [T, width]. In place."""
    return _add_by_slot(y, x, rows, low, F.linear)


@add_low_rank.made("cpu")
def make_cpu(whole: Callable[..., Tensor], kernels: Kernels) -> Callable[..., Tensor]:
    """With the matmul of these kernels, which in batch-invariant mode takes every row by itself."""
    multiply = kernels.of(linear)

    def add_low_rank_cpu(y: Tensor, x: Tensor, rows: AdapterRows, low: LowRank) -> Tensor:
        return _add_by_slot(y, x, rows, low, multiply)

    return add_low_rank_cpu


def _add_by_slot(y: Tensor, x: Tensor, rows: AdapterRows, low: LowRank, multiply: Multiply) -> Tensor:
    for slot, some in rows.groups:
        if pieces := low.pieces[slot - 1]:
            add_pieces(y, x[some], some, pieces, multiply)
    return y


def add_pieces(y: Tensor, x: Tensor, some: SomeRows, pieces: tuple[LowRankPiece, ...], multiply: Multiply) -> None:
    """The same for rows of one slot: x has them alone, `some` says which of y they are."""
    x = x.to(pieces[0].a.dtype)
    for start, stop, a, b, scale in pieces:
        delta = multiply(multiply(x, a), b)
        y[some, start:stop] += delta if scale == 1.0 else delta * scale
