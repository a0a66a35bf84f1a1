"""One call's results as Anthropic's messages: as the events of a stream, or as the whole message that they add up to.

In: results of the engine, through the answer's parser. Out: events (message_start, blocks, message_delta, message_stop)
from one producer, `MessageEvents`: `MessageStream` encodes each, `WholeMessage` adds them up as a client of the stream
would. All bytes are those of the wire types. Must not know: engines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from quire.schema.outputs import RequestOutput
from quire.server.anthropic.protocol import (
    AnthropicContent,
    AnthropicContentDelta,
    AnthropicContentGrowth,
    AnthropicContentStart,
    AnthropicContentStop,
    AnthropicEvent,
    AnthropicInputDelta,
    AnthropicMessageDelta,
    AnthropicMessageEnd,
    AnthropicMessagesResponse,
    AnthropicMessageStart,
    AnthropicMessageStop,
    AnthropicPing,
    AnthropicSignatureDelta,
    AnthropicText,
    AnthropicTextDelta,
    AnthropicThinking,
    AnthropicThinkingDelta,
    AnthropicToolUse,
    AnthropicUsage,
    StopReason,
)
from quire.server.openai.chat_open import OpenedChat
from quire.server.openai.envelope import encode
from quire.server.parts import AnswerParts, Change, Kind, Part, Step


class MessageEvents:
    """What there is to tell of an answer, as it grows."""

    def __init__(self, chat: OpenedChat, public_id: str) -> None:
        self._id = public_id
        self._model = chat.model.name
        self._num_prompt_tokens = chat.opened.num_prompt_tokens
        self._num_tokens = 0
        self._parser = chat.new_parser()
        self._parts = AnswerParts()
        self._begun = False
        self._end = AnthropicMessageEnd(None, None)

    def of(self, results: list[RequestOutput]) -> Iterator[AnthropicEvent]:
        """What is new."""
        if not self._begun:
            self._begun = True
            yield AnthropicMessageStart(self._empty_message())
            yield AnthropicPing()
        for result in results:
            for output in result.outputs:
                self._num_tokens += len(output.token_ids)
                ended = output.finish_reason is not None
                deltas = self._parser.feed(output.text, output.token_ids, final=ended)
                for step in self._parts.feed(deltas):
                    yield from _content_events(step)
                if ended:
                    self._end = self._ended(output.finish_reason, output.stop_reason)

    def last(self) -> Iterator[AnthropicEvent]:
        """After the last result."""
        for step in self._parts.end():
            yield from _content_events(step)
        yield AnthropicMessageDelta(self._end, self._usage())
        yield AnthropicMessageStop()

    def _ended(self, finish_reason: str | None, stop_reason: int | str | None) -> AnthropicMessageEnd:
        if finish_reason == "length":
            return AnthropicMessageEnd("max_tokens", None)
        if isinstance(stop_reason, str) and finish_reason == "stop":
            return AnthropicMessageEnd("stop_sequence", stop_reason)
        called = any(part.kind is Kind.CALL for part in self._parts.all)
        reason: StopReason = "tool_use" if called else "end_turn"
        return AnthropicMessageEnd(reason, None)

    def _empty_message(self) -> AnthropicMessagesResponse:
        return AnthropicMessagesResponse(
            id=self._id,
            type="message",
            role="assistant",
            content=[],
            model=self._model,
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(),
        )

    def _usage(self) -> AnthropicUsage:
        return AnthropicUsage(self._num_prompt_tokens, self._num_tokens)


class MessageStream:
    """The events as bytes."""

    def __init__(self, events: MessageEvents) -> None:
        self._events = events

    def chunk(self, results: list[RequestOutput]) -> bytes:
        return b"".join(map(_encoded, self._events.of(results)))

    def end(self) -> bytes:
        return b"".join(map(_encoded, self._events.last()))


class WholeMessage:
    """The message that the events add up to."""

    def __init__(self, events: MessageEvents) -> None:
        self._events = events
        self._message: AnthropicMessagesResponse | None = None
        self._content: list[_GrowingContent] = []

    def take(self, results: list[RequestOutput]) -> None:
        self._add(self._events.of(results))

    def end(self) -> None:
        self._add(self._events.last())

    def whole(self) -> bytes:
        assert self._message is not None
        return encode(replace(self._message, content=[content.whole() for content in self._content]))

    def _add(self, events: Iterable[AnthropicEvent]) -> None:
        for event in events:
            if isinstance(event, AnthropicContentGrowth):
                self._content[event.index].grow(event.delta)
            elif isinstance(event, AnthropicContentStart):
                self._content.append(_GrowingContent(event.content_block))
            elif isinstance(event, AnthropicMessageStart):
                self._message = event.message
            elif isinstance(event, AnthropicMessageDelta):
                assert self._message is not None
                end = event.delta
                self._message = replace(
                    self._message, stop_reason=end.stop_reason, stop_sequence=end.stop_sequence, usage=event.usage
                )


class _GrowingContent:
    """One block of a message, from the events that speak of it."""

    __slots__ = ("_opening", "_pieces", "_signature")

    def __init__(self, opening: AnthropicContent) -> None:
        self._opening = opening
        self._pieces: list[str] = []
        self._signature = ""

    def grow(self, delta: AnthropicContentDelta) -> None:
        if isinstance(delta, AnthropicTextDelta):
            self._pieces.append(delta.text)
        elif isinstance(delta, AnthropicThinkingDelta):
            self._pieces.append(delta.thinking)
        elif isinstance(delta, AnthropicInputDelta):
            self._pieces.append(delta.partial_json)
        else:
            self._signature += delta.signature

    def whole(self) -> AnthropicContent:
        opening, text = self._opening, "".join(self._pieces)
        if isinstance(opening, AnthropicText):
            return AnthropicText(text)
        if isinstance(opening, AnthropicThinking):
            return AnthropicThinking(text, self._signature)
        return replace(opening, input=_arguments(text))


def _encoded(event: AnthropicEvent) -> bytes:
    name = str(event.__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n\n"


def _content_events(step: Step) -> Iterator[AnthropicEvent]:
    part = step.part
    if step.change is Change.GREW:
        yield AnthropicContentGrowth(part.index, _delta(part.kind, step.text))
        return
    if step.change is Change.OPENED:
        yield AnthropicContentStart(part.index, _opening(part))
        return
    if part.kind is Kind.THOUGHT:
        yield AnthropicContentGrowth(part.index, AnthropicSignatureDelta(_signature(part)))
    yield AnthropicContentStop(part.index)


def _delta(kind: Kind, text: str) -> AnthropicContentDelta:
    if kind is Kind.TEXT:
        return AnthropicTextDelta(text)
    if kind is Kind.THOUGHT:
        return AnthropicThinkingDelta(text)
    return AnthropicInputDelta(text)


def _opening(part: Part) -> AnthropicContent:
    """A block before anything is in it."""
    if part.kind is Kind.TEXT:
        return AnthropicText("")
    if part.kind is Kind.THOUGHT:
        return AnthropicThinking("", "")
    return AnthropicToolUse(part.call_id, part.name, {})


def _arguments(text: str) -> dict[str, Any]:
    """A model may write what is not JSON, or be cut off; its words are then kept under a name of ours."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"raw_arguments": text}


def _signature(part: Part) -> str:
    """Clients send it back with the thought and want one; nothing is checked with it."""
    return hashlib.sha256(part.text.encode("utf-8", "replace")).hexdigest()
