"""Adapters of a model's layers: which slots the step under way uses, and what each layer has in every slot.

A model without adapters has none of this. `attach` (places.py) gives every Linear, the experts of mixtures, the
embedding and the head their slots; the decoder says at the start of a step which rows have which slot (`StepAdapters`),
and the layers add what they add. The head, which sees some rows of a step, is told the slots of those. Where ranks
divide A and B of a matrix (`AdapterShards`), its layer adds them itself, and nothing else reads them.
Must not know: files, names of adapters, why a slot is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from quire.ops.lora_shards import (
    AdapterShards,
    ShardedStacks,
    add_results,
    add_sharded_pieces,
    add_sharded_stacks,
    no_inputs,
    put_inputs,
)
from quire.ops.op import Kernels
from quire.quant.experts import StoredExperts

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.moe import ExpertShare
    from quire.quant.shard import ExpertSpread

_EVERY = slice(None)


class StepAdapters:
    """Shared by all layers of a model; set by the decoder at the start of every step."""

    __slots__ = ("by_slot", "every_layer", "is_sharded", "rows", "version")

    def __init__(self, *, is_sharded: bool = False) -> None:
        self.is_sharded = is_sharded  # some layers sum over ranks between A and B: each has to add them itself
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
        self, layer: Linear, step: StepAdapters, num_slots: int, rank: int, like: Tensor, kernels: Kernels,
        shards: AdapterShards | None = None,  # None: this rank has all that it needs of A and B
    ) -> None:  # fmt: skip
        self.step, self.low, self.shards = step, LowRank(num_slots, like.dtype), shards
        self.is_used = False  # some slot has something here
        self.was_used = False  # the same, now or before: what is captured once stays good when slots change
        self.sharded_stacks: ShardedStacks | None = None  # None: there are no shards, or steps may wait for the device
        self._linear, self._add = kernels.of(linear), kernels.of(add_low_rank)
        if kernels.device.type != "cpu" and shards is not None:
            self.set_up_shards(layer, rank, like)
        elif kernels.device.type != "cpu":
            as_columns = num_slots * rank <= kernels.of(most_columns)()
            self.low.set_up_stacks(layer.parts.values(), layer.in_size, rank, like, as_columns=as_columns)

    def set_up_shards(self, layer: Linear, rank: int, like: Tensor) -> None:
        """Room for all slots."""
        assert self.shards is not None
        self.sharded_stacks = ShardedStacks(
            len(self.low.pieces), layer.parts.values(), layer.in_size, rank, self.shards, like,
            by_columns=layer.is_summed,
        )  # fmt: skip

    def put(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        if pieces or self.low.pieces[slot - 1]:
            self.low.put(slot, tuple(pieces))
            if self.sharded_stacks is not None:
                self.sharded_stacks.put(slot, pieces)
            self.is_used = any(self.low.pieces)
            if self.is_used and not self.was_used:
                self.was_used = True
                self.step.version += 1

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        added = self.added(len(x))
        if added is None:
            return y
        if self.shards is None:
            return self._add(y, x, *added)
        if self.sharded_stacks is not None:
            add_sharded_stacks(y, x, added.rows.index, self.sharded_stacks, self._linear)
        else:
            groups = [(some, self.low.pieces[slot - 1]) for slot, some in added.rows.groups]
            add_sharded_pieces(y, x, groups, self.shards, self._linear)
        return y

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

    def __init__(self, num_slots: int, kernels: Kernels, shards: AdapterShards | None = None) -> None:
        self.slots: list[tuple[LowRankPiece, ...]] = [()] * num_slots
        self._linear, self._device, self._shards = kernels.of(linear), kernels.device, shards

    def put(self, slot: int, pieces: Sequence[LowRankPiece]) -> None:
        self.slots[slot - 1] = tuple(piece.on(self._device) for piece in pieces)

    def add(self, hidden: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        """`slots` [S] are those of the rows of `hidden`."""
        if any(self.slots):
            groups = [(some, self.slots[slot - 1]) for slot, some in AdapterRows(slots).groups]
            if self._shards is not None:
                add_sharded_pieces(logits, hidden, groups, self._shards, self._linear)
                return logits
            for some, pieces in groups:
                if pieces:
                    add_pieces(logits, hidden[some], some, pieces, self._linear)
        return logits


class TableAdapters:
    """What adapters add to the vectors of an embedding."""

    def __init__(self, step: StepAdapters, num_slots: int, kernels: Kernels, shards: AdapterShards | None) -> None:
        self.step = step
        self.is_sharded = shards is not None  # each rank has some of an adapter's ranks, and adds to its own part
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
            if (piece := self.slots[slot - 1]) is not None and piece.b.shape[1]:
                x[some] += self._linear(piece.rows[index[some]], piece.b) * piece.scale
        return x


class ExpertPieces(NamedTuple):
    """What one adapter adds to the two matrices of one expert."""

    up: tuple[LowRankPiece, ...] = ()
    down: tuple[LowRankPiece, ...] = ()


class _Chosen(NamedTuple):
    """Which rows have chosen an expert, and as which of their choices."""

    place: int  # where it is stored
    tokens: Tensor
    choices: Tensor


class ExpertAdapters:
    """What adapters add to the experts of a mixture. Rows of a slot that has something here are computed apart, expert
    by expert: what is added before the activation cannot be added afterwards. Where engines share experts, their slots
    follow each other: those of engine e are numbered from e * num_slots + 1."""

    def __init__(
        self, stored: StoredExperts, step: StepAdapters, num_slots: int, kernels: Kernels,
        shards: AdapterShards | None = None, share: ExpertShare | None = None, spread: ExpertSpread | None = None,
    ) -> None:  # fmt: skip
        """`share`: the experts that this rank has whole; None: it has some entries of each, or all. `spread`: the
        engines whose tokens come here; None: there is one."""
        self.stored, self.step, self._share = stored, step, share
        engines, engine = (1, 0) if spread is None else (len(spread.peers), spread.engine)
        self._num_slots, self._before = num_slots, engine * num_slots  # slots of engines that come before this one
        self.slots: list[dict[int, ExpertPieces]] = [{}] * (engines * num_slots)  # by expert; those that are here
        self._read: list[dict[int, ExpertPieces]] = [{}] * (engines * num_slots)  # of experts that may come here, too
        self._linear, self._device, self._shards = kernels.of(linear), kernels.device, shards

    def put(self, slot: int, pieces: dict[int, ExpertPieces]) -> None:
        """Into a slot of this engine."""
        self._put(self._before + slot, pieces)

    def put_of(self, engine: int, slot: int, pieces: dict[int, ExpertPieces]) -> None:
        """Into a slot of any engine."""
        self._put(engine * self._num_slots + slot, pieces)

    def _put(self, slot: int, pieces: dict[int, ExpertPieces]) -> None:
        if self._share is not None and self._share.moves:
            self._read[slot - 1] = pieces
        self._hold(slot, pieces)

    def moved(self) -> None:
        """Other experts are here than before."""
        for slot, pieces in enumerate(self._read, 1):
            self._hold(slot, pieces)

    def _hold(self, slot: int, pieces: dict[int, ExpertPieces]) -> None:
        own = pieces if self._share is None else {e: pieces[e] for e in self._share.own if e in pieces}
        self.slots[slot - 1] = {
            expert: ExpertPieces(*(tuple(piece.on(self._device) for piece in side) for side in both))
            for expert, both in own.items()
        }

    def rows(self, num_rows: int) -> AdapterRows | None:
        """Of this engine's step: one or several for each row of the step. None: no row has an adapter."""
        rows = self.step.by_slot
        if rows is None or not num_rows:  # without rows it is a step of other engines, and `step` tells of one before
            return None
        count, rest = divmod(num_rows, len(rows.index))
        if rest or not count:
            raise RuntimeError(f"experts have {num_rows} rows in a step of {len(rows.index)}")
        return rows.repeated(count)

    def slots_of(self, num_rows: int) -> Tensor:
        """[num_rows, 1] int32: the slots of this engine's rows among those of all engines; 0: no adapter."""
        rows = self.rows(num_rows)
        if rows is None:
            return torch.zeros((num_rows, 1), dtype=torch.int32, device=self._device)
        index = rows.index[:, None]
        return torch.where(index > 0, index + self._before, index)

    def groups(self, rows: AdapterRows | None) -> list[tuple[int, SomeRows]]:
        """The slots that have something here, with their rows."""
        if rows is None or not any(self.slots):
            return []
        return [(slot, some) for slot, some in rows.groups if self.slots[slot - 1]]

    def multiply(self, slot: int, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Sum over a token's experts of weight * expert(x), for rows that all have this slot. `index` [rows, choices]:
        where these experts are stored; -1: on another rank."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        places = [place for place in index.unique().tolist() if place >= 0]
        chosen = [_Chosen(place, *(index == place).nonzero(as_tuple=True)) for place in places]
        if self._shards is not None:
            self._multiply_sharded(slot, x, weights, chosen, self._shards, total)
            return total.to(x.dtype)
        for place, tokens, choices in chosen:
            own = self._pieces_at(slot, place)
            h = x[tokens]
            up = self.stored.multiply_up(place, h)
            if own.up:
                add_pieces(up, h, _EVERY, own.up, self._linear)
            h = self.stored.shape.act(up)
            down = self.stored.multiply_down(place, h)
            if own.down:
                add_pieces(down, h, _EVERY, own.down, self._linear)
            total.index_add_(0, tokens, down.float() * weights[tokens, choices, None].float())
        return total.to(x.dtype)

    def _multiply_sharded(
        self, slot: int, x: Tensor, weights: Tensor, chosen: Sequence[_Chosen], shards: AdapterShards, total: Tensor
    ) -> None:
        """All experts together, so that there are two sums over ranks, which have the same experts."""
        pieces = [self._pieces_at(slot, place) for place, _, _ in chosen]
        sums = self._summed(chosen, (x[tokens] for _, tokens, _ in chosen), [own.up for own in pieces], shards)
        between = []
        for (place, tokens, _), h, own in zip(chosen, sums, pieces, strict=True):
            up = self.stored.multiply_up(place, x[tokens])
            add_results(up, h, _EVERY, own.up, self._linear)
            between.append(self.stored.shape.act(up))
        sums = self._summed(chosen, between, [own.down for own in pieces], shards)
        for (place, tokens, choices), h, own, x_down in zip(chosen, sums, pieces, between, strict=True):
            down = self.stored.multiply_down(place, x_down)
            add_results(down, h, _EVERY, own.down, self._linear)
            total.index_add_(0, tokens, down.float() * weights[tokens, choices, None].float())

    def _summed(
        self, chosen: Sequence[_Chosen], inputs: Iterable[Tensor], pieces: Sequence[Sequence[LowRankPiece]],
        shards: AdapterShards,
    ) -> Sequence[Tensor]:  # fmt: skip
        """Of each expert x A^T, x being its input."""
        counts = [len(tokens) for _, tokens, _ in chosen]
        h = no_inputs(sum(counts), pieces, self._device)
        if h is None:
            return [torch.empty((count, 0)) for count in counts]
        for own, x, some in zip(h.split(counts), inputs, pieces, strict=True):
            put_inputs(own, x, _EVERY, some, shards, self._linear)
        return shards.reduce(h).split(counts)

    def _pieces_at(self, slot: int, place: int) -> ExpertPieces:
        return self.slots[slot - 1].get(place if self._share is None else self._share.own[place], ExpertPieces())
