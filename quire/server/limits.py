"""Limits on what a connection may send before any route sees it: size and number of headers, time to send them.

`limited_protocol` gives uvicorn its HTTP protocol with these limits built in: httptools itself has none, so a client
could fill memory with one endless header. A head that breaks a limit is answered 431 and the connection is closed.
Must not know: routes, dialects.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from quire.config.server import ServerConfig

HEAD_SECONDS = 60.0  # a head that takes longer is somebody holding connections open


class HeadError(Exception):
    """Raised inside the parser; uvicorn then asks for the answer to send."""


class LimitedProtocol(HttpToolsProtocol):
    """Counts the bytes and the headers of a request's head while they come in."""

    max_bytes = 65536
    max_headers = 256

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = True
        self._head_bytes = 0
        self._why = ""
        self._timer: TimerHandle | None = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)  # also of a header that has not ended yet
            if self._head_bytes > self.max_bytes:
                self._why = self._size_words()
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._kept = 0
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > self.max_headers:
            self._why = f"more than {self.max_headers} headers (h11_max_header_count)"
            raise HeadError(self._why)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
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

    def _size_words(self) -> str:
        return f"more than {self.max_bytes} bytes of headers (h11_max_incomplete_event_size)"

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited_protocol(options: ServerConfig) -> type[LimitedProtocol]:
    limits: dict[str, Any] = {
        "max_bytes": options.h11_max_incomplete_event_size,
        "max_headers": options.h11_max_header_count,
    }
    return type("LimitedProtocol", (LimitedProtocol,), limits)
