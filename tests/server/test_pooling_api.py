"""Pooling over HTTP: embeddings in every encoding, classes, scores, ranks, by clients and by hand, and refusals."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.schema.step import Pooled
from quire.server.app import build_app
from quire.server.missing import GENERATING
from quire.server.openai.batch import BatchRunner
from quire.server.pooling import encoding, routes, running
from quire.server.pooling.encoding import raw_bytes
from quire.server.pooling.protocol import EncodingFields
from quire.server.pooling.routes import PATHS
from quire.text import template_child
from tests.pooling_models import VOCAB, make_pooling
from tests.server.live import Live, error_of, live, live_fake
from tests.server.pooling_servers import TEXTS, embedding_server, ranking_server


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("embedder")
    make_pooling("BertModel", folder)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about["chat_template"] = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    with embedding_server(folder, max_prompts_per_request=8) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with ranking_server(tmp_path_factory.mktemp("ranker")) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("classifier")
    make_pooling("Qwen2ForSequenceClassification", folder, id2label={0: "bad", 1: "good", 2: "odd"},
                 label2id={"bad": 0, "good": 1, "odd": 2})  # fmt: skip
    with live(str(folder), engine={"dtype": "float32", "served_model_name": "cls"}) as server:
        yield server


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Small limits, inputs in parts, and keys that only some routes ask for."""
    folder = tmp_path_factory.mktemp("tight")
    make_pooling("Qwen3Model", folder)
    engine = {"dtype": "float32", "pooler_config": {"enable_chunked_processing": True}}
    options = {"max_fan_out_bytes": 4096, "max_sequences_per_request": 3, "api_key": ["alice", "bob"],
               "api_key_scope": "v1"}  # fmt: skip
    with live(str(folder), engine=engine, **options) as server:
        yield server


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """ColBERT, of 8 numbers a token."""
    folder = tmp_path_factory.mktemp("late")
    make_pooling("BertModel", folder)
    weights = {f"bert.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(1)
    save_file({**weights, "linear.weight": torch.randn(8, 32)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"], "dim": 8}))
    with live(str(folder), engine={"dtype": "float32"}, max_fan_out_bytes=4096) as server:
        yield server


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A ranker whose requests may bring a template."""
    folder = tmp_path_factory.mktemp("trusting")
    make_pooling("BertForSequenceClassification", folder, num_labels=1)
    options = {"trust_request_chat_template": True, "max_fan_out_bytes": 4096}
    with live(str(folder), engine={"dtype": "float32"}, **options) as server:
        yield server


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def embeddings(server: Live, body: dict[str, Any]) -> list[Any]:
    return [item["embedding"] for item in ok(server.post("/v1/embeddings", body))["data"]]


def test_forms_of_input(embedder: Live) -> None:
    """Texts, token ids and a conversation come to the same vectors where they are the same tokens."""
    answer = ok(embedder.post("/v1/embeddings", {"model": "emb", "input": TEXTS}))
    assert answer["object"] == "list" and answer["model"] == "emb" and answer["id"].startswith("embd-")
    assert [item["index"] for item in answer["data"]] == [0, 1, 2] and answer["data"][0]["object"] == "embedding"
    ids = [ok(embedder.post("/tokenize", {"prompt": text}))["tokens"] for text in TEXTS]
    count = sum(map(len, ids))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count
    vectors = [item["embedding"] for item in answer["data"]]
    assert torch.tensor(vectors).norm(dim=-1).sub(1).abs().max() < 1e-5
    by_ids = embeddings(embedder, {"input": ids})
    assert torch.tensor(by_ids).sub(torch.tensor(vectors)).abs().max() < 1e-6
    assert torch.tensor(embeddings(embedder, {"input": ids[0]})[0]).sub(torch.tensor(vectors[0])).abs().max() < 1e-6
    chat = {"messages": [{"role": "user", "content": TEXTS[0]}], "add_special_tokens": True}
    assert torch.tensor(embeddings(embedder, chat)[0]).sub(torch.tensor(vectors[0])).abs().max() < 1e-6
    plain = embeddings(embedder, {"messages": chat["messages"]})[0]
    assert torch.tensor(plain).sub(torch.tensor(vectors[0])).abs().max() > 1e-3  # without [CLS] and [SEP]


def test_encodings_are_the_same_numbers(embedder: Live) -> None:
    """To the bit, in base64 and as bytes; other dtypes are roundings of them."""
    body = {"input": TEXTS}
    vectors = embeddings(embedder, body)
    packed = [struct.pack(f"<{len(one)}f", *one) for one in vectors]
    coded = embeddings(embedder, {**body, "encoding_format": "base64"})
    assert [base64.b64decode(one) for one in coded] == packed
    raw = embedder.post("/v1/embeddings", {**body, "encoding_format": "bytes"})
    about = json.loads(raw.headers["metadata"])
    assert raw.content == b"".join(packed) and raw.headers["content-type"] == "application/octet-stream"
    assert [raw.content[item["start"] : item["end"]] for item in about["data"]] == packed
    assert about["usage"]["prompt_tokens"] > 0 and about["data"][0]["shape"] == [32]
    bare = embedder.post("/v1/embeddings", {**body, "encoding_format": "bytes_only", "endianness": "big"})
    assert "metadata" not in bare.headers
    assert bare.content == b"".join(struct.pack(f">{len(one)}f", *one) for one in vectors)
    for dtype, kind in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        raw = embedder.post("/v1/embeddings", {**body, "encoding_format": "bytes_only", "embed_dtype": dtype})
        rounded = torch.frombuffer(bytearray(raw.content), dtype=kind)
        assert torch.equal(rounded, torch.tensor(vectors).flatten().to(kind))


def test_rounding_to_bfloat16_takes_ties_to_even() -> None:
    pooled = Pooled((2,), "float32", struct.pack("<2I", 0x3F808000, 0x3F818000))
    fields = EncodingFields(encoding_format="bytes", embed_dtype="bfloat16")
    assert raw_bytes(pooled, fields) == struct.pack("<2H", 0x3F80, 0x3F82)


def test_openai_client(embedder: Live) -> None:
    """It asks for base64 by itself, and turns it back."""
    expected = embeddings(embedder, {"input": TEXTS})
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="emb", input=TEXTS)
        short = client.embeddings.create(model="emb", input=TEXTS[0], dimensions=8, encoding_format="float")
    assert [item.embedding for item in answer.data] == expected
    cut = torch.nn.functional.normalize(torch.tensor(expected[0][:8]), dim=-1)
    assert torch.tensor(short.data[0].embedding).sub(cut).abs().max() < 1e-6

    async def ask() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.embeddings.create(model="emb", input=text) for text in TEXTS))
        return [answer.data[0].embedding for answer in answers]

    alone = torch.tensor(asyncio.run(ask()))
    assert alone.sub(torch.tensor(expected)).abs().max() < 1e-5


def test_truncation(embedder: Live) -> None:
    long = list(range(20, 20 + 80))
    told = error_of(embedder.post("/v1/embeddings", {"input": long}))
    assert "80 tokens" in told["message"] and "64 (max_model_len)" in told["message"]
    usage = ok(embedder.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}))["usage"]
    assert usage["prompt_tokens"] == 64
    one, other = (
        embeddings(embedder, {"input": long, "truncate_prompt_tokens": 5, "truncation_side": side})[0]
        for side in ("left", "right")
    )
    assert one == pytest.approx(embeddings(embedder, {"input": long[-5:]})[0], abs=1e-6)
    assert other == pytest.approx(embeddings(embedder, {"input": long[:5]})[0], abs=1e-6)


def test_pooling_route(embedder: Live) -> None:
    tokens = ok(embedder.post("/pooling", {"input": TEXTS[0], "task": "token_embed"}))
    assert tokens["id"].startswith("pool-") and tokens["data"][0]["object"] == "pooling"
    rows = torch.tensor(tokens["data"][0]["data"])
    assert rows.shape == (tokens["usage"]["prompt_tokens"], 32)
    first = ok(embedder.post("/pooling", {"input": TEXTS[0], "task": "embed"}))["data"][0]["data"]
    assert torch.tensor(first).sub(rows[0]).abs().max() < 1e-6  # of [CLS]
    raw = ok(embedder.post("/pooling", {"input": TEXTS[0], "task": "embed", "use_activation": False}))["data"][0][
        "data"
    ]
    assert abs(torch.tensor(raw).norm() - 1) > 1e-3


def test_cohere_form(embedder: Live) -> None:
    expected = embeddings(embedder, {"input": TEXTS})
    body = {"model": "emb", "texts": TEXTS, "input_type": "search_query", "embedding_types": ["float", "base64"]}
    answer = ok(embedder.post("/v2/embed", body))
    assert answer["embeddings"]["float"] == expected and answer["texts"] == TEXTS
    assert base64.b64decode(answer["embeddings"]["base64"][0]) == struct.pack("<32f", *expected[0])
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    assert error_of(embedder.post("/v2/embed", {**body, "embedding_types": ["ubinary"]}))["param"] == "embedding_types"


def test_classes(classifier: Live) -> None:
    answer = ok(classifier.post("/classify", {"model": "cls", "input": TEXTS}))
    assert answer["id"].startswith("classify-") and len(answer["data"]) == 3
    for item in answer["data"]:
        assert item["num_classes"] == 3 and sum(item["probs"]) == pytest.approx(1, abs=1e-5)
        assert item["label"] == ["bad", "good", "odd"][max(range(3), key=item["probs"].__getitem__)]
    raw = ok(classifier.post("/classify", {"input": TEXTS[0], "use_activation": False}))["data"][0]["probs"]
    assert torch.tensor(raw).softmax(-1).tolist() == pytest.approx(answer["data"][0]["probs"], abs=1e-5)
    assert "num_labels=1" in error_of(classifier.post("/score", {"text_1": "a", "text_2": "b"}))["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(path: str, ranker: Live, embedder: Live) -> None:
    for server in (ranker, embedder):
        answer = ok(server.post(path, {"text_1": TEXTS[0], "text_2": TEXTS[1:]}))
        assert answer["id"].startswith("score-") and [item["object"] for item in answer["data"]] == ["score"] * 2
        each = ok(server.post(path, {"text_1": [TEXTS[0]] * 2, "text_2": TEXTS[1:]}))
        one = ok(server.post(path, {"queries": TEXTS[0], "documents": TEXTS[2]}))
        assert [item["score"] for item in each["data"]] == [item["score"] for item in answer["data"]]
        assert one["data"][0]["score"] == pytest.approx(answer["data"][1]["score"], abs=1e-5)
        assert answer["data"][0]["score"] != pytest.approx(answer["data"][1]["score"], abs=1e-4)
    vectors = torch.tensor(embeddings(embedder, {"input": TEXTS}))
    assert answer["data"][0]["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks(path: str, ranker: Live) -> None:
    body = {"model": "rank", "query": "what is the cat", "documents": [*TEXTS, {"text": "a log"}]}
    answer = ok(ranker.post(path, body))
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == sorted(scores, reverse=True) and {item["index"] for item in answer["results"]} == {0, 1, 2, 3}
    pairs = ok(ranker.post("/score", {"text_1": body["query"], "text_2": [*TEXTS, "a log"]}))["data"]
    for item in answer["results"]:
        assert item["document"]["text"] == [*TEXTS, "a log"][item["index"]]
        assert item["relevance_score"] == pytest.approx(pairs[item["index"]]["score"], abs=1e-6)
    best = ok(ranker.post(path, {**body, "top_n": 2, "return_documents": False}))["results"]
    assert [item["index"] for item in best] == [item["index"] for item in answer["results"][:2]]
    assert "document" not in best[0] and answer["usage"]["prompt_tokens"] > 0


def test_bad_input(embedder: Live, ranker: Live) -> None:
    for server, path, body, words in (
        (embedder, "/v1/embeddings", {}, "input or messages"),
        (embedder, "/v1/embeddings", {"input": []}, "input is empty"),
        (embedder, "/v1/embeddings", {"input": [""] * 9}, "the limit is 8 (--max-prompts-per-request)"),
        (embedder, "/v1/embeddings", {"input": [[]]}, "cannot be empty"),
        (embedder, "/v1/embeddings", {"input": [VOCAB]}, f"vocabulary size is {VOCAB}"),
        (embedder, "/v1/embeddings", {"input": [-1]}, "out of vocabulary"),
        (embedder, "/v1/embeddings", {"input": 7}, "input"),
        (embedder, "/v1/embeddings", {"input": "cat", "encoding_format": "hex"}, "encoding_format"),
        (embedder, "/v1/embeddings", {"input": "cat", "dimensions": 33}, "from 1 to 32"),
        (embedder, "/v1/embeddings", {"input": "cat", "dimensions": -1}, "dimensions"),
        (embedder, "/v1/embeddings", {"input": "cat", "truncate_prompt_tokens": 65}, "max_model_len (64)"),
        (embedder, "/v1/embeddings", {"input": "cat", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (embedder, "/pooling", {"input": "cat", "task": "fly"}, "task 'fly'"),
        (embedder, "/classify", {"input": "cat"}, "it can embed, token_embed"),
        (ranker, "/v1/embeddings", {"input": "cat"}, "it can classify, token_classify"),
        (ranker, "/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 texts and text_2 3"),
        (ranker, "/score", {"text_1": [], "text_2": "a"}, "text_1"),
        (ranker, "/score", {"text_1": "a"}, "text_2"),
        (ranker, "/rerank", {"query": "a", "documents": []}, "documents"),
        (ranker, "/rerank", {"query": "a", "documents": [{"image": 1}]}, "documents"),
        (ranker, "/rerank", {"query": "a", "documents": ["b"], "chat_template": "{{ 1 }}"}, "trust-request"),
    ):
        told = error_of(server.post(path, body))
        assert words in told["message"], (path, body, told)
    assert error_of(embedder.post("/v1/embeddings", {"model": "nope", "input": "cat"}), 404)["param"] == "model"
    assert len(embeddings(embedder, {"input": "cat"})) == 1  # it goes on


def test_the_other_runner_is_named(embedder: Live, tmp_path: Path) -> None:
    """What generates is refused by a pooling model, and the reverse, whatever the body."""
    for path in GENERATING:
        answer = embedder.post(path, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "runner=pooling" in message and "cannot generate" in message, path
    bodies: dict[str, Any] = {"/v2/embed": {"texts": ["a"]}}
    with live_fake(tmp_path) as server:
        for path in PATHS:
            body = {"input": "a"}
            if "score" in path:
                body = {"text_1": "a", "text_2": "b"}
            elif "rerank" in path:
                body = {"query": "a", "documents": ["b"]}
            told = error_of(server.post(path, bodies.get(path, body)))
            assert "runner=generate" in told["message"], path


def test_batch_files(embedder: Live, ranker: Live) -> None:
    """The same routes, line by line."""
    asked = [
        ("a", "/v1/embeddings", {"input": TEXTS[0]}), ("b", "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}),
        ("c", "/rerank", {"query": TEXTS[0], "documents": TEXTS}), ("d", "/v1/completions", {"prompt": "a"}),
        ("e", "/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}),
        ("f", "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS}),
        ("g", "/v2/rerank", {"query": TEXTS[0], "documents": TEXTS}),
    ]  # fmt: skip
    lines = [json.dumps({"custom_id": i, "method": "POST", "url": url, "body": body}) for i, url, body in asked]
    for server in (embedder, ranker):
        target = io.BytesIO()
        runner = BatchRunner(build_app(server.state), window=2, longest_line=1 << 20)
        running = runner.run(io.BytesIO("\n".join(lines).encode()), target)
        asyncio.run_coroutine_threadsafe(running, server.loop).result(60)
        answers = [json.loads(line) for line in target.getvalue().splitlines()]
        statuses = [answer["response"]["status_code"] for answer in answers]
        assert statuses == [200 if server is embedder else 400, 200, 200, 400, 200, 200, 200]
        assert "runner=pooling" in answers[3]["error"]["message"]
        score = ok(server.post("/score", asked[1][2]))["data"][0]["score"]
        for number in (1, 4):
            assert answers[number]["response"]["body"]["data"][0]["score"] == pytest.approx(score, abs=1e-6)
        ranks = [[item["index"] for item in answers[number]["response"]["body"]["results"]] for number in (2, 5, 6)]
        assert ranks[0] == ranks[1] == ranks[2] and sorted(ranks[0]) == [0, 1, 2]


def test_pages_list_the_routes(embedder: Live) -> None:
    page = ok(httpx.get(embedder.url + "/openapi.json", timeout=60))
    assert set(PATHS) <= set(page["paths"]) and "/v1/chat/completions" not in page["paths"]


# ---- limits ---------------------------------------------------------------------------------------------------------

ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}


def test_columns_that_are_not_there(classifier: Live, embedder: Live) -> None:
    """A column that the classifier does not have is refused, and the engine goes on."""
    body = {"input": TEXTS[0], "use_activation": False}
    for columns, words in (
        ([5], "holds 5; this model's columns are 0 to 2"), ([3], "0 to 2"), ([-1], "holds -1"), ([], "empty"),
        ([1, 1], "twice"), ([0] * 1025, "1025 entries; the limit is 1024"), ([1 << 70], "0 to 2"),
    ):  # fmt: skip
        told = error_of(classifier.post("/pooling", {**body, "returned_token_ids": columns}))
        assert words in told["message"] and told["param"] == "returned_token_ids", told
    told = error_of(classifier.post("/pooling", {**body, "step_tag_id": VOCAB}))
    assert told["param"] == "step_tag_id" and str(VOCAB - 1) in told["message"]
    told = error_of(embedder.post("/pooling", {"input": "cat", "returned_token_ids": [0]}))
    assert "the task is embed" in told["message"]
    for task in ("classify", "token_classify"):
        whole = torch.tensor(ok(classifier.post("/pooling", {**body, "task": task}))["data"][0]["data"])
        some = ok(classifier.post("/pooling", {**body, "task": task, "returned_token_ids": [2, 0]}))["data"][0]["data"]
        assert torch.tensor(some).sub(whole[..., [2, 0]]).abs().max() < 1e-6


def test_results_larger_than_the_limit(tight: Live) -> None:
    ids = list(range(20, 60))
    told = error_of(tight.post("/pooling", {"input": ids, "task": "token_embed"}, headers=ALICE))
    assert "5120 bytes" in told["message"] and "4096 (--max-fan-out-bytes)" in told["message"]
    assert len(ok(tight.post("/pooling", {"input": ids[:32], "task": "token_embed"}, headers=ALICE))["data"]) == 1
    told = error_of(tight.post("/v1/embeddings", {"input": [[20]] * 33}, headers=ALICE))
    assert "4224 bytes" in told["message"] and told["param"] == "input"
    assert len(ok(tight.post("/v1/embeddings", {"input": [[20]] * 32}, headers=ALICE))["data"]) == 32


def test_parameters_times_inputs(tight: Live) -> None:
    body = {"input": [[20], [21]], "cache_salt": "s" * 2500}
    told = error_of(tight.post("/v1/embeddings", body, headers=ALICE))
    assert told["param"] == "cache_salt" and "4096 (--max-fan-out-bytes)" in told["message"]
    ok(tight.post("/v1/embeddings", {**body, "input": [20]}, headers=ALICE))


def test_pairs_larger_than_the_limit(trusting: Live) -> None:
    """One query stands in every pair."""
    body = {"query": "cat " * 15, "documents": ["a"] * 70}
    told = error_of(trusting.post("/rerank", body))
    assert f"70 pairs is {70 * 61} bytes" in told["message"] and "4096 (--max-fan-out-bytes)" in told["message"]
    told = error_of(trusting.post("/rerank", {"query": "c" * 400, "documents": ["a"]}))
    assert "64 (max_model_len)" in told["message"]


def test_parts_of_an_input_are_counted(tight: Live) -> None:
    told = error_of(tight.post("/v1/embeddings", {"input": [20] * 200}, headers=ALICE))
    assert "4 parts" in told["message"] and "3 (--max-sequences-per-request)" in told["message"]
    ok(tight.post("/v1/embeddings", {"input": [20] * 190}, headers=ALICE))
    told = error_of(tight.post("/v1/embeddings", {"input": [[20] * 190, [20]]}, headers=ALICE))
    assert "4 parts" in told["message"]


def test_tokens_of_late_interaction(late: Live) -> None:
    """Every token of one text times every token of the other."""
    told = error_of(late.post("/score", {"text_1": "cat " * 20, "text_2": "dog " * 50}))
    assert f"{4 * 22 * 52} bytes" in told["message"] and told["param"] == "text_2"
    query, document = "the cat is", "a dog . the mat"
    rows = [torch.tensor(ok(late.post("/pooling", {"input": text}))["data"][0]["data"]) for text in (query, document)]
    score = ok(late.post("/score", {"text_1": query, "text_2": document}))["data"][0]["score"]
    assert score == pytest.approx((rows[0] @ rows[1].T).max(1).values.sum().item(), abs=1e-5)


def test_routes_outside_v1_ask_for_the_key(tight: Live) -> None:
    """--api-key-scope v1: all that run the model."""
    for path in PATHS:
        assert tight.post(path, {}).status_code == 401, path
    assert httpx.get(tight.url + "/health", timeout=60).status_code == 200
    assert httpx.get(tight.url + "/version", timeout=60).status_code == 200


def opened(server: Live, patch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that reach the engine from now on."""
    seen: list[Any] = []
    real = server.engine.open

    def spy(requests: Any, **more: Any) -> Any:
        seen.extend(one.requests[0] for one in requests)
        return real(requests, **more)

    patch.setattr(server.engine, "open", spy)
    return seen


def test_what_inputs_share_is_one_object(tight: Live, classifier: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is sent once, for whole inputs and for parts; and who sent it is known."""
    seen = opened(tight, monkeypatch)
    ok(tight.post("/v1/embeddings", {"input": [[20], [21], [22]]}, headers=ALICE))
    ok(tight.post("/v1/embeddings", {"input": [20] * 150}, headers=BOB))
    assert (
        len(seen) == 6 and len({id(one.params) for one in seen[:3]}) == len({id(one.params) for one in seen[3:]}) == 1
    )
    tenants = [one.tenant for one in seen]
    assert len(set(tenants[:3])) == len(set(tenants[3:])) == 1 and tenants[0] != tenants[3]
    seen = opened(classifier, monkeypatch)
    ok(classifier.post("/pooling", {"input": TEXTS, "returned_token_ids": [0, 2]}))
    assert len(seen) == 3 and len({id(one.params) for one in seen}) == 1


def test_an_aborted_request(embedder: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    real = embedder.engine.open

    def open_and_abort(requests: Any, **more: Any) -> Any:
        flow = real(requests, **more)
        embedder.engine._streams.abort([one.request_id for one in requests])
        return flow

    monkeypatch.setattr(embedder.engine, "open", open_and_abort)
    told = error_of(embedder.post("/v1/embeddings", {"input": TEXTS}), 500)
    assert "aborted" in told["message"]
    monkeypatch.undo()
    assert len(embeddings(embedder, {"input": TEXTS})) == 3


def test_work_on_results_is_done_apart(
    embedder: Live, late: Live, tight: Live, classifier: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores, classes, bytes, numbers and the joining of parts: not on the event loop, where there is much of it."""
    threads: dict[str, str] = {}

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread().name
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)

    for module, name in ((routes, "cosine"), (routes, "max_sim"), (routes, "_label"), (encoding, "raw_bytes"),
                         (encoding, "json_numbers"), (running, "join_parts")):  # fmt: skip
        watch(module, name)
    monkeypatch.setattr(running, "_SMALL", 1)
    ok(embedder.post("/score", {"text_1": "cat", "text_2": "dog"}))
    ok(late.post("/score", {"text_1": "cat", "text_2": "dog"}))
    ok(classifier.post("/classify", {"input": TEXTS}))
    assert embedder.post("/v1/embeddings", {"input": "cat", "encoding_format": "bytes"}).status_code == 200
    ok(embedder.post("/v1/embeddings", {"input": "cat"}))
    ok(tight.post("/v1/embeddings", {"input": [20] * 150}, headers=ALICE))
    assert len(threads) == 6 and all("lane" in thread for thread in threads.values()), threads


def test_templates_of_requests_for_pairs(trusting: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template is text, never a file of the server's, and a child process renders it for all pairs."""
    template = "{{ messages[1].content }} {{ messages[0].content }}"
    file = tmp_path / "template"
    file.write_text(template)
    body = {"query": "cat", "documents": TEXTS, "chat_template": template}
    told = error_of(trusting.post("/rerank", {**body, "chat_template": str(file)}))
    assert "no braces" in told["message"]
    runs = []
    real = template_child.subprocess.run

    def run(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(template_child.subprocess, "run", run)
    scores = {item["index"]: item["relevance_score"] for item in ok(trusting.post("/rerank", body))["results"]}
    assert len(runs) == 1
    whole = ok(trusting.post("/classify", {"input": [f"{text} cat" for text in TEXTS]}))["data"]
    assert [scores[index] for index in range(3)] == pytest.approx([item["probs"][0] for item in whole], abs=1e-5)
    told = error_of(trusting.post("/rerank", {**body, "chat_template": "{{ raise_exception('not this') }}"}))
    assert "not this" in told["message"]
