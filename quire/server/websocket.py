"""WebSockets under uvicorn: its protocol over the package `websockets`, with limits that both of them lack.

Loaded only where a route takes WebSockets. A message has so many bytes and fragments; a client that asks for pongs and
does not read them is cut off; nothing is compressed, so that no small message unpacks to a large one.
Must not know: routes, events.
"""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

MESSAGE_BYTES = 1 << 20
MOST_FRAGMENTS = 256  # of a message
_POLICY = 1008
SETTINGS = {  # of uvicorn
    "ws_max_size": MESSAGE_BYTES,
    "ws_per_message_deflate": False,
    "ws_ping_interval": None,  # a client may be made to wait; sessions have a limit on idle time of their own
    "ws_ping_timeout": None,
}


class LimitedSocket(WebSocketsSansIOProtocol):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:  # the whole head came from the HTTP parser, and this one refused it
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        if len(self.frames) >= MOST_FRAGMENTS:
            self.conn.fail(_POLICY, f"a message has more than {MOST_FRAGMENTS} fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:  # pongs that nobody reads would fill memory
            self.transport.abort()
