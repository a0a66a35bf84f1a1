"""GET /metrics, the measuring of every HTTP answer, and the engine's load in a response header.

In: an app whose routes are complete. Out: the page of all processes that share the engine (observe/prometheus.py), and
an ASGI layer that counts answers by route, method and class of status. Probes and the page itself are not counted.
Label sets are closed: a path that is no route counts as handler "none", a method outside the table as "other".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.base.clock import now
from quire.observe.declared import METHODS, OTHER_HANDLER, STATUSES, http_table
from quire.observe.prometheus import MetricSource, Page
from quire.observe.reader import Gauge, Metric
from quire.observe.sheet import Sheet
from quire.server.console.stats import PATH as CONSOLE_STATS
from quire.server.middleware import route_path
from quire.server.state import ServerState

PATH = "/metrics"
UNCOUNTED = frozenset({PATH, f"{PATH}/", CONSOLE_STATS, "/health", "/load", "/ping", "/version", "/server_info"})
_GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}
)
_METHODS = frozenset(METHODS)
_CLIENT_GONE = 499  # nobody was there to answer
_ASKED, _TOLD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
_NAMES = {"vllm:kv_cache_usage_perc": "kv_cache_usage_perc", "vllm:num_requests_waiting": "num_requests_waiting"}


def install(app: FastAPI, state: ServerState) -> None:
    """Call it last: the routes it finds are the label values there can be."""
    metrics, folder = state.engine.front.metrics, state.engine.front.metrics_folder
    handlers = {path for route in app.routes if (path := _path_of(route)) is not None}
    http = HttpMetrics(handlers - UNCOUNTED, folder=folder)
    sources: list[MetricSource] = [http] if metrics is None else [metrics, http]
    page = Page(sources, alone=folder is None)

    async def show(request: Request) -> Response:
        """What was counted, for Prometheus; `?name[]=` picks samples."""
        accept, names = request.headers.get("accept", ""), request.query_params.getlist("name[]")
        body, content_type = await asyncio.to_thread(
            page.render, accept, names
        )  # milliseconds that streams need not wait
        return Response(body, headers={"content-type": content_type})

    app.add_api_route(
        PATH,
        show,
        methods=["GET"],
        tags=["admin"],
        operation_id="metrics",
        response_class=Response,
        responses={200: {"description": "Prometheus's text format.", "content": {"text/plain": {}}}},
    )
    app.add_api_route(f"{PATH}/", show, methods=["GET"], include_in_schema=False)
    if metrics is not None:
        app.add_middleware(LoadHeader, metrics=metrics, routes=_GENERATING)
    app.add_middleware(Measured, metrics=http)


class HttpMetrics:
    """Requests, sizes and times of the HTTP side, by route, method and class of status."""

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

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in UNCOUNTED:
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
                _path_of(scope.get("route")),
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


def _path_of(route: object) -> str | None:
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
        if isinstance(metric, Gauge) and metric.name in _NAMES:
            name = _NAMES[metric.name]
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
            form = next((value.decode("latin-1") for name, value in scope["headers"] if name == _ASKED), None)
        if form is None:
            await self._app(scope, receive, send)
            return
        header_form = form.strip()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                value = header_of(header_form, load_of(self._metrics))
                if value is not None:
                    message = {**message, "headers": [*message.get("headers", ()), (_TOLD, value)]}
            await send(message)

        await self._app(scope, receive, tell)
