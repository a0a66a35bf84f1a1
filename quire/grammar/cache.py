"""GrammarCache: results of compilations, up to a number of bytes; grammars used once do not evict reused ones.

A result is new until a second request uses it. New ones have an eighth of the capacity; a client that sends one new
grammar after another therefore fills only that eighth, and recurring grammars stay. Refusals are results too.
Not thread-safe. Must not know: how grammars are compiled, who requests them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from quire.schema.grammar import GrammarSpec

MOST_ENTRIES = 4096
_NEW_PART = 8  # of the bytes, as its inverse
Outcome = TypeVar("Outcome")


class GrammarCache(Generic[Outcome]):
    def __init__(self, most_bytes: int) -> None:
        self._new: _Shelf[Outcome] = _Shelf(most_bytes // _NEW_PART)
        self._reused: _Shelf[Outcome] = _Shelf(most_bytes - most_bytes // _NEW_PART)
        self._used: set[GrammarSpec] = set()  # of the new ones, those used by one request

    @property
    def num_bytes(self) -> int:
        return self._new.num_bytes + self._reused.num_bytes

    def __len__(self) -> int:
        return len(self._new.entries) + len(self._reused.entries)

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec in self._new.entries or spec in self._reused.entries

    def put(self, spec: GrammarSpec, outcome: Outcome, cost: int) -> None:
        """`cost` in bytes. The latest entry is kept whatever it costs, until the next one."""
        self._reused.take(spec)
        self._used.discard(spec)
        self._used.difference_update(self._new.put(spec, outcome, cost))

    def use(self, spec: GrammarSpec) -> Outcome | None:
        """For a request; None: it is not here."""
        if (entry := self._reused.entries.get(spec)) is not None:
            self._reused.entries.move_to_end(spec)
            return entry[0]
        if (entry := self._new.entries.get(spec)) is None:
            return None
        if spec in self._used:
            self._used.discard(spec)
            self._new.take(spec)
            self._reused.put(spec, *entry)
        else:
            self._used.add(spec)
        return entry[0]


class _Shelf(Generic[Outcome]):
    """The latest used, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.entries: OrderedDict[GrammarSpec, tuple[Outcome, int]] = OrderedDict()
        self.num_bytes = 0
        self._most_bytes = most_bytes

    def put(self, spec: GrammarSpec, outcome: Outcome, cost: int) -> list[GrammarSpec]:
        """Returns those that were evicted."""
        self.take(spec)
        self.entries[spec] = outcome, cost
        self.num_bytes += cost
        gone: list[GrammarSpec] = []
        while len(self.entries) > 1 and (self.num_bytes > self._most_bytes or len(self.entries) > MOST_ENTRIES):
            oldest, (_, freed) = self.entries.popitem(last=False)
            self.num_bytes -= freed
            gone.append(oldest)
        return gone

    def take(self, spec: GrammarSpec) -> None:
        if (entry := self.entries.pop(spec, None)) is not None:
            self.num_bytes -= entry[1]
