"""ResponseAnswer: one call's results as an answer of /v1/responses, in events or whole.

In: results of the engine, through the answer's parser. Out: events with their numbers, and at any time the response as
it stands. Items are made of AnswerParts: reasoning, messages and function calls, in the order in which they came.
Must not know: engines, sockets, stores.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.server.errors import Refusal
from quire.server.openai.chat_open import OpenedChat
from quire.server.openai.envelope import encode
from quire.server.openai.logprobs import TokenNames, chat_logprobs
from quire.server.openai.responses_input import Messages, assistant_message, namespaces
from quire.server.openai.responses_protocol import ResponsesRequest
from quire.server.openai.responses_rounds import ServerTools
from quire.server.parts import AnswerParts, Change, Kind, Part, Step
from quire.server.tool_server import ToolResult
from quire.text.parse.base import Delta

_NO_RESULT: ToolResult | None = None
_PREFIXES = {Kind.TEXT: "msg_", Kind.THOUGHT: "rs_", Kind.CALL: "fc_"}


class ResponseAnswer:
    """`tools`: those that the server runs; calls of them get a result before the answer goes on (Rounds)."""

    def __init__(
        self, chat: OpenedChat, request: ResponsesRequest, public_id: str, tools: ServerTools | None = None
    ) -> None:
        self.id = public_id
        self._tools = tools or {}
        self._pending: list[bytes] = []  # events of tools that are not out yet
        self._first = 0  # the part with which this round began
        self._num_prompt = chat.opened.num_prompt_tokens
        self.status = "queued"
        self._chat, self._request = chat, request
        self._created = int(time.time())
        self._parser = chat.new_parser()
        self._parts = AnswerParts()
        self._items: list[_Item] = []
        self._names = TokenNames(chat.model.engine.tokenizer, as_ids=chat.options.return_tokens_as_token_ids)
        self._logprobs: list[Any] = []  # of tokens whose text is not out yet
        self._num_tokens = self._num_cached = self._number = 0
        self._final = "completed"  # the status it will have
        self._reason: str | None = None  # why it is not complete
        self._error: dict[str, Any] | None = None
        self.input_messages: Messages | None = None  # to be shown
        self._namespaces = namespaces(request)
        self.keep: Callable[[], None] | None = None  # called when it is whole, before its client hears of that

    # ---- events ------------------------------------------------------------------------------------------------

    def chunk(self, results: list[RequestOutput]) -> bytes:
        return b"".join(self.events(results))

    def end(self) -> bytes:
        return b"".join(self.last_events())

    def failed(self, refusal: Refusal) -> bytes:
        return b"".join(self.failed_events(refusal))

    def events(self, results: list[RequestOutput]) -> list[bytes]:
        """What is new."""
        events = list(self.first_events())
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

    def queued_events(self) -> list[bytes]:
        """Of one that is made in the background: it is there, and waits."""
        return [self._event(f"response.{name}", response=self.response()) for name in ("created", "queued")]

    def first_events(self) -> Iterator[bytes]:
        if self.status == "queued":
            self.status = "in_progress"
            if self._number == 0:
                yield self._event("response.created", response=self.response())
            yield self._event("response.in_progress", response=self.response())

    def last_events(self) -> list[bytes]:
        """After the last result."""
        events, self._pending = self._pending, []
        for step in self._parts.begin() if not self._parts.all else ():
            events += self._step(step)
        self.status = self._final
        for step in self._parts.end():
            events += self._step(step)
        name = "response.completed" if self.status == "completed" else "response.incomplete"
        events.append(self._event(name, response=self.response()))
        if self.keep is not None:
            self.keep()
        return events

    def failed_events(self, refusal: Refusal) -> list[bytes]:
        """It could not go on."""
        self._cut_off("failed")
        code = "rate_limit_exceeded" if refusal.status in (429, 503) else "server_error"
        self._error = {"code": code, "message": refusal.message}
        error = self._event("error", code=code, message=refusal.message, param=refusal.param)
        return [error, self._event("response.failed", response=self.response())]

    def cancelled_events(self) -> list[bytes]:
        """Whoever asked for it does not want it any more."""
        self._cut_off("cancelled")
        return [self._event("response.cancelled", response=self.response())]

    def _cut_off(self, status: str) -> None:
        self.status = status
        for item in self._items:
            item.status = "completed" if item.status == "completed" else "incomplete"

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        body = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def _deltas(self, output: CompletionOutput) -> list[Delta]:
        self._num_tokens += len(output.token_ids)
        ended = output.finish_reason is not None
        if output.finish_reason == "length":
            self._final, self._reason = "incomplete", "max_output_tokens"
        elif output.finish_reason == "abort":
            self._final = "cancelled"
        if output.logprobs is not None:
            most = self._chat.prepared.request.top_logprobs or 0
            self._logprobs += chat_logprobs(self._names, output.token_ids, output.logprobs, most)["content"]
        return list(self._parser.feed(output.text, output.token_ids, final=ended))

    def _step(self, step: Step) -> list[bytes]:
        if step.change is Change.OPENED:
            own = self._tools.get(step.part.name) if step.part.kind is Kind.CALL else None
            label = None if own is None else own.server
            place_of = self._namespaces.get(step.part.name)
            item = _Item(step.part, self._chat.prepared.request.logprobs is True, label, place_of)
            self._items.append(item)
            place = {"output_index": step.part.index}
            added = self._event("response.output_item.added", **place, item=item.shown("in_progress"))
            return [added, *(self._event(name, **fields) for name, fields in item.opening())]
        item = self._items[step.part.index]
        if step.change is Change.GREW:
            news: list[Any] = []
            if self._logprobs:
                news, self._logprobs = self._logprobs, []
            name, fields = item.grown(step.text, news)
            return [self._event(name, **fields)]
        whole = self.status in ("in_progress", "completed")
        item.status = "completed" if whole else "incomplete"
        closing = [self._event(name, **fields) for name, fields in item.closing()]
        if item.label is not None and whole:
            item.status = "calling"
            return closing
        shown = {"output_index": step.part.index, "item": item.shown()}
        return [*closing, self._event("response.output_item.done", **shown)]

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
        place = {"item_id": item.id, "output_index": part.index}
        self._pending += [
            self._event(f"response.mcp_call.{item.status}", **place),
            self._event("response.output_item.done", output_index=part.index, item=item.shown()),
        ]

    def next_round(self, chat: OpenedChat) -> None:
        """The model goes on, as another request."""
        self._chat, self._parser = chat, chat.new_parser()
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

    def take(self, results: list[RequestOutput]) -> None:
        self.events(results)

    def whole(self) -> bytes:
        return encode(self.response())

    def response(self) -> dict[str, Any]:
        """As it stands."""
        request, params = self._request, self._chat.prepared.params
        ended = self.status not in ("queued", "in_progress")
        tools = request.tools or []
        return {
            "id": self.id,
            "created_at": self._created,
            "error": self._error,
            "incomplete_details": None if self._reason is None else {"reason": self._reason},
            "instructions": request.instructions,
            "metadata": request.metadata,
            "model": self._chat.model.name,
            "object": "response",
            "output": [item.shown() for item in self._items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "tool_choice": (request.tool_choice or "auto") if tools else "none",
            "tools": tools,
            "top_p": params.top_p,
            "background": bool(request.background),
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
            "reasoning": None if request.reasoning is None else request.reasoning.model_dump(exclude_none=True),
            "service_tier": request.service_tier or "auto",
            "status": self.status,
            "text": None if request.text is None else request.text.model_dump(exclude_none=True),
            "top_logprobs": request.top_logprobs,
            "truncation": request.truncation or "disabled",
            "usage": self._usage() if ended else None,
            "user": request.user,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": self.input_messages,
            "output_messages": self.messages() if self.input_messages is not None and ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = self._num_prompt
        thought = "".join(part.text for part in self._parts.all if part.kind is Kind.THOUGHT)
        tokenizer = self._chat.model.engine.tokenizer
        num_thought = len(tokenizer.encode(thought, False)) if thought and tokenizer is not None else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_thought, self._num_tokens)},
            "total_tokens": prompt + self._num_tokens,
        }


def _assistant(parts: list[Part]) -> dict[str, Any]:
    texts = [part.text for part in parts if part.kind is Kind.TEXT]
    thoughts = [part.text for part in parts if part.kind is Kind.THOUGHT]
    calls = [
        {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
        for part in parts
        if part.kind is Kind.CALL
    ]
    return assistant_message(texts, thoughts, calls)


class _Item:
    """One item of the output. Its events come without their numbers. `label`: the tool server that runs this call.
    `called`: (namespace, name there) of a function that has one."""

    __slots__ = ("_called", "_logprobs", "_part", "id", "label", "result", "status")

    def __init__(
        self, part: Part, with_logprobs: bool, label: str | None = None, called: tuple[str, str] | None = None
    ) -> None:
        self._called = called
        self.id = (_PREFIXES[part.kind] if label is None else "mcp_") + secrets.token_hex(12)
        self.status = "in_progress"
        self.label, self.result = label, _NO_RESULT
        self._part = part
        self._logprobs: list[Any] | None = [] if with_logprobs else None

    @property
    def _call(self) -> str:
        return "function_call" if self.label is None else "mcp_call"

    @property
    def _name(self) -> str:
        return self._part.name if self._called is None else self._called[1]

    def opening(self) -> list[tuple[str, dict[str, Any]]]:
        if self._part.kind is Kind.CALL:
            return [] if self.label is None else [("response.mcp_call.in_progress", self._place({}))]
        name = "response.content_part.added" if self._part.kind is Kind.TEXT else "response.reasoning_part.added"
        return [(name, self._place({"content_index": 0, "part": self._content("")}))]

    def grown(self, text: str, logprobs: list[Any]) -> tuple[str, dict[str, Any]]:
        if self._part.kind is Kind.CALL:
            return f"response.{self._call}_arguments.delta", self._place({"delta": text})
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if self._part.kind is Kind.THOUGHT:
            return "response.reasoning_text.delta", self._place(fields)
        if self._logprobs is not None:
            self._logprobs += logprobs
        return "response.output_text.delta", self._place({**fields, "logprobs": logprobs})

    def closing(self) -> list[tuple[str, dict[str, Any]]]:
        part = self._part
        if part.kind is Kind.CALL:
            done = {"name": self._name, "arguments": part.text}
            return [(f"response.{self._call}_arguments.done", self._place(done))]
        fields: dict[str, Any] = {"content_index": 0, "text": part.text}
        whole = self._place({"content_index": 0, "part": self._content(part.text)})
        if part.kind is Kind.THOUGHT:
            return [("response.reasoning_text.done", self._place(fields)), ("response.reasoning_part.done", whole)]
        fields["logprobs"] = self._logprobs or []
        return [("response.output_text.done", self._place(fields)), ("response.content_part.done", whole)]

    def shown(self, status: str | None = None) -> dict[str, Any]:
        """`status` in_progress: as it opens, with nothing in it."""
        part, opens = self._part, status is not None
        item: dict[str, Any] = {"id": self.id}
        if part.kind is Kind.TEXT:
            content = [] if opens else [self._content(part.text)]
            item |= {"content": content, "role": "assistant", "type": "message", "phase": None}
        elif part.kind is Kind.THOUGHT:
            content = [] if opens else [self._content(part.text)]
            item |= {"summary": [], "type": "reasoning", "content": content, "encrypted_content": None}
        else:
            item |= {"name": self._name, "arguments": "" if opens else part.text, "type": self._call}
            item |= {} if self._called is None else {"namespace": self._called[0]}
            item |= {"call_id": part.call_id} if self.label is None else self._of_server()
        return {**item, "status": status or self.status}

    def _of_server(self) -> dict[str, Any]:
        result = self.result
        text = None if result is None else result.text
        failed = result is not None and result.failed
        return {
            "server_label": self.label,
            "output": None if failed else text,
            "error": text if failed else None,
            "approval_request_id": None,
        }

    def _content(self, text: str) -> dict[str, Any]:
        if self._part.kind is Kind.THOUGHT:
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs if text else ([] if self._logprobs is not None else None)
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _place(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._part.index, **fields}
