"""What a client got wrong is answered 4xx in the form of its dialect, never 500: constraints, beams, bodies, calls."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.grammar import masks
from tests.server.live import Live, error_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
ASK = {"model": "smol", "prompt": "A:", "max_tokens": 4, "temperature": 0}
HI = [{"role": "user", "content": "Hi"}]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("raw", [b"{bad", b'{"prompt": "a"', b'{"prompt": "\xff"}', b"{} x", b'{"prompt": 1e}'])
def test_invocations_that_are_no_json(smol: Live, raw: bytes) -> None:
    answer = httpx.post(f"{smol.url}/invocations", content=raw, headers=JSON, timeout=60)
    assert error_of(answer)["type"] == "BadRequestError"


WRONG_SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "required": [{}], "properties": {"a": {}}},
    {"type": "object", "required": 5, "properties": {"a": {}}},
    {"type": "object", "required": "a", "properties": {"a": {}}},
    {"type": "string", "pattern": "a{" + "9" * 5000 + "}"},
    {"type": "string", "pattern": 5},
    {"type": {}},
    {"properties": 5},
    {"anyOf": 5},
    {"enum": 5},
]


@pytest.mark.parametrize("schema", WRONG_SCHEMAS, ids=range(len(WRONG_SCHEMAS)))
def test_schemas_that_are_none(smol: Live, schema: dict[str, Any]) -> None:
    assert error_of(smol.post(TEXT, {**ASK, "structured_outputs": {"json": schema}}))["param"] == "structured_outputs"
    tool = {"name": "f", "input_schema": schema}
    asked = {"model": "smol", "messages": HI, "max_tokens": 4, "tools": [tool], "tool_choice": {"type": "any"}}
    answer = smol.post("/v1/messages", asked)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text


ODD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "minItems": {}},
    {"type": "array", "maxItems": "x", "items": {"type": "null"}},
    {"type": "string", "maxLength": []},
    {"type": "string", "format": 5},
    {"type": "integer", "minimum": "a"},
    {"type": "number", "multipleOf": 0},
    {"$ref": 5},
    {"$ref": "#/nowhere"},
    {"type": "object", "minProperties": {}},
    {"type": "object", "patternProperties": {"(": {}}},
]


@pytest.mark.parametrize("schema", ODD_SCHEMAS, ids=range(len(ODD_SCHEMAS)))
def test_odd_schemas_are_no_fault_of_the_server(smol: Live, schema: dict[str, Any]) -> None:
    assert smol.post(TEXT, {**ASK, "structured_outputs": {"json": schema}}).status_code in (200, 400)


FORMS: list[Any] = [
    {"type": "regex", "pattern": 5},
    {"type": "regex"},
    {"type": 5},
    {"type": {}},
    {"type": "tag", "begin": 5, "content": {"type": "any_text"}, "end": ""},
    {"type": "tag", "begin": "a", "content": 5, "end": "b"},
    {"type": "triggered_tags", "triggers": 5, "tags": 5},
    {"type": "json_schema", "json_schema": 5},
    5,
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_structural_tags_that_are_none(smol: Live, form: Any) -> None:
    error_of(smol.post(TEXT, {**ASK, "response_format": {"type": "structural_tag", "format": form}}))


@pytest.mark.parametrize("form", [{"type": "sequence", "elements": {}}, {"type": "const_string", "value": []}])
def test_odd_structural_tags_are_no_fault_of_the_server(smol: Live, form: Any) -> None:
    answer = smol.post(TEXT, {**ASK, "response_format": {"type": "structural_tag", "format": form}})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "regex", ["a{" + "9" * 5000 + "}", "a{" + "9" * 5000, "a{1," + "9" * 5000 + "}", "\\p{" * 5250]
)
def test_regexes_that_are_none(smol: Live, regex: str) -> None:
    error_of(smol.post(TEXT, {**ASK, "structured_outputs": {"regex": regex}}))


@pytest.mark.parametrize("penalty", [1e6, -1e6, 33])
def test_length_penalties_without_measure(smol: Live, penalty: float) -> None:
    body = {**ASK, "n": 2, "use_beam_search": True, "length_penalty": penalty}
    error = error_of(smol.post(TEXT, body))
    assert error["param"] == "length_penalty" and "32" in error["message"]


@pytest.mark.parametrize("penalty", [32, -32])
def test_the_largest_length_penalties(smol: Live, penalty: float) -> None:
    body = {**ASK, "n": 2, "max_tokens": 8, "use_beam_search": True, "length_penalty": penalty}
    assert smol.post(TEXT, body).status_code == 200


@pytest.mark.parametrize("arguments", [DEEP, "[" * 500 + "]" * 500, '{"a":' * 129 + "1" + "}" * 129])
def test_arguments_of_a_call_that_are_too_deep(smol: Live, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    error = error_of(smol.post(CHAT, {"model": "smol", "messages": messages, "max_tokens": 2}))
    assert error["param"] == "messages" and "128 levels" in error["message"]


def test_arguments_of_a_call_with_a_giant_number_are_text(smol: Live) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": ' + "9" * 5000 + "}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    answer = smol.post(CHAT, {"model": "smol", "messages": messages, "max_tokens": 2})
    assert answer.status_code in (200, 400), answer.text


def test_nothing_is_allowed(smol: Live) -> None:
    (end,) = {smol.engine.front.inputs.eos_token_id}
    for body in (
        {"allowed_token_ids": [end], "min_tokens": 2},
        {"allowed_token_ids": [end, 100], "stop_token_ids": [100], "min_tokens": 2},
        {"allowed_token_ids": [smol.engine.tokenizer.encode("a", False)[0]], "bad_words": ["a"]},
    ):
        assert error_of(smol.post(TEXT, {**ASK, **body}))["param"] == "allowed_token_ids"
    assert smol.post(TEXT, {**ASK, "allowed_token_ids": [end]}).status_code == 200


def test_nothing_is_left_while_it_runs(smol: Live) -> None:
    ids = smol.engine.tokenizer.encode("7", False)
    body = {**ASK, "allowed_token_ids": ids[:1], "structured_outputs": {"choice": ["red"]}}
    assert "forbid all" in error_of(smol.post(TEXT, body))["message"]


def test_a_grammar_that_outgrows_its_limits_while_it_runs(smol: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_SECONDS", -1.0)
    body = {**ASK, "structured_outputs": {"regex": "[a-z]{40}"}}
    assert "too complex" in error_of(smol.post(TEXT, body))["message"]
    streamed = smol.post(TEXT, {**body, "stream": True})
    assert streamed.status_code == 400 or '"code":400' in streamed.text
