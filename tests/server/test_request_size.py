"""One small request cannot hold up the server: limits come before work, and each is named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.config.server import server_config
from quire.server.openai.limits import check_request
from quire.server.openai.protocol import CompletionRequest
from tests.server.live import Live, error_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SOON = 10.0  # seconds of computing, for what takes a fraction of one and once took many


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < SOON


def post(fake: Live, path: str, raw: str) -> httpx.Response:
    return httpx.post(fake.url + path, content=raw.encode(), headers={"Content-Type": "application/json"}, timeout=60)


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"])
def test_too_many_values(fake: Live, path: str) -> None:
    answer = post(fake, path, '{"unknown": [' + "[]," * 1_100_000 + "[]]}")
    assert answer.status_code == 400 and "--max-json-values" in answer.json()["error"]["message"]


def test_a_prompt_of_too_many_ids(fake: Live) -> None:
    too_many = error_of(post(fake, TEXT, '{"prompt": [' + "1," * 1_100_000 + "1]}"))["message"]
    assert "--max-request-token-ids" in too_many
    for raw in ("[" + "1," * 900_000 + "1]", "[[" + "1," * 900_000 + "1]]", "[" + "[1]," * 20_000 + "[1]]"):
        assert error_of(post(fake, TEXT, f'{{"prompt": {raw}}}'))["param"] == "prompt"


def test_commas_of_a_text_are_no_values(fake: Live) -> None:
    assert "characters" in error_of(fake.post(TEXT, {"prompt": "," * 1_200_000}))["message"]


def test_a_text_is_refused_by_its_characters(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("it is tokenized")

    monkeypatch.setattr(fake.engine.front.inputs.tokenizer, "encode_batch", never)
    for path, body in (
        (TEXT, {"prompt": "x" * 2_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
    ):
        error = error_of(fake.post(path, body))
        assert "characters" in error["message"] and "512" in error["message"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_cut_may_be_longer(fake: Live, side: str) -> None:
    body = {"prompt": "x" * 40_000, "truncate_prompt_tokens": 9, "truncation_side": side, "max_tokens": 1}
    assert fake.post(TEXT, body).json()["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize("side", ["left", "right", None])
def test_but_not_without_end(fake: Live, side: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("it is tokenized")

    monkeypatch.setattr(fake.engine.front.inputs.tokenizer, "encode_batch", never)
    long, many = "x" * 2_000_000, [{"role": "user", "content": "x" * 2_000_000}]
    cut = {"truncate_prompt_tokens": 9, "truncation_side": side}
    for path, body in (
        (TEXT, {"prompt": long} | cut),
        (TEXT, {"prompt": ["a", long]} | cut),
        (CHAT, {"messages": many} | cut),
        ("/v1/responses", {"input": long, "truncation": "auto"}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": many}),
        (f"{TEXT}/render", {"prompt": long} | cut),
        (f"{CHAT}/render", {"messages": many} | cut),
    ):
        if path == TEXT and isinstance(body["prompt"], list):
            monkeypatch.undo()  # its first prompt is tokenized
        error = error_of(fake.post(path, body))
        assert "2000" in error["message"] and f"{16 * 512} that would be truncated" in error["message"], path


def test_messages_are_counted_within_the_same_limit(fake: Live) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 2_000_000}]}
    for path, more in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/count_tokens", {})):
        answer = fake.post(path, body | more)
        assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"], path


def test_bad_words_are_words(fake: Live) -> None:
    error = error_of(fake.post(TEXT, {"prompt": "a", "bad_words": ["x" * 1000] * 1024}))
    assert error["param"] == "bad_words" and "65536" in error["message"]
    many = [f"w{i}" for i in range(1024)]
    body = {"prompt": ["a"] * 64, "bad_words": many, "max_tokens": 1}  # the words are the same for all prompts
    assert fake.post(TEXT, body).status_code == 200


def test_detokenize_as_much_as_a_prompt_may_have(fake: Live) -> None:
    assert fake.post("/detokenize", {"tokens": [97] * 512}).json() == {"prompt": "]" * 512}
    assert fake.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    error = error_of(fake.post("/detokenize", {"tokens": [97] * 513}))
    assert error["param"] == "tokens" and "512" in error["message"]


WRONG: list[tuple[str, str, str]] = [
    (CHAT, "messages", json.dumps([1] * 60_000)),
    (CHAT, "messages", json.dumps([{"role": "user", "content": [1] * 60_000}])),
    (CHAT, "tools", json.dumps([1] * 60_000)),
    (TEXT, "stop", json.dumps([1] * 60_000)),
    (TEXT, "stop_token_ids", json.dumps(["a"] * 60_000)),
    (TEXT, "bad_words", json.dumps([1] * 60_000)),
    (TEXT, "prompt", json.dumps([{}] * 30_000)),
    (TEXT, "logit_bias", json.dumps({str(i): "x" for i in range(60_000)})),
    (TEXT, "vllm_xargs", json.dumps({str(i): {} for i in range(30_000)})),
    (TEXT, "vllm_xargs", json.dumps({"a": [{}] * 30_000})),
]


@pytest.mark.parametrize("path, field, value", WRONG, ids=[f"{i}-{row[1]}" for i, row in enumerate(WRONG)])
def test_one_fault_of_many_is_told(fake: Live, path: str, field: str, value: str) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    rest = json.dumps({name: given for name, given in body.items() if name != field})
    raw = f'{{"{field}": {value}, {rest[1:]}' if rest != "{}" else f'{{"{field}": {value}}}'
    error = error_of(post(fake, path, raw))
    assert error["param"] == field and len(error["message"]) < 2500


def test_a_schema_of_unknown_keywords(fake: Live) -> None:
    schema = {"type": "object", **{f"unknown-{i}": 1 for i in range(60_000)}}
    assert fake.post(TEXT, {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}).status_code < 500


def test_what_nobody_will_look_at_is_not_kept() -> None:
    """A request lives as long as its answer is made."""
    given = {"prompt": "a", "unknown": [[]] * 9, "other": {"a": 1}, "word": "w", "guided_choice": ["a", "b"]}
    request = CompletionRequest(**given)
    check_request(request, server_config(), 1)
    assert request.model_extra == {"word": "w", "guided_choice": ["a", "b"]}
