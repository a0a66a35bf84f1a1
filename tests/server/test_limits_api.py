"""What a request may not hold: one 400 each, which names the field (and the limit), and an engine that goes on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.live import Live, error_of, live_fake

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# field -> body beside the prompt, words the message must have
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("n", {"n": 0}, ["at least 1", "0"]),
    ("n", {"n": 129}, ["129", "128", "--max-num-choices"]),
    ("n", {"n": 10**30}, ["128"]),
    ("max_tokens", {"max_tokens": -1}, ["at least 1, got -1"]),
    ("max_tokens", {"max_tokens": 999999}, ["max_tokens=999999 cannot be greater than max_model_len=512"]),
    ("max_tokens", {"max_tokens": 512}, ["512 tokens", "1 input tokens"]),
    ("temperature", {"temperature": -1}, ["temperature", "-1"]),
    ("top_p", {"top_p": 0}, ["top_p"]),
    ("top_k", {"top_k": -2}, ["-2"]),
    ("min_p", {"min_p": 1.5}, ["1.5"]),
    ("presence_penalty", {"presence_penalty": 3}, ["3"]),
    ("repetition_penalty", {"repetition_penalty": 0}, ["0"]),
    ("seed", {"seed": 2**64}, [str(2**64)]),
    ("seed", {"seed": 2**63}, [str(2**63), str(2**63 - 1), str(-(2**63))]),
    ("logprobs", {"logprobs": 50}, ["50", "20"]),
    ("logprobs", {"logprobs": -2}, ["-2"]),
    ("prompt_logprobs", {"prompt_logprobs": 50}, ["50", "20"]),
    ("stop", {"stop": ["a"] * 65}, ["65", "64", "--max-stop-strings"]),
    ("stop", {"stop": ["a" * 1025]}, ["1025", "1024", "--max-stop-length"]),
    ("stop", {"stop": [""]}, ["empty"]),
    ("stop_token_ids", {"stop_token_ids": list(range(65))}, ["65", "64"]),
    ("stop_token_ids", {"stop_token_ids": [260]}, ["260", "259"]),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(4097)}}, ["4097", "4096"]),
    ("logit_bias", {"logit_bias": {"260": 1}}, ["260"]),
    ("logit_bias", {"logit_bias": {"260": 1, "5": 1, "300": 1, "-1": 1}},
     ["260, 300, -1", "out of vocabulary", "vocabulary size is 260"]),
    ("logit_bias", {"logit_bias": {"x": 1}}, ["'x'"]),
    ("bad_words", {"bad_words": ["a"] * 1025}, ["1025", "1024"]),
    ("bad_words", {"bad_words": [" "]}, ["empty"]),
    ("allowed_token_ids", {"allowed_token_ids": []}, ["empty"]),
    ("allowed_token_ids", {"allowed_token_ids": [-1]}, ["-1"]),
    ("logprob_token_ids", {"logprob_token_ids": [999]}, ["999"]),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}, ["9", "8"]),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}, ["0"]),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 9999}, ["9999", "512"]),
    ("priority", {"priority": 1}, ["fcfs"]),
    ("priority", {"priority": 2**63}, ["priority"]),
    ("cache_salt", {"cache_salt": ""}, ["empty"]),
    ("stream_options", {"stream_options": {"include_usage": True}}, ["stream"]),
    ("stream_interval", {"stream_interval": 0, "stream": True}, ["0"]),
    ("best_of", {"best_of": 2}, ["best_of", "use n"]),
    ("length_penalty", {"length_penalty": 2.0}, ["use_beam_search"]),
    ("response_format", {"response_format": {"type": "yaml"}}, ["yaml", "json_schema"]),
    ("structured_outputs", {"structured_outputs": {"choice": []}}, ["choice"]),
    ("guided_decoding_backend", {"guided_decoding_backend": "outlines"}, ["structured-outputs-config.backend"]),
    ("kv_transfer_params", {"kv_transfer_params": {"a": 1}}, ["KV transfer"]),
    ("thinking_token_budget", {"thinking_token_budget": 5}, ["--reasoning-parser"]),
    ("watermarking", {"watermarking": True}, ["not in this version"]),
    ("vllm_xargs", {"vllm_xargs": {"a": {"b": 1}}}, ["vllm_xargs"]),
    ("request_id", {"request_id": "a\nb"}, ["printable"]),
]  # fmt: skip


@pytest.mark.parametrize("field, body, words", REFUSED, ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED)])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_refused(fake: Live, path: str, field: str, body: dict[str, Any], words: list[str]) -> None:
    if path == CHAT:
        if field == "logprobs":
            body = {"logprobs": True, "top_logprobs": body["logprobs"]}
        if body == {"max_tokens": 512}:
            words = ["512 tokens", "18 input tokens"]
        body = {"messages": HI, **body}
    else:
        body = {"prompt": "a", **body}
    error = error_of(fake.post(path, body))
    assert error["param"] == field
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(
    "prompt, words",
    [
        (None, "prompt"),
        ([], "prompt"),
        ("", "empty"),
        ([[]], "empty"),
        ([""], "empty"),
        ([260], "260"),
        ([-1], "-1"),
        ([[1], [10**30]], "0 to 259"),
        (["a", 1], "prompt"),
        ([1, "a"], "prompt"),
        ([1.5], "prompt"),
        ({"a": 1}, "prompt"),
        ("x" * 512, "512"),
        (["a"] * 1025, "1024"),
    ],
)
def test_prompts_that_cannot_be(fake: Live, prompt: Any, words: str) -> None:
    error = error_of(fake.post(TEXT, {"prompt": prompt}))
    assert error["param"] == "prompt" and words in error["message"]


@pytest.mark.parametrize("field", ["suffix"])
def test_completion_fields_not_built(fake: Live, field: str) -> None:
    error = error_of(fake.post(TEXT, {"prompt": "a", field: "b"}))
    assert error["param"] == field and "not in this version" in error["message"]


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [1], [{}], [{"role": "user", "content": 5}], [{"content": "a"}], [{"role": "", "content": "a"}],
     [{"role": "user", "content": [{"type": "nonsense"}]}], [{"role": "user", "content": [{"type": "text"}]}]],
)  # fmt: skip
def test_messages_that_cannot_be(fake: Live, messages: Any) -> None:
    assert error_of(fake.post(CHAT, {"messages": messages}))["param"] == "messages"


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "JSON"),
        (b"{bad json", "JSON"),
        (b"[]", "object"),
        (b'{"prompt": "a"} x', "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"prompt": "a", "whatever": NaN}', "NaN"),
        (b'{"prompt": "a", "logit_bias": {"5": 1e999}}', "finite"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": ' + b"[" * 150 + b"1" + b"]" * 150 + b"}", "128 levels"),
        (b'{"prompt": "a", "x": ' + b'{"a":' * 100000 + b"1" + b"}" * 100000 + b"}", "128 levels"),
    ],
    ids=range(14),
)
def test_bodies_that_are_no_json(fake: Live, raw: bytes, words: str) -> None:
    response = httpx.post(fake.url + TEXT, content=raw, timeout=60, headers=JSON)
    assert words in error_of(response)["message"]


def test_brackets_in_text_are_no_nesting(fake: Live) -> None:
    body = {"prompt": "[{(" * 60 + '\\"', "max_tokens": 1, "stop": ["NaN", "Infinity"], "truncate_prompt_tokens": 9}
    assert fake.post(TEXT, body).status_code == 200


def test_1e999_in_open_fields(fake: Live) -> None:
    tool = b'{"type": "function", "function": {"name": "f", "parameters": {"x": 1e999}}}'
    raw = b'{"messages": [{"role": "user", "content": "a"}], "tools": [' + tool + b"]}"
    assert error_of(httpx.post(fake.url + CHAT, content=raw, headers=JSON, timeout=60))["param"] == "tools"


def test_limits_are_the_servers(tmp_path: Any) -> None:
    limits = {"max_num_choices": 2, "max_prompts_per_request": 3, "max_sequences_per_request": 4, "max_messages": 2,
              "max_request_bytes": 4096}  # fmt: skip
    with live_fake(tmp_path / "model", **limits) as server:
        assert server.post(TEXT, {"prompt": "a", "n": 2, "max_tokens": 1}).status_code == 200
        assert "limit is 2" in error_of(server.post(TEXT, {"prompt": "a", "n": 3}))["message"]
        assert "limit is 3" in error_of(server.post(TEXT, {"prompt": ["a"] * 4}))["message"]
        assert "limit is 4" in error_of(server.post(TEXT, {"prompt": ["a"] * 3, "n": 2}))["message"]
        assert "limit is 2" in error_of(server.post(CHAT, {"messages": HI * 3}))["message"]
        assert "4096" in error_of(server.post(TEXT, {"prompt": "a" * 5000}), 413)["message"]


def test_unknown_fields_pass_and_null_means_absent(fake: Live) -> None:
    nothing = dict.fromkeys([row[0] for row in REFUSED])
    for path, prompt in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        response = fake.post(path, {**nothing, **prompt, "max_tokens": 1, "store": True, "metadata": {"a": "b"}})
        assert response.status_code == 200, response.text


def test_other_routes(fake: Live) -> None:
    assert error_of(httpx.get(fake.url + "/nosuch", timeout=60), 404)["type"] == "NotFoundError"
    assert error_of(httpx.get(fake.url + TEXT, timeout=60), 405)["type"] == "MethodNotAllowedError"
    assert error_of(fake.post("/v1/models", {}), 405)
    assert error_of(httpx.get(fake.url + "/v1/models/nope", timeout=60), 404)["param"] == "model"


def test_the_engine_goes_on(fake: Live) -> None:
    assert fake.post(TEXT, {"prompt": "abc", "max_tokens": 3}).json()["choices"][0]["text"] == "abc"
    assert httpx.get(fake.url + "/health", timeout=60).status_code == 200


def test_behind_a_proxy_that_strips_a_prefix(tmp_path: Any) -> None:
    with live_fake(tmp_path / "model", root_path="/api") as server:
        for prefix in ("", "/api"):
            assert server.post(prefix + TEXT, {"prompt": "abc", "max_tokens": 2}).json()["choices"][0]["text"] == "ab"
            assert httpx.get(server.url + prefix + "/v1/models", timeout=60).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_only_json_is_read(fake: Live, kind: str | None) -> None:
    """Pages of other sites can send these types without asking first."""
    headers = {} if kind is None else {"Content-Type": kind}
    error = error_of(httpx.post(fake.url + TEXT, content=b'{"prompt": "a"}', headers=headers, timeout=60), 415)
    assert "application/json" in error["message"]
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON"):
        answer = httpx.post(fake.url + TEXT, content=b'{"prompt": "a"}', headers={"Content-Type": kind}, timeout=60)
        assert answer.status_code == 200


@pytest.mark.parametrize("prompt, words", [
    ([5, 260], ["260", "out of vocabulary"]), ("", ["decoder prompt cannot be empty"]),
    ([5] * 600, ["600", "512", "longer than the maximum model length"]),
    ("a" * 600, ["512", "longer than the maximum model length"]),
    ("a" * 100_000, ["100000", "512", "longer than the maximum model length"]),
])  # fmt: skip
def test_prompts_that_are_refused_say_why(fake: Live, prompt: Any, words: list[str]) -> None:
    """In words that clients look for."""
    error = error_of(fake.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}))
    assert error["param"] == "prompt" and all(word in error["message"] for word in words), error
