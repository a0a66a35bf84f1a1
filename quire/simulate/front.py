"""The server in front of a replica: one processor that takes requests in and sends tokens out, one thing at a time.

Whatever waits for it when it is free is sent in one go, and tokens of one request that came meanwhile share a chunk.
Must not know: engines, routers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from quire.schema.messages import EngineOutput
from quire.simulate.devices import HostModel
from quire.simulate.replica import NEVER

# Of a chunk: the request, when its client has it, how many tokens, and whether it is the last.
Send = Callable[[str, float, int, bool], None]


class ServerFront:
    def __init__(self, host: HostModel, send: Send, random: Random) -> None:
        self._host, self._send, self._random = host, send, random
        self._free = 0.0  # when the processor has nothing to do
        self._pending: dict[str, tuple[int, bool]] = {}  # tokens to be sent, and whether they are the last
        self._silent: dict[str, int] = {}  # tokens without text, which go out with the next one
        self.wake_at = NEVER

    def accept(self, now: float) -> float:
        """When a request that comes now is handed to the engine."""
        self._free = max(self._free, now) + self._host.accept_seconds
        return self._free + self._host.request_seconds

    def deliver(self, now: float, outputs: Sequence[EngineOutput]) -> None:
        """News from the engine."""
        pending = self._pending
        for output in outputs:
            number, was_last = pending.get(output.request_id, (0, False))
            is_last = was_last or output.finish_reason is not None
            pending[output.request_id] = number + len(output.new_token_ids), is_last
        self.wake_at = max(now, self._free)

    def wake(self, now: float) -> None:
        """Send all that waits, one chunk after another."""
        host, pending, self._pending = self._host, self._pending, {}
        time = max(now, self._free)
        for request_id, (number, is_last) in pending.items():
            number += self._silent.pop(request_id, 0)
            time += host.token_seconds * number
            if not is_last and host.silent_share and self._random.random() < host.silent_share:
                self._silent[request_id] = number
                continue
            time += host.chunk_seconds
            self._send(request_id, time, number, is_last)
        self._free = time
        self.wake_at = NEVER
