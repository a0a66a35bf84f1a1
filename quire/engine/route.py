"""Routes: which client of an engine asked for what, so that each hears its own news. Only used when there are several.

In: messages with the number of the client that sent them. Out: what the loop should see, and who should see what the
loop says. Control calls are numbered by each client for itself; here they get numbers that no two share.
`arrive` runs in the receiving thread, `deliver` in the loop's. Must not know: sockets.
"""

from __future__ import annotations

import itertools
import threading

import msgspec

from quire.schema.messages import (
    Abort,
    ControlCall,
    ControlReply,
    EngineOutput,
    EngineRequest,
    FromEngine,
    Outputs,
    Stop,
    ToEngine,
)

OWNER = 0  # the client that started the engine, and whose end is the engine's end


class Routes:
    def __init__(self) -> None:
        self._clients = {OWNER}
        self._client_of: dict[str, int] = {}  # request id -> client
        self._calls: dict[int, tuple[int, int]] = {}  # our number -> client, its number
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def join(self, client: int) -> None:
        """From now on it hears what concerns it."""
        with self._lock:
            self._clients.add(client)

    def has(self, client: int) -> bool:
        with self._lock:
            return client in self._clients

    def leave(self, client: int) -> Abort:
        """It is gone; what it asked for need not go on."""
        with self._lock:
            self._clients.discard(client)
            ids = tuple(request_id for request_id, asker in self._client_of.items() if asker == client)
            for request_id in ids:
                del self._client_of[request_id]
            self._calls = {number: origin for number, origin in self._calls.items() if origin[0] != client}
        return Abort(request_ids=ids)

    def arrive(self, client: int, message: EngineRequest | Abort | ControlCall | Stop) -> ToEngine:
        with self._lock:
            if isinstance(message, EngineRequest):
                self._client_of[message.request_id] = client
            elif isinstance(message, ControlCall):
                number = next(self._numbers)
                self._calls[number] = (client, message.call_id)
                return msgspec.structs.replace(message, call_id=number)
        return self.leave(client) if isinstance(message, Stop) and client != OWNER else message

    def deliver(self, message: FromEngine) -> list[tuple[int, FromEngine]]:
        """Each hears its own; a step's numbers go to one client, never to the owner, who only watches."""
        with self._lock:
            if isinstance(message, Outputs):
                return self._share(message)
            if isinstance(message, ControlReply):
                client, number = self._calls.pop(message.call_id, (OWNER, 0))
                return [(client, msgspec.structs.replace(message, call_id=number))]
            return [(client, message) for client in self._clients]

    def _share(self, message: Outputs) -> list[tuple[int, FromEngine]]:
        parts: dict[int, list[EngineOutput]] = {client: [] for client in self._clients}
        for output in message.outputs:
            done = output.finish_reason is not None
            client = self._client_of.pop(output.request_id, -1) if done else self._client_of.get(output.request_id, -1)
            if client in parts:
                parts[client].append(output)
        observer = min((client for client in parts if client != OWNER), default=OWNER)
        return [
            (client, Outputs(outputs=outputs, stats=message.stats if client == observer else None))
            for client, outputs in parts.items()
            if outputs or (client == observer != OWNER and message.stats is not None)
        ]
