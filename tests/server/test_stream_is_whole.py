"""A stream put together is the whole answer, field by field, for every option that both forms have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import test_anthropic_api, test_responses_api
from tests.server.live import Live, events, live_fake
from tests.server.response_events import walk

HI = [{"role": "user", "content": "Hi there, é€😀"}]
CASES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": 2},
    {"logprobs": 0, "echo": True},
    {"logprobs": 2, "echo": True, "n": 2},
    {"echo": True, "max_tokens": 1},
    {"stop": ["r:H", "zz"], "return_token_ids": True},
    {"stop": ["there"], "include_stop_str_in_output": True},
    {"stop_token_ids": [62]},
    {"vllm_xargs": {"eos_at": 7}},
    {"max_tokens": 1},
    {"stream_interval": 4},
    {"return_tokens_as_token_ids": True, "logprobs": 1},
]


def fold(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "end": None})
            assert one["end"] is None, "nothing follows the end"
            delta = choice.get("delta")
            one["text"] += choice["text"] if delta is None else delta["content"]
            one["token_ids"] += choice.get("token_ids") or []
            one["logprobs"].append(choice["logprobs"])
            if choice["finish_reason"] is not None:
                one["end"] = (choice["finish_reason"], choice["stop_reason"])
    return found


def joined(pieces: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    given = [piece for piece in pieces if piece is not None]
    return {key: [entry for piece in given for entry in piece[key]] for key in given[0]} if given else None


@pytest.mark.parametrize("case", CASES, ids=[",".join(case) or "plain" for case in CASES])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_same(fake: Live, path: str, case: dict[str, Any]) -> None:
    body: dict[str, Any] = {"max_tokens": 24, "seed": 1, **case}
    if path == "/v1/completions":
        body["prompt"] = ["user:Hi there, é€😀", "ab"]
    else:
        body["messages"] = HI
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    whole = fake.post(path, body).json()
    response = fake.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = events(response.text)
    streamed = fold(chunks)
    assert len(streamed) == len(whole["choices"])
    for choice in whole["choices"]:
        one = streamed[choice["index"]]
        assert one["text"] == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert one["end"] == (choice["finish_reason"], choice["stop_reason"])
        assert one["token_ids"] == (choice["token_ids"] or [])
        assert joined(one["logprobs"]) == choice["logprobs"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][key] == whole["usage"][key]


# ---- dialects that show an answer in parts: thoughts, texts and calls ------------------------------------------------

TWO_CALLS = test_responses_api.ANSWER
PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # what the model says, and how many tokens of it; where it stops
    "text": ("</think>Hello é€😀", {"max_tokens": 30}),
    "thought and text": ("Hm.</think>Hello", {"max_tokens": 16, "vllm_xargs": {"eos_at": 17}}),
    "calls": (TWO_CALLS, {"max_tokens": 300, "vllm_xargs": {"eos_at": len(TWO_CALLS) + 1}}),
    "cut in a thought": (TWO_CALLS, {"max_tokens": 5}),
    "cut in a text": (TWO_CALLS, {"max_tokens": 25}),
    "cut in a call": (TWO_CALLS, {"max_tokens": TWO_CALLS.index('"Rome"') + 3}),
    "one token": ("</think>Hello", {"max_tokens": 1}),
    "nothing": ("</think>Hello", {"max_tokens": 20, "vllm_xargs": {"eos_at": 1}}),
    "stopped": ("Hm.</think>Hello there", {"max_tokens": 40, "stop": ["the"]}),
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Repeats its prompt, which is the last message's text. Tools and thoughts are parsed."""
    with live_fake(
        tmp_path_factory.mktemp("scripted"), chat_template="{{ messages[-1]['content'] }}",
        engine={"reasoning_parser": "deepseek_r1", "generation_config": "vllm"}, enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    ) as server:  # fmt: skip
        yield server


def renamed(fields: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in fields.items()}


def both(server: Live, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The whole answer, and the text of the stream."""
    whole, stream = server.post(path, body), server.post(path, {**body, "stream": True})
    assert whole.status_code == stream.status_code == 200, whole.text
    return whole.json(), stream.text


def fold_message(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the events of /v1/messages."""
    message: dict[str, Any] = stream[0]["message"]
    arguments: dict[int, str] = {}
    for event in stream[1:]:
        kind, index = event["type"], event.get("index")
        if kind == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            ((field, text),) = ((name, value) for name, value in event["delta"].items() if name != "type")
            if field == "partial_json":
                arguments[index] = arguments.get(index, "") + text
            else:
                message["content"][index][field] += text
        elif kind == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
        else:
            assert kind in ("ping", "content_block_stop", "message_stop"), kind
    for index, text in arguments.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:
            message["content"][index]["input"] = {"raw_arguments": text}
    return message


def nameless(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which are drawn."""
    content = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "content": content}


@pytest.mark.parametrize("case", PARTS)
def test_same_messages(scripted: Live, case: str) -> None:
    text, fields = PARTS[case]
    body = {"messages": [{"role": "user", "content": text}], "tools": [test_anthropic_api.TOOL]}
    whole, stream = both(scripted, "/v1/messages", body | renamed(fields, stop="stop_sequences"))
    assert nameless(fold_message(test_anthropic_api.events(stream))) == nameless(whole)


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("case", PARTS)
def test_same_responses(scripted: Live, case: str, with_logprobs: bool) -> None:
    text, fields = PARTS[case]
    if with_logprobs:
        fields = fields | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = {"input": text, "tools": [test_responses_api.TOOL]} | renamed(fields, max_tokens="max_output_tokens")
    whole, stream = both(scripted, "/v1/responses", body)
    last = walk(test_responses_api.events(stream))  # what the deltas add up to
    assert test_responses_api.plain(last) == test_responses_api.plain(whole)
