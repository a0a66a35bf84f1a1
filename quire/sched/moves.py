"""BlockMoves: copies of KV blocks that the next plan carries, and what the prefix cache knows of them meanwhile.

    bring     a slot of other memory fills a block, which is found from the next plan on as if it had been computed
    save      a block that can be found is copied to a slot; where that happens after the forward pass, nobody may take
              the block before
    relocate  a block that nobody holds gets another place
Plans run in order, and moves in the order of their plan, so what was queued is true for whatever is planned later: a
block may even be taken again in the plan that carries its move. Whoever knows slots (an offloading tier, a connector)
calls these between plans. Must not know: what a slot is, or how a copy is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.schema.step import Direction, Move

if TYPE_CHECKING:
    from quire.sched.kv_cache import KVCache
    from quire.sched.request import Request


class BlockMoves:
    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.waiting: list[Move] = []
        self.pinned: list[int] = []  # blocks held until the plan that carries their move is made

    def take(self) -> tuple[Move, ...]:
        """For the plan just filled."""
        if not self.waiting:
            return ()
        moves, self.waiting = tuple(self.waiting), []
        self._unpin()
        return moves

    def unpin(self) -> bool:
        """Blocks are wanted: what was to be saved after the next forward pass is saved before it. False: none was."""
        if not self.pinned:
            return False
        self.waiting = [Move(move.source, move.target, move.direction) for move in self.waiting]
        self._unpin()
        return True

    def clear(self) -> None:
        """Nothing of what was queued shall happen: the cache was reset."""
        self.waiting = []
        self._unpin()

    def bring(self, request: Request, group: int, index: int, slot: int) -> bool:
        """Block `index` of the request's prefix comes from a slot. False: it can be found already, or none is free."""
        kv, pool = self._kv, self._kv.pool
        name = kv.name_of(request, group, index)
        if name in pool.named[group] or not pool.num_free:
            return False
        (block,) = taken = pool.take(1)
        pool.name(group, block, name)
        if pool.events is not None:
            kv.record(request, group, [index])
        pool.drop(taken)
        self.waiting.append(Move(slot, block, Direction.IN))
        return True

    def save(self, group: int, name: bytes, slot: int, *, after: bool = False) -> bool:
        """The block of this name goes to a slot too. False: there is none."""
        pool = self._kv.pool
        block = pool.named[group].get(name)
        if block is None:
            return False
        if after:
            pool.share((block,))
            self.pinned.append(block)
        self.waiting.append(Move(block, slot, Direction.OUT, after))
        return True

    def relocate(self, group: int, name: bytes) -> bool:
        """The block of this name moves to another place. False: there is none, somebody holds it, or none is free."""
        pool = self._kv.pool
        block = pool.named[group].get(name)
        if block is None or pool.refs[block] or pool.num_free < 2:
            return False
        pool.share((block,))  # lest it be taken itself
        (target,) = taken = pool.take(1)
        pool.rename(block, target)
        pool.drop((block,))
        pool.drop(taken)
        self.waiting.append(Move(block, target))
        return True

    def _unpin(self) -> None:
        if self.pinned:
            self._kv.pool.drop(self.pinned)
            self.pinned = []
