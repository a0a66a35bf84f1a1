"""Quantized checkpoints on a GPU: whole engines against transformers' model of the numbers that a checkpoint
means, with and without graphs, and in batch-invariant mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire import LLM, SamplingParams
from quire.base import env
from quire.config import EngineArgs
from quire.layers.stored import matrices_of
from quire.loader.load import load_model
from quire.quant.coded_scheme import CodedParts
from tests.engine.test_coded_weights import KINDS
from tests.engine.test_quantized_formats import FORMS
from tests.quantized import write
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu
ROUNDING = {name for name in FORMS if "fp8" in name or name == "ct-w8a8-int8"}  # inputs too, with more than 64 rows
ROUNDED_INPUTS = 0.2  # log-probabilities of a tiny random model
PROMPTS = [list(range(4, 40)), [300, 7, 7, 25], [9] * 70, list(range(5, 200, 3))]


def first_logprobs(folder: Path, count: int = 6, **options: Any) -> tuple[list[list[int]], list[dict[int, float]]]:
    """Tokens of every prompt, and the largest log-probabilities of the first."""
    llm = LLM(str(folder), **{"dtype": "bfloat16", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, **options})
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=5, ignore_eos=True)
    try:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    finally:
        llm.close()
    tokens = [list(out.outputs[0].token_ids) for out in outputs]
    return tokens, [{at: one.logprob for at, one in out.outputs[0].logprobs[0].items()} for out in outputs]


def error_of(logprobs: list[dict[int, float]], exact: list[torch.Tensor]) -> float:
    return max(
        abs(value - row[token].item()) for one, row in zip(logprobs, exact, strict=True) for token, value in one.items()
    )


@pytest.mark.parametrize("name", FORMS)
def test_checkpoints_of_every_format(name: str, tmp_path: Path) -> None:
    form, _, _ = FORMS[name]
    hf = write(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    config = EngineArgs(model=str(tmp_path), dtype="bfloat16", device="cuda").create_engine_config()
    model = load_model(config, "cuda")
    kinds = {p.kind for _, m in matrices_of(model) if isinstance(m, CodedParts) for p in m.coded()}
    assert kinds == ({KINDS[name]} if KINDS[name] else set())
    del model
    eager, found = first_logprobs(tmp_path, enforce_eager=True)
    captured, again = first_logprobs(tmp_path)
    hf.save_pretrained(tmp_path / "numbers")  # what the codes mean, uncoded: its own error is that of 16 bits
    _, plain = first_logprobs(tmp_path / "numbers", skip_tokenizer_init=True)
    with torch.no_grad():
        exact = [hf(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in PROMPTS]
    bound = 2 * error_of(plain, exact) + (ROUNDED_INPUTS if name in ROUNDING else 0.02)
    assert error_of(found, exact) < bound and error_of(again, exact) < bound
    same = sum(a == b for a, b in zip(eager, captured, strict=True))
    assert same >= len(PROMPTS) - 1  # equal logits of two tokens may go either way


@pytest.mark.parametrize("how", ["fp8", "ptpc_fp8", "int8_wo", "int4_wo"])
def test_rounded_while_loading(how: str, tmp_path: Path) -> None:
    make_tiny("Qwen3ForCausalLM", tmp_path)
    _, plain = first_logprobs(tmp_path)
    _, found = first_logprobs(tmp_path, quantization=how)
    worst = 0.0
    for one, other in zip(plain, found, strict=True):
        worst = max([worst, *(abs(one[token] - other[token]) for token in one.keys() & other.keys())])
    assert 0 < worst < (0.6 if how == "int4_wo" else 0.2)


@pytest.mark.parametrize("name", ["ct-w8a8-fp8", "gptq-4-sym", "ct-w8a8-int8"])
def test_batch_invariant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "LlamaForCausalLM", FORMS[name][0], num_hidden_layers=2)
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    try:
        llm = LLM(str(tmp_path), dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=64 << 20)
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
        try:
            together = llm.generate(PROMPTS * 8, params, use_tqdm=False)[: len(PROMPTS)]
            alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
        finally:
            llm.close()
    finally:
        env.forget_all()
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        mine, theirs = ([next(iter(at.values())).logprob for at in each.outputs[0].logprobs] for each in (one, other))
        assert mine == theirs


def test_memory_while_rounding(tmp_path: Path) -> None:
    """Never the whole model in 16 bits: the peak is what stays, and a matrix in work with its copies."""
    make_tiny("Qwen3ForCausalLM", tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    args = EngineArgs(model=str(tmp_path), dtype="bfloat16", device="cuda", quantization="fp8")
    model = load_model(args.create_engine_config(), "cuda")
    stays, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    coded_bytes = sum(p.codes.numel() for _, m in matrices_of(model) if isinstance(m, CodedParts) for p in m.coded())
    largest = 2 * 4096 * 1024 * 4  # gate and up in float32, the widest that rounding makes
    assert stays < coded_bytes * 1.2 + (8 << 20)
    assert peak - stays < 16 * largest  # as many threads as there are may each have one in work
    assert peak < stays + coded_bytes  # and far from 16 bits of everything
