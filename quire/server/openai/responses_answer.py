"""ResponseAnswer: one call's results as an answer of /v1/responses, in events or whole.

In: results of the engine, through the answer's parser. Out: numbered events, which tell how the response stands as it
begins and as it ends: `ResponseStream` encodes each of them, `WholeResponse` the response that the last one holds. The
output is made of AnswerParts, one item each (responses_items.py). All bytes are those of the wire types. Must not know:
engines, sockets, stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from quire.llm.online import Flow
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.server.errors import Refusal
from quire.server.openai.chat_open import OpenedChat
from quire.server.openai.envelope import encode
from quire.server.openai.logprobs import TokenNames, chat_logprobs
from quire.server.openai.responses_input import Messages, assistant_message, namespaces
from quire.server.openai.responses_items import ShownItem
from quire.server.openai.responses_protocol import ResponsesRequest
from quire.server.openai.responses_rounds import ServerTools
from quire.server.openai.responses_wire import (
    ErrorEvent,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseLogprob,
    ResponsesEvent,
    ResponsesResponse,
    ResponseState,
    ResponseStateEvent,
    ResponseUsage,
    Status,
    event_bytes,
)
from quire.server.parts import AnswerParts, Change, Kind, Part, Step
from quire.server.tool_server import ToolResult
from quire.text.parse.base import Delta


class ResponseAnswer:
    """`tools`: those that the server runs; calls of them get a result before the answer goes on (Rounds)."""

    def __init__(
        self, chat: OpenedChat, request: ResponsesRequest, public_id: str, tools: ServerTools | None = None
    ) -> None:
        self.id = public_id
        self._tools = tools or {}
        self._pending: list[ResponsesEvent] = []  # events of tools that are not out yet
        self._first = 0  # the part with which this round began
        self._num_prompt = chat.opened.num_prompt_tokens
        self.status: Status = "queued"
        self._request = request
        self._created = int(time.time())
        self._listen(chat)
        self._parts = AnswerParts()
        self._items: list[ShownItem] = []
        self._names = TokenNames(chat.model.engine.tokenizer, as_ids=chat.options.return_tokens_as_token_ids)
        self._logprobs: list[ResponseLogprob] = []  # of tokens whose text is not out yet
        self._num_fresh = 0  # of these, the tokens that came last
        self._num_tokens = self._num_cached = self._number = 0
        self._final: Status = "completed"  # the status it will have
        self._reason: str | None = None  # why it is not complete
        self._error: ResponseError | None = None
        self.input_messages: Messages | None = None  # to be shown
        self._namespaces = namespaces(request)
        self.keep: Callable[[], None] | None = None  # called when it is whole, before its client hears of that

    def _listen(self, chat: OpenedChat) -> None:
        self._chat, self._parser = chat, chat.new_parser()
        if isinstance(flow := chat.opened.flow, Flow):
            flow.merges = chat.prepared.request.logprobs is not True

    # ---- events ------------------------------------------------------------------------------------------------

    def events(self, results: list[RequestOutput]) -> list[ResponsesEvent]:
        """What is new."""
        events: list[ResponsesEvent] = list(self.first_events())
        for result in results:
            self._num_cached = result.num_cached_tokens or self._num_cached
            for output in result.outputs:
                for step in self._parts.feed(self._deltas(output)):
                    events += self._step(step)
                if self._tools and output.finish_reason == "stop":
                    for step in self._parts.end():  # a call is run when it is whole
                        events += self._step(step)
        events += self._pending
        self._pending = []
        return events

    def queued_events(self) -> list[ResponsesEvent]:
        """Of one that is made in the background: it is there, and waits."""
        return [self._state("response.created"), self._state("response.queued")]

    def first_events(self) -> Iterator[ResponsesEvent]:
        if self.status == "queued":
            self.status = "in_progress"
            if self._number == 0:
                yield self._state("response.created")
            yield self._state("response.in_progress")

    def last_events(self) -> list[ResponsesEvent]:
        """After the last result."""
        events, self._pending = self._pending, []
        for step in self._parts.begin() if not self._parts.all else ():
            events += self._step(step)
        self.status = self._final
        for step in self._parts.end():
            events += self._step(step)
        events.append(self._state("response.completed" if self.status == "completed" else "response.incomplete"))
        if self.keep is not None:
            self.keep()
        return events

    def failed_events(self, refusal: Refusal) -> list[ResponsesEvent]:
        """It could not go on."""
        self._cut_off("failed")
        code: Literal["rate_limit_exceeded", "server_error"]
        code = "rate_limit_exceeded" if refusal.status in (429, 503) else "server_error"
        self._error = ResponseError(code=code, message=refusal.message)
        error = ErrorEvent(
            type="error", sequence_number=self._next(), code=code, message=refusal.message, param=refusal.param
        )
        return [error, self._state("response.failed")]

    def cancelled_events(self) -> list[ResponsesEvent]:
        """Whoever asked for it does not want it any more."""
        self._cut_off("cancelled")
        return [self._state("response.cancelled")]

    def _cut_off(self, status: Status) -> None:
        self.status = status
        for item in self._items:
            item.status = "completed" if item.status == "completed" else "incomplete"

    def _state(self, kind: ResponseState) -> ResponseStateEvent:
        return ResponseStateEvent(type=kind, sequence_number=self._next(), response=self.response())

    def _next(self) -> int:
        """The number of the next event."""
        self._number += 1
        return self._number - 1

    def _deltas(self, output: CompletionOutput) -> list[Delta]:
        self._num_tokens += len(output.token_ids)
        ended = output.finish_reason is not None
        if output.finish_reason == "length":
            self._final, self._reason = "incomplete", "max_output_tokens"
        elif output.finish_reason == "abort":
            self._final = "cancelled"
        if output.logprobs is not None:
            most = self._chat.prepared.request.top_logprobs or 0
            entries = chat_logprobs(self._names, output.token_ids, output.logprobs, most)["content"]
            self._logprobs += msgspec.convert(entries, list[ResponseLogprob])
            self._num_fresh = len(entries)
        return list(self._parser.feed(output.text, output.token_ids, final=ended))

    def _step(self, step: Step) -> list[ResponsesEvent]:
        part = step.part
        if step.change is Change.OPENED:
            own = self._tools.get(part.name) if part.kind is Kind.CALL else None
            label = None if own is None else own.server
            with_logprobs = self._chat.prepared.request.logprobs is True
            item = ShownItem(part, self._next, with_logprobs, label, self._namespaces.get(part.name))
            self._items.append(item)
            self._logprobs = self._logprobs[max(0, len(self._logprobs) - self._num_fresh) :]  # before it: marks
            return item.opening()
        item = self._items[part.index]
        if step.change is Change.GREW:
            news: list[ResponseLogprob] = []
            if self._logprobs:
                news, self._logprobs = self._logprobs, []
            return [item.grown(step.text, news)]
        whole = self.status in ("in_progress", "completed")
        item.status = "completed" if whole else "incomplete"
        closing = item.closing()
        if item.label is not None and whole:
            item.status = "calling"
            return closing
        return [*closing, item.done()]

    # ---- tools that the server runs (Rounds) -------------------------------------------------------------------

    def waiting(self) -> list[Part]:
        return [part for part, item in zip(self._parts.all, self._items, strict=True) if item.status == "calling"]

    def goes_on(self) -> bool:
        if not self._tools or self._final != "completed":
            return False
        calls = [part for part in self._parts.all[self._first :] if part.kind is Kind.CALL]
        return bool(calls) and all(part.name in self._tools for part in calls)

    def num_calls(self) -> int:
        """Calls that were run."""
        return sum(item.label is not None for item in self._items)

    def num_left(self) -> int | None:
        """Tokens that the rest of the answer may have."""
        most = self._request.max_output_tokens
        return None if most is None else most - self._num_tokens

    def settle(self, part: Part, result: ToolResult) -> None:
        """A call has its result."""
        item = self._items[part.index]
        item.result, item.status = result, "failed" if result.failed else "completed"
        if (left := self.num_left()) is not None and left <= 0:  # no room for another round
            self._final, self._reason = "incomplete", "max_output_tokens"
        self._pending += item.settled()

    def next_round(self, chat: OpenedChat) -> None:
        """The model goes on, as another request."""
        self._listen(chat)
        self._first = len(self._parts.all)
        self._num_prompt += chat.opened.num_prompt_tokens

    # ---- whole -------------------------------------------------------------------------------------------------

    def messages(self) -> list[dict[str, Any]]:
        """The answer as the next request's template is to see it: the assistant's words and calls, and in between the
        results of calls that were run here."""
        messages: list[dict[str, Any]] = []
        turn: list[Part] = []
        for part, item in zip(self._parts.all, self._items, strict=True):
            turn.append(part)
            following = self._items[part.index + 1 : part.index + 2]
            if item.result is not None and not (following and following[0].result is not None):
                messages.append(_assistant(turn))
                for one in turn:
                    if (result := self._items[one.index].result) is not None:
                        messages.append({"role": "tool", "tool_call_id": one.call_id, "content": result.text})
                turn = []
        if turn or not messages:
            messages.append(_assistant(turn))
        return messages

    def whole(self) -> bytes:
        """As it stands."""
        return encode(self.response())

    def response(self) -> ResponsesResponse:
        """As it stands."""
        request, params = self._request, self._chat.prepared.params
        ended = self.status not in ("queued", "in_progress")
        tools = request.tools or []
        return ResponsesResponse(
            id=self.id,
            created_at=self._created,
            error=self._error,
            incomplete_details=None if self._reason is None else IncompleteDetails(reason=self._reason),
            instructions=request.instructions,
            metadata=request.metadata,
            model=self._chat.model.name,
            object="response",
            output=[item.shown() for item in self._items],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=params.temperature,
            tool_choice=(request.tool_choice or "auto") if tools else "none",
            tools=tools,
            top_p=params.top_p,
            background=bool(request.background),
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            previous_response_id=request.previous_response_id,
            prompt=None,
            reasoning=None if request.reasoning is None else request.reasoning.model_dump(exclude_none=True),
            service_tier=request.service_tier or "auto",
            status=self.status,
            text=None if request.text is None else request.text.model_dump(exclude_none=True),
            top_logprobs=request.top_logprobs,
            truncation=request.truncation or "disabled",
            usage=self._usage() if ended else None,
            user=request.user,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            kv_transfer_params=None,
            ec_transfer_params=None,
            input_messages=self.input_messages,
            output_messages=self.messages() if self.input_messages is not None and ended else None,
        )

    def _usage(self) -> ResponseUsage:
        prompt = self._num_prompt
        thought = "".join(part.text for part in self._parts.all if part.kind is Kind.THOUGHT)
        tokenizer = self._chat.model.engine.tokenizer
        num_thought = len(tokenizer.encode(thought, False)) if thought and tokenizer is not None else 0
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=self._num_cached, cache_write_tokens=0),
            output_tokens=self._num_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=min(num_thought, self._num_tokens)),
            total_tokens=prompt + self._num_tokens,
        )


class ResponseStream:
    """The events as bytes."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer

    def chunk(self, results: list[RequestOutput]) -> bytes:
        return b"".join(map(event_bytes, self._answer.events(results)))

    def end(self) -> bytes:
        return b"".join(map(event_bytes, self._answer.last_events()))

    def failed(self, refusal: Refusal) -> bytes:
        return b"".join(map(event_bytes, self._answer.failed_events(refusal)))


class WholeResponse:
    """The response that the last event holds."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._response: ResponsesResponse | None = None

    def take(self, results: list[RequestOutput]) -> None:
        self._add(self._answer.events(results))

    def end(self) -> None:
        self._add(self._answer.last_events())

    def whole(self) -> bytes:
        return encode(self._response)

    def _add(self, events: list[ResponsesEvent]) -> None:
        for event in events:
            if isinstance(event, ResponseStateEvent):
                self._response = event.response


def _assistant(parts: list[Part]) -> dict[str, Any]:
    texts = [part.text for part in parts if part.kind is Kind.TEXT]
    thoughts = [part.text for part in parts if part.kind is Kind.THOUGHT]
    calls = [
        {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
        for part in parts
        if part.kind is Kind.CALL
    ]
    return assistant_message(texts, thoughts, calls)
