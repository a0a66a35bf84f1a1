"""Limits on connections: how many, size and number of headers and trailers, time to send these and bodies.

`limited_protocol` gives uvicorn its HTTP protocol with these limits built in: httptools itself has none, so a client
could fill memory with one endless header. A head that breaks a limit is answered 431 and the connection is closed; so
is one whose request is answered long before its body ends. Trailers count like a head and are then dropped: no layer
may take them for headers. A body that comes too slowly is answered 408; a connection too many, 503. One that is idle
for long is closed, but not over a request that has arrived and was not read yet.
Must not know: routes, dialects.
"""

from __future__ import annotations

import http
import logging
import resource
import select
from asyncio import TimerHandle, Transport
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.base.log import logger, once
from quire.server.errors import Refusal

if TYPE_CHECKING:
    from quire.config.server import ServerConfig

log = logger(__name__)
MOST_CONNECTIONS, OTHER_FILES = 65536, 256
REFUSED_SECONDS = 2.0  # for a connection too many to read that it is one
_REFUSED_AT_ONCE = 64  # further ones are told nothing
BODY_RATE = 1 << 16  # bytes per second; a body that comes at least as fast is never too slow
HEAD_SECONDS = 60.0  # a head that takes longer is somebody holding connections open
LINGER_SECONDS, LINGER_BYTES = 5.0, 4 << 20  # for the rest of a body whose request is answered


class HeadError(Exception):
    """Raised inside the parser; uvicorn then asks for the answer to send."""


class LimitedProtocol(HttpToolsProtocol):
    """Counts the bytes and the headers of a request's head, and what frames its body, while they come in."""

    max_bytes = 65536
    max_headers = 256
    max_connections = MOST_CONNECTIONS
    body_seconds = 60.0
    socket_paths: frozenset[bytes] = frozenset()  # whose connections may become WebSockets

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head, self._in_message = True, False
        self._pending_bytes = 0  # of a head or of framing that has not ended yet
        self._body_bytes = 0  # of the data being read
        self._between = False  # chunks: the last one's header is read, and nothing of its data
        self._num_trailers = 0
        self._dropped = 0  # bytes of a body whose request is answered
        self._why = ""
        self._is_refused = len(self.connections) > self.max_connections
        seconds = REFUSED_SECONDS if self._is_refused else HEAD_SECONDS
        self._timer: TimerHandle | None = self.loop.call_later(seconds, self._too_slow)
        self._lingering: TimerHandle | None = None
        self._body_timer: TimerHandle | None = None
        self._body_began = 0.0
        self._received = 0  # bytes of the body so far
        if len(self.connections) > self.max_connections + _REFUSED_AT_ONCE:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_lingering()
        self._stop_body_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._refuse_connection()
            return
        self._body_bytes = 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            self._count_pending(len(data) - self._body_bytes)  # also of a header that has not ended yet
        elif self._in_message:
            self._count_framing(len(data))
            if self._body_timer is None and self.body_seconds:
                self._body_began = self.loop.time()
                self._body_timer = self.loop.call_later(self.body_seconds, self._look_at_body)
        elif (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None:
            self._wait_for_request()  # what came was the rest of an answered request, or empty lines

    def timeout_keep_alive_handler(self) -> None:
        """A loop that was busy runs its timers before it reads what has come meanwhile. Closing over unread bytes would
        reset the connection, and the client could not know whether its request was heard."""
        if self.transport.is_closing():  # a connection that was reset leaves its timer
            return
        if self._has_unread():
            self._wait_for_request()
        else:
            super().timeout_keep_alive_handler()

    def _wait_for_request(self) -> None:
        until = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = until

    def _has_unread(self) -> bool:
        waiting = select.poll()
        waiting.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(waiting.poll(0))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._pending_bytes = self._kept = self._num_trailers = self._dropped = self._received = 0
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
        self._received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._stop_timer()
        self._stop_lingering()
        self._stop_body_timer()
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
        self._answer(431, "BadRequestError", f"the request has {self._why}")
        self.transport.close()

    def _should_upgrade_to_ws(self) -> bool:
        is_idle = self.cycle is None or self.cycle.response_complete  # whom an answer is for would not be told its end
        return is_idle and super()._should_upgrade_to_ws() and self.url.partition(b"?")[0] in self.socket_paths

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as any other."""
        log.debug("A connection asked to become another protocol, which this path has not")

    def _answer(self, status: int, kind: str, message: str, headers: bytes = b"") -> None:
        """Past the app, where there is no request that it could answer."""
        body = Refusal(status, message, kind).body
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(head.encode() + headers + b"\r\n" + body)

    def _refuse_connection(self) -> None:
        """Told once it asks; then what it sends is dropped until it has read that, but not for long."""
        if self.transport.is_closing() or self._dropped:
            return
        self._dropped = 1
        once(log, logging.WARNING, "There are %d connections, as many as --max-connections allows; more are refused",
             self.max_connections)  # fmt: skip
        message = f"the server has {self.max_connections} connections, as many as it takes (--max-connections)"
        self._answer(503, "ServiceUnavailableError", f"{message}; try again later", b"retry-after: 1\r\n")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _look_at_body(self) -> None:
        """Time grows with what has come, so that a large body may take longer than a small one."""
        self._body_timer = None
        seconds = self.body_seconds + self._received / BODY_RATE
        left = self._body_began + seconds - self.loop.time()
        if left > 0:
            self._body_timer = self.loop.call_later(left, self._look_at_body)
            return
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_started:
            self._answer(
                408, "RequestTimeoutError",
                f"{self._received} bytes of the body came in {seconds:g} s, and it is not whole; it has "
                f"{self.body_seconds:g} s, and one more for each {BODY_RATE} bytes (--body-timeout)",
            )  # fmt: skip
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

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None


def limited_protocol(options: ServerConfig, socket_paths: Iterable[str] = ()) -> type[LimitedProtocol]:
    """`socket_paths`: as routes are declared."""
    root = (options.root_path or "").rstrip("/")
    limits: dict[str, Any] = {
        "max_bytes": options.h11_max_incomplete_event_size,
        "max_headers": options.h11_max_header_count,
        "max_connections": room_for_connections(options.max_connections),
        "body_seconds": options.body_timeout,
        "socket_paths": frozenset(prefix.encode() + path.encode() for path in socket_paths for prefix in ("", root)),
    }
    return type("LimitedProtocol", (LimitedProtocol,), limits)


def room_for_connections(requested: int | None) -> int:
    """How many connections there may be: what was asked, or what the limit on open files leaves. That limit is raised
    as far as this process may, since a connection that finds no file is refused by nobody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (requested or MOST_CONNECTIONS) + OTHER_FILES
    soft = needed if soft == resource.RLIM_INFINITY else soft
    if soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    room = max(soft - OTHER_FILES, soft // 2)
    if requested is not None and requested > room:
        log.warning("--max-connections is %d, but %d open files leave room for %d", requested, soft, room)
    return min(requested or MOST_CONNECTIONS, room)
