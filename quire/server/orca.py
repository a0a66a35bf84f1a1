"""The engine's load in a response header, for load balancers that speak ORCA (Open Request Cost Aggregation).

A client sends `endpoint-load-metrics-format: TEXT` or `JSON`; whatever generates for it answers with
`endpoint-load-metrics`. In: the gauges of /metrics. Must not know: how they are counted, what was asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observe.prometheus import MetricSource
from quire.observe.reader import Gauge

_ASKED, _TOLD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
_NAMES = {"vllm:kv_cache_usage_perc": "kv_cache_usage_perc", "vllm:num_requests_waiting": "num_requests_waiting"}


def load_of(metrics: MetricSource) -> dict[str, float]:
    """How full the engine is, by the names that load balancers look for."""
    found: dict[str, float] = {}
    for metric in metrics.snapshot():
        if isinstance(metric, Gauge) and metric.name in _NAMES:
            name = _NAMES[metric.name]
            found[name] = found.get(name, 0.0) + metric.value
    return found


def header_of(form: str, load: dict[str, float]) -> bytes | None:
    """None: nobody knows that form, or nothing is known."""
    if not load:
        return None
    if form.upper() == "TEXT":
        return ("TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())).encode()
    return f"JSON {json.dumps({'named_metrics': load})}".encode() if form.upper() == "JSON" else None


class LoadHeader:
    """The ASGI layer. `routes`: those that generate."""

    def __init__(
        self, app: ASGIApp, *, metrics: MetricSource, path_of: Callable[[Scope], str], routes: frozenset[str]
    ) -> None:
        self._app, self._metrics, self._path_of, self._routes = app, metrics, path_of, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = None
        if scope["type"] == "http" and self._path_of(scope) in self._routes:
            form = next((value.decode("latin-1") for name, value in scope["headers"] if name == _ASKED), None)
        if form is None:
            await self._app(scope, receive, send)
            return
        asked = form.strip()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                value = header_of(asked, load_of(self._metrics))
                if value is not None:
                    message = {**message, "headers": [*message.get("headers", ()), (_TOLD, value)]}
            await send(message)

        await self._app(scope, receive, tell)
