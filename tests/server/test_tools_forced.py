"""tool_choice "required" and a named function, over the embedded model: held to the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

from tests.server.live import Live, events

PATH = "/v1/chat/completions"


def joined(chunks: list[dict[str, Any]]) -> tuple[str, str]:
    """(content, arguments) of the one call of a stream."""
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls") or ()]
    assert {part["index"] for part in parts} == {0}
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    return content, "".join(part["function"]["arguments"] for part in parts)


def test_a_function_without_parameters_gets_none(packed: Live) -> None:
    """An object is closed unless its schema says otherwise: the model would make up keys."""
    for parameters in ({"properties": {}}, {"type": "object", "properties": {}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            body = {"messages": [{"role": "user", "content": "Call f."}], "tools": tools, "tool_choice": choice,
                    "temperature": 1.0, "seed": 3, "max_tokens": 60, "parallel_tool_calls": False}  # fmt: skip
            calls = packed.post(PATH, body).json()["choices"][0]["message"]["tool_calls"]
            assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [("f", {})]


def test_calls_that_must_be(packed: Live) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"], "additionalProperties": False}}}]  # fmt: skip
    named = {"type": "function", "function": {"name": "get_weather"}}
    question = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": tools,
            "temperature": 0, "max_tokens": 100}  # fmt: skip
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        body = {**question, "tool_choice": choice, "parallel_tool_calls": False}
        whole = packed.post(PATH, body).json()["choices"][0]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in whole["message"]["tool_calls"]]
        assert [name for name, _ in calls] == ["get_weather"]
        assert set(json.loads(calls[0][1])) == {"city", "unit"}
        assert (whole["finish_reason"], whole["message"]["content"]) == (reason, None)
        chunks = [e["choices"][0] for e in events(packed.post(PATH, {**body, "stream": True}).text)]
        assert joined(chunks) == ("", calls[0][1])
        assert chunks[-1]["finish_reason"] == reason
