"""WebSockets under uvicorn: its protocol over the package `websockets`, with limits that both of them lack.

Loaded only where a route takes WebSockets. A message has so many bytes and fragments; a client that asks for pongs and
does not read them is cut off; nothing is compressed, so that no small message unpacks to a large one. A client that
breaks the protocol or a limit is told code and reason even while it is still sending.
Must not know: routes, events.
"""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

MESSAGE_BYTES = 1 << 20
MOST_FRAGMENTS = 256  # of a message
_POLICY = 1008
_LINGER_SECONDS = 10.0  # after a failure, for the client to read why; clients wait that long for the end of a handshake
SETTINGS = {  # of uvicorn
    "ws_max_size": MESSAGE_BYTES,
    "ws_per_message_deflate": False,
    "ws_ping_interval": None,  # a client may be made to wait; sessions have a limit on idle time of their own
    "ws_ping_timeout": None,
}


class LimitedSocket(WebSocketsSansIOProtocol):
    _failed = False

    def data_received(self, data: bytes) -> None:
        if self._failed:
            return
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
        if self._failed:  # a ping that came together with what failed: its pong is sent
            return
        if self.writable.is_set():
            super().handle_ping()
        else:  # pongs that nobody reads would fill memory
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Say why and read on without looking: closing with bytes unread makes TCP reset the connection, and a client
        whose next write fails by that may never see the close frame."""
        if self._failed:
            return
        self._failed = self.close_sent = True
        self.disconnected = True  # whatever the application still sends goes nowhere
        assert self.conn.close_sent is not None
        code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
