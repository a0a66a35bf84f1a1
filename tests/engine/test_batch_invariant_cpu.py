"""Batch-invariant mode on CPU: the bits of a request's log probabilities do not depend on its neighbours."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.ops.cpu.native import kernels
from tests.tiny_models import VOCAB, write_tiny

COMMON: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 32 << 20, "seed": 0, "device": "cpu"}
STATES = ("Qwen3NextForCausalLM", "BambaForCausalLM")  # their runs with few blocks save and reuse states instead
GROUPS = {"Gemma3ForCausalLM": 130, "Llama4ForCausalLM": 80}  # blocks where there are seven or four groups of layers
RUNS: dict[str, dict[str, Any]] = {
    "small chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 5, "block_size": 8},
    "few blocks": {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "two at a time": {"max_num_seqs": 2, "enable_prefix_caching": False},
}


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    tails = [[rng.randrange(4, VOCAB) for _ in range(rng.choice([1, 2, 7, 19, 33, 70]))] for _ in range(9)]
    return [stem + tail if i % 2 else tail for i, tail in enumerate(tails)]


def bits_of(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[tuple[int, float]]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    llm = LLM(str(folder), **{**COMMON, **options})
    try:
        found = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.close()
    return [bits(out.outputs[0]) for out in found]


def bits(output: Any) -> list[tuple[int, float]]:
    return [(token, entry[token].logprob) for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


CASES = {
    "Qwen3ForCausalLM": "float32",
    "Gemma3ForCausalLM": "bfloat16",
    "Qwen3MoeForCausalLM": "bfloat16",
    "DeepseekV3ForCausalLM": "float32",
    "Llama4ForCausalLM": "float32",
    "Qwen3NextForCausalLM": "bfloat16",
    "BambaForCausalLM": "float32",
}


@pytest.mark.parametrize("arch", CASES)
def test_bits_do_not_depend_on_the_batch(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two of the runs each, in turn."""
    at = list(CASES).index(arch)
    names = sorted({list(RUNS)[at % len(RUNS)], "small chunks"})
    check_bits(arch, CASES[arch], {name: RUNS[name] for name in names}, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("arch", CASES)
def test_bits_do_not_depend_on_the_batch_in_any_run(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bits(arch, CASES[arch], RUNS, tmp_path, monkeypatch)


def check_bits(
    arch: str, dtype: str, runs: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    write_tiny(arch, tmp_path)
    prompts = prompts_of(4)[: 4 if arch in STATES else 9]
    wanted = bits_of(tmp_path, prompts, dtype=dtype)
    for name, options in runs.items():
        if arch in GROUPS and "num_gpu_blocks_override" in options:
            options = {**options, "num_gpu_blocks_override": GROUPS[arch]}
        if arch in STATES and "num_gpu_blocks_override" in options:
            options = {**options, "enable_prefix_caching": True, "num_gpu_blocks_override": 200}
        assert bits_of(tmp_path, prompts, dtype=dtype, **options) == wanted, name
    alone = len(prompts) // 2 + 1
    assert bits_of(tmp_path, [prompts[alone]], dtype=dtype) == [wanted[alone]]


@pytest.mark.parametrize("arch", ["DeepseekV3ForCausalLM", "BambaForCausalLM", "Llama4ForCausalLM"])
def test_bits_do_not_depend_on_the_batch_in_torch(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    write_tiny(arch, tmp_path)
    prompts = prompts_of(4)[:4]
    wanted = bits_of(tmp_path, prompts, dtype="float32")
    assert bits_of(tmp_path, prompts, dtype="float32", **RUNS["small chunks"]) == wanted
    assert bits_of(tmp_path, prompts[2:3], dtype="float32") == wanted[2:3]


def test_without_the_mode_they_do_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if this ever fails, the test above proves nothing."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    write_tiny("Qwen3ForCausalLM", tmp_path)
    prompts = prompts_of(4)
    wanted = bits_of(tmp_path, prompts, dtype="float32")
    assert any(bits_of(tmp_path, prompts, dtype="float32", **options) != wanted for options in RUNS.values())


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
def test_without_the_mode_compiled_float32_products_have_the_same_bits(tmp_path: Path) -> None:
    env.forget_all()
    write_tiny("Qwen3ForCausalLM", tmp_path)
    prompts = prompts_of(4)
    wanted = bits_of(tmp_path, prompts, dtype="float32")
    for name, options in RUNS.items():
        assert bits_of(tmp_path, prompts, dtype="float32", **options) == wanted, name
