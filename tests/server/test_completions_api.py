"""/v1/completions over the worker that repeats its prompt, so that every answer is known."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_engine import ids_of
from tests.server.live import Live, error_of, events, live_fake

PATH = "/v1/completions"


def ask(server: Live, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"model": "fake", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    "prompt, wanted",
    [
        ("abc", ["abcab"]),
        (["abc", "xyz"], ["abcab", "xyzxy"]),
        (ids_of("abc"), ["abcab"]),
        ([ids_of("abc"), ids_of("xy")], ["abcab", "xyxyx"]),
        (["é"], ["éé\ufffd"]),
    ],
)
def test_every_form_of_a_prompt(fake: Live, prompt: Any, wanted: list[str]) -> None:
    answer = ask(fake, prompt=prompt, max_tokens=5)
    assert texts(answer) == wanted
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * len(wanted)
    assert answer["usage"]["completion_tokens"] == 5 * len(wanted)


def test_n_and_prompts_are_numbered_together(fake: Live) -> None:
    answer = ask(fake, prompt=["ab", "xy"], n=2, max_tokens=2)
    assert texts(answer) == ["ab", "ab", "xy", "xy"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 8, 12)


def test_echo(fake: Live) -> None:
    assert texts(ask(fake, prompt="abc", max_tokens=2, echo=True)) == ["abcab"]
    assert texts(ask(fake, prompt=ids_of("abc"), max_tokens=2, echo=True)) == ["abcab"]
    assert texts(ask(fake, prompt="abcdef", max_tokens=2, echo=True, truncate_prompt_tokens=2)) == ["efef"]
    alone = ask(fake, prompt="abc", max_tokens=0, echo=True)
    assert texts(alone) == ["abc"] and alone["usage"]["completion_tokens"] == 0


def test_logprobs_and_their_offsets(fake: Live) -> None:
    found = ask(fake, prompt="abc", max_tokens=2, logprobs=2)["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b"] and found["text_offset"] == [0, 1] and found["token_logprobs"] == [-2.0, -2.0]
    assert found["top_logprobs"][0] == {"a": -2.0, chr(6): -1.0, chr(7): -2.0}
    with_prompt = ask(fake, prompt="abc", max_tokens=1, logprobs=1, echo=True)["choices"][0]["logprobs"]
    assert with_prompt["tokens"] == ["a", "b", "c", "a"] and with_prompt["text_offset"] == [0, 1, 2, 3]
    assert with_prompt["token_logprobs"][0] is None and with_prompt["top_logprobs"][0] is None
    as_ids = ask(fake, prompt="abc", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
    assert as_ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ids_of('a')[0]}"]


def test_echo_of_token_ids_keeps_special_tokens(fake: Live) -> None:
    """Text, tokens and offsets are of the same text."""
    tokenizer = fake.engine.tokenizer
    assert tokenizer is not None
    special = min(tokenizer.skipped_ids)
    ids = [special, *ids_of("ab"), special, *ids_of("c")]
    for further in ({}, {"return_tokens_as_token_ids": True}, {"stream": True}):
        body = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, **further}
        answer = fake.post("/v1/completions", body)
        choices = [e["choices"][0] for e in events(answer.text)] if "stream" in further else answer.json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        offsets = [place for choice in choices for place in choice["logprobs"]["text_offset"]]
        tokens = [tokenizer.token_text(token_id) for token_id in ids]
        assert text.startswith("".join(tokens))
        for offset, token in zip(offsets, tokens, strict=False):
            assert text.startswith(token, offset)
        if not further:
            assert choices[0]["logprobs"]["tokens"][: len(ids)] == tokens


def test_prompt_logprobs_and_token_ids(fake: Live) -> None:
    choice = ask(fake, prompt="ab", max_tokens=2, prompt_logprobs=1, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == ids_of("ab") and choice["token_ids"] == ids_of("ab")
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second[str(ids_of("b")[0])] == {"logprob": -2.0, "rank": 2, "decoded_token": "b"}
    assert (
        error_of(fake.post(PATH, {"prompt": "a", "stream": True, "prompt_logprobs": 1}))["param"] == "prompt_logprobs"
    )


def test_ends(fake: Live) -> None:
    stopped = ask(fake, prompt="abcd", max_tokens=9, stop=["cd"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("ab", "stop", "cd")
    kept = ask(fake, prompt="abcd", max_tokens=9, stop="cd", include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "abcd"
    by_id = ask(fake, prompt="abcd", max_tokens=9, stop_token_ids=ids_of("c"))["choices"][0]
    assert (by_id["text"], by_id["stop_reason"]) == ("ab", ids_of("c")[0])
    ended = ask(fake, prompt="abcd", max_tokens=9, vllm_xargs={"eos_at": 3})["choices"][0]
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("ab", "stop", None)


def test_truncation(fake: Live) -> None:
    assert texts(ask(fake, prompt="abcdef", max_tokens=2, truncate_prompt_tokens=2)) == ["ef"]
    right = ask(fake, prompt="abcdef", max_tokens=2, truncate_prompt_tokens=2, truncation_side="right")
    assert texts(right) == ["ab"] and right["usage"]["prompt_tokens"] == 2


def test_the_models_own_sampling_is_the_default(fake: Live) -> None:
    """The fake's generation config says at most 33 new tokens."""
    assert ask(fake, prompt="ab", max_tokens=50)["usage"]["completion_tokens"] == 33
    assert ask(fake, prompt="ab")["usage"]["completion_tokens"] == 16
    assert ask(fake, prompt="ab", max_tokens=None, temperature=None)["usage"]["completion_tokens"] == 16


def test_names(fake: Live) -> None:
    assert ask(fake, model="alias", prompt="a")["model"] == "fake"
    assert ask(fake, model=None, prompt="a")["model"] == "fake"
    error = error_of(fake.post(PATH, {"model": "nope", "prompt": "a"}), 404)
    assert error["type"] == "NotFoundError" and error["param"] == "model"
    assert error["message"] == "The model `nope` does not exist. Valid aliases: fake, alias."


def test_request_ids(fake: Live) -> None:
    given = fake.post(PATH, {"prompt": "a"}, headers={"X-Request-Id": "mine-1"})
    assert given.json()["id"] == "cmpl-mine-1" and given.headers["x-request-id"] == "mine-1"
    assert fake.post(PATH, {"prompt": "a", "request_id": "theirs"}).json()["id"] == "cmpl-theirs"
    drawn = fake.post(PATH, {"prompt": "a"})
    assert drawn.json()["id"] == f"cmpl-{drawn.headers['x-request-id']}"
    assert "printable" in error_of(fake.post(PATH, {"prompt": "a", "request_id": "x" * 300}))["message"]


def test_a_stream(fake: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    response = fake.post(PATH, body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response.text)
    *parts, usage = chunks
    assert "".join(part["choices"][0]["text"] for part in parts) == "abca"
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "length"
    assert all("usage" not in part for part in parts)
    assert usage["choices"] == [] and usage["usage"] == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_in_every_chunk(fake: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(fake.post(PATH, {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": options}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4 and all(c["usage"]["prompt_tokens"] == 3 for c in chunks)
    alone = events(fake.post(PATH, {"prompt": "abc", "max_tokens": 2, "stream": True}).text)
    assert all("usage" not in chunk for chunk in alone)


def test_stream_interval(fake: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 9, "stream": True, "stream_interval": 20, "vllm_xargs": {"sleep": 0.02}}
    texts = [chunk["choices"][0]["text"] for chunk in events(fake.post(PATH, body).text)]
    assert "".join(texts) == "abcabcabc" and len(texts) == 2  # the first token, then the rest


def test_an_error_in_the_middle_is_the_last_chunk(fake: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 9, "stream": True, "vllm_xargs": {"fail_at": 4, "sleep": 0.05}}
    response = fake.post(PATH, body)
    assert response.status_code == 200
    *parts, last = events(response.text)
    assert "".join(part["choices"][0]["text"] for part in parts) == "abc"
    assert last["error"]["code"] == 500 and "this one cannot go on" in last["error"]["message"]
    whole = error_of(fake.post(PATH, body | {"stream": False}), 500)
    assert "this one cannot go on" in whole["message"] and whole["type"] == "InternalServerError"
    assert texts(ask(fake, prompt="abc", max_tokens=2)) == ["ab"]  # the engine goes on


def test_what_fails_before_the_first_token_has_a_status(fake: Live) -> None:
    error = error_of(fake.post(PATH, {"prompt": "abc", "stream": True, "vllm_xargs": {"fail_at": 1}}), 500)
    assert "this one cannot go on" in error["message"]


def test_prompt_tokens_details_and_forced_usage(tmp_path: Any) -> None:
    options = {"enable_prompt_tokens_details": True, "enable_force_include_usage": True}
    with live_fake(tmp_path / "model", **options, engine={"max_model_len": 512}) as server:
        long = "x" * 64
        first, second = (ask(server, prompt=long, max_tokens=1)["usage"]["prompt_tokens_details"] for _ in range(2))
        assert first == {"cached_tokens": 0} and second["cached_tokens"] >= 16
        salted = ask(server, prompt=long, max_tokens=1, cache_salt="mine")["usage"]["prompt_tokens_details"]
        assert salted == {"cached_tokens": 0}
        chunks = events(server.post(PATH, {"prompt": "ab", "stream": True, "max_tokens": 1}).text)
        assert chunks[-1]["usage"]["total_tokens"] == 3


def test_a_silent_stream_sends_comments(tmp_path: Any) -> None:
    with live_fake(tmp_path / "model", sse_keep_alive_interval=0.05) as server:
        body = {"prompt": "abc", "max_tokens": 2, "stream": True, "vllm_xargs": {"sleep": 0.5}}
        text = server.post(PATH, body).text
        assert text.startswith(": keep-alive\n\n") and text.count(": keep-alive\n\n") > 2
        chunks = events(text.replace(": keep-alive\n\n", ""))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"


def test_priorities(tmp_path: Any) -> None:
    with live_fake(tmp_path / "model", engine={"scheduling_policy": "priority"}) as server:
        assert texts(ask(server, prompt="abc", max_tokens=2, priority=-5)) == ["ab"]
