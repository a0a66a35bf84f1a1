"""Drafters as programs use them, beside grammars and adapters: answers are those of an engine without drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from quire.schema.errors import ConfigError
from tests.engine.test_drafts import same_bits
from tests.tiny_adapters import write_adapter
from tests.tiny_drafters import eagle3, speculators
from tests.tiny_models import make_tiny

__all__ = ["same_bits"]


def shaped(regex: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=regex)


PROMPTS = ["the river ran under an old stone bridge", "seven children", "the river ran under an old stone"] * 3
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, n=2, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=shaped("[a-f]{6}-[0-9]{8}")),
    SamplingParams(temperature=0.8, seed=3, max_tokens=30, structured_outputs=shaped("(yes|no)+!")),
    SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1, repetition_penalty=1.1),
]
COMMON: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, enable_lora=True, max_lora_rank=8, max_num_batched_tokens=24
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model, a draft model that is often right, a head, and an adapter."""
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny("LlamaForCausalLM", folder / "model", num_hidden_layers=7)
    write_adapter(model, folder / "adapter", targets=("q_proj", "down_proj"), rank=4, seed=1)
    ends = model.model.embed_tokens.weight.data.clone(), model.lm_head.weight.data.clone()
    eagle3(folder / "head", *ends, library=True, verifier=str(folder / "model"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.005 * torch.randn_like(parameter)
    model.save_pretrained(folder / "draft")
    return folder


def said(llm: LLM, folder: Path) -> list[Any]:
    """Half of the requests have an adapter."""
    params = [PARAMS[i % len(PARAMS)] for i in range(len(PROMPTS))]
    adapter = LoRARequest("one", 1, str(folder / "adapter"))
    which = [adapter if i % 2 else None for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=which)
    return [[(one.text, one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(folder: Path, same_bits: None) -> Iterator[list[Any]]:
    yield said(LLM(str(folder / "model"), **COMMON), folder)


def accepted(llm: LLM) -> Any:
    metrics: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    return metrics["vllm:spec_decode_num_draft_tokens"].value, metrics["vllm:spec_decode_num_accepted_tokens"].value


def test_a_draft_model_beside_grammars_and_adapters(folder: Path, plain: list[Any]) -> None:
    keys = {"model": str(folder / "draft"), "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(str(folder / "model"), speculative_config=keys, disable_log_stats=False, **COMMON)
    assert said(llm, folder) == plain
    assert accepted(llm)[1] > 20
    llm.collective_rpc("reload_weights")
    assert said(llm, folder) == plain


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_checkpoint_of_the_speculators_library_configures_itself(
    folder: Path, plain: list[Any], adaptive: bool
) -> None:
    """Given as the model, or as the drafter of one."""
    options: dict[str, Any] = dict(COMMON, disable_log_stats=False)
    if adaptive:
        llm = LLM(str(folder / "head"), **options)
    else:
        keys = {"model": str(folder / "head"), "adaptive": False}
        llm = LLM(str(folder / "model"), speculative_config=keys, **options)
    config = llm.llm_engine.vllm_config
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == ("eagle3", 4)
    assert config.model_config.model == str(folder / "model")
    assert said(llm, folder) == plain
    assert adaptive or accepted(llm)[0] > 100


def test_a_drafter_that_does_not_say_for_which_model(tmp_path: Path) -> None:
    config = speculators("eagle3", {"model_type": "llama"}, "")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is a drafter, and its speculators_config does not say for which model"):
        LLM(str(tmp_path))
