"""Adapters of pooling models: results are those of merged weights, of each text its own, in one batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, EngineArgs, LoRARequest
from quire.schema.errors import InputError, NotBuiltError
from tests.pooling_models import ENCODERS, make_pooling
from tests.products import marked
from tests.server.live import error_of, live
from tests.tiny_adapters import TinyAdapter, linear_modules, merge, write_adapter

TEXTS = [[30, 40, 50, 60, 31], [33, 34], [35, 36, 37, 38, 39, 40, 41, 42, 43], [30, 40, 50, 60, 31]]
NAMES = [
    *(f"{name}Model" for name in ENCODERS if name != "Ernie"), "Qwen3Model", "Gemma2Model", "LlamaForCausalLM",
    "BertForSequenceClassification", "Qwen2ForSequenceClassification",
]  # fmt: skip
KEPT = [
    "BertModel", "ModernBertModel", "NomicBertModel", "ElectraModel", "MPNetModel", "Qwen3Model", "LlamaForCausalLM",
    "Qwen2ForSequenceClassification",
]  # fmt: skip
HEADS = ("score", "classifier", "pooler", "head", "lm_head")


def start(folder: Path, **more: Any) -> LLM:
    return LLM(str(folder), dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8, **more)


def adapter_of(model: Any, folder: Path, seed: int, *, table: bool = False) -> TinyAdapter:
    """Of the trunk's matmuls, and of the embedding."""
    found = linear_modules(model, None)
    modules = {name: size for name, size in found.items() if not any(part in HEADS for part in name.split("."))}
    if table:
        name = next(name for name, one in model.named_modules() if one is model.get_input_embeddings())
        modules |= linear_modules(model, [name.rpartition(".")[2]])
    assert len(modules) >= 12
    return write_adapter(model, folder, modules=modules, seed=seed)


def expected(name: str, model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        if name.endswith("ForSequenceClassification"):
            return model(torch.tensor([text])).logits[0].softmax(-1)
        trunk = model.model if name.endswith("ForCausalLM") else model
        states = trunk(input_ids=torch.tensor([text])).last_hidden_state[0]
    vector = states[0] if name.removesuffix("Model") in ENCODERS else states[-1]
    return torch.nn.functional.normalize(vector, dim=-1)


def results(name: str, llm: LLM, texts: Any, loras: Any) -> list[torch.Tensor]:
    if name.endswith("ForSequenceClassification"):
        return [torch.tensor(one.outputs.probs) for one in llm.classify(texts, lora_request=loras, use_tqdm=False)]
    return [torch.tensor(one.outputs.embedding) for one in llm.embed(texts, lora_request=loras, use_tqdm=False)]


@pytest.mark.parametrize("name", marked(NAMES, KEPT))
def test_adapters_are_merged_weights(name: str, tmp_path: Path) -> None:
    """The base model and two adapters in one batch; then more adapters than slots; then one for all texts."""
    model = make_pooling(name, tmp_path / "model")
    tables = [name in ("BertModel", "Qwen3Model"), False, False]
    adapters = [adapter_of(model, tmp_path / f"a{n}", n, table=table) for n, table in enumerate(tables)]
    models = [model, *(merge(model, one) for one in adapters)]
    loras = [None, *(LoRARequest(f"a{n}", n, one.path) for n, one in enumerate(adapters, 1))]
    convert = {"convert": "embed"} if name.endswith("ForCausalLM") else {}
    with start(tmp_path / "model", **convert) as llm:
        for picked in ([0, 1, 2, 1], [3, 2, 1, 0], [0, 0, 0, 0]):
            found = results(name, llm, TEXTS, [loras[one] for one in picked])
            wanted = [expected(name, models[one], text) for one, text in zip(picked, TEXTS, strict=True)]
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        alike = results(name, llm, TEXTS, loras[2])
        for one, text in zip(alike, TEXTS, strict=True):
            torch.testing.assert_close(one, expected(name, models[2], text), atol=1e-4, rtol=1e-4)
        assert (results(name, llm, TEXTS, None)[0] - alike[0]).abs().max() > 1e-2, "the adapter changes nothing"


@pytest.mark.parametrize("both", [False, True], ids=["one half", "both"])
def test_ranks_that_share_an_encoder(both: bool, tmp_path: Path, warm_children: None) -> None:
    model = make_pooling("BertModel", tmp_path / "model")
    adapter = adapter_of(model, tmp_path / "a", 1, table=True)
    models, loras = (model, merge(model, adapter)), (None, LoRARequest("a", 1, adapter.path))
    with start(tmp_path / "model", tensor_parallel_size=2, fully_sharded_loras=both) as llm:
        found = results("BertModel", llm, TEXTS, [loras[n % 2] for n in range(4)])
        for n, (one, text) in enumerate(zip(found, TEXTS, strict=True)):
            torch.testing.assert_close(one, expected("BertModel", models[n % 2], text), atol=1e-4, rtol=1e-4)


def test_prefixes_belong_to_their_adapter(tmp_path: Path) -> None:
    model = make_pooling("Qwen3Model", tmp_path / "model")
    adapter = adapter_of(model, tmp_path / "a", 1)
    text, lora = list(range(20, 68)), LoRARequest("a", 1, adapter.path)
    with start(tmp_path / "model", block_size=16) as llm:
        for model_of, own in ((model, None), (merge(model, adapter), lora)) * 2:
            (found,) = llm.embed([text], lora_request=own, use_tqdm=False)
            wanted = expected("Qwen3Model", model_of, text)
            torch.testing.assert_close(torch.tensor(found.outputs.embedding), wanted, atol=1e-4, rtol=1e-4)
        assert found.num_cached_tokens == 32


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The head of a language model whose vectors are pooled is no place for an adapter; so many as texts, or one."""
    model = make_pooling("Qwen3ForCausalLM", tmp_path / "model")
    head = write_adapter(model, tmp_path / "head", modules=linear_modules(model, ("lm_head", "q_proj")))
    with start(tmp_path / "model", convert="embed") as llm:
        with pytest.raises(InputError, match="lm_head"):
            llm.embed(TEXTS, lora_request=LoRARequest("head", 1, head.path), use_tqdm=False)
        with pytest.raises(InputError, match="1 lora_request were given for 4 prompts"):
            llm.embed(TEXTS, lora_request=[None], use_tqdm=False)
        assert len(llm.embed(TEXTS, use_tqdm=False)) == 4
    with pytest.raises(NotBuiltError, match="on a GPU, pooling models take no adapters"):
        EngineArgs(
            model=str(tmp_path / "model"), convert="embed", enable_lora=True, device="cuda"
        ).create_engine_config()  # fmt: skip


def test_a_name_picks_its_adapter(tmp_path: Path) -> None:
    """Over HTTP, as for models that generate."""
    model = make_pooling("BertModel", tmp_path / "model")
    adapter = adapter_of(model, tmp_path / "a", 1)
    engine = {"dtype": "float32", "served_model_name": "base", "enable_lora": True, "max_lora_rank": 8}
    with live(str(tmp_path / "model"), engine=engine) as server:
        loading = server.state.adapters.load("own", adapter.path)
        asyncio.run_coroutine_threadsafe(loading, server.loop).result(60)
        for name, one in (("base", model), ("own", merge(model, adapter))):
            answer = server.post("/v1/embeddings", {"model": name, "input": TEXTS[:2]})
            assert answer.status_code == 200 and answer.json()["model"] == name
            for item, text in zip(answer.json()["data"], TEXTS, strict=False):
                wanted = expected("BertModel", one, text)
                torch.testing.assert_close(torch.tensor(item["embedding"]), wanted, atol=1e-4, rtol=1e-4)
        error_of(server.post("/v1/embeddings", {"model": "none", "input": "cat"}), 404)
