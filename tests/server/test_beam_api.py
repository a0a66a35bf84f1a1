"""use_beam_search: the answers of a search worked out by hand; forms and logprobs hold, and it can be ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.base import env
from tests.server.live import Live, error_of, live_fake
from tests.server.test_disconnect import STEP_S, running, send, wait_for

PROMPT = "The capital of France is"
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With the route that aborts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_SERVER_DEV_MODE", "1")
        env.forget_all()
        with live_fake(tmp_path_factory.mktemp("fake")) as server:
            yield server
    env.forget_all()


def by_hand(server: Live, prompt: list[int], width: int, length: int) -> list[tuple[list[int], float]]:
    """Every beam asked for its followers in a request of its own; none of the followers ends the text."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(length):
        body = {"prompt": [prompt + ids for ids, _ in beams], "max_tokens": 1, "logprobs": 2 * width, "temperature": 0}
        answer = server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True}).json()
        grown = []
        for (ids, total), choice in zip(beams, answer["choices"], strict=True):
            for name, logprob in choice["logprobs"]["top_logprobs"][0].items():
                grown.append(([*ids, int(name.removeprefix("token_id:"))], total + logprob))
        beams = sorted(grown, key=lambda pair: -pair[1])[:width]
    return beams


def test_the_best_answers(smol: Live) -> None:
    prompt = smol.engine.tokenizer.encode(PROMPT)
    body = {"prompt": PROMPT, **BEAMS, "ignore_eos": True, "return_token_ids": True, "logprobs": 2}
    found = smol.post("/v1/completions", body).json()
    wanted = by_hand(smol, prompt, 3, 3)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    for choice, (ids, total) in zip(found["choices"], wanted, strict=True):
        assert choice["token_ids"] == ids and choice["finish_reason"] == "length"
        assert choice["text"] == smol.engine.tokenizer.decode(prompt + ids).removeprefix(PROMPT)
        logprobs = choice["logprobs"]
        assert sum(logprobs["token_logprobs"]) == pytest.approx(total, abs=1e-3)
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])  # two, and the chosen one
    assert found["usage"] == {
        **found["usage"], "prompt_tokens": len(prompt), "completion_tokens": 9, "total_tokens": len(prompt) + 9,
    }  # fmt: skip


def test_a_wider_search_and_several_prompts(smol: Live) -> None:
    body = {"prompt": [PROMPT, "Water is"], **BEAMS, "n": 1, "best_of": 3, "return_token_ids": True}
    wide = smol.post("/v1/completions", body).json()["choices"]
    assert [choice["index"] for choice in wide] == [0, 1]
    alone = smol.post("/v1/completions", {**body, "prompt": PROMPT, "n": 3, "best_of": None}).json()["choices"]
    assert wide[0]["token_ids"] == alone[0]["token_ids"] and len(alone) == 3


def test_a_chat_with_the_official_client(smol: Live) -> None:
    client = openai.OpenAI(base_url=smol.url + "/v1", api_key="none")
    ask: dict[str, Any] = {
        "model": "smol", "messages": [{"role": "user", "content": "Which is a fruit: apple or stone? One word."}],
        "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    answer = client.chat.completions.create(
        **ask, extra_body={"use_beam_search": True, "guided_choice": ["apple", "fig"]}
    )
    assert {choice.message.content for choice in answer.choices} <= {"apple", "fig"}  # one may be written in two ways
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and choice.logprobs and choice.logprobs.content
        assert all(len(entry.top_logprobs) == 1 for entry in choice.logprobs.content)
    schema = {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema}}
    ask |= {"max_tokens": 12, "response_format": form, "logprobs": None, "top_logprobs": None}
    held = client.chat.completions.create(**ask, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert held.choices[0].finish_reason == "stop", held
    assert set(json.loads(held.choices[0].message.content or "")) == {"fruit"}


def test_the_end_of_the_text(smol: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hi"}], "use_beam_search": True, "n": 2, "max_tokens": 30}
    chat |= {"length_penalty": -2.0, "guided_choice": ["Hi", "Hello"]}
    end = smol.engine.tokenizer.decode([smol.engine.tokenizer.eos_token_id])
    bare = smol.post("/v1/chat/completions", chat).json()["choices"]
    full = smol.post("/v1/chat/completions", {**chat, "include_stop_str_in_output": True}).json()["choices"]
    assert [c["message"]["content"] + end for c in bare] == [c["message"]["content"] for c in full]
    assert {c["message"]["content"] for c in bare} <= {"Hi", "Hello"} and bare[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "param, body",
    [
        ("stream", {"stream": True}),
        ("top_p", {"top_p": 0.5}),
        ("stop", {"stop": ["a"]}),
        ("temperature", {"temperature": 0.7}),
        ("best_of", {"best_of": 1}),
        ("best_of", {"best_of": 129}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("prompt_logprobs", {"prompt_logprobs": 0}),
    ],
)
def test_refusals(fake: Live, param: str, body: dict[str, Any]) -> None:
    assert error_of(fake.post("/v1/completions", {"prompt": "abc", **BEAMS, **body}))["param"] == param


def test_what_asks_for_nothing_is_let_through(fake: Live) -> None:
    idle = {"top_p": 1.0, "top_k": -1, "frequency_penalty": 0, "stop": [], "logit_bias": {}, "seed": 1}
    assert fake.post("/v1/completions", {"prompt": "abc", **BEAMS, **idle}).status_code == 200
    refused = error_of(fake.post("/v1/completions/render", {"prompt": "abc", **BEAMS}))
    assert refused["param"] == "use_beam_search"


def _slowly(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take their time, so that a search can be met under way."""
    worker = server.engine.front.client.loop.executor
    forward = worker.forward

    def slow(plan: Any) -> None:
        time.sleep(STEP_S / 3)
        forward(plan)

    monkeypatch.setattr(worker, "forward", slow)


def test_a_client_that_goes_frees_its_beams(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    _slowly(fake, monkeypatch)
    client = send(fake, "/v1/completions", {"prompt": "abc", **BEAMS, "max_tokens": 400, "ignore_eos": True})
    wait_for(lambda: running(fake)[0], 3)
    client.close()
    wait_for(lambda: fake.state.load.count, 0)
    wait_for(lambda: len(fake.engine.front.outputs), 0)
    wait_for(lambda: running(fake), (0, 0.0))


def test_a_search_that_is_aborted_or_out_of_time(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    _slowly(fake, monkeypatch)
    late = {"prompt": "abc", **BEAMS, "max_tokens": 400, "ignore_eos": True}
    error_of(fake.post("/v1/completions", late, headers={"X-Request-Timeout": "0.4"}), 504)
    wait_for(lambda: running(fake), (0, 0.0))
    client = send(fake, "/v1/completions", {**late, "prompt": ["abc", "de"], "request_id": "mine"})
    wait_for(lambda: running(fake)[0], 6)
    assert fake.post("/abort_requests", {"request_ids": ["other"]}).json() == {"aborted": 0}
    assert fake.post("/abort_requests", {"request_ids": ["mine"]}).json()["aborted"] >= 2
    wait_for(lambda: fake.state.load.count, 0)
    wait_for(lambda: running(fake), (0, 0.0))
    answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"abort"' in answer
