"""The KV cache of all requests: one pool of blocks, a policy per group, four verbs.

    match(request) -> Hit        the longest prefix that every group can serve; pure
    join / grow                  take the hit's blocks; then blocks up to a position
    commit(request)              name blocks whose tokens are known, give back those nobody will read
    release(request)             all blocks back, last first, so that the beginning of a prompt is evicted last
A table is a list of block ids per group, -1 where nothing is (any more). Blocks are given back only for positions whose
results are in (`computed`), so a step in flight never loses a block it reads, nor a draft its way back.

A block may be named as soon as its tokens are known and the grant that fills it stands: steps run in order, and within
a step a layer writes all its K/V before it attends. A state layer does not (it scans), so with one (`has_state`) blocks
of a step are named when its plan is complete. Must not know: order, gates, stop rules.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from quire.sched.blocks import BlockPool
from quire.sched.events import MEDIUM_GPU, BlockStored
from quire.sched.kv_policy import make_policy
from quire.sched.moves import BlockMoves
from quire.sched.prefix_hash import BlockHasher
from quire.schema.kv import KVKind, KVLayout

if TYPE_CHECKING:
    from quire.sched.request import Request

NEVER = 1 << 60
Tables = tuple[tuple[int, ...], ...]


class Holding:
    """What the cache keeps for one request: its tables, how many of their blocks are dealt with, its hashes."""

    __slots__ = ("hashes", "num_given_back", "num_named", "tables")

    def __init__(self) -> None:
        self.tables: list[list[int]] = []
        self.num_named: list[int] = []  # per group: blocks before this have been offered a name
        self.num_given_back: list[int] = []  # per group: blocks before this were given back, or never taken
        self.hashes: list[bytes] = []  # of its known tokens; outlives a preemption


class Hit(NamedTuple):
    length: int  # tokens
    rows: list[list[int]]  # per group


class KVCache:
    def __init__(
        self, layout: KVLayout, *, caching: bool, algorithm: str, events: bool, max_chunk: int, seed: bytes = b"",
        joins_media: bool = False,
    ) -> None:  # fmt: skip
        groups = layout.groups
        self.policies = [make_policy(group) for group in groups]
        self.pool = BlockPool(layout.num_blocks, len(groups), events=events)
        self.cross = [i for i, group in enumerate(groups) if group.kind is KVKind.CROSS]
        self.growing = [(i, group.block_size) for i, group in enumerate(groups) if group.kind is not KVKind.CROSS]
        self.tails = [i for i, group in enumerate(groups) if group.kind not in (KVKind.FULL, KVKind.CROSS)]
        self.has_state = any(group.kind is KVKind.STATE for group in groups)
        sizes = [size for _, size in self.growing]
        self.unit = math.gcd(*sizes) if sizes else 1  # tokens per hash
        self.align = math.lcm(*sizes) if sizes else 1  # a reused prefix ends at a block end in every group
        self.caching = caching and bool(sizes)
        self.hasher = BlockHasher(algorithm if self.caching else "sha256", self.unit, seed, joins_media=joins_media)
        self.max_chunk = max_chunk
        self.moves = BlockMoves(self)

    def match(self, request: Request) -> Hit:
        """At least the last known token is left to compute, so that one can be sampled."""
        if not self.caching:
            return Hit(0, [[] for _ in self.policies])
        empty: list[list[int]] = [[] for _ in self.policies]
        longest = (len(request.tokens) - 1) // self.align * self.align
        if not longest or not request.reads_cache:
            return Hit(0, empty)
        hashes = request.holding.hashes
        self.hasher.extend(hashes, request.tokens, len(request.tokens), request.source)
        length, agreed = longest, False
        while length and not agreed:
            agreed = True
            for group, size in self.growing:
                names = hashes if size == self.unit else hashes[size // self.unit - 1 :: size // self.unit]
                served = self.policies[group].longest(names, self.pool.named[group], length // size) * size
                if served < length:
                    length, agreed = served // self.align * self.align, False
        return Hit(length, self._rows(hashes, length)) if length else Hit(0, empty)

    def _rows(self, hashes: list[bytes], length: int) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in self.policies]
        for group, size in self.growing:
            step, named = size // self.unit, self.pool.named[group]
            first = self.policies[group].first_needed(length)
            rows[group] = [-1] * min(first, length // size)
            rows[group] += [named[name] for name in hashes[(first + 1) * step - 1 : length // self.unit : step]]
        return rows

    def need(self, request: Request, upto: int) -> int:
        """Blocks a running request lacks to hold `upto` tokens."""
        tables, lacking = request.holding.tables, 0
        for group, size in self.growing:
            lacking += max(0, -(-upto // size) - len(tables[group]))
        return lacking

    def need_to_join(self, request: Request, hit: Hit, upto: int, *, whole: bool) -> int:
        """Free blocks that joining takes to hold `upto` tokens; `whole`: to get through all its known tokens."""
        refs, known = self.pool.refs, len(request.tokens)
        lacking = sum(-(-num_encoder_tokens(request) // self.policies[g].block_size) for g in self.cross)
        for group, size in self.growing:
            row = hit.rows[group]
            there = row[row.count(-1) :]
            more = -(-upto // size) - len(row)
            if whole:
                more = max(more, self.policies[group].peak(known, self.max_chunk) - len(there))
            lacking += more + [refs[block] for block in there].count(0)
        return lacking

    def outstanding(self, request: Request, upto: int) -> int:
        """About how many more blocks a request at `upto` will take to get through its known tokens."""
        known, tables, more = len(request.tokens), request.holding.tables, 0
        if upto < known:
            for group, size in self.growing:
                more += min(-(-known // size) - len(tables[group]), self.policies[group].peak(known, self.max_chunk))
        return more

    def peak(self, request: Request) -> int:
        """Blocks it may hold at most, alone and with nothing else in flight."""
        if not self.policies:
            return 0
        total = sum(-(-num_encoder_tokens(request) // self.policies[g].block_size) for g in self.cross)
        return total + sum(self.policies[g].peak(request.limit - 1, self.max_chunk) for g, _ in self.growing)

    def join(self, request: Request, hit: Hit) -> None:
        """Start from the hit; its blocks are now held."""
        if not self.policies:  # no layer keeps anything
            request.next_block = request.room = NEVER
            return
        holding = request.holding
        holding.tables = hit.rows
        for row in hit.rows:
            self.pool.share(row)
        holding.num_named = [hit.length // policy.block_size for policy in self.policies]
        holding.num_given_back = [policy.first_needed(hit.length) for policy in self.policies]
        request.computed = request.planned = hit.length
        self._set_marks(request)

    def grow(self, request: Request, upto: int) -> Tables:
        """Blocks up to `upto` tokens; what was appended, per group. The caller knows that they are there."""
        if not self.policies:
            return ()
        tables = request.holding.tables
        added: list[tuple[int, ...]] = [()] * len(self.policies)
        for group, size in self.growing:
            table = tables[group]
            if (more := -(-upto // size) - len(table)) > 0:
                added[group] = taken = self.pool.take(more)
                table.extend(taken)
        for group in self.cross:
            if not tables[group] and (tokens := num_encoder_tokens(request)):
                added[group] = taken = self.pool.take(-(-tokens // self.policies[group].block_size))
                tables[group].extend(taken)
        request.room = min([len(tables[group]) * size for group, size in self.growing], default=NEVER)
        return tuple(added)

    def name(self, request: Request) -> None:
        """Let others find every full block whose tokens are known and granted."""
        if not self.caching:
            return
        holding, tokens = request.holding, request.tokens
        known = min(request.planned, len(tokens))
        if len(holding.hashes) < known // self.unit:
            self.hasher.extend(holding.hashes, tokens, known, request.source)
        for group, size in self.growing:
            first, last = holding.num_named[group], known // size
            if last <= first:
                continue
            holding.num_named[group] = last
            step, table, named = size // self.unit, holding.tables[group], self.pool.name
            new = [
                index
                for index in range(first, last)
                if table[index] >= 0 and named(group, table[index], holding.hashes[(index + 1) * step - 1])
            ]
            if self.pool.events is not None:
                self.record(request, group, new)

    def commit(self, request: Request) -> None:
        """After results: name what is full, give back what no later query reads."""
        self.name(request)
        holding = request.holding
        for group in self.tails:
            first, table = holding.num_given_back[group], holding.tables[group]
            last = min(self.policies[group].first_needed(request.computed), len(table))
            if last > first:
                self.pool.drop(table[first:last])
                table[first:last] = [-1] * (last - first)
                holding.num_given_back[group] = last
        self._set_marks(request)

    def release(self, request: Request, *, spoilt: bool = False) -> None:
        """All blocks back. `spoilt`: what they hold may be wrong, so nobody shall find it."""
        for table in request.holding.tables:
            if spoilt:
                self.pool.forget(table)
            self.pool.drop(reversed(table))
        request.holding.tables = []

    def check_idle(self) -> None:
        """No request is left, so no block may be held."""
        leaked = self.pool.num_blocks - self.pool.num_free - len(set(self.moves.pinned))
        assert not leaked, f"{leaked} blocks are held by no request"

    def _set_marks(self, request: Request) -> None:
        idle = not self.caching and not self.tails
        request.next_block = NEVER if idle else (request.computed // self.unit + 1) * self.unit

    def name_of(self, request: Request, group: int, index: int) -> bytes:
        """Of block `index` of the request's known tokens."""
        size = self.policies[group].block_size
        if not self.caching or group in self.cross or not 0 <= index < len(request.tokens) // size:
            raise ValueError(f"block {index} of {request.id}, group {group}, has no name that could be known")
        self.hasher.extend(request.holding.hashes, request.tokens, len(request.tokens), request.source)
        return request.holding.hashes[(index + 1) * (size // self.unit) - 1]

    def record(self, request: Request, group: int, indices: list[int]) -> None:
        """One event per run of consecutive new names."""
        assert self.pool.events is not None
        size, hashes, source = self.policies[group].block_size, request.holding.hashes, request.source
        step = size // self.unit
        while indices:
            run = 1
            while run < len(indices) and indices[run] == indices[0] + run:
                run += 1
            first, last = indices[0], indices[run - 1] + 1
            stored = BlockStored(
                block_hashes=hashes[(first + 1) * step - 1 : last * step : step],
                parent_block_hash=hashes[first * step - 1] if first else None,
                token_ids=request.tokens[first * size : last * size],
                block_size=size,
                lora_id=source.lora_id or None,
                medium=MEDIUM_GPU,
                lora_name=source.lora_name,
                group=group,
            )
            self.pool.events.append(stored)
            indices = indices[run:]


def num_encoder_tokens(request: Request) -> int:
    """What a cross-attention group must hold: all its media."""
    return sum(item.length for item in request.source.media)
