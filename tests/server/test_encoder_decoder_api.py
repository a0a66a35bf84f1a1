"""An encoder-decoder that reads text over HTTP: a prompt is its encoder's, with that one's limits."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.seq2seq_models import make_model
from tests.server.live import Live, error_of, live

POSITIONS, LENGTH = 128, 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("bart")
    make_model("BartForConditionalGeneration", folder)
    with live(str(folder), engine={"dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4}) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_ids_may_be_as_many_as_the_encoder_reads(server: Live, path: str) -> None:
    """However few the decoder may write."""

    def ask(count: int) -> httpx.Response:
        if path == "/v1/completions":
            return server.post(path, {"prompt": [5] * count, "max_tokens": 3, "ignore_eos": True})
        return server.post(path, {"token_ids": [5] * count, "sampling_params": {"max_tokens": 3, "ignore_eos": True}})

    answer = ask(POSITIONS)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    refused = ask(POSITIONS + 1)
    assert refused.status_code == 400 and "129 tokens; this model's encoder reads 128" in error_of(refused)["message"]


def test_what_ids_alone_cannot_say_is_not_rendered(server: Live) -> None:
    """They would be taken for the encoder's."""
    refused = server.post("/v1/completions/render", {"prompt": "hello"})
    assert refused.status_code == 400 and "encoder-decoder" in error_of(refused)["message"]
