"""A load generator on one processor, as it disturbs what it measures: it sends requests and reads chunks in turns.

Times are taken where a generator in Python takes them: as its turn comes to begin a request, and to read a chunk.
Chunks of one stream that wait are read one after another. Connections are kept. Must not know: servers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.simulate.devices import ClientModel
from quire.simulate.turns import At, TurnLoop, in_turns

Take = Callable[[str, float, int, bool], None]  # a chunk was read: request, when, how many tokens, whether the last


class LoadClient:
    def __init__(self, model: ClientModel, at: At, take: Take) -> None:
        self._model, self._take, self._at = model, take, at
        self._loop = TurnLoop(at)
        self._num_open = self._num_used = 0  # connections
        self._unread: dict[str, list[tuple[int, bool]]] = {}

    def begin(self, now: float, start: Callable[[float], None], sent: Callable[[bool, float], None]) -> None:
        """A request that is due now: `start` is told when the generator takes its time; `sent` whether over a new
        connection, and when."""
        self._loop.add(now, partial(self._open, start, sent))

    def _open(self, start: Callable[[float], None], sent: Callable[[bool, float], None], time: float) -> float:
        start(time)
        model, end = self._model, time + self._model.request_seconds
        self._num_used += 1
        if self._num_used <= self._num_open:
            self._at(end, partial(sent, False))
            return end
        self._num_open += 1

        def connected(time: float) -> None:
            self._at(time, partial(sent, True))

        in_turns(self._loop, end, model.connect_seconds, model.connect_turns, connected)
        return end

    def receive(self, now: float, request_id: str, num_tokens: int, is_last: bool) -> None:
        if unread := self._unread.get(request_id):
            unread.append((num_tokens, is_last))
            return
        self._unread[request_id] = [(num_tokens, is_last)]
        self._loop.add(now, partial(self._read, request_id))

    def _read(self, request_id: str, time: float) -> float:
        for num_tokens, is_last in self._unread.pop(request_id):
            time += self._model.chunk_seconds
            self._take(request_id, time, num_tokens, is_last)
            self._num_used -= is_last
        return time
