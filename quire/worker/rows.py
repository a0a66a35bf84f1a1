"""The persistent batch: one row per live request, rows 0 to n-1 without holes, changed by difference.

Owns: which request has which row, the rows' tokens (on the device: the sampler writes them, the next step reads them)
and one block table per KV group. In: StepPlan.left, joined and the grants' new blocks. Out: what changed, for the
sampler and for custom processors. Nothing is allocated after the start, whatever comes and goes.
Where the rows live on another device, their tables are mirrored there: `take_changes` says what to write.

    left frees rows; joined takes the lowest free ones first, then grows the batch; holes that remain are filled from
    the end, the highest row into the lowest hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.ops.copy import uploader
from quire.schema.kv import KVGroup, KVKind
from quire.schema.step import Grant, NewRow, RowToken, StepPlan
from quire.worker.row_extras import RowExtras
from quire.worker.staging import align


@dataclass(frozen=True)
class RowChanges:
    """To be followed in this order. An added row may be one that was left (its request is replaced, not removed)."""

    removed: list[int] = field(default_factory=list)
    added: list[tuple[int, NewRow]] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)  # (from, to)


class BlockTable:
    """The blocks of every row in one KV group; -1 where a row has none."""

    def __init__(self, group: KVGroup, max_rows: int, max_tokens: int) -> None:
        self.group = group
        self.spare = -1  # first block for states after drafts (worker/draft_states.py); -1: there are none
        self.host = np.full((max_rows, -(-longest_of(group, max_tokens) // group.block_size)), -1, np.int32)
        self.changed: list[tuple[int, int, int]] | None = None  # (row, from, to) since the last look; None: no mirror
        self._used = [0] * max_rows

    def append(self, row: int, blocks: Sequence[int] | np.ndarray) -> None:
        used = self._used[row]
        end = used + len(blocks)
        if end > self.host.shape[1]:
            raise RuntimeError(
                f"row {row} gets {end} blocks of a {self.group.kind} group, {self.host.shape[1]} at most"
            )
        self.host[row, used:end] = blocks
        self._used[row] = end
        if self.changed is not None and end > used:
            self.changed.append((row, used, end))

    def clear(self, row: int) -> None:
        self.host[row, : self._used[row]] = -1
        self._used[row] = 0

    def move(self, source: int, target: int) -> None:
        self.clear(target)
        self.append(target, self.host[source, : self._used[source]])
        self.clear(source)


def longest_of(group: KVGroup, max_tokens: int) -> int:
    """Tokens that a row may have in this group: its own text, or an encoder's output where that has a limit."""
    return group.window if group.kind is KVKind.CROSS and group.window else max_tokens


class Mirror:
    """The block tables on the device, in one tensor; each has a row more than there are requests, all -1, for padding.

    Entries past a row's own blocks are left over from other requests: nothing may read them.
    """

    def __init__(self, tables: Sequence[BlockTable], device: torch.device) -> None:
        self._hosts = tables
        shapes = [(table.host.shape[0] + 1, table.host.shape[1]) for table in tables]
        sizes = [align(rows * width) for rows, width in shapes]
        self.flat = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.tables = [
            self.flat[start : start + rows * width].view(rows, width)
            for start, (rows, width) in zip(self._starts, shapes, strict=True)
        ]
        for table in tables:
            table.changed = []

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """(places in `flat` int64, values int32) to write; a place may come twice, with the same value."""
        places, values = [], []
        for table, start in zip(self._hosts, self._starts, strict=True):
            if not table.changed:
                continue
            row, first, last = np.array(table.changed, np.int64).T
            table.changed.clear()
            counts = last - first
            rows = np.repeat(row, counts)
            columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - first, counts)
            places.append(start + rows * table.host.shape[1] + columns)
            values.append(table.host[rows, columns])
        if not places:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return np.concatenate(places), np.concatenate(values)


class Rows:
    def __init__(self, groups: Sequence[KVGroup], max_rows: int, max_len: int, device: torch.device) -> None:
        width = max_len + 1  # a token sampled ahead of a stop that is not known yet may lie one past the end
        # one row more than requests: padding of a step reads and writes there
        if device.type == "cpu":  # numpy's zeros cost nothing until they are written, torch's are written at once
            self.tokens: Tensor = torch.from_numpy(np.zeros((max_rows + 1, width), np.int32))
        else:
            self.tokens = torch.zeros((max_rows + 1, width), dtype=torch.int32, device=device)
        self._upload = uploader(device)
        self.lengths = np.zeros(max_rows, np.int64)  # tokens in a row, those only the device knows included
        self.epochs = np.zeros(max_rows, np.int64)
        self.encoder_lens = np.zeros(max_rows, np.int64)  # tokens of an encoder's output
        self.is_encoded = np.zeros(max_rows, np.bool_)  # a step has filled the blocks of cross-attention groups
        self.has_cross = any(group.kind is KVKind.CROSS for group in groups)
        self.encoder_keys: dict[str, tuple[str, ...]] = {}  # of a request: the vectors that its first step reads
        self.adapters = np.zeros(max_rows, np.int32)  # 0: none
        self.has_adapters = False
        self.extras: RowExtras | None = None  # until a request brings some
        self.encoded: dict[str, Tensor] = {}  # vectors of media by key; filled and freed by whoever encodes them
        self.tables = [BlockTable(group, max_rows, width) for group in groups]
        self.row_of: dict[str, int] = {}
        self.request_of: list[str] = []  # row -> request id
        self.max_rows = max_rows

    def make_extras(self) -> RowExtras:
        """What requests bring beside tokens is put here, before their first step."""
        if self.extras is None:
            self.extras = RowExtras(self.encoded)
        return self.extras

    @property
    def num_rows(self) -> int:
        return len(self.request_of)

    def write(self, sampled: Sequence[RowToken]) -> None:
        """Tokens that rows have got on another stage."""
        known = [(self.row_of[new.request_id], new.position, new.token_id) for new in sampled
                 if new.request_id in self.row_of]  # fmt: skip
        if known:
            self.put(known)

    def put(self, tokens: Sequence[tuple[int, int, int]]) -> None:
        """Row, position and token of each."""
        rows, positions, token_ids = self._upload(np.array(tokens, np.int64).T.copy())
        self.tokens[rows, positions] = token_ids.to(self.tokens.dtype)

    def apply(self, plan: StepPlan) -> RowChanges:
        changes = RowChanges()
        if plan.left or plan.joined:
            changes = self._change(plan)
            self.has_adapters = bool(self.adapters.any())
        self._append_blocks(plan.grants)
        return changes

    def _change(self, plan: StepPlan) -> RowChanges:
        changes = RowChanges()
        if self.extras is not None:
            for name in plan.left:
                self.extras.forget(name)
            self.extras = self.extras or None
        if self.has_cross:
            for name in plan.left:
                self.encoder_keys.pop(name, None)
        holes = sorted((self.row_of.pop(name) for name in plan.left if name in self.row_of), reverse=True)
        for new in plan.joined:
            if new.request_id in self.row_of:
                raise RuntimeError(f"request {new.request_id!r} joins a batch it has not left")
            row = holes.pop() if holes else self._grow()
            self._fill(row, new)
            changes.added.append((row, new))
        changes.removed.extend(reversed(holes))
        for row in holes:
            self._clear(row)
        while holes:  # falling: the highest first
            last = self.num_rows - 1
            name = self.request_of.pop()
            if last == holes[0]:
                del holes[0]
                continue
            hole = holes.pop()
            changes.moved.append((last, hole))
            self._move(name, last, hole)
        return changes

    def _grow(self) -> int:
        if self.num_rows == self.max_rows:
            raise RuntimeError(f"a plan joins more requests than there are rows ({self.max_rows})")
        self.request_of.append("")
        return self.num_rows - 1

    def _fill(self, row: int, new: NewRow) -> None:
        self._clear(row)
        self.row_of[new.request_id] = row
        self.request_of[row] = new.request_id
        self.epochs[row] = new.epoch
        self.encoder_lens[row], self.is_encoded[row] = new.num_encoder_tokens, False
        if self.has_cross:
            self.encoder_keys[new.request_id] = tuple(item.key for item in new.media)
        self.adapters[row] = new.lora_id
        count = len(new.token_ids)
        self.lengths[row] = count
        self.tokens[row, :count] = self._upload(np.fromiter(new.token_ids, np.int32, count))
        for table, blocks in zip(self.tables, new.blocks or ((),) * len(self.tables), strict=True):
            table.append(row, blocks)

    def _clear(self, row: int) -> None:
        self.lengths[row] = self.adapters[row] = 0
        for table in self.tables:
            table.clear(row)

    def _move(self, name: str, source: int, target: int) -> None:
        self.row_of[name] = target
        self.request_of[target] = name
        count = int(self.lengths[source])
        self.tokens[target, :count] = self.tokens[source, :count]
        for column in (self.lengths, self.epochs, self.encoder_lens, self.is_encoded, self.adapters):
            column[target] = column[source]
        for table in self.tables:
            table.move(source, target)
        self._clear(source)

    def _append_blocks(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            if grant.new_blocks:
                row = self.row_of[grant.request_id]
                for table, blocks in zip(self.tables, grant.new_blocks, strict=True):
                    if blocks:
                        table.append(row, blocks)
