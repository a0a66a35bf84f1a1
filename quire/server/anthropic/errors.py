"""Errors as Anthropic's clients read them: {"type": "error", "error": {"type", "message"}}.

`AnthropicErrors` is a layer outside all others on the paths of this dialect: whoever refused a request (keys, size,
the route itself), the client gets Anthropic's form and status. Must not know: who refused, or why.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.anthropic.protocol import AnthropicError, AnthropicErrorResponse
from quire.server.errors import ERROR_RESPONSES, Refusal
from quire.server.openai.envelope import encode

PATH = "/v1/messages"
_OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
# What the routes of this dialect may answer besides 200, for the OpenAPI page.
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorResponse, "description": response["description"]}
    for status, response in ERROR_RESPONSES.items()
}
ANTHROPIC_ERRORS[_OVERLOADED] = {
    "model": AnthropicErrorResponse,
    "description": "Overloaded or shutting down; Retry-After says when to try again.",
}


def type_of(status: int) -> str:
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def status_of(status: int, *, retry_after: bool) -> int:
    """529 is Anthropic's way to say: try again later."""
    return _OVERLOADED if status == 503 and retry_after else status


def error_event(refusal: Refusal) -> bytes:
    """The last event of a stream that failed."""
    status = status_of(refusal.status, retry_after=any(name == "Retry-After" for name, _ in refusal.headers))
    return b"event: error\ndata: " + _body(status, refusal.message) + b"\n\n"


def _body(status: int, message: str, request_id: str | msgspec.UnsetType = msgspec.UNSET) -> bytes:
    return encode(AnthropicErrorResponse(AnthropicError(type_of(status), message), request_id))


class AnthropicErrors:
    """Rewrites refusals, and names every answer there in the header that its clients read."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send if scope["method"] == "OPTIONS" else _Rewriter(send))


class _Rewriter:
    """Holds the status of a refusal back until its words are there. They come in one message."""

    __slots__ = ("_send", "_start")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.setdefault("headers", [])
            by_name = dict(headers)
            if b"x-request-id" in by_name:
                headers.append((b"request-id", by_name[b"x-request-id"]))
            if message["status"] >= 400 and by_name.get(b"content-type") == b"application/json":
                self._start = message
                return
        elif self._start is not None:
            start, self._start = self._start, None
            message = {**message, "body": _rewrite(start, message.get("body", b""))}
            await self._send(start)
        await self._send(message)


def _rewrite(start: Message, body: bytes) -> bytes:
    """The new body; the status and the length in `start` are set to fit."""
    by_name = dict(start["headers"])
    start["status"] = status_of(start["status"], retry_after=b"retry-after" in by_name)
    error = msgspec.json.decode(body)["error"]
    request_id = by_name.get(b"request-id")
    body = _body(
        start["status"], error["message"], msgspec.UNSET if request_id is None else request_id.decode("latin-1")
    )
    others = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    start["headers"] = [*others, (b"content-length", b"%d" % len(body))]
    return body
