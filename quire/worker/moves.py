"""BlockCopies: a plan's moves, run over the KV memory in their order.

Slots are pages of host memory; there are none until they are reserved, and moves in or out are refused. Copies are
launched in the order of the device's stream, as steps are. Must not know: whose blocks these are, or why they move.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.schema.errors import NotBuiltError
from quire.schema.step import Direction, Move
from quire.worker.kv_memory import KVMemory


class BlockCopies:
    def __init__(self, kv: KVMemory) -> None:
        self._kv = kv
        self.slots: Tensor | None = None  # uint8 [slots, block_bytes], on the host

    def reserve(self, num_slots: int) -> None:
        self.slots = self._kv.on_host(num_slots)

    def check(self, moves: Sequence[Move]) -> None:
        """Before anything of a plan is done: NotBuiltError if some move needs a slot that is not there."""
        num_slots = 0 if self.slots is None else len(self.slots)
        for move in moves:
            slot = {Direction.IN: move.source, Direction.OUT: move.target}.get(move.direction)
            if slot is not None and not 0 <= slot < num_slots:
                raise NotBuiltError(f"a plan moves a KV block {move.direction} by slot {slot}; there are {num_slots}")

    def run(self, moves: Sequence[Move], *, after: bool) -> None:
        """Those for before, or after, the forward pass. One by one: a later move may read what an earlier wrote."""
        for move in moves:
            if move.after is not after:
                continue
            if move.direction is Direction.WITHIN:
                self._kv.copy_within([move.source], [move.target])
                continue
            assert self.slots is not None
            if move.direction is Direction.IN:
                self._kv.copy_in([move.target], self.slots[move.source : move.source + 1])
            else:
                self._kv.copy_out([move.source], self.slots[move.target : move.target + 1])
