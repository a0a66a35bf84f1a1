"""/v1/chat/completions/render and /v1/completions/render: what these requests would send to the engine, and no more.

In: the same requests. Out: token ids and sampling parameters in the form that /inference/v1/generate takes, with every
default filled in; nothing is generated. Must not know: engines, answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import RootModel

from quire.engine.inputs import Asked
from quire.schema.errors import InputError
from quire.schema.params import SamplingParams
from quire.server.generate import NAMES, TokensRequest
from quire.server.openai.chat_open import prepare_chat
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.completions import prepare_completion
from quire.server.openai.envelope import encode
from quire.server.openai.params import prepare_requests
from quire.server.openai.protocol import CompletionRequest, GenerateRequest
from quire.server.route import App, Call, add_route
from quire.server.state import ServerState
from quire.text.offsets import token_offsets

_TAG = "tokens"


class RenderedRequests(RootModel[list[TokensRequest]]):
    """One for each prompt, in order."""


def add_routes(app: App) -> None:
    add_route(
        app, "/v1/chat/completions/render", render_chat_completion, ChatRequest, answer=TokensRequest, tag=_TAG
    )  # fmt: skip
    add_route(
        app, "/v1/completions/render", render_completion, CompletionRequest, answer=RenderedRequests, tag=_TAG
    )  # fmt: skip


async def render_chat_completion(call: Call, request: ChatRequest) -> None:
    """The token ids and parameters of a chat request."""
    state = call.state
    state.served.check(request.model)
    prepared = await prepare_chat(call, request)
    public_id = f"chatcmpl-{call.request_id(request.request_id)}"
    special = bool(prepared.request.add_special_tokens)
    asked = await prepare_requests(
        call, prepared.request, public_id, [prepared.prompt], prepared.params, add_special_tokens=special,
        most=prepared.most,
    )  # fmt: skip
    (rendered,) = await call.apart(_rendered, state, asked, request, public_id)
    await call.reply(encode(rendered))


async def render_completion(call: Call, request: CompletionRequest) -> None:
    """The token ids and parameters of a completion request, prompt by prompt."""
    state = call.state
    state.served.check(request.model)
    ready = await call.apart(prepare_completion, state, request)
    public_id = f"cmpl-{call.request_id(request.request_id)}"
    asked = await prepare_requests(
        call, request, public_id, ready.prompts, ready.params, add_special_tokens=ready.special, most=ready.most
    )
    await call.reply(encode(await call.apart(_rendered, state, asked, request, public_id)))


def _rendered(
    state: ServerState, asked: Sequence[Asked], request: GenerateRequest, public_id: str
) -> list[dict[str, Any]]:
    if request.use_beam_search:
        raise InputError("use_beam_search: a search is many requests, and has no form of one", param="use_beam_search")
    streaming = None if request.stream_options is None else request.stream_options.model_dump()
    return [
        {
            "request_id": public_id if len(asked) == 1 else f"{public_id}-{index}",
            "token_ids": one.token_ids,
            "sampling_params": _shown(one.params, one.requests[0].max_tokens),
            "model": state.served.name,
            "stream": bool(request.stream),
            "stream_options": streaming,
            "cache_salt": request.cache_salt,
            "priority": request.priority or 0,
            "features": None,
            "token_offsets": _offsets(state, one, request),
            "kv_transfer_params": None,
        }
        for index, one in enumerate(asked)
    ]


def _offsets(state: ServerState, one: Asked, request: GenerateRequest) -> list[tuple[int, int]] | None:
    """None: nobody asked, the prompt was no text or not all of it is used, or it cannot be told."""
    if not request.return_token_offsets or one.text is None or request.truncate_prompt_tokens is not None:
        return None
    return token_offsets(state.tokenizer, one.text, one.token_ids)


def _shown(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Every parameter that is set, also where it is the default; the prompt is cut already."""
    given = {name: getattr(params, name) for name in NAMES if name != "truncate_prompt_tokens"}
    given["max_tokens"] = max_tokens
    return {name: msgspec.to_builtins(value, str_keys=True) for name, value in given.items() if value is not None}
