"""What /render says is what is sent: fed to /inference/v1/generate, it gives the same tokens as the request itself."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.live import Live, error_of, events
from tests.server.test_disconnect import running, send, wait_for

PATH = "/inference/v1/generate"
CHAT: Any = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "temperature": 0}


def generate(server: Live, body: Any) -> dict[str, Any]:
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("further", [{}, {"temperature": 0.9, "seed": 5, "n": 2, "top_k": 40, "stop": [","]}])
def test_a_rendered_chat_gives_the_same_answer(smol: Live, further: dict[str, Any]) -> None:
    asked = {**CHAT, **further, "return_token_ids": True}
    rendered = smol.post("/v1/chat/completions/render", asked).json()
    itself = smol.post("/v1/chat/completions", asked).json()
    assert rendered["token_ids"] == itself["prompt_token_ids"]
    found = generate(smol, rendered)
    assert [choice["token_ids"] for choice in found["choices"]] == [one["token_ids"] for one in itself["choices"]]
    assert [choice["finish_reason"] for choice in found["choices"]] == [
        one["finish_reason"] for one in itself["choices"]
    ]
    assert found["usage"]["completion_tokens"] == itself["usage"]["completion_tokens"]
    assert found["request_id"] == rendered["request_id"]


def test_rendered_completions(smol: Live) -> None:
    asked: Any = {"prompt": ["The sea is", "One, two,"], "max_tokens": 4, "temperature": 0, "logit_bias": {"28": 2}}
    rendered = smol.post("/v1/completions/render", asked).json()
    assert len({one["request_id"] for one in rendered}) == 2
    itself = smol.post("/v1/completions", {**asked, "return_token_ids": True}).json()["choices"]
    for one, choice in zip(rendered, itself, strict=True):
        assert one["token_ids"] == choice["prompt_token_ids"] and one["sampling_params"]["logit_bias"] == {"28": 2.0}
        assert generate(smol, one)["choices"][0]["token_ids"] == choice["token_ids"]


def test_where_tokens_stand(smol: Live) -> None:
    """Every token's place in the text, also of characters that are cut and of special tokens."""
    tokenizer = smol.engine.tokenizer
    assert tokenizer is not None
    text = "The sea, naïve 東京 🌧 is <|im_end|> deep."
    (one,) = smol.post("/v1/completions/render", {"prompt": text, "return_token_offsets": True}).json()
    places = one["token_offsets"]
    assert len(places) == len(one["token_ids"])
    end = 0
    for token_id, (first, past) in zip(one["token_ids"], places, strict=True):
        said = tokenizer.token_text(token_id)
        assert text[first:past] == said or "\ufffd" in said
        assert end - 1 <= first <= end <= past  # nothing is left out; a character that is cut counts for both
        end = past
    assert end == len(text)
    chat = smol.post("/v1/chat/completions/render", {**CHAT, "return_token_offsets": True}).json()
    assert len(chat["token_offsets"]) == len(chat["token_ids"])
    assert generate(smol, chat)["choices"]
    assert smol.post("/v1/completions/render", {"prompt": text}).json()[0]["token_offsets"] is None
    (ids,) = smol.post("/v1/completions/render", {"prompt": [504, 5061], "return_token_offsets": True}).json()
    assert ids["token_offsets"] is None


def test_defaults_are_filled_in(fake: Live) -> None:
    """The model's generation config says temperature 0.5 and at most 33 tokens."""
    rendered = fake.post("/v1/chat/completions/render", {"messages": CHAT["messages"]}).json()
    assert rendered["sampling_params"]["temperature"] == 0.5 and rendered["sampling_params"]["max_tokens"] == 33
    assert len(fake.engine.front.outputs) == 0
    cut = fake.post("/v1/completions/render", {"prompt": "abcdef", "truncate_prompt_tokens": 2}).json()
    assert len(cut[0]["token_ids"]) == 2 and "truncate_prompt_tokens" not in cut[0]["sampling_params"]


def test_refused_as_the_request_itself(fake: Live) -> None:
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        error = error_of(fake.post(path, {**CHAT, "temperature": -1}))
        assert error["param"] == "temperature"
        error_of(fake.post(path, {**CHAT, "model": "nope"}), 404)
    error_of(fake.post("/v1/completions/render", {"prompt": [99999]}))


# ---- generate -----------------------------------------------------------------------------------------------------


def test_streamed_is_whole(smol: Live) -> None:
    body = {
        "token_ids": [504, 5061, 314],
        "sampling_params": {"max_tokens": 6, "temperature": 0.0, "logprobs": 2, "n": 2},
    }
    whole = generate(smol, body)
    parts = events(smol.post(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}).text)
    assert parts[-1]["usage"] == whole["usage"] and parts[-1]["choices"] == []
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert [i for part in mine for i in part["token_ids"]] == choice["token_ids"] and len(mine) > 1
        logprobs = [entry for part in mine for entry in part["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"] and len(logprobs[0]["top_logprobs"]) == 2
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_what_is_not_said_is_sampling_params_own(fake: Live) -> None:
    found = generate(fake, {"token_ids": [70, 71]})
    assert found["choices"][0]["token_ids"] == [70, 71] * 8  # 16 tokens, not the generation config's 33
    with_prompt = generate(
        fake, {"token_ids": [70, 71, 72], "sampling_params": {"prompt_logprobs": 1, "max_tokens": 1}}
    )
    assert with_prompt["prompt_logprobs"][0] is None and set(with_prompt["prompt_logprobs"][1]) >= {"71"}


def test_text_may_be_switched_off(fake: Live) -> None:
    """Nothing of it is shown here; only stop strings need it."""
    for told in (True, False):
        body = {"token_ids": [70, 71], "sampling_params": {"detokenize": told, "max_tokens": 2, "logprobs": 1}}
        assert generate(fake, body)["choices"][0]["token_ids"] == [70, 71]
    wrong = error_of(fake.post(PATH, {"token_ids": [5], "sampling_params": {"detokenize": False, "stop": ["a"]}}))
    assert "detokenize" in wrong["message"]
    error_of(fake.post(PATH, {"token_ids": [5], "sampling_params": {"detokenize": "maybe"}}))


def test_stop_strings(fake: Live) -> None:
    asked = {"token_ids": [5, 6, 7, 8], "sampling_params": {"stop_token_ids": [7]}}
    choice = generate(fake, asked)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == 7 and choice["token_ids"] == [5, 6, 7]
    ids = [byte + 4 for byte in b"abcd"]
    choice = generate(fake, {"token_ids": ids, "sampling_params": {"stop": ["bc"]}})["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "bc"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"token_ids": [5], "sampling_params": {"colour": 1}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"output_kind": 0}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 512}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"n": 1000}}, "n"),
        ({"token_ids": [5], "sampling_params": {"top_p": "much"}}, "top_p"),
        ({"token_ids": [99999]}, "prompt"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [5], "features": {"a": 1}}, "features"),
        ({"token_ids": [5], "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"token_ids": [5], "colour": 1}, "colour"),
        ({}, "token_ids"),
    ],
)
def test_refusals_name_the_field(fake: Live, body: dict[str, Any], param: str) -> None:
    assert error_of(fake.post(PATH, body))["param"] == param


def test_an_error_in_a_stream(fake: Live) -> None:
    body = {"token_ids": [5, 6, 7], "stream": True, "sampling_params": {"extra_args": {"fail_at": 3}}}
    assert "cannot go on" in events(fake.post(PATH, body).text)[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes(fake: Live, stream: bool) -> None:
    params = {"max_tokens": 40, "extra_args": {"sleep": 0.3}}
    client = send(fake, PATH, {"token_ids": [5, 6], "stream": stream, "sampling_params": params})
    wait_for(lambda: running(fake)[0], 1)
    client.close()
    wait_for(lambda: fake.state.load.count, 0)
    wait_for(lambda: running(fake), (0, 0.0))


def test_the_page(fake: Live) -> None:
    page = httpx.get(f"{fake.url}/openapi.json").json()
    rendered = page["paths"]["/v1/chat/completions/render"]["post"]["responses"]["200"]["content"]
    taken = page["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert taken.endswith("/TokensRequest") and rendered["application/json"]["schema"]["$ref"].endswith("TokensRequest")
