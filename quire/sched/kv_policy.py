"""What a layer kind needs of earlier blocks: one policy per group, and two questions it answers.

What is a hit?  A prefix of n tokens can be reused when the blocks still needed at n are all there.
What is needed? `first_needed(n)`: queries at position n and later read no block before this one.

    full     reads all:  [0 ......................... n)
    window   the last w: [n-w+1 .. n)      older blocks are given back
    chunk    its chunk:  [n - n % w .. n)
    state    one block:  the one that ends at or holds position n-1. A kernel writes, into every block a grant
             touches, the state after the last position of that block it computed; so a full block is a snapshot at
             its end, and the last block is the running state
    cross    an encoder's output, allocated once at join and filled by the row's first grant; never a hit, never a limit
Must not know: requests, the pool's bookkeeping, or memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.schema.kv import KVGroup, KVKind


class KVPolicy(Protocol):
    block_size: int

    def first_needed(self, computed: int) -> int:
        """Index of the first block that a query at `computed` or later may read."""

    def longest(self, names: Sequence[bytes], blocks_by_name: dict[bytes, int], most: int) -> int:
        """The largest n <= most such that n blocks can be reused. names[i] is the hash at the end of block i."""

    def peak(self, tokens: int, chunk: int) -> int:
        """Blocks one request of `tokens` holds at most when a step computes up to `chunk` of them."""


class Full:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def first_needed(self, computed: int) -> int:
        return 0

    def longest(self, names: Sequence[bytes], blocks_by_name: dict[bytes, int], most: int) -> int:
        for first in range(0, most, 64):
            blocks = [*map(blocks_by_name.get, names[first : min(first + 64, most)])]
            if None in blocks:
                return first + blocks.index(None)
        return most

    def peak(self, tokens: int, chunk: int) -> int:
        return -(-tokens // self.block_size)


class Window:
    """Sliding window; also the general case for kinds that need only a tail."""

    def __init__(self, block_size: int, window: int) -> None:
        self.block_size, self.window = block_size, window

    def first_needed(self, computed: int) -> int:
        return max(0, computed - self.window + 1) // self.block_size

    def longest(self, names: Sequence[bytes], blocks_by_name: dict[bytes, int], most: int) -> int:
        """Walk down from the end. A missing block rules out every length that still needs it, so jump below it."""
        end = index = most
        while index > self.first_needed(end * self.block_size):
            index -= 1
            if names[index] not in blocks_by_name:
                end = index
        return end

    def peak(self, tokens: int, chunk: int) -> int:
        """Blocks are given back when `computed` passes a block end, so up to a block late."""
        span = min(chunk, tokens) + self.window + self.block_size - 2
        return min(-(-tokens // self.block_size), -(-span // self.block_size) + 1)


class ChunkedLocal(Window):
    """Chunked local attention: a query reads its own chunk only."""

    def first_needed(self, computed: int) -> int:
        return computed // self.window * self.window // self.block_size


class State(Window):
    """A recurrent state."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, 2)

    def first_needed(self, computed: int) -> int:
        return max(0, computed - 1) // self.block_size


class Cross:
    def __init__(self, block_size: int, longest_input: int) -> None:
        self.block_size, self.longest_input = block_size, longest_input

    def first_needed(self, computed: int) -> int:
        return 0

    def longest(self, names: Sequence[bytes], blocks_by_name: dict[bytes, int], most: int) -> int:
        return most

    def peak(self, tokens: int, chunk: int) -> int:
        return -(-self.longest_input // self.block_size)


def make_policy(group: KVGroup) -> KVPolicy:
    match group.kind:
        case KVKind.FULL:
            return Full(group.block_size)
        case KVKind.WINDOW:
            return Window(group.block_size, group.window)
        case KVKind.CHUNK:
            return ChunkedLocal(group.block_size, group.window)
        case KVKind.STATE:
            return State(group.block_size)
        case KVKind.CROSS:
            return Cross(group.block_size, group.window)
