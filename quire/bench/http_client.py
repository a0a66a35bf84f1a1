"""A small HTTP/1.1 client for load: keep-alive connections, one exchange at a time on each, bodies handed over as read.

In: bytes of a whole request. Out: Reply, and every piece of a body with the moment it came, while it comes. It does
what a load generator needs and nothing else (no redirects, no compression, no cookies), because what it costs is taken
from the server under test when both share a machine. Must not know: what the bytes mean.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from quire.base.clock import now
from quire.schema.errors import InputError

Sink = Callable[[bytes, float], None]  # a piece of the body, and when it came
_LONGEST_HEAD = 64 << 10


class HTTPError(Exception):
    """The exchange failed below HTTP: refused, cut off, or not HTTP at all."""


class ServerAddress(NamedTuple):
    """Where to connect, and what to say in Host."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    path: str  # what comes before every endpoint, '' or '/prefix'

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (80 if self.tls is None else 443) else f"{host}:{self.port}"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case


def parse_server(url: str, *, insecure: bool = False) -> ServerAddress:
    """'http(s)://host[:port][/prefix]' -> ServerAddress."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as wrong:
        raise InputError(f"base URL {url!r}: {wrong}", param="base_url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"base URL {url!r} must look like http://host:port", param="base_url", value=url)
    if parts.query or parts.fragment or parts.username:
        raise InputError(f"base URL {url!r} may hold a host, a port and a path only", param="base_url", value=url)
    context = None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        if insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    return ServerAddress(parts.hostname, port or (443 if context else 80), context, parts.path.rstrip("/"))


def encode_request(server: ServerAddress, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """A whole request as bytes."""
    lines = [f"{method} {server.path}{path} HTTP/1.1", f"Host: {server.name}", "Accept-Encoding: identity"]
    for name, value in headers.items():
        if any(character in name + value for character in "\r\n\0"):
            raise InputError(f"header {name!r} holds a line break", param="header")
        lines.append(f"{name}: {value}")
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Connection(asyncio.Protocol):
    """One connection. `exchange` sends a request and waits for the end of its answer."""

    def __init__(self) -> None:
        self.is_open = False
        self.replied = False  # any byte of the running exchange's answer has come
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Reply] | None = None
        self._sink: Sink | None = None
        self._reply: Reply | None = None
        self._read: Callable[[bytes, float], bytes | None] = self._head
        self._rest = b""
        self._left = 0  # bytes of the body, or of the chunk and its line end, still to come

    async def exchange(self, request: bytes, sink: Sink) -> Reply:
        assert self._transport is not None and self._waiting is None
        self._waiting = asyncio.get_running_loop().create_future()
        self._sink, self._read, self._reply, self.replied = sink, self._head, None, False
        self._transport.write(request)
        try:
            return await self._waiting
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiting = self._sink = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    # ---- called by the event loop ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        at = now()
        self.replied = True
        rest: bytes | None = self._rest + data if self._rest else data
        try:
            while rest and self._waiting is not None:
                left = self._read(rest, at)
                if left is None:  # needs more
                    self._rest = rest
                    return
                rest = left
        except (ValueError, HTTPError) as wrong:
            self._fail(f"not an HTTP/1.1 answer: {wrong}")
            return
        self._rest = b""
        if rest:  # bytes after the end of an answer: this connection cannot be trusted with another request
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._waiting is None or self._waiting.done():
            return
        if self._read == self._until_close and error is None:
            self._end()
            return
        at = "before an answer" if self._reply is None else "in the middle of the answer"
        self._fail(f"the server closed the connection {at}{f' ({error})' if error else ''}")

    # ---- reading: each takes what it can and gives back the rest, or None to wait for more ----------------------

    def _head(self, data: bytes, at: float) -> bytes | None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _LONGEST_HEAD:
                raise HTTPError(f"the head is longer than {_LONGEST_HEAD} bytes")
            return None
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise HTTPError(f"it begins with {first[:40]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        rest = data[end + 4 :]
        code = int(status[:3])
        if 100 <= code < 200:
            return rest
        self._reply = Reply(code, headers)
        if code in (204, 304):
            self._end()
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            self._read = self._chunk_size
        elif "content-length" in headers:
            self._left = int(headers["content-length"])
            self._read = self._counted
            if self._left == 0:
                self._end()
        else:
            self._read = self._until_close
        return rest

    def _counted(self, data: bytes, at: float) -> bytes:
        chunk, rest = data[: self._left], data[self._left :]
        self._left -= len(chunk)
        self._hand_over(chunk, at)
        if self._left == 0:
            self._end()
        return rest

    def _until_close(self, data: bytes, at: float) -> bytes:
        self._hand_over(data, at)
        return b""

    def _chunk_size(self, data: bytes, at: float) -> bytes | None:
        end = data.find(b"\r\n")
        if end < 0:
            return None
        size = int(data[:end].partition(b";")[0], 16)
        if size == 0:
            self._read = self._trailer
            return data[end + 2 :]
        self._left = size
        self._read = self._chunk
        return data[end + 2 :]

    def _chunk(self, data: bytes, at: float) -> bytes | None:
        if len(data) >= self._left + 2:  # the usual case: the whole chunk, and its line end
            chunk, rest = data[: self._left], data[self._left + 2 :]
            self._left, self._read = 0, self._chunk_size
            self._hand_over(chunk, at)
            return rest
        if len(data) < self._left:
            self._left -= len(data)
            self._hand_over(data, at)
            return b""
        return None  # only the line end is missing

    def _trailer(self, data: bytes, at: float) -> bytes | None:
        end = data.find(b"\r\n")
        if end < 0:
            return None
        if end == 0:
            self._end()
        return data[end + 2 :]

    def _hand_over(self, chunk: bytes, at: float) -> None:
        if self._sink is not None:
            self._sink(chunk, at)

    def _end(self) -> None:
        assert self._reply is not None
        if self._reply.headers.get("connection", "").lower() == "close" or self._read == self._until_close:
            self.close()
        self._read = self._head
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self._reply)
        self._waiting = None

    def _fail(self, why: str) -> None:
        self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(HTTPError(why))


class Pool:
    """As many connections to one server as there are exchanges at once; the idle ones are kept."""

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, sink: Sink) -> Reply:
        """A kept connection may have been closed by the server meanwhile: then once more, on a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                return await self._on(connection, request, sink)
            except HTTPError:
                if connection.replied:
                    raise
        return await self._on(await self._connect(), request, sink)

    async def get(self, path: str, headers: dict[str, str]) -> tuple[Reply, bytes]:
        return await self.ask("GET", path, headers)

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[Reply, bytes]:
        """An exchange whose body is wanted whole."""
        chunks: list[bytes] = []
        request = encode_request(self.server, method, path, headers, body)
        reply = await self.exchange(request, lambda chunk, at: chunks.append(chunk))
        return reply, b"".join(chunks)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _on(self, connection: Connection, request: bytes, sink: Sink) -> Reply:
        reply = await connection.exchange(request, sink)
        if connection.is_open:
            self._idle.append(connection)
        return reply

    async def _connect(self) -> Connection:
        loop, server = asyncio.get_running_loop(), self.server
        try:
            _, connection = await loop.create_connection(Connection, server.host, server.port, ssl=server.tls)
        except OSError as wrong:
            raise HTTPError(f"no connection to {server.name}: {wrong}") from None
        return connection
