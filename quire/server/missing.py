"""Documented routes whose feature this version does not have: each answers 501 with the feature's name, whatever comes.

A client learns that it came to the right server and what is missing, where 404 would send it looking for a wrong path.
In: paths and features. Out: routes that are on no page. Must not know: bodies.
"""

from __future__ import annotations

from fastapi import Request, Response
from starlette.routing import Route

from quire.server.adapters import UPDATING_OFF
from quire.server.errors import refusal
from quire.server.pooling.routes import PATHS
from quire.server.route import App

_ELASTIC = "elastic expert parallelism"
MISSING = {
    "/v1/audio/speech": "models that speak",
    "/scale_elastic_ep": _ELASTIC, "/is_scaling_elastic_ep": _ELASTIC,
    "/v1/systemone": "structured decisions",
    "/v1/images/generations": "image models", "/v1/images/edits": "image models",
    "/v1/moderations": "moderation models",
    "/v1/files": "files over HTTP (`quire run-batch` reads them)",
    "/v1/batches": "batches over HTTP (`quire run-batch` runs them)",
}  # fmt: skip


# What a server without an engine leaves to others.
GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", "/generative_scoring",
    "/inference/v1/generate", "/invocations",
)  # fmt: skip
SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime")


def install(app: App, *, renders_only: bool, pools: bool) -> None:
    """`pools`: the model is a pooling model, so what generates is refused."""
    for path in (*MISSING, *SWITCHED_OFF, *((*GENERATING, *SPEECH, *PATHS) if renders_only else ())):
        app.router.routes.append(Route(path, _refuse, methods=["GET", "POST"], include_in_schema=False))
    for path in (*GENERATING, *SPEECH) if pools and not renders_only else ():
        app.router.routes.append(Route(path, _refuse_generating, methods=_methods(path), include_in_schema=False))


def refuse_speech(app: App) -> None:
    """The model generates text, and hears nothing."""
    for path in SPEECH:
        app.router.routes.append(Route(path, _refuse_hearing, methods=_methods(path), include_in_schema=False))


def _methods(path: str) -> list[str]:
    """A WebSocket begins as a GET."""
    return ["GET", "POST"] if path == "/v1/realtime" else ["POST"]


async def _refuse_hearing(request: Request) -> Response:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return refusal(
        400, f"{path}: this model does not support transcriptions: it takes no speech", param="model"
    ).response()


async def _refuse_generating(request: Request) -> Response:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    message = f"{path}: this model runs with runner=pooling and cannot generate; it answers {', '.join(PATHS)}"
    return refusal(400, message, param="model").response()


# Routes that a server has if its operator wants them.
SWITCHED_OFF = {"/v1/load_lora_adapter": UPDATING_OFF, "/v1/unload_lora_adapter": UPDATING_OFF}


async def _refuse(request: Request) -> Response:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if path in SWITCHED_OFF:
        return refusal(404, f"{path}: {SWITCHED_OFF[path]}").response()
    if path in MISSING:
        return refusal(501, f"{path}: this version of Quire has no {MISSING[path]}").response()
    return refusal(501, f"{path}: this server renders requests and answers none (`quire launch render`)").response()
