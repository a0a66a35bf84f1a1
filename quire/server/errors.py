"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}.

In: any exception, or a status and words. Out: status, headers and body; for a stream that has begun, an event.
Every refusal of every route has this form. Must not know: routes, or who raised.
"""

from __future__ import annotations

import http
import logging
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Send

from quire.base.log import logger
from quire.schema.errors import InputError, OverloadedError, QuireError, ShutdownError

log = logger(__name__)
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "DeadlineError",
}
_LONGEST = 2000  # characters of a message; a client's own words may be in it


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo


# What every route of a dialect may answer besides 200, for the OpenAPI page.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request cannot be served; the message names value and limit."},
    401: {"model": ErrorResponse, "description": "A key is needed, or the one given is wrong."},
    404: {"model": ErrorResponse, "description": "No such model or route."},
    413: {"model": ErrorResponse, "description": "The body is larger than --max-request-bytes."},
    415: {"model": ErrorResponse, "description": "The body is not declared as application/json."},
    429: {"model": ErrorResponse, "description": "The waiting queue is full; Retry-After says when to try again."},
    500: {"model": ErrorResponse, "description": "This request failed."},
    503: {"model": ErrorResponse, "description": "Overloaded, shutting down, or the engine is gone."},
    504: {"model": ErrorResponse, "description": "The request took longer than it may (--request-timeout)."},
}


class ClientGoneError(Exception):
    """Nobody reads the answer any more; there is nothing to send."""


class Refusal(NamedTuple):
    """An error ready to be sent."""

    status: int
    message: str
    type: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        info = ErrorInfo(message=self.message, type=self.type, param=self.param, code=self.status)
        return ErrorResponse(error=info).model_dump_json().encode()

    @property
    def event(self) -> bytes:
        """The same as the last event of a stream."""
        return b"data: " + self.body + b"\n\n"

    def response(self) -> Response:
        return Response(self.body, self.status, dict(self.headers), media_type="application/json")

    async def refuse_socket(self, send: Send) -> None:
        """Instead of making the connection a WebSocket."""
        await self.send(send, kind="websocket.http")

    async def send(self, send: Send, kind: str = "http") -> None:
        """For code that has no response class: plain ASGI."""
        body = self.body
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]
        await send({"type": f"{kind}.response.start", "status": self.status, "headers": headers})
        await send({"type": f"{kind}.response.body", "body": body})


def refusal(status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> Refusal:
    """Words for a status."""
    kind = _TYPES.get(status) or http.HTTPStatus(status).phrase
    return Refusal(status, _bounded(message), kind, param, tuple((headers or {}).items()))


def refusal_of(error: BaseException, *, full: str = "503") -> Refusal:
    """What a client is told of an exception. Words of an unforeseen one stay in the log. `full`: the status where a
    queue is."""
    if isinstance(error, InputError):
        return refusal(error.status, str(error), param=error.param)
    if isinstance(error, OverloadedError | ShutdownError):
        status = int(full) if isinstance(error, OverloadedError) else error.status
        return refusal(status, str(error), headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, QuireError):
        return refusal(error.status, str(error))
    if isinstance(error, RequestValidationError):
        return refusal(400, _all_wrong(error.errors()), param=_place(error.errors()))
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_context=False)
        return refusal(400, _all_wrong(faults), param=_place(faults))
    if isinstance(error, HTTPException):
        return refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    log.error("A request failed by a fault of the server", exc_info=error)
    return refusal(500, f"internal error ({type(error).__name__}); the server's log has the details")


def in_words(wrong: InputError, names: Mapping[str, str]) -> InputError:
    """A refusal in the client's own words. `names`: field of the chat request -> the client's name for it."""
    if wrong.param is None or (name := names.get(wrong.param)) is None:
        return wrong
    return type(wrong)(str(wrong).replace(wrong.param, name), param=name, value=wrong.value)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """For a dialect that makes a chat request of its own request, and has other names for some fields."""
    try:
        yield
    except InputError as wrong:
        if (renamed_error := in_words(wrong, names)) is wrong:
            raise
        raise renamed_error from wrong


def install(app: FastAPI, *, log_stack: bool = False, full: str = "503") -> None:
    """Every error that reaches the framework is rendered here."""

    async def answer(request: Request, error: Exception) -> Response:
        refused = refusal_of(error, full=full)
        if log_stack:
            log.log(logging.INFO, "%s answered %d", request.url.path, refused.status, exc_info=error)
        return refused.response()

    for kind in (QuireError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _all_wrong(faults: Any) -> str:
    """Each fault with its place, its reason and the value that was seen. A union reports every form it tried."""
    lines = []
    for fault in list(faults)[:5]:
        place = ".".join(str(part) for part in fault["loc"]) or "body"
        seen = "" if fault["type"] in ("json_invalid", "missing") else f", got {_shown(fault.get('input'))}"
        lines.append(f"{place}: {fault['msg']}{seen}")
    more = len(faults) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def _place(faults: Any) -> str | None:
    names = [str(part) for part in faults[0]["loc"]] if faults else []
    return names[0] if names and names[0] != "body" else (names[1] if len(names) > 1 else None)


def _shown(value: Any) -> str:
    return reprlib.repr(value)  # bounded, whatever the value


def _bounded(message: str) -> str:
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}… ({len(message)} characters)"
    return message.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent
