"""Routes for operators: health, version, load, and (where they are switched on) control of the engine.

Always there: /health, /ping, /version, /load, /kv_event_sources, /invocations. With a profiler configured:
/start_profile, /stop_profile.
With QUIRE_SERVER_DEV_MODE=1 (or VLLM_SERVER_DEV_MODE=1), and never for the public: everything in DEVELOPMENT.
A control route is one verb of engine/control.py. Must not know: how a verb is done.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import BaseModel, Field

from quire import __version__
from quire.base import env
from quire.schema.errors import InputError
from quire.server.body import JsonLimits, check_json, read_body
from quire.server.errors import ERROR_RESPONSES, refusal
from quire.server.openai.chat import create_chat_completion
from quire.server.openai.chat_protocol import ChatChunk, ChatRequest, ChatResponse
from quire.server.openai.completions import create_completion
from quire.server.openai.protocol import CompletionChunk, CompletionRequest, CompletionResponse
from quire.server.route import App, HttpCall, add_route

if TYPE_CHECKING:
    from quire.server.state import ServerState

_TAG = "admin"
_LONGEST_CALL_S = 3600.0
# how openai/params.py continues a client's id, and a beam search that
_OWN_NAME = r"(?:(?:chat)?cmpl-|resp_|msg_)?{}(?:-[0-9a-f]{{9,}}(?:-\d+){{0,2}})?"


class Version(BaseModel):
    version: str


class ServerLoad(BaseModel):
    server_load: int = Field(description="Requests that this process is answering now.")


class Status(BaseModel):
    status: str


class RpcRequest(BaseModel):
    method: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", description="Name of a worker's method.")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = Field(None, gt=0, le=_LONGEST_CALL_S, description="Seconds.")


class AbortRequest(BaseModel):
    request_ids: list[str] | None = Field(
        None, max_length=10_000, description="X-Request-Ids, or ids of answers; absent: all."
    )


def install(app: App, state: ServerState) -> None:
    """Add the routes that this server has."""
    app.include_router(basic)
    if state.config.renders_only:
        return
    add_route(
        app, "/invocations", invocations, ChatRequest | CompletionRequest, answer=ChatResponse | CompletionResponse,
        streams=(ChatChunk, CompletionChunk), tag=_TAG, read=_read_invocation,
    )  # fmt: skip
    if state.config.profiler_config.profiler is not None:
        app.include_router(profiling)
    if env.SERVER_DEV_MODE.get():
        app.include_router(development)


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.quire
    return state


# ---- always -------------------------------------------------------------------------------------------------------

basic = APIRouter(tags=[_TAG])


@basic.get("/health", response_class=Response, responses={503: ERROR_RESPONSES[503]})
async def health(request: Request) -> Response:
    """200 while requests can be served; 503 with the reason when the engine is dead or stuck. Of several engines, those
    that are dead while others serve are named in the body of a 200."""
    state = _state(request)
    words = state.trouble()
    if words is not None:
        return refusal(503, words).response()
    if lost := state.engine.front.lost_engines():
        body = {"status": "degraded", "dead_engines": {str(rank): reason for rank, reason in lost.items()}}
        return Response(msgspec.json.encode(body), media_type="application/json")
    return Response(status_code=200)


@basic.get("/ping", operation_id="ping_get", response_class=Response, responses={503: ERROR_RESPONSES[503]})
@basic.post("/ping", operation_id="ping_post", response_class=Response, responses={503: ERROR_RESPONSES[503]})
async def ping(request: Request) -> Response:
    """The same as /health, where SageMaker looks for it."""
    return await health(request)


@basic.get("/version")
async def version() -> Version:
    return Version(version=__version__)


@basic.get("/load")
async def server_load(request: Request) -> ServerLoad:
    return ServerLoad(server_load=_state(request).load.count)


@basic.get("/kv_event_sources")
async def kv_event_sources() -> list[dict[str, Any]]:
    """Where engines publish events about cached blocks: nowhere, in this version."""
    return []


async def invocations(call: HttpCall, request: ChatRequest | CompletionRequest) -> None:
    """Where SageMaker sends everything: a body with `messages` is a chat, one with `prompt` a completion."""
    if isinstance(request, ChatRequest):
        await create_chat_completion(call, request)
    else:
        await create_completion(call, request)


class _InvocationKeys(msgspec.Struct):
    """What tells requests apart."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _read_invocation(raw: bytes | bytearray, limits: JsonLimits) -> ChatRequest | CompletionRequest:
    check_json(raw, limits)
    try:
        keys = msgspec.json.decode(raw, type=_InvocationKeys) if raw.lstrip()[:1] == b"{" else _InvocationKeys()
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise InputError(f"the body is not JSON: {wrong}", param="body") from None
    if keys.messages is not msgspec.UNSET:
        return read_body(ChatRequest, raw, limits)
    if keys.prompt is not msgspec.UNSET:
        return read_body(CompletionRequest, raw, limits)
    raise InputError("the body has neither `messages` (a chat) nor `prompt` (a completion)", param="body")


# ---- with a profiler ----------------------------------------------------------------------------------------------

profiling = APIRouter(tags=["profile"])


@profiling.post("/start_profile", responses=ERROR_RESPONSES)
async def start_profile(request: Request) -> Status:
    """Record what the workers do, until /stop_profile."""
    await _state(request).engine.start_profile()
    return Status(status="profiling")


@profiling.post("/stop_profile", responses=ERROR_RESPONSES)
async def stop_profile(request: Request) -> Status:
    """Write the trace into profiler_config.torch_profiler_dir."""
    await _state(request).engine.stop_profile()
    return Status(status="written")


# ---- for development ----------------------------------------------------------------------------------------------

development = APIRouter(tags=["development"], responses=ERROR_RESPONSES)


@development.get("/server_info")
async def server_info(request: Request, config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
    """The whole configuration, the options of the server (no keys) and the environment variables that are set."""
    state = _state(request)
    config: Any = str(state.config)
    if config_format == "json":
        config = _without_secrets(msgspec.to_builtins(dataclasses.asdict(state.config), enc_hook=str))
    shown = {
        name: str(variable.get()) for name, variable in env.ALL.items() if variable.is_set() and not env.is_secret(name)
    }
    return {"vllm_config": config, "server": repr(state.options), "vllm_env": shown, "version": __version__}


def _without_secrets(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: "***" if key == "hf_token" and inner else _without_secrets(inner) for key, inner in value.items()}


@development.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Forget every cached prefix; `done` is false when running requests hold blocks."""
    done = await _state(request).engine.reset_prefix_cache(reset_running_requests, reset_external)
    return {"done": bool(done)}


@development.post("/reset_mm_cache")
async def reset_mm_cache(request: Request) -> Status:
    await _state(request).engine.reset_mm_cache()
    return Status(status="reset")


@development.post("/pause")
async def pause(
    request: Request,
    mode: Literal["abort", "wait"] | None = None,
    wait_for_inflight_requests: bool = False,
    clear_cache: bool = True,
) -> Status:
    """Hold new requests. Those in flight are aborted, or (mode wait) finish first."""
    wait = mode == "wait" if mode is not None else wait_for_inflight_requests
    await _state(request).engine.pause_generation(wait_for_inflight_requests=wait, clear_cache=clear_cache)
    return Status(status="paused")


@development.post("/resume")
async def resume(request: Request) -> Status:
    await _state(request).engine.resume_generation()
    return Status(status="resumed")


@development.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    return {"is_paused": bool(await _state(request).engine.is_paused())}


@development.post("/abort_requests")
async def abort_requests(request: Request, body: Annotated[AbortRequest | None, Body()] = None) -> dict[str, int]:
    """End requests by their ids, whichever process answers them; their answers say finish_reason abort."""
    ids, engine = None if body is None else body.request_ids, _state(request).engine
    patterns = None if ids is None else [_OWN_NAME.format(re.escape(one)) for one in ids]
    pattern = re.compile(".*" if patterns is None else "|".join(patterns) or r"(?!)", re.DOTALL)
    searches = await engine.abort_searches(pattern.fullmatch)
    return {"aborted": searches + int(await engine.call("abort_requests", patterns))}


@development.post("/sleep")
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Status:
    await _state(request).engine.sleep(level)
    return Status(status="sleeping")


@development.post("/wake_up")
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Status:
    await _state(request).engine.wake_up(tags)
    return Status(status="awake")


@development.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    return {"is_sleeping": bool(await _state(request).engine.is_sleeping())}


@development.post("/collective_rpc")
async def collective_rpc(request: Request, body: RpcRequest) -> dict[str, list[Any]]:
    """Call a method of every worker; the results as they are, or as text where JSON has no form for them."""
    engine = _state(request).engine
    results = await engine.collective_rpc(body.method, body.timeout, tuple(body.args), body.kwargs)
    return {"results": [_plain(one) for one in results]}


def _plain(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError):
        return str(value)
