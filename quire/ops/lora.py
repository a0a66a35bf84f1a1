"""Low-rank additions to a matmul: y += scale * (x A^T) B^T, each row of a step with the adapter of its own slot.

`AdapterRows` says which slot each row of a step has; `LowRank` holds what one matrix has in every slot. The reference
goes through the slots of a step one by one; a form for a device may take all rows at once from the stacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
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
    """The same in tensors that a kernel takes: padded with zeros to the largest rank and number of pieces."""

    a: Tensor  # [slots, pieces, rank, width]
    b: Tensor  # [slots, rows, rank]
    spans: Tensor  # [slots, pieces, 2] int32: first row and last of each piece, exclusive
    scales: Tensor  # [slots, pieces] float32


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

    def set_up_stacks(self, rows: int, width: int, num_pieces: int, rank: int, like: Tensor) -> None:
        slots, device = len(self.pieces), like.device
        self.stacks = LowRankStacks(
            torch.zeros((slots, num_pieces, rank, width), dtype=like.dtype, device=device),
            torch.zeros((slots, rows, rank), dtype=like.dtype, device=device),
            torch.zeros((slots, num_pieces, 2), dtype=torch.int32, device=device),
            torch.zeros((slots, num_pieces), dtype=torch.float32, device=device),
        )

    def put(self, slot: int, pieces: tuple[LowRankPiece, ...]) -> None:
        """What was in the slot is gone."""
        if self.stacks is None:
            self.pieces[slot - 1] = pieces
            if self.form is not None:
                self.form.put(slot, pieces)
            return
        a, b, spans, scales = (stack[slot - 1] for stack in self.stacks)
        if self.pieces[slot - 1]:
            b.zero_()
        placed = []
        for number in range(spans.shape[0]):
            if number >= len(pieces):
                spans[number].zero_()
                continue
            piece = pieces[number]
            rank = piece.a.shape[0]
            a[number].zero_()
            a[number, :rank].copy_(piece.a)
            b[piece.start : piece.stop, :rank].copy_(piece.b)
            spans[number].copy_(torch.tensor((piece.start, piece.stop), dtype=torch.int32))
            scales[number].fill_(piece.scale)
            placed.append(piece._replace(a=a[number, :rank], b=b[piece.start : piece.stop, :rank]))
        self.pieces[slot - 1] = tuple(placed)


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
