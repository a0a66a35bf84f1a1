"""What every request passes before a route sees it: measuring, load header, request id, CORS, keys, body size.

Plain ASGI classes, outermost first in `install`; a user's own middleware (--middleware) comes last, next to the routes.
The layers that measure are outside of all these (metrics_route.py, which knows the routes, puts them there).
Refusals have the form of server/errors.py. Must not know: routes, dialects, the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import json
import logging
import re
import uuid
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.base.clock import now
from quire.base.registry import load
from quire.observe.declared import METHODS, OTHER_HANDLER, STATUSES, http_table
from quire.observe.prometheus import MetricSource
from quire.observe.reader import Gauge, Metric
from quire.observe.sheet import Sheet
from quire.schema.errors import ConfigError, TooLargeError
from quire.server.callers import digests, note_key
from quire.server.errors import refusal, refusal_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from quire.config.server import ServerConfig
    from quire.server.state import ServerState

_ID = re.compile(rb"[A-Za-z0-9._:/@=+-]{1,128}")
_OPEN_PATHS = frozenset(("/health", "/ping"))
_METRICS = frozenset(("/metrics", "/metrics/"))
# With api_key_scope v1: what vLLM guards, and the pooling routes under other names, which run the model all the same.
_GUARDED_ALWAYS = ("/v1", "/v2", "/inference", "/pooling", "/classify", "/score", "/rerank")
_DRAIN_BYTES, _DRAIN_SECONDS = 4 << 20, 2.0
_METHODS = frozenset(METHODS)
_CLIENT_GONE = 499  # nobody was there to answer
_LOAD_FORM, _LOAD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
_LOAD_NAMES = {"vllm:kv_cache_usage_perc": "kv_cache_usage_perc", "vllm:num_requests_waiting": "num_requests_waiting"}


def install(
    app: FastAPI, state: ServerState, *, open_paths: frozenset[str] = frozenset(),
    uploads: Mapping[str, BodyLimit] | None = None,
) -> None:  # fmt: skip
    """`open_paths` ask for no key, beside those that never do. `uploads`: paths whose bodies have limits of their
    own."""
    options = state.options
    outermost_first = [
        Middleware(RequestIds, answer=options.enable_request_id_headers),
        *_cors(options),
        *([Middleware(ApiKeyAuth, options=options, open_paths=open_paths)] if options.keys else []),
        Middleware(BodySize, limit=BodyLimit(options.max_request_bytes, "max_request_bytes"), uploads=uploads or {}),
        *map(_users_own, options.middleware),
    ]
    for one in reversed(outermost_first):
        app.add_middleware(one.cls, *one.args, **one.kwargs)


def route_path(scope: Scope) -> str:
    """The path as routes are declared, without the prefix of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


class RequestIds:
    """Gives every request an id: the client's X-Request-Id if it is a sane one, else a new one. Answers carry it."""

    def __init__(self, app: ASGIApp, answer: bool) -> None:
        self.app = app
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        known = _ID.fullmatch(client_id) is not None
        request_id = client_id if known else uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["request_id_given"] = known
        if not self.answer:
            await self.app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKeyAuth:
    """Lets in whoever shows one of the keys, and notes which. Every key is compared, in constant time, whatever the
    first ones said."""

    def __init__(self, app: ASGIApp, options: ServerConfig, open_paths: frozenset[str] = frozenset()) -> None:
        self.app = app
        self._keys = digests(options.keys)
        self._narrow = options.api_key_scope == "v1"
        self._open = _OPEN_PATHS | open_paths | (_METRICS if options.open_metrics else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        shown = self._shown(scope)
        if shown is not None:
            note_key(scope, shown)
        if shown is not None or self._free(scope):
            await self.app(scope, receive, send)
            return
        refused = refusal(
            401,
            "a key is needed: send 'Authorization: Bearer KEY' (or 'x-api-key: KEY') with one of the server's keys",
            headers={"WWW-Authenticate": "Bearer"},
        )
        if scope["type"] == "websocket":
            await refused.refuse_socket(send)
        else:
            await refused.send(send)

    def _free(self, scope: Scope) -> bool:
        if scope.get("method") == "OPTIONS":
            return True
        path = route_path(scope)
        return path in self._open or (self._narrow and not path.startswith(_GUARDED_ALWAYS))

    def _shown(self, scope: Scope) -> int | None:
        """The number of the first key that is shown."""
        matches: list[int] = []
        for name, value in scope["headers"]:
            if name == b"x-api-key":  # as Anthropic's clients send it
                matches += self._numbers(value)
            elif name == b"authorization":
                scheme, _, token = value.partition(b" ")
                numbers = self._numbers(token)
                matches += numbers if scheme.lower() == b"bearer" else []
        return matches[0] if matches else None

    def _numbers(self, token: bytes) -> list[int]:
        digest = sha256(token.strip()).digest()
        same = [hmac.compare_digest(digest, key) for key in self._keys]
        return [number for number, is_it in enumerate(same) if is_it]


class BodyLimit(NamedTuple):
    bytes: int
    name: str  # of the option that says so


class BodySize:
    """Refuses a body over the limit with 413: by its declared length before a byte of it is read, or while it comes."""

    def __init__(self, app: ASGIApp, limit: BodyLimit, uploads: Mapping[str, BodyLimit]) -> None:
        """`uploads`: paths with another limit."""
        self.app = app
        self.limit, self.uploads = limit, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.uploads.get(route_path(scope), self.limit) if self.uploads else self.limit
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if declared is not None and declared.isdigit() and int(declared) > limit.bytes:
            await self._refuse(receive, send, limit, f"the body has {declared.decode()[:20]} bytes")
            return
        if declared is not None:  # the parser lets no more in than was declared
            await self.app(scope, receive, send)
            return
        await self._count(limit, scope, receive, send)

    async def _count(self, limit: BodyLimit, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0
        began = over = False

        async def counted() -> Message:
            nonlocal seen, over
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit.bytes:
                over = True
                raise TooLargeError(_too_large("the body has more bytes", limit))
            return message

        async def watched(message: Message) -> None:
            nonlocal began
            if over and not began:
                return  # the refusal below says it, and sees the rest of the body off
            began = True
            await send(message)

        try:
            await self.app(scope, counted, watched)
        except TooLargeError:
            if began:
                raise
        if over and not began:
            await self._refuse(receive, send, limit, "the body has more bytes")

    async def _refuse(self, receive: Receive, send: Send, limit: BodyLimit, words: str) -> None:
        """The answer goes out at once; then some of the body is read, so that closing does not cut the answer off."""
        refused = refusal_of(TooLargeError(_too_large(words, limit)))
        body = refused.body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        left, more = _DRAIN_BYTES, True
        with contextlib.suppress(TimeoutError):  # a client that says no more must not hold the connection
            async with asyncio.timeout(_DRAIN_SECONDS):
                while more and left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    more = message["type"] == "http.request" and message.get("more_body", False)
        await send({"type": "http.response.body", "body": b""})


def _too_large(words: str, limit: BodyLimit) -> str:
    return f"{words}; at most {limit.bytes} are read ({limit.name})"


class QuietPaths(logging.Filter):
    """Drops access-log lines of given paths (disable_access_log_for_endpoints)."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args  # client, method, path with query, version, status
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        return str(args[2]).partition("?")[0] not in self._paths


def _cors(options: ServerConfig) -> list[Middleware]:
    if not options.allowed_origins:
        return []
    made = Middleware(
        CORSMiddleware,
        allow_origins=list(options.allowed_origins),
        allow_credentials=options.allow_credentials,
        allow_methods=list(options.allowed_methods),
        allow_headers=list(options.allowed_headers),
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    return [made]


def _users_own(path: str) -> Middleware:
    """A class is used as it is; an async function (request, call_next) as FastAPI's http middleware."""
    try:
        loaded: Any = load(path)
    except ImportError as missing:
        raise ConfigError(f"middleware {path!r} cannot be imported: {missing}", param="middleware") from missing
    if isinstance(loaded, type):
        return Middleware(cast(Any, loaded))
    if inspect.iscoroutinefunction(loaded):
        return Middleware(load("starlette.middleware.base:BaseHTTPMiddleware"), dispatch=loaded)
    raise ConfigError(
        f"middleware {path!r} is a {type(loaded).__name__}; it must be a class or an async function", param="middleware"
    )


# ---- measuring every answer -----------------------------------------------------------------------------------------


class HttpMetrics:
    """Requests, sizes and times of the HTTP side, by route, method and class of status. Label sets are closed: a path
    that is no route counts as handler "none", a method outside the table as "other"."""

    def __init__(self, handlers: Iterable[str], *, folder: str | None = None) -> None:
        """`handlers` are the routes as they are written, such as /v1/models/{name}."""
        self._handlers = tuple(sorted(set(handlers) - {OTHER_HANDLER}))
        self.sheet = Sheet(http_table(self._handlers), kind="http", folder=folder)
        self._known = frozenset(self._handlers)

    def answered(
        self, handler: str | None, method: str, status: int, seconds: float, *, received: int, sent: int
    ) -> None:
        """`received` and `sent` are bytes of the bodies."""
        name = handler if handler in self._known and handler is not None else OTHER_HANDLER
        verb = method if method in _METHODS else "other"
        sheet = self.sheet
        sheet.add("http_requests", 1, name, verb, STATUSES[min(max(status // 100, 1), 5) - 1])
        sheet.observe("http_request_size_bytes", received, name)
        sheet.observe("http_response_size_bytes", sent, name)
        sheet.observe("http_request_duration_highr_seconds", seconds)
        sheet.observe("http_request_duration_seconds", seconds, name, verb)

    def snapshot(self) -> list[Metric]:
        """Only combinations that happened: there are hundreds."""
        return self.sheet.read({}, seen_only=True)


class Measured:
    """The ASGI layer. Outermost, so that refusals of other layers are counted too."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, uncounted: frozenset[str]) -> None:
        """`uncounted`: paths of probes, which would drown everything else."""
        self._app, self._metrics, self._uncounted = app, metrics, uncounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in self._uncounted:
            await self._app(scope, receive, send)
            return
        answer = _CountedResponse(send)
        began = now()
        try:
            await self._app(scope, receive, answer)
        except Exception:
            answer.status = answer.status or 500
            raise
        finally:
            self._metrics.answered(
                declared_path(scope.get("route")),
                scope["method"],
                answer.status or _CLIENT_GONE,
                now() - began,
                received=_length(scope),
                sent=answer.sent,
            )


class _CountedResponse:
    """Passes an answer on, and remembers what it was."""

    __slots__ = ("_send", "sent", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.sent = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def declared_path(route: object) -> str | None:
    """A route as it is written; a mount or a foreign layer has none."""
    try:
        path = route.path  # type: ignore[attr-defined]
    except AttributeError:
        return None
    return path if isinstance(path, str) else None


def _length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


# ---- the engine's load in a header ---------------------------------------------------------------------------------


def load_of(metrics: MetricSource) -> dict[str, float]:
    """How full the engine is, by the names that load balancers look for."""
    load: dict[str, float] = {}
    for metric in metrics.snapshot():
        if isinstance(metric, Gauge) and metric.name in _LOAD_NAMES:
            name = _LOAD_NAMES[metric.name]
            load[name] = load.get(name, 0.0) + metric.value
    return load


def header_of(form: str, load: dict[str, float]) -> bytes | None:
    """None: nobody knows that form, or nothing is known."""
    if not load:
        return None
    if form.upper() == "TEXT":
        return ("TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())).encode()
    return f"JSON {json.dumps({'named_metrics': load})}".encode() if form.upper() == "JSON" else None


class LoadHeader:
    """The ASGI layer for load balancers that speak ORCA (Open Request Cost Aggregation): a client that sends
    `endpoint-load-metrics-format: TEXT` or `JSON` is told the load in `endpoint-load-metrics`, by `routes`."""

    def __init__(self, app: ASGIApp, *, metrics: MetricSource, routes: frozenset[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = None
        if scope["type"] == "http" and route_path(scope) in self._routes:
            form = next((value.decode("latin-1") for name, value in scope["headers"] if name == _LOAD_FORM), None)
        if form is None:
            await self._app(scope, receive, send)
            return
        header_form = form.strip()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                value = header_of(header_form, load_of(self._metrics))
                if value is not None:
                    message = {**message, "headers": [*message.get("headers", ()), (_LOAD, value)]}
            await send(message)

        await self._app(scope, receive, tell)
