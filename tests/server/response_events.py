"""A stream of /v1/responses walked event by event: each of the official type, numbered, in its place; and what its
deltas add up to, which must be the response that its last event tells.
"""

from __future__ import annotations

import typing
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

OFFICIAL: dict[str, type[BaseModel]] = {
    typing.get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
}
# Beside the official ones: those of vLLM, and the end of a response that its client cancelled.
OURS = {"response.reasoning_part.added", "response.reasoning_part.done", "response.cancelled"}
ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_GROWING = {  # event of a delta: what its item holds it in
    "response.output_text": "text", "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments", "response.mcp_call_arguments": "arguments",
}  # fmt: skip


def walk(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event's response, after all that came before was compared with it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        kind = OFFICIAL.get(event["type"])
        assert kind is not None or event["type"] in OURS, event["type"]
        if kind is not None:
            kind.model_validate(event)
            assert {name for name, field in kind.model_fields.items() if field.is_required()} <= set(event)
    kinds = [event["type"] for event in events]
    behind = events[0]["response"]["background"]
    start = ["response.created", *(["response.queued"] if behind else [])]
    assert kinds[: len(start)] == start and kinds.count("response.created") == 1
    assert all(event["response"]["status"] == "queued" for event in events[: len(start)] if behind)
    output: list[dict[str, Any]] = []
    for event in events[len(start) : -1]:
        if event["type"] not in ("response.in_progress", "error"):
            _take(output, event)
    last = events[-1]
    assert last["type"] in ENDS and last["type"] == f"response.{last['response']['status']}"
    response: dict[str, Any] = last["response"]
    Response.model_validate(response)
    assert [_bare(item) for item in output] == [_bare(item) for item in response["output"]]
    if last["type"] == "response.completed":
        assert output == response["output"]
    same = {**events[0]["response"], **{name: response[name] for name in ("status", "output", "usage", "error")}}
    assert same | {"incomplete_details": None} == response | {"incomplete_details": None}
    return response


def _take(output: list[dict[str, Any]], event: dict[str, Any]) -> None:
    kind, index = event["type"], event["output_index"]
    if kind == "response.output_item.added":
        item = event["item"]
        assert index == len(output) and item["status"] == "in_progress"
        assert not item.get("content") and not item.get("arguments")
        output.append(dict(item))
        return
    assert index == len(output) - 1 or "mcp" in kind or output[index]["type"] == "mcp_call"  # one after the other
    item = output[index]
    if kind == "response.output_item.done":
        assert event["item"]["status"] != "in_progress" and _bare(event["item"]) == _bare(item)
        output[index] = event["item"]
        return
    assert event["item_id"] == item["id"]
    about, _, change = kind.rpartition(".")
    if about in ("response.content_part", "response.reasoning_part"):
        if change == "added":
            assert event["content_index"] == len(item["content"]) and not event["part"]["text"]
            item["content"] = [*item["content"], dict(event["part"])]
        else:
            assert event["part"] == item["content"][event["content_index"]]
    elif about in _GROWING:
        held = item if "content_index" not in event else item["content"][event["content_index"]]
        field = _GROWING[about]
        if change == "delta":
            assert event["delta"]
            held[field] += event["delta"]
            if event.get("logprobs"):
                held["logprobs"] = held["logprobs"] + event["logprobs"]
        else:
            assert event[field] == held[field] and event.get("logprobs", []) == (held.get("logprobs") or [])
            assert event.get("name", item.get("name")) == item.get("name")
    else:
        assert about == "response.mcp_call" and change in ("in_progress", "completed", "failed"), kind


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    """Without what no delta tells."""
    return {name: value for name, value in item.items() if name not in ("status", "output", "error")}
