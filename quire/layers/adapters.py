"""Adapters of a model's layers: which slots the step under way uses, and what each layer has in every slot.

A model without adapters has none of this. `attach` (places.py) gives every Linear, the experts of mixtures, the
embedding and the head their slots; the decoder says at the start of a step which rows have which slot (`StepAdapters`),
and the layers add what they add. The head, which sees some rows of a step, is told the slots of those.
Must not know: files, names of adapters, why a slot is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire.ops.linear import linear
from quire.ops.lora import (
    AdapterRows,
    AddedLowRank,
    LowRank,
    LowRankPiece,
    SomeRows,
    TablePiece,
    add_low_rank,
    add_pieces,
    most_columns,
)
from quire.ops.op import Kernels
from quire.quant.experts import StoredExperts

if TYPE_CHECKING:
    from quire.layers.linear import Linear


class StepAdapters:
    """Shared by all layers of a model; set by the decoder at the start of every step."""

    __slots__ = ("by_slot", "every_layer", "rows", "version")

    def __init__(self) -> None:
        self.rows: AdapterRows | None = None  # None: no row has an adapter
        # The same, for what goes through the slots of a step one by one; None too in a step that is captured, whose
        # rows have other slots at every replay.
        self.by_slot: AdapterRows | None = None
        self.version = 0  # changes whenever an adapter is the first one to change some Linear
        self.every_layer = False  # trial steps: as if adapters changed every Linear

    def begin(self, index: Tensor | None, *, is_captured: bool = False) -> None:
        self.rows = None if index is None else AdapterRows(index)
        self.by_slot = None if is_captured else self.rows


class LinearAdapters:
    """What adapters add to one Linear."""

    def __init__(
        self, layer: Linear, step: StepAdapters, num_slots: int, rank: int, like: Tensor, kernels: Kernels
    ) -> None:
        self.step, self.low = step, LowRank(num_slots, like.dtype)
        self.is_used = False  # some slot has something here
        self.was_used = False  # the same, now or before: what is captured once stays good when slots change
        if kernels.device.type != "cpu":
            as_columns = num_slots * rank <= kernels.of(most_columns)()
            self.low.set_up_stacks(layer.parts.values(), layer.in_size, rank, like, as_columns=as_columns)
        self._add = kernels.of(add_low_rank)

    def put(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        if pieces or self.low.pieces[slot - 1]:
            self.low.put(slot, tuple(pieces))
            self.is_used = any(self.low.pieces)
            if self.is_used and not self.was_used:
                self.was_used = True
                self.step.version += 1

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        added = self.added(len(x))
        return y if added is None else self._add(y, x, *added)

    def added(self, num_rows: int) -> AddedLowRank | None:
        """What is to be added to this many rows in the step under way; None: nothing."""
        rows = self.step.rows
        if rows is None or not (self.was_used or self.step.every_layer):
            return None
        if num_rows != len(rows.index):
            if not self.was_used:
                return None  # a trial of layers that no adapter has changed
            raise RuntimeError(
                f"a layer has {num_rows} rows in a step of {len(rows.index)}: adapters cannot be matched"
            )
        return AddedLowRank(rows, self.low)

    def merged(self, weight: Tensor, slot: int) -> Tensor:
        """A copy of the weight [rows, width] with what the slot's adapter adds; itself, where it adds nothing."""
        pieces = self.low.pieces[slot - 1]
        if not pieces:
            return weight
        weight = weight.clone()
        for start, stop, a, b, scale in pieces:
            weight[start:stop] += (torch.mm(b.float(), a.float()) * scale).to(weight.dtype)
        return weight


class HeadAdapters:
    """What adapters add to the logits. One matrix with as many rows as there are tokens: nothing is reserved for it."""

    def __init__(self, num_slots: int, kernels: Kernels) -> None:
        self.slots: list[tuple[LowRankPiece, ...]] = [()] * num_slots
        self._linear, self._device = kernels.of(linear), kernels.device

    def put(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        self.slots[slot - 1] = tuple(piece.on(self._device) for piece in pieces)

    def add(self, hidden: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        """`slots` [S] are those of the rows of `hidden`."""
        if any(self.slots):
            for slot, some in AdapterRows(slots).groups:
                if pieces := self.slots[slot - 1]:
                    add_pieces(logits, hidden[some], some, pieces, self._linear)
        return logits


class TableAdapters:
    """What adapters add to the vectors of an embedding."""

    def __init__(self, step: StepAdapters, num_slots: int, kernels: Kernels) -> None:
        self.step = step
        self.slots: list[TablePiece | None] = [None] * num_slots
        self._linear, self._device = kernels.of(linear), kernels.device

    def put(self, slot: int, piece: TablePiece | None) -> None:
        self.slots[slot - 1] = None if piece is None else piece.on(self._device)

    def add(self, index: Tensor, x: Tensor) -> Tensor:
        """x [T, width] are rows of the table, which `index` [T] names."""
        rows = self.step.by_slot
        if rows is None or not any(self.slots):
            return x
        for slot, some in rows.groups:
            if (piece := self.slots[slot - 1]) is not None:
                x[some] += self._linear(piece.rows[index[some]], piece.b) * piece.scale
        return x


class ExpertPieces(NamedTuple):
    """What one adapter adds to the two matrices of one expert."""

    up: tuple[LowRankPiece, ...] = ()
    down: tuple[LowRankPiece, ...] = ()


class ExpertAdapters:
    """What adapters add to the experts of a mixture. Rows of a slot that has something here are computed apart, expert
    by expert: what is added before the activation cannot be added afterwards."""

    def __init__(self, stored: StoredExperts, step: StepAdapters, num_slots: int, kernels: Kernels) -> None:
        self.stored, self.step = stored, step
        self.slots: list[dict[int, ExpertPieces]] = [{}] * num_slots  # by expert
        self._linear, self._device = kernels.of(linear), kernels.device

    def put(self, slot: int, pieces: dict[int, ExpertPieces]) -> None:
        self.slots[slot - 1] = {
            expert: ExpertPieces(*(tuple(piece.on(self._device) for piece in side) for side in own))
            for expert, own in pieces.items()
        }

    def groups(self, num_rows: int) -> list[tuple[int, SomeRows]]:
        """Slots of this step that have something here, with their rows: one or several for each row of the step."""
        rows = self.step.by_slot
        if rows is None or not any(self.slots):
            return []
        count, rest = divmod(num_rows, len(rows.index))
        if rest or not count:
            raise RuntimeError(f"experts have {num_rows} rows in a step of {len(rows.index)}")
        return [(slot, some) for slot, some in rows.repeated(count).groups if self.slots[slot - 1]]

    def multiply(self, slot: int, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Sum over a token's experts of weight * expert(x), for rows that all have this slot."""
        pieces, total = self.slots[slot - 1], torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in index.unique().tolist():
            tokens, choices = (index == expert).nonzero(as_tuple=True)
            own, every = pieces.get(expert, ExpertPieces()), slice(None)
            h = x[tokens]
            up = self.stored.multiply_up(expert, h)
            if own.up:
                add_pieces(up, h, every, own.up, self._linear)
            h = self.stored.shape.act(up)
            down = self.stored.multiply_down(expert, h)
            if own.down:
                add_pieces(down, h, every, own.down, self._linear)
            total.index_add_(0, tokens, down.float() * weights[tokens, choices, None].float())
        return total.to(x.dtype)
