"""build_app: the composition root of an API process. Routes, layers in front of them, and errors, put together once.

In: a ServerState. Out: an ASGI app. The routes that generate come first, because every request walks the list.
"""

from __future__ import annotations

from quire import __version__
from quire.checkpoint.media import hears_speech
from quire.server import adapters, admin, errors, generate, metrics_route, middleware, missing, render, tokens
from quire.server.anthropic import messages
from quire.server.console import pages, stats
from quire.server.openai import chat_batch, models, responses, scoring
from quire.server.openai.chat import create_chat_completion
from quire.server.openai.chat_protocol import ChatChunk, ChatRequest, ChatResponse
from quire.server.openai.completions import create_completion
from quire.server.openai.protocol import CompletionChunk, CompletionRequest, CompletionResponse
from quire.server.pooling import routes
from quire.server.route import App, add_route
from quire.server.state import ServerState

_ABOUT = "An OpenAI-compatible server that also speaks Anthropic's Messages API. Fields beyond theirs are vLLM's."


def build_app(state: ServerState) -> App:
    shown = not state.options.disable_fastapi_docs
    app = App(
        title="Quire",
        version=__version__,
        description=_ABOUT,
        openapi_url="/openapi.json" if shown else None,
        docs_url=None,  # ours, which need no other site: console/pages.py
        redoc_url=None,
        redirect_slashes=False,
    )
    app.root_path = state.options.root_path or ""
    app.state.quire = state
    pools = state.config.model_config.is_pooling
    uploads: dict[str, middleware.BodyLimit] = {}
    if not state.config.renders_only:
        if not pools:
            _add_generating(app, state)
            uploads = _add_speech(app, state)
        routes.add_routes(app)
    render.add_routes(app)
    app.include_router(models.router)
    tokens.add_routes(app, state)
    admin.install(app, state)
    if not state.config.renders_only:
        adapters.install(app, state.options.api_server_count)
    if not state.options.disable_console:
        app.include_router(stats.router)
    pages.install(app, state.options)
    missing.install(app, renders_only=state.config.renders_only, pools=pools)
    errors.install(app, log_stack=state.options.log_error_stack, full=state.options.queue_full_status)
    middleware.install(app, state, open_paths=pages.open_paths(state.options), uploads=uploads)
    metrics_route.install(app, state)
    messages.install(app)
    return app


def _add_generating(app: App, state: ServerState) -> None:
    add_route(
        app, "/v1/completions", create_completion, CompletionRequest, answer=CompletionResponse,
        streams=CompletionChunk, tag="generate",
    )  # fmt: skip
    add_route(
        app, "/v1/chat/completions", create_chat_completion, ChatRequest, answer=ChatResponse,
        streams=ChatChunk, tag="generate",
    )  # fmt: skip
    chat_batch.add_routes(app)
    scoring.add_routes(app)
    messages.add_routes(app)
    responses.add_routes(app, state)
    generate.add_routes(app)


def _add_speech(app: App, state: ServerState) -> dict[str, middleware.BodyLimit]:
    """Where the model hears speech. Out: limits of what may be sent there."""
    if not hears_speech(state.config.model_config.hf_config):
        missing.refuse_speech(app)
        return {}
    from quire.server.openai import realtime, speech  # lazy
    from quire.server.openai.speech_desk import SpeechDesk  # lazy

    desk = SpeechDesk()
    speech.add_routes(app, desk)
    realtime.add_routes(app, state, desk)
    return speech.upload_limits()
