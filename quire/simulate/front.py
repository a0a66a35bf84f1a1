"""The server in front of a replica: one processor that takes requests in and sends tokens out, in turns.

Whatever waits for it when a turn begins is sent in that turn, and tokens of one request that came until then share a
chunk. Must not know: engines, routers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from quire.schema.messages import EngineOutput
from quire.simulate.devices import HostModel
from quire.simulate.turns import At, TurnLoop, in_turns

# Of a chunk: the request, when it leaves the server, how many tokens, and whether it is the last.
Send = Callable[[str, float, int, bool], None]


class ServerFront:
    def __init__(self, host: HostModel, at: At, send: Send, random: Random) -> None:
        self._host, self._at, self._send, self._random = host, at, send, random
        self._loop = TurnLoop(at)
        self._pending: dict[str, tuple[int, bool]] = {}  # tokens to be sent, and whether they are the last
        self._silent: dict[str, int] = {}  # tokens without text, which go out with the next one

    def accept(self, now: float, submit: Callable[[float], None], *, connects: bool = False) -> None:
        """A request that comes now; `submit` is called when the engine has it. `connects`: over a new connection."""
        host, turns = self._host, self._host.accept_turns + connects

        def read(time: float) -> None:
            self._at(time + host.request_seconds, submit)

        in_turns(self._loop, now, host.accept_seconds, turns, read)

    def deliver(self, now: float, outputs: Sequence[EngineOutput]) -> None:
        """News from the engine."""
        pending = self._pending
        if not pending:
            self._loop.add(now, self._send_pending)
        for output in outputs:
            number, was_last = pending.get(output.request_id, (0, False))
            is_last = was_last or output.finish_reason is not None
            pending[output.request_id] = number + len(output.new_token_ids), is_last

    def _send_pending(self, time: float) -> float:
        host, pending, self._pending = self._host, self._pending, {}
        for request_id, (number, is_last) in pending.items():
            number += self._silent.pop(request_id, 0)
            time += host.token_seconds * number
            if not is_last and host.silent_share and self._random.random() < host.silent_share:
                self._silent[request_id] = number
                continue
            time += host.chunk_seconds
            self._send(request_id, time, number, is_last)
        return time
