"""Documented routes: several conversations at once, tokens of an input, scores, and 501 for what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.server.missing import MISSING
from tests.server.live import Live, error_of, live

BATCH = "/v1/chat/completions/batch"
GREEDY = {"temperature": 0, "max_tokens": 8}
ASKED = [[{"role": "user", "content": "What is the capital of France?"}],
         [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]]  # fmt: skip


@pytest.fixture(scope="module")
def smol() -> Iterator[Live]:
    with live(engine={"max_model_len": 512, "max_num_seqs": 8}, api_key=None) as found:
        yield found


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- several conversations


def test_a_batch_is_its_chats(smol: Live) -> None:
    whole = ok(smol.post(BATCH, {"messages": ASKED, **GREEDY}))
    alone = [ok(smol.post("/v1/chat/completions", {"messages": one, **GREEDY})) for one in ASKED]
    assert whole["object"] == "chat.completion" and [c["index"] for c in whole["choices"]] == [0, 1]
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [one["choices"][0]["message"]["content"] for one in alone] and all(texts)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(one["usage"][name] for one in alone)


def test_fields_of_a_chat_hold_for_each(smol: Live) -> None:
    body = {"messages": ASKED, "n": 2, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 3, "seed": 7}
    choices = ok(smol.post(BATCH, body))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(len(choice["logprobs"]["content"]) <= 3 for choice in choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"messages": []}, "messages"), ({"messages": ASKED[0]}, "messages"), ({"stream": True}, "stream"),
     ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"max_tokens": 0}, "max_tokens"),
     ({"model": "nope"}, "model")],
    ids=str,
)  # fmt: skip
def test_what_a_batch_refuses(smol: Live, fields: dict[str, Any], param: str) -> None:
    answer = smol.post(BATCH, {"messages": ASKED, **fields})
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text


def test_conversations_are_bounded(smol: Live) -> None:
    many = smol.state.options.max_prompts_per_request + 1
    error = error_of(smol.post(BATCH, {"messages": [[{"role": "user", "content": "a"}]] * many}))
    assert f"{many} prompts" in error["message"]


# ---- tokens of an input


def test_input_tokens_are_what_a_response_uses(smol: Live) -> None:
    body = {"input": "What is the capital of France?", "instructions": "Be brief."}
    told = ok(smol.post("/v1/responses/input_tokens", body))
    used = ok(smol.post("/v1/responses", {**body, "max_output_tokens": 1}))["usage"]["input_tokens"]
    assert told == {"object": "response.input_tokens", "input_tokens": used}
    assert error_of(smol.post("/v1/responses/input_tokens", {"input": "a", "model": "nope"}), 404)["param"] == "model"


# ---- scores


def ids_of(smol: Live, text: str) -> list[int]:
    found: list[int] = ok(smol.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
    return found


def test_scores_are_probabilities(smol: Live) -> None:
    query, items = "The capital of France is", [" Paris, the capital of Italy is", " Paris, the capital of Spain is"]
    (rome,), (madrid,) = ids_of(smol, " Rome"), ids_of(smol, " Madrid")
    body = {"query": query, "items": items, "label_token_ids": [rome, madrid]}
    answer = ok(smol.post("/generative_scoring", body))
    scores = [one["score"] for one in answer["data"]]
    assert [one["index"] for one in answer["data"]] == [0, 1] and answer["object"] == "list"
    assert scores[0] > 0.5 > scores[1] > 0
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(smol, query + item)) for item in items)
    plain = ok(smol.post("/generative_scoring", {**body, "apply_softmax": False}))["data"][0]["score"]
    other = {**body, "apply_softmax": False, "label_token_ids": [madrid, rome]}
    also = ok(smol.post("/generative_scoring", other))["data"][0]["score"]
    assert math.isclose(scores[0], plain / (plain + also), rel_tol=1e-4) and plain + also < 1


def test_scores_of_tokens_and_of_items_first(smol: Live) -> None:
    query, item, labels = ids_of(smol, " is big"), ids_of(smol, "Paris"), ids_of(smol, " and")
    body = {"query": query, "items": [item], "label_token_ids": labels, "apply_softmax": False, "item_first": True}
    found = ok(smol.post("/generative_scoring", body))["data"][0]["score"]
    words = {"query": " is big", "items": ["Paris"], "label_token_ids": labels, "apply_softmax": False}
    said = ok(smol.post("/generative_scoring", {**words, "item_first": True}))["data"][0]["score"]
    assert math.isclose(found, said, rel_tol=1e-4)
    assert found != ok(smol.post("/generative_scoring", words))["data"][0]["score"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"items": []}, "items"), ({"label_token_ids": []}, "label_token_ids"), ({"items": [[1]]}, "items"),
     ({"label_token_ids": [10**9]}, "label_token_ids"), ({"label_token_ids": [-1]}, "label_token_ids"),
     ({"items": ["a"] * 20_000}, "items")],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_scoring_refuses(smol: Live, fields: dict[str, Any], param: str) -> None:
    body = {"query": "a", "items": ["b"], "label_token_ids": [1], **fields}
    assert error_of(smol.post("/generative_scoring", body))["param"] == param


# ---- what is missing, and what there is nothing of


def test_no_events_are_published(smol: Live) -> None:
    assert ok(httpx.get(smol.url + "/kv_event_sources", timeout=60)) == []


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_feature_is_named(smol: Live, path: str) -> None:
    for answer in (smol.post(path, {"input": "a"}), httpx.get(smol.url + path, timeout=60)):
        error = error_of(answer, 501)
        assert error["type"] == "NotImplementedError" and MISSING[path] in error["message"]
    assert path not in httpx.get(smol.url + "/openapi.json", timeout=60).json()["paths"]


def test_tokenize_looks_at_unknown_fields_as_chat_does(smol: Live) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": hi}), ("/tokenize", {"messages": hi}), ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1]}),
    ):  # fmt: skip
        error = error_of(smol.post(path, {**body, "functions": [{"name": "f"}]}), 400)
        assert error["param"] == "functions", path
