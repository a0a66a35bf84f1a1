"""Limits on what a connection may send beside bodies: size and number of headers and trailers, time to send them.

`limited_protocol` gives uvicorn its HTTP protocol with these limits built in: httptools itself has none, so a client
could fill memory with one endless header. A head that breaks a limit is answered 431 and the connection is closed; so
is one whose request is answered long before its body ends. Trailers count like a head and are then dropped: no layer
may take them for headers. Must not know: routes, dialects.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from quire.config.server import ServerConfig

HEAD_SECONDS = 60.0  # a head that takes longer is somebody holding connections open
LINGER_SECONDS, LINGER_BYTES = 5.0, 4 << 20  # for the rest of a body whose request is answered


class HeadError(Exception):
    """Raised inside the parser; uvicorn then asks for the answer to send."""


class LimitedProtocol(HttpToolsProtocol):
    """Counts the bytes and the headers of a request's head, and what frames its body, while they come in."""

    max_bytes = 65536
    max_headers = 256

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head, self._in_message = True, False
        self._pending_bytes = 0  # of a head or of framing that has not ended yet
        self._body_bytes = 0  # of the data being read
        self._between = False  # chunks: the last one's header is read, and nothing of its data
        self._num_trailers = 0
        self._dropped = 0  # bytes of a body whose request is answered
        self._why = ""
        self._timer: TimerHandle | None = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        self._lingering: TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_lingering()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._body_bytes = 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            self._count_pending(len(data) - self._body_bytes)  # also of a header that has not ended yet
        elif self._in_message:
            self._count_framing(len(data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._pending_bytes = self._kept = self._num_trailers = self._dropped = 0
        self._between = False
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:
            super().on_header(name, value)
        else:
            self._num_trailers += 1
        if len(self.headers) + self._num_trailers > self.max_headers:
            self._why = f"more than {self.max_headers} headers (h11_max_header_count)"
            raise HeadError(self._why)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._pending_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._between = True

    def on_body(self, body: bytes) -> None:
        self._between = False
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._stop_timer()
        self._stop_lingering()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A client may send the rest of what is already answered, but not for long."""
        super().on_response_complete()
        if self._in_message and not self._in_head and self.cycle.response_complete and not self.transport.is_closing():
            self._lingering = self.loop.call_later(LINGER_SECONDS, self._too_slow)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self._in_head:
            self.transport.close()  # an answer is on its way, which another one would only garble
            return
        if not self._why:
            super().send_400_response(msg)
            return
        message = f"the request has {self._why}"
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 431}
        body = msgspec.json.encode({"error": error})
        head = (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n"
        )
        self.transport.write(head + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._kept += size
        if self._kept > self.max_bytes:
            self._why = self._size_words()
            raise HeadError(self._why)

    def _count_framing(self, size: int) -> None:
        """Of a body: what comes between its data (chunk extensions) and behind it (trailers)."""
        if self.cycle.response_complete:
            self._dropped += size
            if self._dropped > LINGER_BYTES:
                self.transport.close()
            return
        if self._body_bytes:
            self._pending_bytes = 0
            self._stop_timer()
        else:
            self._count_pending(size)
        if self._between:
            self._start_timer()

    def _count_pending(self, size: int) -> None:
        self._pending_bytes += size
        if self._pending_bytes > self.max_bytes:
            self._why = self._size_words()
            self.send_400_response("")

    def _size_words(self) -> str:
        return f"more than {self.max_bytes} bytes of headers (h11_max_incomplete_event_size)"

    def _too_slow(self) -> None:
        self._timer = self._lingering = None
        if not self.transport.is_closing():
            self.transport.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None


def limited_protocol(options: ServerConfig) -> type[LimitedProtocol]:
    limits: dict[str, Any] = {
        "max_bytes": options.h11_max_incomplete_event_size,
        "max_headers": options.h11_max_header_count,
    }
    return type("LimitedProtocol", (LimitedProtocol,), limits)
