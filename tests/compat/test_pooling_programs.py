"""Documented programs with pooling models and with adapters, written against vLLM's interface, run through compat/."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.compat.test_programs import Warm, quoted
from tests.engine.lora_answers import log_probabilities
from tests.engine.test_quantized_formats import FORMS
from tests.pooling_models import make_pooling
from tests.quantized import write
from tests.server.live import live
from tests.server.pooling_servers import embedding_server, ranking_server
from tests.tiny_adapters import merge, write_adapter
from tests.warm_python import WarmPython

METHODS = {"bitsandbytes": "bnb-nf4", "awq": "awq", "gptq": "gptq-4-sym"}
TEXTS = ["the cat is a cat", "the dog is a river", "no boat"]  # of the programs


@pytest.fixture
def warm(warm_python: WarmPython) -> Warm:
    return Warm(warm_python, "openai")


def near(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=1e-4)


def regret(judge: Any, prompt: list[int], ids: list[int]) -> float:
    """By how many nats tokens are less likely than the likeliest, on average."""
    scores = log_probabilities(judge, prompt + ids)[len(prompt) - 1 : -1]
    return float((scores.amax(-1) - scores[range(len(ids)), ids]).mean())


def test_lora_with_quantization_inference(warm: Warm, tmp_path: Path) -> None:
    """Three engines in one process, each let go before the next. Kernels of coded weights round their inputs, so that
    tokens need not be those of merged weights; but they are far nearer to those than to the other model's."""
    models = {name: write(tmp_path / name, "LlamaForCausalLM", FORMS[form][0]) for name, form in METHODS.items()}
    adapter = write_adapter(models["awq"], tmp_path / "adapter", rank=8, strength=0.1)
    given = [f"{name}={tmp_path / name}" for name in METHODS]
    printed = warm.run("lora_with_quantization_inference", str(tmp_path / "adapter"), *given)
    assert quoted(printed, "Freed") == [True] * 3
    found = {(name, number): (lora, prompt, ids) for name, number, lora, prompt, ids in quoted(printed, "Finished")}
    assert len(found) == 9
    for name, model in models.items():
        merged = merge(model, adapter)
        answers = []
        for number, lora in enumerate((None, "lora-test-1", "lora-test-2")):
            used, prompt, ids = found[name, str(number)]
            assert used == lora and len(ids) == 8
            own, other = (merged, model) if lora else (model, merged)
            assert regret(own, prompt, ids) < 0.2 and regret(own, prompt, ids) < regret(other, prompt, ids) / 4
            answers.append(tuple(ids))
        assert len(set(answers)) == 2


def hidden(model: Any, folder: Path, text: str) -> torch.Tensor:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    with torch.no_grad():
        found = model(torch.tensor([ids]))
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state)[0]


def test_classes_of_tokens(warm: Warm, tmp_path: Path) -> None:
    labels = {0: "O", 1: "ANIMAL", 2: "PLACE"}
    model = make_pooling(
        "BertForTokenClassification", tmp_path, id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    printed = warm.run("token_pooling", "token_classify", str(tmp_path))
    expected = [[labels[int(row.argmax())] for row in hidden(model, tmp_path, text)] for text in TEXTS]
    assert quoted(printed, "Labels") == expected and len({label for row in expected for label in row}) > 1


def test_vectors_of_tokens(warm: Warm, tmp_path: Path) -> None:
    model = make_pooling("ModernBertModel", tmp_path)
    printed = warm.run("token_pooling", "token_embed", str(tmp_path))
    states = [torch.nn.functional.normalize(hidden(model, tmp_path, text), dim=-1) for text in TEXTS]
    for found, wanted in zip(quoted(printed, "Vectors"), states, strict=True):
        near(found, wanted)
    near(quoted(printed, "Score"), torch.stack([states[0][0] @ other[0] for other in states[1:]]))  # cosines of [CLS]


def test_rewards(warm: Warm, tmp_path: Path) -> None:
    """A model with a value for each token."""
    model = make_pooling("Qwen2ForTokenClassification", tmp_path, num_labels=1)
    printed = warm.run("token_pooling", "reward", str(tmp_path))
    for text, found in zip(TEXTS, quoted(printed, "Reward"), strict=True):
        near(found, hidden(model, tmp_path, text).sigmoid())


def test_embedding_clients(warm: Warm, tmp_path: Path) -> None:
    """The same numbers by openai's client, in base64 of both byte orders, and as bytes."""
    model = make_pooling("BertModel", tmp_path)
    with embedding_server(tmp_path) as server:
        printed = warm.run("pooling_clients", "embed", server.url)
    vectors = quoted(printed, "Embedding")
    for text, vector in zip(TEXTS, vectors, strict=True):
        near(vector, torch.nn.functional.normalize(hidden(model, tmp_path, text)[0], dim=-1))
    assert quoted(printed, "Base64") == vectors * 2 and quoted(printed, "Bytes") == vectors
    assert quoted(printed, "Tokens") == [len(hidden(model, tmp_path, text)) for text in TEXTS]


def test_classification_client(warm: Warm, tmp_path: Path) -> None:
    names = {0: "bad", 1: "good", 2: "odd"}
    model = make_pooling(
        "BertForSequenceClassification", tmp_path, id2label=names, label2id={v: k for k, v in names.items()}
    )
    with live(str(tmp_path), engine={"dtype": "float32"}) as server:
        printed = warm.run("pooling_clients", "classify", server.url)
    for text, (label, probs) in zip(TEXTS, quoted(printed, "Class"), strict=True):
        wanted = hidden(model, tmp_path, text).softmax(-1)
        near(probs, wanted)
        assert label == names[int(wanted.argmax())]


def test_ranking_clients(warm: Warm, tmp_path: Path) -> None:
    with ranking_server(tmp_path) as server:
        printed = warm.run("pooling_clients", "rank", server.url)
    one, several, pairs = quoted(printed, "Scores")
    assert (len(one), len(several), len(pairs)) == (1, 2, 2) and several[0] == pytest.approx(one[0], abs=1e-5)
    expected = sorted(enumerate(several), key=lambda item: -item[1])
    answers = [*quoted(printed, "Jina"), *quoted(printed, "Cohere")]
    assert len(answers) == (3 if find_spec("cohere") else 1)
    for found in answers:
        assert [index for index, _ in found] == [index for index, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)
