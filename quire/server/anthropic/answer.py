"""MessageAnswer: one call's results as Anthropic's messages, streamed or whole.

In: results of the engine, through the answer's parser. Out: events (message_start, blocks, message_delta,
message_stop), or after the last result the whole message. Both are made of the same AnswerParts. Must not know:
engines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from quire.schema.outputs import RequestOutput
from quire.server.openai.chat_open import OpenedChat
from quire.server.openai.envelope import encode
from quire.server.parts import AnswerParts, Change, Kind, Part, Step


class MessageAnswer:
    def __init__(self, chat: OpenedChat, public_id: str) -> None:
        self._id = public_id
        self._model = chat.model.name
        self._num_prompt_tokens = chat.opened.num_prompt_tokens
        self._num_tokens = 0
        self._parser = chat.new_parser()
        self._parts = AnswerParts()
        self._begun = False
        self._reason: str | None = None
        self._sequence: str | None = None

    def _news(self, results: list[RequestOutput]) -> Iterator[dict[str, Any]]:
        """What is new, as events that are not encoded yet; the parts grow with it."""
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self._message([])}
            yield {"type": "ping"}
        for result in results:
            for output in result.outputs:
                self._num_tokens += len(output.token_ids)
                ended = output.finish_reason is not None
                deltas = self._parser.feed(output.text, output.token_ids, final=ended)
                for step in self._parts.feed(deltas):
                    yield from _block_events(step)
                if ended:
                    self._ended(output.finish_reason, output.stop_reason)

    def _last_news(self) -> Iterator[dict[str, Any]]:
        for step in self._parts.end():
            yield from _block_events(step)
        delta = {"stop_reason": self._reason, "stop_sequence": self._sequence}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield {"type": "message_stop"}

    def chunk(self, results: list[RequestOutput]) -> bytes:
        return b"".join(map(_event, self._news(results)))

    def end(self) -> bytes:
        return b"".join(map(_event, self._last_news()))

    def take(self, results: list[RequestOutput]) -> None:
        for _ in self._news(results):
            pass

    def whole(self) -> bytes:
        return encode(self._message([_block(part) for part in self._parts.all]))

    def _ended(self, finish_reason: str | None, stop_reason: int | str | None) -> None:
        if finish_reason == "length":
            self._reason = "max_tokens"
        elif isinstance(stop_reason, str) and finish_reason == "stop":
            self._reason, self._sequence = "stop_sequence", stop_reason
        elif any(part.kind is Kind.CALL for part in self._parts.all):
            self._reason = "tool_use"
        else:
            self._reason = "end_turn"

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": self._reason,
            "stop_sequence": self._sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self._num_prompt_tokens, "output_tokens": self._num_tokens}


def _event(fields: dict[str, Any]) -> bytes:
    name: str = fields["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode(fields) + b"\n\n"


def _block_events(step: Step) -> Iterator[dict[str, Any]]:
    part = step.part
    if step.change is Change.GREW:
        yield {"type": "content_block_delta", "index": part.index, "delta": _delta(part.kind, step.text)}
        return
    if step.change is Change.OPENED:
        yield {"type": "content_block_start", "index": part.index, "content_block": _opening(part)}
        return
    if part.kind is Kind.THOUGHT:
        delta = {"type": "signature_delta", "signature": _signature(part)}
        yield {"type": "content_block_delta", "index": part.index, "delta": delta}
    yield {"type": "content_block_stop", "index": part.index}


def _delta(kind: Kind, text: str) -> dict[str, str]:
    if kind is Kind.TEXT:
        return {"type": "text_delta", "text": text}
    if kind is Kind.THOUGHT:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _opening(part: Part) -> dict[str, Any]:
    """A block before anything is in it."""
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": ""}
    if part.kind is Kind.THOUGHT:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _block(part: Part) -> dict[str, Any]:
    block = _opening(part)
    if part.kind is Kind.TEXT:
        block["text"] = part.text
    elif part.kind is Kind.THOUGHT:
        block |= {"thinking": part.text, "signature": _signature(part)}
    else:
        block["input"] = _arguments(part.text)
    return block


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
