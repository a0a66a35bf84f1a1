"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

In: its requests. Out: its messages or their events. Inside it is a chat like any other (openai/chat_open.py): this
dialect only reads and writes it in its own words. Must not know: engines, sockets, templates.
"""

from __future__ import annotations

from typing import get_args

from quire.server.anthropic.answer import MessageEvents, MessageStream, WholeMessage
from quire.server.anthropic.errors import ANTHROPIC_ERRORS, PATH, AnthropicErrors, error_event
from quire.server.anthropic.prompt import NAMES, chat_request, template_variables
from quire.server.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicEvent,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from quire.server.errors import renamed
from quire.server.openai.chat_open import PreparedChat, check_reasoning, open_chat, prepare_chat
from quire.server.openai.envelope import encode
from quire.server.openai.limits import forget_unused
from quire.server.route import App, HttpCall, add_route
from quire.server.served import ServedModel
from quire.server.stream import drained, send_events

_TAG = "anthropic"


def add_routes(app: App) -> None:
    add_route(
        app, PATH, create_message, AnthropicMessagesRequest, answer=AnthropicMessagesResponse,
        streams=get_args(AnthropicEvent), tag=_TAG, errors=ANTHROPIC_ERRORS, ends_with_done=False,
    )  # fmt: skip
    add_route(
        app, f"{PATH}/count_tokens", count_message_tokens, AnthropicCountTokensRequest,
        answer=AnthropicCountTokensResponse, tag=_TAG, errors=ANTHROPIC_ERRORS,
    )  # fmt: skip


def install(app: App) -> None:
    """Whoever refuses a request to these paths, the client is told in its own form."""
    app.dialects[PATH] = AnthropicErrors


async def create_message(call: HttpCall, request: AnthropicMessagesRequest) -> None:
    """Answer a conversation, as Anthropic's API does.

    Streams with `stream: true`.
    """
    prepared = await _prepare(call, request)
    public_id = f"msg_{call.request_id(None)}"
    with renamed(NAMES):
        chat = await open_chat(call, prepared, public_id)
    with chat.opened.flow as flow:
        events = MessageEvents(chat, public_id)
        if request.stream:
            await send_events(call, flow, MessageStream(events), done=b"", failed=error_event)
        else:
            await call.reply(await drained(call, flow, WholeMessage(events)))


async def count_message_tokens(call: HttpCall, request: AnthropicCountTokensRequest) -> None:
    """How many tokens the prompt of such a message has."""
    model = call.model
    prompt = (await _prepare(call, request)).prompt
    if prompt.has_media:
        from quire.server.media import media_token_ids  # lazy

        ids = await media_token_ids(call, prompt, add_special_tokens=False)
        await call.reply(encode(AnthropicCountTokensResponse(len(ids))))
        return
    text = prompt.text or ""
    count = await model.engine.read(len(text), _num_tokens, model, text)
    await call.reply(encode(AnthropicCountTokensResponse(count)))


def _num_tokens(model: ServedModel, text: str) -> int:
    model.engine.front.inputs.check_length(text, is_cut=True, param="messages")
    return len(model.tokenizer.encode(text, False))


async def _prepare(call: HttpCall, request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> PreparedChat:
    if request.thinking is not None and request.thinking.type == "enabled":
        check_reasoning(call.model, "thinking")
    with renamed(NAMES):
        chat = await call.apart(chat_request, request, takes_media=call.model.takes_media)
        forget_unused(request.model_extra)
        return await prepare_chat(call, chat, template_variables(request))
