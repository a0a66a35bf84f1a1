"""Drafts where several processes share a model: all of them draft the same, as one process does, and answers are those
of the same ranks without drafts.

Drafts are compared where nothing but tokens decides about them, and again where measured costs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.test_drafts import same_bits
from tests.products import marked
from tests.tiny_drafters import eagle, eagle3, medusa, mlp_speculator, mtp
from tests.tiny_models import make_tiny

__all__ = ["same_bits"]

pytestmark = pytest.mark.usefixtures("warm_children")
OPTIONS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_model_len=96, num_gpu_blocks_override=60, max_num_seqs=4,
    max_num_batched_tokens=32,
)  # fmt: skip
PROMPTS = [{"prompt_token_ids": [7, 9, 30, 4, 11, 80, 21, 6, 45] * 2}, {"prompt_token_ids": [5, 6]}] * 3
MORE: dict[str, Any] = dict(max_tokens=12, ignore_eos=True)
PARAMS = [
    SamplingParams(temperature=0.0, **MORE),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, top_k=20, n=2, **MORE),
    SamplingParams(temperature=0.8, seed=4, repetition_penalty=1.2, presence_penalty=0.2, **MORE),
    SamplingParams(temperature=0.0, allowed_token_ids=[5, 6, 7], **MORE),
    SamplingParams(temperature=0.8, seed=5, structured_outputs=StructuredOutputsParams(regex="(yes|no)+!"), **MORE),
    SamplingParams(temperature=0.8, seed=6, allowed_token_ids=[5, 6, 7], **MORE),
]
HEADS = {"medusa": medusa, "mlp_speculator": mlp_speculator, "eagle": eagle, "eagle3": eagle3}
METHODS = ("draft_model", "eagle", "medusa", "eagle3", "mlp_speculator", "mtp", "ngram", "suffix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a drafter for each method."""
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny("LlamaForCausalLM", folder / "llama", num_hidden_layers=7)
    table, head = model.model.embed_tokens.weight.data.clone(), model.lm_head.weight.data.clone()
    medusa(folder / "medusa", head, bare=True)
    mlp_speculator(folder / "mlp_speculator", tied=False)
    eagle(folder / "eagle", table, head, own=False)
    eagle3(folder / "eagle3", table, head)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.003 * torch.randn_like(parameter)
    model.save_pretrained(folder / "draft_model")
    family = "DeepseekV3ForCausalLM"
    mtp(folder / "mtp", make_tiny(family, folder / "mtp"), family)
    return folder


def target(folder: Path, method: str) -> str:
    return str(folder / ("mtp" if method == "mtp" else "llama"))


def keys_of(folder: Path, method: str, **more: Any) -> dict[str, Any]:
    keys = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **more}
    return keys | ({} if method in ("mtp", "ngram", "suffix") else {"model": str(folder / method)})


def said(llm: LLM) -> list[Any]:
    done = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in done]


@pytest.fixture(scope="module")
def plain_of(folder: Path, same_bits: None) -> Iterator[Callable[[str], list[Any]]]:
    """Of two ranks without drafts, by the model."""
    kept: dict[str, list[Any]] = {}

    def answers(method: str) -> list[Any]:
        name = target(folder, method)
        if name not in kept:
            with LLM(name, tensor_parallel_size=2, **OPTIONS) as llm:
                kept[name] = said(llm)
        return kept[name]

    yield answers


def drafts_of(folder: Path, method: str, size: int, **more: Any) -> tuple[list[Any], list[Any], Any, list[int]]:
    """Answers, what each rank proposed, drafts that were kept, and bytes of the drafter on each."""
    keys, options = keys_of(folder, method, **more), dict(OPTIONS, disable_log_stats=False)
    with LLM(target(folder, method), tensor_parallel_size=size, speculative_config=keys, **options) as llm:
        llm.collective_rpc("tests.rank_probe:record_drafts")
        answers = said(llm)
        metrics: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
        proposed = llm.collective_rpc("tests.rank_probe:recorded_drafts")
        has_model = method not in ("ngram", "suffix")
        sizes = llm.collective_rpc("tests.rank_probe:drafter_bytes") if has_model else []
        return answers, proposed, metrics["vllm:spec_decode_num_accepted_tokens"].value, sizes


@pytest.mark.parametrize("method", marked(METHODS, METHODS[:2]))
def test_ranks_draft_as_one_process(folder: Path, plain_of: Callable[[str], list[Any]], method: str) -> None:
    answers, proposed, accepted, sizes = drafts_of(folder, method, 2)
    assert answers == plain_of(method)
    assert len(proposed) == 2 and proposed[0] == proposed[1] and len(proposed[0]) > 40
    _, alone, accepted_alone, whole = drafts_of(folder, method, 1)
    assert accepted == accepted_alone > (5 if method in ("draft_model", "ngram") else -1)
    assert sorted(proposed[0]) == sorted(alone[0]), "whatever is shared out"
    if method in ("draft_model", "eagle", "eagle3", "mtp"):
        assert sizes[0] == sizes[1] < 0.9 * whole[0], "they share it"


def test_every_rank_with_all_of_the_drafter(folder: Path, plain_of: Callable[[str], list[Any]]) -> None:
    answers, proposed, accepted, sizes = drafts_of(folder, "draft_model", 2, draft_tensor_parallel_size=1)
    _, _, accepted_alone, whole = drafts_of(folder, "draft_model", 1)
    assert answers == plain_of("draft_model") and sizes == [*whole, *whole]
    assert proposed[0] == proposed[1] and accepted == accepted_alone


@pytest.mark.parametrize("method", marked(METHODS, METHODS[2:3]))
def test_ranks_that_weigh_costs_come_to_the_same(
    folder: Path, plain_of: Callable[[str], list[Any]], method: str
) -> None:
    """Each measures its own time, and what they draft goes by the sum. Drafts that a model makes may not be worth
    theirs on a machine that is in use."""
    more = {"draft_sample_method": "probabilistic"} if method in ("draft_model", "eagle") else {}
    answers, proposed, _, _ = drafts_of(folder, method, 2, adaptive=True, **more)
    expected = plain_of(method)
    assert answers[::3] == expected[::3] and (more or answers == expected)
    assert proposed[0] == proposed[1] and (proposed[0] or method in ("draft_model", "eagle", "eagle3", "mtp"))
