"""Ranks on a GPU: sums of a process group as parts of CUDA graphs; and several ranks that share one GPU, so that what
ranks do runs on CUDA where there are no more GPUs. Tokens are those of one worker without a group."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.schema.errors import EngineDeadError

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.gpu
COMMON: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
                          "max_num_seqs": 16, "max_num_batched_tokens": 256}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, top_k=40, max_tokens=16, ignore_eos=True)
_draw = random.Random(1)
PROMPTS = [[_draw.randrange(4, VOCAB) for _ in range(count)] for count in (1, 3, 19, 40, 70, 130)]
PARAMS = [GREEDY, DRAWN] * 3


def tokens_of(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, PARAMS, use_tqdm=False)]


def one_rank(folder: Path) -> list[list[int]]:
    llm = LLM(str(folder), **COMMON)
    try:
        return tokens_of(llm)
    finally:
        llm.close()


def set_flag(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    env.forget_all()


@pytest.mark.parametrize(
    ("arch", "peers"), [("LlamaForCausalLM", False), ("LlamaForCausalLM", True), ("Qwen3MoeForCausalLM", False)]
)
def test_sums_are_captured_in_graphs(arch: str, peers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(arch, tmp_path)
    wanted = one_rank(tmp_path)
    set_flag(monkeypatch, "QUIRE_JOIN_ALONE")
    if peers:
        set_flag(monkeypatch, "QUIRE_PEER_SUMS")
    llm = LLM(str(tmp_path), distributed_executor_backend="mp", **COMMON)
    try:
        assert tokens_of(llm) == wanted
        assert llm.collective_rpc("tests.rank_probe:how_summed") == ["PeerSum" if peers else "function"]
        ((backend, summed, graphs),) = llm.collective_rpc("tests.rank_probe:sums_of")
    finally:
        llm.close()
    assert backend == "nccl" and summed >= 2 * 3 and graphs > 3


def test_a_group_of_one_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, whose matmuls of some rows leave partial sums: with a group they are added up before the sum over it."""
    make_tiny("Qwen3ForCausalLM", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    common = COMMON | {"dtype": "bfloat16"}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)

    def answers(**options: Any) -> list[Any]:
        llm = LLM(str(tmp_path), **common, **options)
        try:
            found = llm.generate(prompts, params, use_tqdm=False) + llm.generate(prompts[:1], params, use_tqdm=False)
        finally:
            llm.close()
        steps = [step for one in found for step in one.outputs[0].logprobs or ()]
        return [{token: value.logprob for token, value in step.items()} for step in steps]

    wanted = answers()
    set_flag(monkeypatch, "QUIRE_JOIN_ALONE")
    assert answers(distributed_executor_backend="mp") == wanted


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("LlamaForCausalLM", {"tensor_parallel_size": 2}),
    "pipeline": ("LlamaForCausalLM", {"pipeline_parallel_size": 2}),
    "latent": ("DeepseekV3ForCausalLM", {"tensor_parallel_size": 2}),
    "experts": ("Qwen3MoeForCausalLM", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "engines": ("Qwen3MoeForCausalLM", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "states": ("Qwen3NextForCausalLM", {"tensor_parallel_size": 2}),
    "contexts": ("GPTBigCodeForCausalLM", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    "latent contexts": (
        "DeepseekV3ForCausalLM",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"},
    ),
    "windows and contexts": (
        "GptOssForCausalLM",
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4},
    ),
    "both": ("Gemma3ForCausalLM", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_that_share_a_gpu_answer_as_one(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, options = SHAPES[shape]
    make_tiny(arch, tmp_path)
    wanted = one_rank(tmp_path)
    set_flag(monkeypatch, "QUIRE_SHARE_GPUS")
    llm = LLM(str(tmp_path), **COMMON, **options)
    try:
        assert tokens_of(llm) == wanted
    finally:
        llm.close()


def test_a_killed_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    set_flag(monkeypatch, "QUIRE_SHARE_GPUS")
    llm = LLM(str(tmp_path), tensor_parallel_size=2, **COMMON)
    try:
        os.kill(llm.collective_rpc("tests.rank_probe:pid_of")[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker 1 .*killed by SIGKILL"):
            tokens_of(llm)
    finally:
        llm.close()
