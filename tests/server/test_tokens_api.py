"""/tokenize, /detokenize, /tokenizer_info and /v1/models."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fake_engine import ids_of
from tests.server.live import Live, error_of, live_fake

HI = [{"role": "user", "content": "Hi"}]


def test_there_and_back(fake: Live) -> None:
    found = fake.post("/tokenize", {"model": "fake", "prompt": "Hé"}).json()
    assert found == {"count": 3, "max_model_len": 512, "tokens": ids_of("Hé"), "token_strs": None}
    assert fake.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "Hé"}
    long = "word " * 2000  # goes to another thread
    assert fake.post("/tokenize", {"prompt": long}).json()["count"] == len(long)
    assert fake.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()["token_strs"] == ["a", "b"]
    assert fake.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_a_chat_is_tokenized_as_it_would_be_computed(fake: Live) -> None:
    tokens = fake.post("/tokenize", {"messages": HI}).json()["tokens"]
    asked = {"messages": HI, "max_tokens": 1, "return_token_ids": True}
    assert tokens == fake.post("/v1/chat/completions", asked).json()["prompt_token_ids"] == ids_of("user:Hi;assistant:")
    bare = fake.post("/tokenize", {"messages": HI, "add_generation_prompt": False}).json()["tokens"]
    assert bare == ids_of("user:Hi;")


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": "x"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [260]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**40]}),
        ("/detokenize", {"tokens": "ab"}),
    ],
)
def test_refused(fake: Live, path: str, body: Any) -> None:
    assert error_of(fake.post(path, body))["param"] in ("prompt", "messages", "tokens")


def test_models_are_checked(fake: Live) -> None:
    assert error_of(fake.post("/tokenize", {"model": "nope", "prompt": "a"}), 404)["param"] == "model"
    assert error_of(fake.post("/detokenize", {"model": "nope", "tokens": [5]}), 404)
    cards = httpx.get(fake.url + "/v1/models", timeout=60).json()
    assert [card["id"] for card in cards["data"]] == ["fake", "alias"]
    assert {card["max_model_len"] for card in cards["data"]} == {512}


def test_tokenizer_info_is_asked_for(fake: Live, tmp_path: Any) -> None:
    assert error_of(httpx.get(fake.url + "/tokenizer_info", timeout=60), 404)
    with live_fake(tmp_path / "model", enable_tokenizer_info_endpoint=True) as server:
        found = httpx.get(server.url + "/tokenizer_info", timeout=60).json()
        assert found["vocab_size"] == 260 and "messages" in found["chat_template"]
        assert found["special_tokens"]["eos_token"] == "</s>"
