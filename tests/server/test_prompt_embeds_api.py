"""prompt_embeds of /v1/completions on a live server: answers, their order, and refusals in the API's own form."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import pytest
import torch

from tests.server.live import Live, live
from tests.tiny_models import make_tiny

WIDTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("llama")
    make_tiny("LlamaForCausalLM", made)
    return str(made)


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Live]:
    options = {"dtype": "float32", "max_model_len": 128, "enable_prompt_embeds": True}
    with live(folder, engine=options) as running:
        yield running


def saved(value: object) -> str:
    stream = io.BytesIO()
    torch.save(value, stream)
    return base64.b64encode(stream.getvalue()).decode()


def complete(server: Live, **body: object) -> dict:
    answer = server.post("/v1/completions", {"max_tokens": 8, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embeddings_of_a_text_are_the_text(server: Live, folder: str) -> None:
    """The embedding table's own rows, in place of the tokens they belong to."""
    from transformers import AutoModelForCausalLM

    ids = [5, 17, 200, 33, 90, 91]
    with torch.no_grad():
        rows = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings()(torch.tensor(ids))
    expected = complete(server, prompt=ids)["choices"][0]["text"]
    both = complete(server, prompt_embeds=[saved(rows), saved(rows[None].bfloat16().float())], prompt=[7, 8, 9])
    assert both["choices"][0]["text"] == expected and len(both["choices"]) == 3
    assert both["choices"][2]["text"] == complete(server, prompt=[7, 8, 9])["choices"][0]["text"], "embeddings first"
    assert both["usage"]["prompt_tokens"] == 15
    streamed = server.post(
        "/v1/completions", {"prompt_embeds": saved(rows), "max_tokens": 8, "temperature": 0, "stream": True}
    )
    assert streamed.status_code == 200 and "data: [DONE]" in streamed.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt_embeds": "@@@"}, "not base64"),
        ({"prompt_embeds": saved({"a": torch.zeros(3)})}, "no dense tensor needs"),
        ({"prompt_embeds": saved(torch.zeros(3, WIDTH + 1))}, "expected one vector"),
        ({"prompt_embeds": saved(torch.zeros(3, WIDTH, dtype=torch.int64))}, "float32, float16 or bfloat16"),
        ({"prompt_embeds": saved(torch.zeros(500, WIDTH))}, "prompt_embeds"),
        ({"prompt_embeds": saved(torch.zeros(0, WIDTH))}, "expected one vector"),
        ({"prompt_embeds": saved(torch.tensor(1.0))}, "expected one vector"),
        ({"prompt_embeds": saved(torch.full((3, WIDTH), torch.nan))}, "finite numbers"),
        ({"prompt_embeds": saved(torch.full((3, WIDTH), -torch.inf, dtype=torch.bfloat16))}, "finite numbers"),
        ({"prompt_embeds": [saved(torch.zeros(3, WIDTH)), saved(torch.full((3, WIDTH), torch.nan))]}, "finite numbers"),
        ({"prompt_embeds": saved(torch.eye(WIDTH).to_sparse())}, "not a tensor"),
        ({"prompt_embeds": saved(torch.quantize_per_tensor(torch.zeros(3, WIDTH), 0.1, 0, torch.qint8))}, "QInt8"),
        ({"prompt_embeds": saved(torch.nested.nested_tensor([torch.zeros(3, WIDTH)] * 2))}, "LongStorage"),
        ({"prompt_embeds": saved(torch.empty((1 << 40, WIDTH), device="meta"))}, "not a tensor"),
        ({"prompt_embeds": saved(torch.zeros(3, WIDTH)), "echo": True}, "echo"),
        ({"prompt_embeds": saved(torch.zeros(3, WIDTH)), "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": []}, "Either prompt or prompt_embeds"),
    ],
)
def test_wrong_embeddings_are_a_400(server: Live, body: dict, message: str) -> None:
    answer = server.post("/v1/completions", {"max_tokens": 4, **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert complete(server, prompt=[7, 8, 9])["choices"], "the server goes on"


def test_not_enabled(folder: str) -> None:
    with live(folder, engine={"dtype": "float32", "max_model_len": 64}) as server:
        answer = server.post("/v1/completions", {"prompt_embeds": saved(torch.zeros(3, WIDTH))})
        assert answer.status_code == 400 and "enable_prompt_embeds=True" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "prompt_embeds"
