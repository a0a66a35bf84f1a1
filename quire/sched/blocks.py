"""The block pool: which KV blocks are free, how many hold each, and which hold a known prefix. All O(1) per block.

    blank ── take ──▶ held (refs > 0) ── drop ──▶ blank          no name: taken again first, then what never was
                        ▲      │ name                            cached: oldest evicted when blank is empty
                        └share─┴───────── drop ──▶ cached
One pool for all groups: a block belongs to one group while it is held or named.
Must not know: requests, tokens, policies. A name is a prefix hash; each group has its own map of names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.sched.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, Event


class BlockPool:
    def __init__(self, num_blocks: int, num_groups: int, *, events: bool = False) -> None:
        self.num_blocks = num_blocks
        self.blank: list[int] = []  # free again, no name; a stack
        self.num_touched = 0  # blocks from this one on were never taken: free, no name
        self.cached: OrderedDict[int, None] = OrderedDict()  # free, named; oldest first
        self.refs = [0] * num_blocks
        self.names: list[bytes | None] = [None] * num_blocks
        self.homes = [0] * num_blocks  # group whose map holds the name
        self.named: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.events: list[Event] | None = [] if events else None

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached) + self.num_blocks - self.num_touched

    def take(self, count: int) -> tuple[int, ...]:
        """`count` blocks with undefined content; the caller knows they are there."""
        blank, refs = self.blank, self.refs
        if len(blank) < count:
            first, self.num_touched = self.num_touched, min(self.num_touched + count - len(blank), self.num_blocks)
            blank[:0] = range(self.num_touched - 1, first - 1, -1)
        while len(blank) < count:
            blank.append(self._evict())
        taken = tuple([blank.pop() for _ in range(count)])
        for block in taken:
            refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder each; -1 stands for no block."""
        refs, cached = self.refs, self.cached
        for block in blocks:
            if block >= 0:
                if refs[block] == 0:
                    del cached[block]
                refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One holder less each; given in the order in which they may be evicted."""
        refs, names = self.refs, self.names
        for block in blocks:
            if block >= 0:
                refs[block] -= 1
                if refs[block] == 0:
                    if names[block] is None:
                        self.blank.append(block)
                    else:
                        self.cached[block] = None

    def name(self, group: int, block: int, name: bytes) -> bool:
        """Let others find it. False when another block already has this content: it stays the one."""
        named = self.named[group]
        if name in named:
            return False
        named[name] = block
        self.names[block] = name
        self.homes[block] = group
        return True

    def rename(self, block: int, target: int) -> None:
        """The name of one block passes to another, which has none and the same content."""
        name, group = self.names[block], self.homes[block]
        assert name is not None and self.names[target] is None
        self.named[group][name] = target
        self.names[block], self.names[target] = None, name
        self.homes[target] = group

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody shall find these again; who holds them goes on."""
        for block in blocks:
            if block >= 0 and self.names[block] is not None:
                self._unname(block)

    def clear(self) -> None:
        """Forget every name; nothing may be held."""
        assert self.num_free == self.num_blocks, "names can only be forgotten while no block is held"
        self.blank.extend(self.cached)
        self.cached.clear()
        self.names = [None] * self.num_blocks
        for named in self.named:
            named.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def _evict(self) -> int:
        block, _ = self.cached.popitem(last=False)
        self._unname(block)
        return block

    def _unname(self, block: int) -> None:
        name, group = self.names[block], self.homes[block]
        assert name is not None
        del self.named[group][name]
        self.names[block] = None
        if self.events is not None:
            self.events.append(BlockRemoved([name], MEDIUM_GPU, group))
