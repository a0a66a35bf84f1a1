"""Embeddings and ranks through the clients that people use: openai, langchain, cohere; and Jina's and Cohere's own
documented bodies, sent by hand."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.bench import serve
from tests.server.live import Live
from tests.server.pooling_servers import TEXTS, embedding_server, ranking_server

QUERY = "what is the cat"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with embedding_server(tmp_path_factory.mktemp("embedder")) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with ranking_server(tmp_path_factory.mktemp("ranker")) as server:
        yield server


def by_hand(server: Live, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors_of(server: Live) -> list[list[float]]:
    return [item["embedding"] for item in by_hand(server, "/v1/embeddings", {"input": TEXTS})["data"]]


def scores_of(server: Live) -> list[float]:
    """Of TEXTS, in their order."""
    data = by_hand(server, "/score", {"text_1": QUERY, "text_2": TEXTS})["data"]
    return [item["score"] for item in data]


def ranks_of(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def near(values: list[list[float]]) -> list[Any]:
    """What one text alone gives may differ in the last bits from what it gives among others."""
    return [pytest.approx(row, abs=1e-5) for row in values]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openai(encoding: Any, embedder: Live) -> None:
    """None: the client asks for base64 and decodes it; where base64 is named it hands the text on."""
    expected = vectors_of(embedder)
    more = {} if encoding is None else {"encoding_format": encoding}

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
            answers = [client.embeddings.create(model="emb", input=text, **more) for text in TEXTS]
            return [answer.data[0].embedding for answer in await asyncio.gather(*answers)]

    def numbers(values: Any) -> list[float]:
        if not isinstance(values, str):
            return list(values)
        data = base64.b64decode(values)
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="emb", input=TEXTS, **more)
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.usage.prompt_tokens > 0
    assert all(isinstance(item.embedding, str) is (encoding == "base64") for item in answer.data)
    assert [numbers(item.embedding) for item in answer.data] == near(expected)
    assert [numbers(one) for one in asyncio.run(ask())] == near(expected)


def test_langchain_embeddings(embedder: Live) -> None:
    langchain = pytest.importorskip("langchain_openai")
    expected = vectors_of(embedder)
    # check_embedding_ctx_length would send ids of OpenAI's own tokenizer
    model = langchain.OpenAIEmbeddings(
        model="emb", base_url=f"{embedder.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert model.embed_documents(TEXTS) == near(expected)
    assert model.embed_query(TEXTS[1]) == pytest.approx(expected[1], abs=1e-5)

    async def ask() -> tuple[list[list[float]], list[float]]:
        return await model.aembed_documents(TEXTS), await model.aembed_query(TEXTS[2])

    many, one = asyncio.run(ask())
    assert many == near(expected) and one == pytest.approx(expected[2], abs=1e-5)


def test_rerank_as_jina_documents_it(ranker: Live) -> None:
    scores = scores_of(ranker)
    body = {"model": "rank", "query": QUERY, "documents": TEXTS, "top_n": 2, "return_documents": True}
    answer = by_hand(ranker, "/v1/rerank", body)
    assert [item["index"] for item in answer["results"]] == ranks_of(scores)[:2]
    for item in answer["results"]:
        assert item["document"] == {"text": TEXTS[item["index"]]}
        assert item["relevance_score"] == pytest.approx(scores[item["index"]], abs=1e-5)
    assert answer["model"] == "rank" and answer["usage"]["total_tokens"] > 0


def test_rerank_as_cohere_documents_it(ranker: Live) -> None:
    scores = scores_of(ranker)
    body = {"model": "rank", "query": QUERY, "documents": TEXTS, "top_n": 3, "max_tokens_per_doc": 4096}
    answer = by_hand(ranker, "/v2/rerank", body)
    assert isinstance(answer["id"], str) and [item["index"] for item in answer["results"]] == ranks_of(scores)
    assert [item["relevance_score"] for item in answer["results"]] == pytest.approx(
        sorted(scores, reverse=True), abs=1e-5
    )


def test_cohere_client(embedder: Live, ranker: Live) -> None:
    cohere = pytest.importorskip("cohere")
    scores, expected = scores_of(ranker), vectors_of(embedder)
    with httpx.Client(timeout=60) as connection:
        client = cohere.ClientV2(api_key="none", base_url=ranker.url, httpx_client=connection)
        ranks = client.rerank(model="rank", query=QUERY, documents=TEXTS, top_n=2).results
        assert [item.index for item in ranks] == ranks_of(scores)[:2]
        assert [item.relevance_score for item in ranks] == pytest.approx(sorted(scores, reverse=True)[:2], abs=1e-5)
        with pytest.raises(cohere.NotFoundError):
            client.rerank(model="nobody", query=QUERY, documents=TEXTS)
        client = cohere.ClientV2(api_key="none", base_url=embedder.url, httpx_client=connection)
        answer = client.embed(model="emb", texts=TEXTS, input_type="search_document", embedding_types=["float"])
        assert answer.embeddings.float_ == near(expected) and answer.texts == TEXTS
        older = cohere.Client(api_key="none", base_url=ranker.url, httpx_client=connection)
        results = older.rerank(model="rank", query=QUERY, documents=[{"text": text} for text in TEXTS]).results
        assert [item.index for item in results] == ranks_of(scores)


@pytest.mark.parametrize("provider", ["jina_ai", "cohere", "hosted_vllm"])
def test_litellm(provider: str, ranker: Live, embedder: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jina's and Cohere's bodies as litellm writes them, and its reading of the answers."""
    monkeypatch.setattr(sys, "path", sys.path[:])  # litellm adds folders when it is imported
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches one
    litellm = pytest.importorskip("litellm")
    scores = scores_of(ranker)
    base = {"jina_ai": "/v1/rerank", "cohere": "/v2/rerank", "hosted_vllm": ""}[provider]
    answer = litellm.rerank(
        model=f"{provider}/rank", query=QUERY, documents=TEXTS, top_n=2, api_base=ranker.url + base, api_key="none"
    )
    assert [item["index"] for item in answer.results] == ranks_of(scores)[:2]
    best = sorted(scores, reverse=True)[:2]
    assert [item["relevance_score"] for item in answer.results] == pytest.approx(best, abs=1e-5)
    if provider == "hosted_vllm":
        found = litellm.embedding(model="hosted_vllm/emb", input=TEXTS, api_base=f"{embedder.url}/v1", api_key="none")
        assert [item["embedding"] for item in found.data] == near(vectors_of(embedder))


def test_bench(embedder: Live, ranker: Live, tmp_path: Path) -> None:
    """`quire bench serve` against real routes: every request is answered, and counted by the server's tokens."""
    path = tmp_path / "result.json"
    always = ["--num-prompts", "3", "--random-input-len", "12", "--random-batch-size", "2", "--disable-tqdm",
              "--save-result", "--result-filename", str(path)]  # fmt: skip
    for server, flags in (
        (embedder, ["--backend", "openai-embeddings", "--endpoint", "/v1/embeddings"]),
        (embedder, ["--backend", "vllm-pooling", "--endpoint", "/pooling", "--extra-body", '{"task": "embed"}']),
        (ranker, ["--backend", "vllm-rerank", "--endpoint", "/v2/rerank", "--dataset-name", "random-rerank"]),
    ):
        model = server.engine.model_config.model
        command = ["--base-url", server.url, "--tokenizer", model, *always, *flags]
        assert serve.main(command, "quire bench serve") == 0
        result = json.loads(path.read_text())
        # of a pair, the tokenizer puts one more special token between the texts
        expected = 3 * 2 * (13 if server is ranker else 12)
        assert (result["completed"], result["failed"], result["total_input_tokens"]) == (3, 0, expected)
