"""Log probabilities of tokens named by id, from the embedded model."""

from __future__ import annotations

from typing import Any

from tests.server.live import Live, events


def test_log_probabilities_of_named_ids(smol: Live) -> None:
    """Those ids and the token that was chosen, whatever else is asked for; the chosen one also where it was named."""
    tokenizer = smol.engine.tokenizer
    assert tokenizer is not None
    asked: dict[str, Any] = {"prompt": "The sea is", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    chosen = smol.post("/v1/completions", asked).json()["choices"][0]["token_ids"]
    named = [chosen[0], 5, 7]
    texts = [{tokenizer.token_text(i) for i in (token_id, *named)} for token_id in chosen]
    for logprobs in (None, 0, 4):
        body = {**asked, "logprob_token_ids": named, "logprobs": logprobs}
        whole = smol.post("/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"]
        parts = [e["choices"][0] for e in events(smol.post("/v1/completions", {**body, "stream": True}).text)]
        streamed = [top for part in parts if part["logprobs"] for top in part["logprobs"]["top_logprobs"]]
        assert [set(top) for top in whole] == texts == [set(top) for top in streamed]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 2, "temperature": 0,
                            "logprobs": True, "return_token_ids": True}  # fmt: skip
    first = smol.post("/v1/chat/completions", chat).json()["choices"][0]["token_ids"][0]
    for top in (None, 0, 5):
        body = {**chat, "logprob_token_ids": [first, 5], "top_logprobs": top}
        whole = smol.post("/v1/chat/completions", body).json()["choices"][0]
        parts = [e["choices"][0] for e in events(smol.post("/v1/chat/completions", {**body, "stream": True}).text)]
        streamed = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
        for token_id, one, other in zip(whole["token_ids"], whole["logprobs"]["content"], streamed, strict=True):
            want = {tokenizer.token_text(i) for i in (token_id, first, 5)}
            assert {entry["token"] for entry in one["top_logprobs"]} == want
            assert {entry["token"] for entry in other["top_logprobs"]} == want
