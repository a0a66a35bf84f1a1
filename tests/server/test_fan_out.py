"""Small bodies that ask for large products: refused before any work, with the product and the limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.server import server_config
from tests.server.live import Live, error_of, live_fake

PATH = "/v1/completions"
PROMPTS = [f"prompt {number}" for number in range(1024)]
MANY: dict[str, Any] = {"prompt": PROMPTS, "n": 2, "max_tokens": 1}
LARGE: dict[str, Any] = {
    "cache_salt": "s" * (1 << 20),
    "vllm_xargs": {"x": "y" * (1 << 20)},
    "structured_outputs": {"json": {"type": "object", "description": "d" * (1 << 19)}},
    "bad_words": ["w" * 60_000, "v"],
    "logit_bias": {str(number): 1.0 for number in range(4, 260)},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With limits that short tests reach."""
    with live_fake(
        tmp_path_factory.mktemp("small"), max_fan_out_bytes=1 << 20, max_logprobs_per_request=1000, max_beam_tokens=100,
        engine={"max_logprobs": -1, "generation_config": "vllm"},
    ) as server:  # fmt: skip
        yield server


@pytest.mark.parametrize("name", ["cache_salt", "vllm_xargs", "structured_outputs"])
def test_bytes_times_answers(fake: Live, name: str) -> None:
    began = time.process_time()
    error = error_of(fake.post(PATH, {**MANY, name: LARGE[name]}))
    assert error["param"] == name and time.process_time() - began < 20
    assert "n (2) times 1024 prompts" in error["message"] and "--max-fan-out-bytes" in error["message"]
    product = int(error["message"].partition(" is ")[2].split()[0])
    assert product > 2048 * (1 << 18) and f"the limit is {256 << 20}" in error["message"]
    assert error_of(fake.post(PATH, {"prompt": "x", "n": 100_000, name: LARGE[name]}))["param"] == "n"
    if name != "structured_outputs":  # which may be too large to compile
        alone = fake.post(PATH, {"prompt": "x", "max_tokens": 1, name: LARGE[name]})
        assert alone.status_code == 200, alone.text


@pytest.mark.parametrize("name", LARGE)
def test_every_large_field_counts(small: Live, name: str) -> None:
    body = {"prompt": PROMPTS[:1000], "max_tokens": 1, name: LARGE[name]}
    error = error_of(small.post(PATH, body))
    assert error["param"] == name and "the limit is 1048576 (--max-fan-out-bytes)" in error["message"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "n": 128, "max_tokens": 1, name: LARGE[name]}
    if name != "logit_bias":  # a few kilobytes times 128 are fine
        assert error_of(small.post("/v1/chat/completions", chat))["param"] == name
    render = small.post(f"{PATH}/render", body)
    assert error_of(render)["param"] == name


def test_ids_are_counted_before_they_are_multiplied(fake: Live) -> None:
    """There cannot be more of them than the model has tokens."""
    error = error_of(fake.post(PATH, {**MANY, "allowed_token_ids": [5] * (1 << 18)}))
    assert error["param"] == "allowed_token_ids" and f"has {1 << 18} ids" in error["message"]


def test_parameters_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To an engine in a process of its own."""
    with live_fake(tmp_path, own_process=True) as server:
        client: Any = server.engine.front.client
        send, sent = client._reader.wire.send, []
        monkeypatch.setattr(
            client._reader.wire, "send", lambda frames: (sent.append(sum(map(len, frames))), send(frames))
        )
        large = {"vllm_xargs": {"x": "y" * 50_000}, "cache_salt": "s" * 50_000, "allowed_token_ids": [70, 71] * 100}
        for more in ({}, {"prompt_logprobs": 1}):
            sent.clear()
            body = {"prompt": PROMPTS[:50], "n": 4, "max_tokens": 2, **large, **more}
            answer = server.post(PATH, body)
            assert answer.status_code == 200 and len(answer.json()["choices"]) == 200
            assert 110_000 < sum(sent) < 400_000  # and not two hundred times as much


def test_prompts_count_too(small: Live) -> None:
    for prompt in ("x" * 400, [5] * 60):
        assert small.post(PATH, {"prompt": prompt, "n": 128, "max_tokens": 1}).status_code == 200
    for prompt in (["x" * 400] * 8, [[5] * 400] * 8):
        error = error_of(small.post(PATH, {"prompt": prompt, "n": 128, "max_tokens": 1, "echo": True,
                                           "stop": ["y" * 1000] * 3}))  # fmt: skip
        assert "--max-fan-out-bytes" in error["message"]
    ids = {"token_ids": [5] * 400, "sampling_params": {"n": 128, "max_tokens": 1, "extra_args": {"x": "y" * 9000}}}
    assert error_of(small.post("/inference/v1/generate", ids))["param"] == "vllm_xargs"


def test_logprobs_times_answers(small: Live) -> None:
    ok = {"prompt": ["abc", "def"], "n": 5, "max_tokens": 20, "logprobs": 4}  # 2 × 5 × 20 × 5
    assert small.post(PATH, ok).status_code == 200
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (PATH, {**ok, "max_tokens": 21}, "1050"),
        (PATH, {**ok, "logprobs": 5}, "1200"),
        (PATH, {**ok, "n": 6}, "1200"),
        (PATH, {**ok, "prompt": ["abc"] * 3}, "1500"),
        (PATH, {**ok, "logprobs": None, "prompt_logprobs": -1}, "7830"),  # 2 × 5 × 3 × 261
        (PATH, {**ok, "n": 1, "echo": True, "logprobs": -1, "max_tokens": 1}, "2088"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
         "the limit is 1000"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": -1, "max_tokens": 4}}, "1044"),
    ]  # fmt: skip
    for path, body, product in wrong:
        error = error_of(small.post(path, body))
        assert product in error["message"] and "--max-logprobs-per-request" in error["message"], error
        assert error["param"] in ("logprobs", "prompt_logprobs")


def test_beams_times_prompts_times_tokens(small: Live) -> None:
    search = {"prompt": ["abc", "def"], "use_beam_search": True, "n": 4, "max_tokens": 10, "temperature": 0}
    assert small.post(PATH, search).status_code == 200
    error = error_of(small.post(PATH, {**search, "max_tokens": 13}))
    assert "104 tokens of beams; the limit is 100 (--max-beam-tokens)" in error["message"]
    assert error["param"] == "max_tokens"
    error = error_of(small.post(PATH, {**search, "prompt": "abc", "best_of": 10}))
    assert "2000 log probabilities; the limit is 1000 (--max-logprobs-per-request)" in error["message"]
    error = error_of(small.post(PATH, {**search, "logprobs": 50, "max_tokens": 5}))
    assert "--max-logprobs-per-request" in error["message"]
    form = {"structured_outputs": {"regex": "[a-y]{3}"}, "prompt": "abc", "max_tokens": 5}
    assert small.post(PATH, {**search, **form}).status_code == 200


def test_a_form_that_needs_many_log_probabilities(tmp_path: Path) -> None:
    """How many tokens it allows is known only when a round begins."""
    with live_fake(tmp_path, max_logprobs_per_request=50) as server:
        search = {"prompt": "abc", "use_beam_search": True, "n": 2, "max_tokens": 3, "temperature": 0}
        few, many = ({"structured_outputs": {"regex": f"[{which}]{{3}}"}} for which in ("a-e", "a-zA-Z0-9"))
        assert server.post(PATH, {**search, **few}).status_code == 200
        error = error_of(server.post(PATH, {**search, **many}))
        assert error["param"] == "structured_outputs" and "63 log probabilities at once" in error["message"]
        assert "the limit is 50 (--max-logprobs-per-request)" in error["message"]


def test_a_search_that_would_take_days(tmp_path: Path) -> None:
    """By default too: 128 beams over a long context."""
    with live_fake(tmp_path, engine={"generation_config": "vllm"}) as server:
        body = {"prompt": ["abc"] * 16, "use_beam_search": True, "n": 128, "max_tokens": 500, "temperature": 0}
        began = time.process_time()
        error = error_of(server.post(PATH, body))
        assert "262144000 log probabilities; the limit is 33554432" in error["message"]
        assert time.process_time() - began < 20


def test_defaults_leave_room() -> None:
    """For a model of 128k tokens: 8 beams, or 8 answers with 20 log probabilities, without a max_tokens."""
    options = server_config()
    assert options.max_beam_tokens >= 8 * 131_072
    assert options.max_logprobs_per_request >= 8 * 131_072 * 21
    assert 32 * options.max_request_bytes <= options.max_fan_out_bytes
