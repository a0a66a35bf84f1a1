"""/tokenize, /detokenize and /tokenizer_info: between words and token ids, without generating anything.

In: text, messages or ids. Out: ids or text. What a chat is tokenized to here is what /v1/chat/completions would
compute. Must not know: engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from quire.schema.errors import InputError
from quire.server.body import JsonLimits, read_body
from quire.server.errors import ERROR_RESPONSES
from quire.server.openai.chat_open import render_prompt
from quire.server.openai.chat_protocol import Message, Tool
from quire.server.openai.envelope import encode
from quire.server.openai.limits import check_extra, check_template_trust
from quire.server.openai.protocol import ListOf, Tokens
from quire.server.route import App, HttpCall, add_route
from quire.server.served import ServedModel
from quire.server.state import ServerState

_TAG = "tokens"


class TokenizeCompletionRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str | None = None
    prompt: str = Field(examples=["Hello world"])
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class TokenizeChatRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str | None = None
    messages: ListOf[Message] = Field(examples=[[{"role": "user", "content": "Say hi"}]])
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ListOf[Tool] | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str | None = None
    tokens: Tokens = Field(examples=[[19556, 905]])


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    model_config = ConfigDict(extra="allow")
    tokenizer_class: str
    name_or_path: str
    is_fast: bool
    vocab_size: int
    model_max_length: int
    chat_template: str | dict[str, str] | None = None
    special_tokens: dict[str, str]


def add_routes(app: App, state: ServerState) -> None:
    either = TokenizeCompletionRequest | TokenizeChatRequest
    add_route(app, "/tokenize", tokenize, either, answer=TokenizeResponse, tag=_TAG, read=_read_either)
    add_route(app, "/detokenize", detokenize, DetokenizeRequest, answer=DetokenizeResponse, tag=_TAG)
    if state.options.enable_tokenizer_info_endpoint:
        app.include_router(_info)


def _read_either(raw: bytes | bytearray, limits: JsonLimits) -> TokenizeCompletionRequest | TokenizeChatRequest:
    # The one key that tells them apart may also stand in a text; a wrong guess is only a refusal that names it.
    if b'"messages"' in raw and b'"prompt"' not in raw:
        return read_body(TokenizeChatRequest, raw, limits)
    return read_body(TokenizeCompletionRequest, raw, limits)


async def tokenize(call: HttpCall, request: TokenizeCompletionRequest | TokenizeChatRequest) -> None:
    """Token ids of a text, or of a chat as the model would get it."""
    model = call.model
    if request.model_extra:
        check_extra(request.model_extra)
    if isinstance(request, TokenizeChatRequest):
        text = await _chat_text(call, request)
        special = bool(request.add_special_tokens)
    else:
        text, special = request.prompt, request.add_special_tokens is not False
    with_strings = bool(request.return_token_strs)
    await call.reply(await model.engine.read(len(text), _tokenized, model, text, special, with_strings))


def _tokenized(model: ServedModel, text: str, special: bool, with_strings: bool) -> bytes:
    """The answer. A text may be longer than a prompt: its tokens are only counted."""
    tokenizer = model.tokenizer
    model.engine.front.inputs.check_length(text, is_cut=True)
    ids = tokenizer.encode(text, special)
    strings = tokenizer.convert_ids_to_tokens(ids) if with_strings else None
    return encode({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings})


async def detokenize(call: HttpCall, request: DetokenizeRequest) -> None:
    """The text of token ids."""
    model = call.model
    if request.model_extra:
        check_extra(request.model_extra)
    tokens, limit = request.tokens, model.max_model_len
    if len(tokens) > limit:
        raise InputError(
            f"tokens has {len(tokens)} ids; the limit is max_model_len ({limit})", param="tokens", value=len(tokens)
        )
    vocab_size = model.engine.front.inputs.vocab_size
    for token_id in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InputError(
                f"tokens holds {token_id}; this model's ids are 0 to {vocab_size - 1}", param="tokens", value=token_id
            )
    await call.reply(await model.engine.read(len(tokens), _detokenized, model, tokens))


def _detokenized(model: ServedModel, tokens: Sequence[int]) -> bytes:
    return encode({"prompt": model.tokenizer.decode(tokens)})


async def _chat_text(call: HttpCall, request: TokenizeChatRequest) -> str:
    check_template_trust(request.chat_template, request.chat_template_kwargs, call.state.options)
    opens = request.add_generation_prompt
    return await render_prompt(
        call,
        request.messages,
        tools=request.tools,
        add_generation_prompt=not request.continue_final_message if opens is None else opens,
        continue_final_message=bool(request.continue_final_message),
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )


_info = APIRouter(tags=[_TAG])


@_info.get("/tokenizer_info", operation_id="tokenizer_info", responses={401: ERROR_RESPONSES[401]})
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """What the tokenizer is, and its chat template."""
    state: ServerState = request.app.state.quire
    model = state.served.base
    tokenizer = model.tokenizer
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        name_or_path=tokenizer.name_or_path,
        is_fast=tokenizer.is_fast,
        vocab_size=tokenizer.vocab_size,
        model_max_length=model.max_model_len,
        chat_template=model.chat_template or tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens_map,
    )
