"""POST /v1/chat/completions/batch: several conversations with the same parameters, answered together.

In: a list of conversations. Out: one chat completion whose choices are those of the first conversation, then of the
next. Each conversation is a chat like any other (chat_open.py). Must not know: templates, engines, sockets.
"""

from __future__ import annotations

from pydantic import Field

from quire.schema.errors import InputError
from quire.schema.outputs import RequestOutput
from quire.server.openai.chat import ChatAnswer
from quire.server.openai.chat_open import OpenedChat, PreparedChat, prepare_chat
from quire.server.openai.chat_protocol import ChatRequest, ChatResponse, Message
from quire.server.openai.envelope import to_json
from quire.server.openai.limits import check_request
from quire.server.openai.params import Opened, open_requests
from quire.server.openai.protocol import ListOf
from quire.server.route import App, HttpCall, add_route
from quire.server.stream import drained

PATH = "/v1/chat/completions/batch"
_ALONE = ("stream", "tools", "tool_choice")  # of one conversation only


class BatchChatRequest(ChatRequest):
    """The fields of a chat, with conversations in place of messages."""

    messages: ListOf[ListOf[Message]] = Field(  # type: ignore[assignment]
        examples=[[[{"role": "user", "content": "Say hi"}], [{"role": "user", "content": "Say bye"}]]]
    )


def add_routes(app: App) -> None:
    add_route(app, PATH, create_chat_batch, BatchChatRequest, answer=ChatResponse, tag="generate")


async def create_chat_batch(call: HttpCall, request: BatchChatRequest) -> None:
    """Answer several conversations."""
    prepared = [await prepare_chat(call, one) for one in await call.apart(_each, request)]
    check_request(prepared[0].request, call.state.options, len(prepared))
    public_id = f"chatcmpl-{call.request_id(request.request_id)}"
    first = prepared[0]
    opened = await open_requests(
        call, first.request, public_id, [one.prompt for one in prepared], first.params,
        add_special_tokens=bool(first.request.add_special_tokens), most=first.most,
        continues=bool(first.request.continue_final_message),
    )  # fmt: skip
    with opened.flow as flow:
        answer = _BatchAnswer(call, prepared, opened, public_id)
        await call.reply(await drained(call, flow, answer))


class _BatchAnswer:
    """The answers to all conversations as one."""

    def __init__(self, call: HttpCall, prepared: list[PreparedChat], opened: Opened, public_id: str) -> None:
        options, model = call.state.options, call.model
        chats = [OpenedChat(options, model, one, _alone(opened, index)) for index, one in enumerate(prepared)]
        self._answers = [ChatAnswer(chat, public_id) for chat in chats]
        self._indices = opened.indices

    def take(self, results: list[RequestOutput]) -> None:
        for result in results:
            self._answers[self._indices[result.request_id]].take([result])

    def end(self) -> None:
        """Nothing follows a whole answer."""

    def whole(self) -> bytes:
        responses = [answer.response() for answer in self._answers]
        first = responses[0]
        first.choices = [choice for response in responses for choice in response.choices]
        for index, choice in enumerate(first.choices):
            choice.index = index
        for later in responses[1:]:
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                setattr(first.usage, name, getattr(first.usage, name) + getattr(later.usage, name))
        return to_json(first)


def _each(request: BatchChatRequest) -> list[ChatRequest]:
    if not request.messages:
        raise InputError("messages holds no conversation; give at least one", param="messages")
    fields = request.model_dump(exclude_unset=True, exclude={"messages"})
    for name in _ALONE:
        if fields.get(name) not in (None, False, "none"):
            raise InputError(f"{name} cannot be given with several conversations", param=name)
    return [ChatRequest.model_validate({**fields, "messages": messages}) for messages in request.messages]


def _alone(opened: Opened, index: int) -> Opened:
    """One conversation's part of what runs."""
    prepared = opened.requests[index]
    return Opened(opened.flow, (prepared,), {prepared.request_id: 0})
