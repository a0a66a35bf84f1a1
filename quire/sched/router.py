"""Which of several equal engines a request goes to: in turn, to the least loaded, or where its prefix is cached.

A router sees what a front of several engines sees: prompts on their way in and requests that end. It asks no engine for
anything. `assign` picks an engine and counts the request to it, `finish` takes it off, `lose` gives up a dead engine.
One thread calls it at a time. Beginnings of prompts are told apart as the prefix cache tells its blocks apart
(prefix_hash.py): by tokens, cache salt, adapter and media items.
Must not know: engines, sockets, blocks; what an engine has really cached may differ from what is expected here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from quire.sched.prefix_hash import BlockHasher
from quire.schema.errors import ConfigError
from quire.schema.messages import EngineRequest

PIECE = 64  # tokens: prefixes are told apart at multiples of this
MOST_PIECES = 1 << 18  # that are remembered, the latest used
MOST_LOOKED_AT = 1024  # pieces of one prompt: a longer common beginning makes no difference to the choice


class Counts(Protocol):
    """Unfinished requests by engine, where several routers share the engines: each adds its own, all are seen."""

    def add(self, engine: int, amount: int) -> None: ...
    def read(self) -> Sequence[int]:
        """Those of all routers together."""


class Router:
    """Round robin, and the count of unfinished requests that other kinds choose by. A lost engine is never chosen."""

    def __init__(self, num_engines: int, shared: Counts | None = None, *, joins_media: bool = False) -> None:
        """`shared`: with the counts of other routers; None: there are no others. `joins_media`: as of BlockHasher."""
        if num_engines < 1:
            raise ConfigError(f"a router needs at least one engine, got {num_engines}")
        self.unfinished = [0] * num_engines
        self.living = list(range(num_engines))
        self._shared = shared
        self._engine_of: dict[str, int] = {}
        self._next = 0

    def assign(self, request: EngineRequest) -> int:
        """The engine for this request."""
        engine = self.choose(request)
        self.place(request.request_id, engine)
        return engine

    def place(self, request_id: str, engine: int) -> None:
        """It goes to this engine, whoever chose it."""
        self._engine_of[request_id] = engine
        self._count(engine, 1)

    def engine_of(self, request_id: str) -> int | None:
        """Of an unfinished request."""
        return self._engine_of.get(request_id)

    def finish(self, request_id: str) -> None:
        """It ended, however; one that was never assigned is ignored."""
        engine = self._engine_of.pop(request_id, None)
        if engine is not None:
            self._count(engine, -1)

    def lose(self, engine: int) -> list[str]:
        """It is gone; its requests, which end with it."""
        if engine in self.living:
            self.living.remove(engine)
        ids = [request_id for request_id, its in self._engine_of.items() if its == engine]
        for request_id in ids:
            self.finish(request_id)
        return ids

    def choose(self, request: EngineRequest) -> int:
        """One of the living, of which there must be some."""
        first, number = self._next, len(self.unfinished)
        return self._took(min(self.living, key=lambda engine: (engine - first) % number))

    def _took(self, engine: int) -> int:
        self._next = (engine + 1) % len(self.unfinished)
        return engine

    def _loads(self) -> Sequence[int]:
        return self.unfinished if self._shared is None else self._shared.read()

    def _count(self, engine: int, amount: int) -> None:
        self.unfinished[engine] += amount
        if self._shared is not None:
            self._shared.add(engine, amount)


class LeastLoaded(Router):
    """The engine with the fewest unfinished requests; among equals, in turn."""

    def choose(self, request: EngineRequest) -> int:
        return self._least(self._loads())

    def _least(self, loads: Sequence[int]) -> int:
        first, number = self._next, len(self.unfinished)
        return self._took(min(self.living, key=lambda engine: (loads[engine], (engine - first) % number)))


class PrefixAware(LeastLoaded):
    """The engine that was sent the longest beginning of this prompt before, unless it is loaded well above the mean."""

    MOST_LOAD = 1.5  # times the mean
    SLACK = 4  # requests more than that

    def __init__(self, num_engines: int, shared: Counts | None = None, *, joins_media: bool = False) -> None:
        super().__init__(num_engines, shared)
        self._hasher = BlockHasher("blake2b", PIECE, joins_media=joins_media)
        self._engine_of_piece: OrderedDict[bytes, int] = OrderedDict()  # hash of a beginning -> engine sent to last

    def choose(self, request: EngineRequest) -> int:
        hashes, loads = self._hashes(request), self._loads()
        engine = self._longest(hashes)
        mean = sum(loads[living] for living in self.living) / len(self.living)
        if engine is None or loads[engine] > self.MOST_LOAD * mean + self.SLACK:
            engine = self._least(loads)
        for piece in hashes:
            self._engine_of_piece[piece] = engine
            self._engine_of_piece.move_to_end(piece)
        while len(self._engine_of_piece) > MOST_PIECES:
            self._engine_of_piece.popitem(last=False)
        return engine

    def lose(self, engine: int) -> list[str]:
        for piece in [piece for piece, its in self._engine_of_piece.items() if its == engine]:
            del self._engine_of_piece[piece]
        return super().lose(engine)

    def _longest(self, hashes: list[bytes]) -> int | None:
        for piece in reversed(hashes):
            engine = self._engine_of_piece.get(piece)
            if engine is not None:
                return engine
        return None

    def _hashes(self, request: EngineRequest) -> list[bytes]:
        """Of the beginnings of 1, 2, ... pieces. The last token is always computed, so it is no part of them."""
        prompt, hashes = request.prompt_token_ids, list[bytes]()
        upto = min(len(prompt) - 1, MOST_LOOKED_AT * PIECE)
        self._hasher.extend(hashes, prompt, upto, request)
        return hashes


ROUTERS: dict[str, type[Router]] = {
    "round-robin": Router,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
