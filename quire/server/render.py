"""/v1/chat/completions/render and /v1/completions/render: what these requests would send to the engine, and no more.

In: the same requests. Out: token ids and sampling parameters in the form that /inference/v1/generate takes, with every
default filled in; nothing is generated. Must not know: engines, answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import RootModel

from quire.engine.inputs import PreparedRequest
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.params import SamplingParams
from quire.server.generate import NAMES, TokensRequest
from quire.server.openai.chat_open import PreparedChat, chat_text, prepare_chat
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.completions import prepare_completion
from quire.server.openai.envelope import encode
from quire.server.openai.params import prepare_requests
from quire.server.openai.protocol import CompletionRequest, GenerateRequest
from quire.server.route import App, HttpCall, add_route
from quire.server.served import ServedModel
from quire.text.chat import find_answers
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


async def render_chat_completion(call: HttpCall, request: ChatRequest) -> None:
    """The token ids and parameters of a chat request."""
    model = call.model
    prepared = await prepare_chat(call, request)
    if prepared.prompt.has_media:
        raise NotBuiltError("messages with media cannot be rendered to token ids alone", param="messages")
    public_id = f"chatcmpl-{call.request_id(request.request_id)}"
    special = bool(prepared.request.add_special_tokens)
    requests = await prepare_requests(
        call, prepared.request, public_id, [prepared.prompt], prepared.params, add_special_tokens=special,
        most=prepared.most,
    )  # fmt: skip
    (rendered,) = await call.apart(_rendered, model, requests, request, public_id, prepared.params)
    if request.return_assistant_tokens_mask:
        places = await _answers_in(call, request, prepared)
        rendered["assistant_tokens_mask"] = await call.apart(_mask, model, requests[0], request, places)
    await call.reply(encode(rendered))


async def _answers_in(call: HttpCall, request: ChatRequest, prepared: PreparedChat) -> list[tuple[int, int]] | None:
    """Where in the prompt's text the model wrote, if the template says so."""
    mark = secrets.token_hex(16)  # not to be guessed: a message could hold it
    variables = request.chat_template_kwargs or {}
    marked = await chat_text(call, prepared.request, prepared.opens, variables, mark=mark)
    return find_answers(marked, mark, prepared.prompt.text or "")


def _mask(
    model: ServedModel, one: PreparedRequest, request: GenerateRequest, places: list[tuple[int, int]] | None
) -> list[int] | None:
    """1 for a token with a character in one of the places. None: it cannot be told, as for token_offsets."""
    if places is None or (offsets := _offsets(model, one, request)) is None:
        return None
    mask = [0] * len(offsets)
    index = 0
    for first, past in places:  # both lists go forward
        while index < len(offsets) and offsets[index][1] <= first:
            index += 1
        while index < len(offsets) and offsets[index][0] < past:
            mask[index] = int(offsets[index][1] > offsets[index][0])
            index += 1
        index = max(0, index - 1)  # a token may reach into the next place
    return mask


async def render_completion(call: HttpCall, request: CompletionRequest) -> None:
    """The token ids and parameters of a completion request, prompt by prompt."""
    model = call.model
    ready = await call.apart(prepare_completion, call.state.options, model, request)
    public_id = f"cmpl-{call.request_id(request.request_id)}"
    requests = await prepare_requests(
        call, request, public_id, ready.prompts, ready.params, add_special_tokens=ready.special, most=ready.most
    )
    await call.reply(encode(await call.apart(_rendered, model, requests, request, public_id, ready.params)))


def _rendered(
    model: ServedModel, requests: Sequence[PreparedRequest], request: GenerateRequest, public_id: str,
    params: SamplingParams,
) -> list[dict[str, Any]]:  # fmt: skip
    if model.config.model_config.is_encoder_decoder:
        raise NotBuiltError(
            "prompts of encoder-decoder models cannot be rendered: what the encoder reads has no place in token_ids",
            param="model",
        )
    if request.use_beam_search:
        raise InputError("use_beam_search: a search is many requests, and has no form of one", param="use_beam_search")
    streaming = None if request.stream_options is None else request.stream_options.model_dump()
    return [
        {
            "request_id": public_id if len(requests) == 1 else f"{public_id}-{index}",
            "token_ids": one.token_ids,
            "sampling_params": _shown(params, one.requests[0].max_tokens),
            "model": model.name,
            "stream": bool(request.stream),
            "stream_options": streaming,
            "cache_salt": request.cache_salt,
            "priority": request.priority or 0,
            "features": None,
            "token_offsets": _offsets(model, one, request) if request.return_token_offsets else None,
            "assistant_tokens_mask": None,
            "kv_transfer_params": None,
        }
        for index, one in enumerate(requests)
    ]


def _offsets(model: ServedModel, one: PreparedRequest, request: GenerateRequest) -> list[tuple[int, int]] | None:
    """None: the prompt was no text or not all of it is used, or it cannot be told."""
    if one.text is None or request.truncate_prompt_tokens is not None:
        return None
    return token_offsets(model.tokenizer, one.text, one.token_ids)


def _shown(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Every parameter that is set, also where it is the default; the prompt is cut already."""
    values = {name: getattr(params, name) for name in NAMES if name != "truncate_prompt_tokens"}
    values["max_tokens"] = max_tokens
    return {name: msgspec.to_builtins(value, str_keys=True) for name, value in values.items() if value is not None}
