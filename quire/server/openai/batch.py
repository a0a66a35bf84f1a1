"""Files of requests in OpenAI's batch format, answered by the routes of the server, in this process.

In: JSON lines {custom_id, method, url, body} and an ASGI app. Out: one line for each, in the order of the input, with
the answer or an error in OpenAI's form. Lines are read as they are needed and written as they are done: only a window
of them is in memory. Must not know: engines, or where the files come from (cli/batch.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import IO, Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from quire.server.openai.batch_resume import INVALID, custom_id_of, read_lines

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank",
    "/rerank",
)  # fmt: skip
LATER = ("/v1/responses", "/v1/audio/transcriptions", "/v1/audio/translations")
_BUSY = (429, 503)
_LONGEST_WAIT_S = 5.0


class BatchLine(msgspec.Struct):
    """One request of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class RefusedLineError(Exception):
    """A line that no route can take."""

    def __init__(self, status: int, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.custom_id = status, code, custom_id


@dataclass(frozen=True)
class BatchResponse:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass
class BatchCounts:
    completed: int = 0
    failed: int = 0
    nameless: int = 0  # of those that failed: lines without a custom_id, whose answers nobody can tell apart


class BatchRunner:
    """Answers a file through an app. `alive` raises when going on makes no sense."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        window: int,
        longest_line: int,
        headers: tuple[tuple[str, str], ...] = (),
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._app, self._window, self._longest, self._alive = app, max(1, window), longest_line, alive
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers]
        self.tally = BatchCounts()

    async def run(
        self,
        source: IO[bytes],
        target: IO[bytes],
        tell: Callable[[], object] = lambda: None,
        done: Collection[str] = frozenset(),
    ) -> BatchCounts:
        """Every line but those whose custom_id is `done`; `tell` hears of each that is written."""
        pending: deque[asyncio.Task[bytes]] = deque()
        try:
            for number, raw in read_lines(source, self._longest):
                if done and raw is not None and custom_id_of(raw) in done:
                    continue
                if len(pending) >= self._window:
                    await self._write(pending, target, tell)
                pending.append(asyncio.create_task(self._line(number, raw)))
            while pending:
                await self._write(pending, target, tell)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return self.tally

    async def _write(self, pending: deque[asyncio.Task[bytes]], target: IO[bytes], tell: Callable[[], object]) -> None:
        line = await pending[0]
        self._alive()
        target.write(line + b"\n")
        target.flush()  # whoever reads along sees it
        pending.popleft()
        tell()

    async def _line(self, number: int, raw: bytes | None) -> bytes:
        custom_id: str | None = None
        try:
            line = self._read(number, raw)
            custom_id = line.custom_id
            answered = await self._ask(line)
        except RefusedLineError as wrong:
            self.tally.failed += 1
            self.tally.nameless += custom_id is None and wrong.custom_id is None
            return refused_line(wrong, custom_id or wrong.custom_id)
        if answered.status == 200:
            self.tally.completed += 1
        else:
            self.tally.failed += 1
        return answered_line(answered, line.custom_id)

    def _read(self, number: int, raw: bytes | None) -> BatchLine:
        if raw is None:
            raise RefusedLineError(413, "invalid_request", f"line {number} is longer than {self._longest} bytes")
        try:
            line = msgspec.json.decode(raw, type=BatchLine)
        except INVALID as wrong:
            message = f"line {number} is not a batch request: {wrong}"
            raise RefusedLineError(400, "invalid_request", message, custom_id_of(raw)) from None
        if line.method.upper() != "POST":
            raise RefusedLineError(
                405, "invalid_method", f"method {line.method!r}: only POST is allowed", line.custom_id
            )
        if line.url in LATER:
            message = f"url {line.url!r} is not in this version of Quire; there are {', '.join(ENDPOINTS)}"
            raise RefusedLineError(501, "invalid_url", message, line.custom_id)
        if line.url not in ENDPOINTS:
            message = f"url {line.url[:200]!r} is unknown; there are {', '.join(ENDPOINTS)}"
            raise RefusedLineError(404, "invalid_url", message, line.custom_id)
        if line.body.get("stream"):
            raise RefusedLineError(400, "invalid_request", "stream: a batch has whole answers only", line.custom_id)
        return line

    async def _ask(self, line: BatchLine) -> BatchResponse:
        """A full queue is no failure here: the line waits."""
        body = msgspec.json.encode(line.body)
        wait = 0.0
        while True:
            answered = await call_app(self._app, line.url, body, self._headers)
            if answered.status not in _BUSY or b"retry-after" not in answered.headers:
                return answered
            self._alive()
            wait = min(_LONGEST_WAIT_S, 2 * wait + 0.05)
            await asyncio.sleep(wait)


async def call_app(app: ASGIApp, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> BatchResponse:
    """One POST to an ASGI app, without a socket."""
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [
            (b"host", b"batch"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
            *headers,
        ],
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0), "state": {},
    }  # fmt: skip
    sent = False
    never = asyncio.Event()
    status, answer_headers, pieces = 0, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await never.wait()  # this client does not go away
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            answer_headers.update({name.lower(): value for name, value in message.get("headers", ())})
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return BatchResponse(status, answer_headers, b"".join(pieces))


def answered_line(answered: BatchResponse, custom_id: str) -> bytes:
    """An answer of a route; one that is no success is repeated under "error"."""
    response = {
        "status_code": answered.status,
        "request_id": answered.headers.get(b"x-request-id", b"").decode("latin-1") or _new_id(),
        "body": msgspec.Raw(answered.body) if _is_json(answered) else answered.body.decode("utf-8", "replace"),
    }
    error = None if answered.status == 200 else _error_of(answered)
    return msgspec.json.encode({"id": _new_id(), "custom_id": custom_id, "response": response, "error": error})


def refused_line(wrong: RefusedLineError, custom_id: str | None) -> bytes:
    error = {"code": wrong.code, "message": str(wrong), "type": "invalid_request_error", "param": None}
    response = {"status_code": wrong.status, "request_id": "", "body": {"error": error}}
    return msgspec.json.encode({"id": _new_id(), "custom_id": custom_id, "response": response, "error": error})


def _error_of(answered: BatchResponse) -> Any:
    try:
        content = msgspec.json.decode(answered.body)
    except msgspec.MsgspecError:
        return {"code": answered.status, "message": answered.body[:500].decode("utf-8", "replace")}
    return content["error"] if isinstance(content, dict) and "error" in content else content


def _is_json(answered: BatchResponse) -> bool:
    return answered.headers.get(b"content-type", b"").startswith(b"application/json") and bool(answered.body)


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
