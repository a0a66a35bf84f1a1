"""Thoughts and calls as OpenAI's chat writes them, in a chunk and in a whole message.

A thought goes by two names: `reasoning`, and `reasoning_content` for older clients. In: Deltas, or their fold. Out:
plain data. Must not know: envelopes, streams.
"""

from __future__ import annotations

from typing import Any

from quire.text.parse.base import Delta, Folded


def wire_delta(delta: Delta) -> dict[str, Any]:
    """The `delta` of a chunk."""
    if (part := delta.call) is not None:
        if part.name is None:
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}
        function = {"name": part.name, "arguments": part.arguments}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
    if delta.reasoning:
        return {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    return {"content": delta.content}


def wire_message(role: str, echo: str, answer: Folded) -> dict[str, Any]:
    """The `message` of a whole answer. One that is calls or thought alone has no content."""
    content: str | None = echo + answer.content
    message: dict[str, Any] = {
        "role": role,
        "content": content if content or not (answer.calls or answer.reasoning) else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ],
        "reasoning": answer.reasoning or None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message
