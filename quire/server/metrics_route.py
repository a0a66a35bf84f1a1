"""GET /metrics, and which routes are counted or answer with the engine's load in a header.

In: an app whose routes are complete. Out: the page of all processes that share the engine (observe/prometheus.py), and
the layers that measure (middleware.py) in front of the app. Probes and the page itself are not counted.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from quire.observe.prometheus import MetricSource, Page
from quire.server.console.stats import PATH as CONSOLE_STATS
from quire.server.middleware import HttpMetrics, LoadHeader, Measured, declared_path
from quire.server.state import ServerState

PATH = "/metrics"
UNCOUNTED = frozenset({PATH, f"{PATH}/", CONSOLE_STATS, "/health", "/load", "/ping", "/version", "/server_info"})
_GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}
)


def install(app: FastAPI, state: ServerState) -> None:
    """Call it last: the routes it finds are the label values there can be."""
    metrics, folder = state.engine.front.metrics, state.engine.front.metrics_folder
    handlers = {path for route in app.routes if (path := declared_path(route)) is not None}
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
    app.add_middleware(Measured, metrics=http, uncounted=UNCOUNTED)
