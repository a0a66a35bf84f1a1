"""The wire of benchmarks/hostile_attacks.py: requests as plain bytes, one per connection, at a bounded rate.

In: bytes. Out: an Answer, and a Tally of statuses, slow refusals and broken promises. Must not know: what is attacked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

NO_ANSWER = 0  # the connection was closed instead
LONGEST_REFUSAL_S = 10.0
MOST_READ = 4 << 20
Pieces = Iterable[bytes]


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    key: str
    victim_key: str
    sockets: str | None  # folder of the server's own sockets


class BrokenError(Exception):
    """A promise that did not hold."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body or b"null")


@dataclass
class Tally:
    rounds: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_refusal: float = 0.0
    broken: list[str] = field(default_factory=list)

    def note(self, answer: Answer, what: str) -> None:
        self.statuses[answer.status] += 1
        if answer.status >= 500 and answer.status != 503:
            self.trouble(f"{what}: status {answer.status}: {answer.body[:300]!r}")
        if 400 <= answer.status < 500:
            self.slowest_refusal = max(self.slowest_refusal, answer.seconds)
            if answer.seconds > LONGEST_REFUSAL_S:
                self.trouble(f"{what}: refused after {answer.seconds:.1f} s only")

    def trouble(self, words: str) -> None:
        if len(self.broken) < 5:
            self.broken.append(words)


class Rate:
    """So many bytes a second, over all attacks."""

    def __init__(self, bytes_per_second: float) -> None:
        self._per_byte = 1.0 / bytes_per_second
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        now = time.monotonic()
        start = max(now, self._free_at)
        self._free_at = start + size * self._per_byte
        if start > now:
            await asyncio.sleep(start - now)


class Door:
    """The way to the server: one request per connection, over a plain socket."""

    def __init__(self, target: Target, tally: Tally, rate: Rate) -> None:
        self.target, self.tally, self._rate = target, tally, rate

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(self.target.host, self.target.port)
        try:
            yield reader, writer
        finally:
            hang_up(writer)

    def head(self, path: str, headers: Sequence[str] = (), *, key: str | None = "", method: str = "POST") -> bytes:
        """`key`: None sends none, "" the attacker's own."""
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: x",
            "Connection: close",
            "Content-Type: application/json",
            *headers,
        ]
        if key is not None:
            lines.append(f"Authorization: Bearer {key or self.target.key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def send(
        self, path: str, body: bytes = b"", *, key: str | None = "", method: str = "POST", patience: float = 120.0
    ) -> Answer:
        """A whole request, and its answer."""
        whole = self.head(path, [f"Content-Length: {len(body)}"], key=key, method=method) + body
        return await self.say(cut(whole), what=f"{method} {path}", patience=patience)

    async def ask(self, path: str, body: Any, **more: Any) -> Answer:
        return await self.send(path, json.dumps(body).encode(), **more)

    async def say(self, pieces: Pieces, *, what: str, patience: float = 120.0) -> Answer:
        """Bytes as they are, as long as the server takes them, and its answer, timed from the last of them."""
        began = time.monotonic()
        body = b""
        try:
            async with asyncio.timeout(patience), self.connect() as (reader, writer):
                with contextlib.suppress(ConnectionError):  # refused while it was being sent: an answer may be there
                    for piece in pieces:
                        await self._rate.take(len(piece))
                        writer.write(piece)
                        began = time.monotonic()
                        await writer.drain()
                        if reader.at_eof() or writer.is_closing():
                            break
                with contextlib.suppress(ConnectionError):
                    body = await read_all(reader)
        except TimeoutError:
            raise BrokenError(f"{what}: no answer within {patience:.0f} s") from None
        except OSError as failed:
            body = b""
            if isinstance(failed, ConnectionRefusedError):
                raise BrokenError(f"{what}: {failed}") from None
        answer = parse(body, time.monotonic() - began)
        self.tally.note(answer, what)
        return answer

    async def must(self, answer: Answer, statuses: Sequence[int], what: str) -> None:
        if answer.status not in statuses:
            raise BrokenError(f"{what}: status {answer.status}, not one of {list(statuses)}: {answer.body[:200]!r}")


def hang_up(writer: asyncio.StreamWriter) -> None:
    """At once and without a word, as a client that is killed."""
    with contextlib.suppress(OSError, AttributeError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    parts, size = [], 0
    while size < MOST_READ and (part := await reader.read(1 << 16)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def parse(raw: bytes, seconds: float) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else NO_ANSWER
    if b"transfer-encoding: chunked" in head.lower():
        body = _dechunk(body)
    return Answer(status, body, seconds)


def _dechunk(raw: bytes) -> bytes:
    parts = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size or b"0", 16)
        parts.append(raw[:length])
        raw = raw[length + 2 :]
    return b"".join(parts)


def cut(body: bytes, size: int = 1 << 18) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]
