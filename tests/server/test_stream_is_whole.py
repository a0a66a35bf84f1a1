"""A stream put together is the whole answer, field by field, for every option that both forms have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live import Live, events

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
