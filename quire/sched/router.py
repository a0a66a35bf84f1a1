"""Which of several equal engines a request goes to: in turn, to the least loaded, or where its prefix is cached.

A router sees what a front of several engines sees: prompts on their way in and requests that end. It asks no engine for
anything. `assign` picks an engine and counts the request to it, `finish` takes it off. One thread calls it.
Must not know: engines, sockets, blocks; what an engine has really cached may differ from what is expected here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from quire.schema.errors import ConfigError

PIECE = 64  # tokens: prefixes are told apart at multiples of this
MOST_PIECES = 1 << 18  # that are remembered, the latest used
MOST_LOOKED_AT = 1024  # pieces of one prompt: a longer common beginning makes no difference to the choice


class Router:
    """Round robin, and the count of unfinished requests that other kinds choose by."""

    def __init__(self, num_engines: int) -> None:
        if num_engines < 1:
            raise ConfigError(f"a router needs at least one engine, got {num_engines}")
        self.unfinished = [0] * num_engines
        self._engine_of: dict[str, int] = {}
        self._next = 0

    def assign(self, request_id: str, prompt_token_ids: Sequence[int], salt: str = "") -> int:
        """The engine for this request. `salt` keeps prefixes of different owners apart (cache_salt)."""
        engine = self.choose(prompt_token_ids, salt)
        self.unfinished[engine] += 1
        self._engine_of[request_id] = engine
        return engine

    def finish(self, request_id: str) -> None:
        """It ended, however; one that was never assigned is ignored."""
        engine = self._engine_of.pop(request_id, None)
        if engine is not None:
            self.unfinished[engine] -= 1

    def choose(self, prompt_token_ids: Sequence[int], salt: str) -> int:
        engine = self._next
        self._next = (engine + 1) % len(self.unfinished)
        return engine


class LeastLoaded(Router):
    """The engine with the fewest unfinished requests; among equals, in turn."""

    def choose(self, prompt_token_ids: Sequence[int], salt: str) -> int:
        return self._least()

    def _least(self) -> int:
        unfinished, number = self.unfinished, len(self.unfinished)
        first = self._next
        engine = min(range(number), key=lambda i: (unfinished[i], (i - first) % number))
        self._next = (engine + 1) % number
        return engine


class PrefixAware(LeastLoaded):
    """The engine that was sent the longest beginning of this prompt before, unless it is loaded well above the mean."""

    MOST_LOAD = 1.5  # times the mean
    SLACK = 4  # requests more than that

    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines)
        self._engine_of_piece: OrderedDict[bytes, int] = OrderedDict()  # hash of a beginning -> engine sent to last

    def choose(self, prompt_token_ids: Sequence[int], salt: str) -> int:
        hashes = self._hashes(prompt_token_ids, salt)
        engine = self._longest(hashes)
        mean = sum(self.unfinished) / len(self.unfinished)
        if engine is None or self.unfinished[engine] > self.MOST_LOAD * mean + self.SLACK:
            engine = self._least()
        for piece in hashes:
            self._engine_of_piece[piece] = engine
            self._engine_of_piece.move_to_end(piece)
        while len(self._engine_of_piece) > MOST_PIECES:
            self._engine_of_piece.popitem(last=False)
        return engine

    def _longest(self, hashes: list[bytes]) -> int | None:
        for piece in reversed(hashes):
            engine = self._engine_of_piece.get(piece)
            if engine is not None:
                return engine
        return None

    @staticmethod
    def _hashes(prompt_token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Of the beginnings of 1, 2, ... pieces. The last token is always computed, so it is no part of them."""
        upto = min((len(prompt_token_ids) - 1) // PIECE, MOST_LOOKED_AT) * PIECE
        chain, hashes = hashlib.blake2b(salt.encode(), digest_size=16).digest(), []
        for first in range(0, upto, PIECE):
            tokens = array("q", prompt_token_ids[first : first + PIECE]).tobytes()
            chain = hashlib.blake2b(chain + tokens, digest_size=16).digest()
            hashes.append(chain)
        return hashes


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round-robin": Router,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
