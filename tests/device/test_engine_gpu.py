"""The whole engine on a GPU: its tokens are the CPU's, with and without graphs and look-ahead, and nothing waits."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base import env
from quire.schema.errors import ConfigError
from quire.worker.runner import ModelRunner

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.gpu
COMMON: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "seed": 0}
ARCHS = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM",
    "Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "BloomForCausalLM", "GPTNeoXForCausalLM",
    "Gemma3nForCausalLM",
)  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "graphs and look-ahead": {},
    "eager": {"enforce_eager": True},
    "no look-ahead": {"async_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 8},
    "few blocks": {"num_gpu_blocks_override": 90, "max_num_batched_tokens": 64, "max_num_seqs": 8},
}


def prompts_of(seed: int, count: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    tails = [[rng.randrange(4, VOCAB) for _ in range(rng.choice([1, 2, 7, 19, 33, 70]))] for _ in range(count)]
    return [stem + tail if i % 2 else tail for i, tail in enumerate(tails)]


def tokens_of(folder: Path, prompts: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
    llm = LLM(str(folder), **{**COMMON, **options})
    try:
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.close()


def greedy(count: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_equal_the_cpus(arch: str, tmp_path: Path) -> None:
    make_tiny(arch, tmp_path)
    prompts = prompts_of(3)
    wanted = tokens_of(tmp_path, prompts, greedy(), device="cpu")
    for name, options in RUNS.items():
        assert tokens_of(tmp_path, prompts, greedy(), device="cuda", **options) == wanted, name


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "LlamaForCausalLM"])
def test_many_prompts_in_one_step(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last layer computes what is sampled alone."""
    make_tiny(arch, tmp_path)
    rng = random.Random(4)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(rng.choice([2, 5, 9, 30]))] for _ in range(100)]
    wanted = tokens_of(tmp_path, prompts, greedy(6), device="cpu", max_num_seqs=128, max_num_batched_tokens=4096)
    told, plain = [], ModelRunner._needs_few_states
    monkeypatch.setattr(ModelRunner, "_needs_few_states", lambda *args: told.append(plain(*args)) or told[-1])
    options = {"enforce_eager": True, "max_num_seqs": 128, "max_num_batched_tokens": 4096}
    assert tokens_of(tmp_path, prompts, greedy(6), device="cuda", **options) == wanted
    assert any(told)


def test_every_parameter_means_the_same_as_on_cpu(tmp_path: Path) -> None:
    """Plain draws through the graph, filters after it, and the whole pipeline, in one batch."""
    make_tiny("Qwen3ForCausalLM", tmp_path)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 7}, {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"temperature": 0, "min_tokens": 6},
        {"temperature": 0.7, "logit_bias": {5: 4.0, 9: -100.0}}, {"temperature": 0, "allowed_token_ids": [7, 8, 9, 30]},
    ]  # fmt: skip
    prompts = prompts_of(5, 2 * len(kinds))
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    for chosen in (kinds[:2], kinds[:5], kinds):
        params = [SamplingParams(seed=i, **common, **chosen[i % len(chosen)]) for i in range(len(prompts))]
        wanted = tokens_of(tmp_path, prompts, params, device="cpu")
        assert tokens_of(tmp_path, prompts, params, device="cuda") == wanted
        assert tokens_of(tmp_path, prompts, params, device="cuda", enforce_eager=True) == wanted


def test_log_probabilities_equal_the_cpus(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    prompts = prompts_of(8, 6)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=4, prompt_logprobs=2, ignore_eos=True)
    found = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, **COMMON)
        found.append(llm.generate(prompts, params, use_tqdm=False))
        llm.close()
    for ours, theirs in zip(*found, strict=True):
        for mine, yours in (
            *zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True),
            *zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True),
        ):
            assert list(mine) == list(yours)
            for token, entry in mine.items():
                assert entry.rank == yours[token].rank
                assert entry.logprob == pytest.approx(yours[token].logprob, abs=1e-3)


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_batch_invariant_mode(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, a request's tokens do not depend on its neighbours, on chunks, on graphs or on prefix hits."""
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    make_tiny(arch, tmp_path)
    prompts = prompts_of(11)
    params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(12)]
    common = {"device": "cuda", "dtype": "bfloat16"}
    wanted = tokens_of(tmp_path, prompts, params, **common)
    for name, options in RUNS.items():
        assert tokens_of(tmp_path, prompts, params, **common, **options) == wanted, name
    alone = [tokens_of(tmp_path, [prompts[i]], params[i], **common)[0] for i in (0, 5)]
    assert alone == [wanted[0], wanted[5]]


def test_a_steady_decode_never_waits_for_the_device(tmp_path: Path) -> None:
    """torch raises on every hidden synchronisation; waiting for a step's own event is the only one allowed."""
    make_tiny("Qwen3ForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), device="cuda", **COMMON)
    params = [SamplingParams(temperature=0.6 * (i % 2), max_tokens=60, ignore_eos=True) for i in range(12)]
    for i, prompt in enumerate(prompts_of(1)):
        llm.llm_engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, params[i])
    loop = llm.llm_engine.front.client.loop
    while loop.scheduler.num_waiting or not loop.scheduler.num_running:
        llm.llm_engine.step()
    for _ in range(4):
        llm.llm_engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            llm.llm_engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loop.scheduler.num_running == 12
    llm.close()


def test_graphs_are_captured_and_used(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), device="cuda", max_num_seqs=20, **COMMON)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.graphs.sizes == [1, 2, 4, 8, 16, 24]
    used: list[int] = []
    plain = runner.graphs.replay
    runner.graphs.replay = lambda bucket: used.append(bucket) or plain(bucket)
    prompts, plain_mixed = [], runner.mixed.replay
    runner.mixed.replay = lambda bucket: prompts.append(bucket) or plain_mixed(bucket)
    llm.generate([[5, 6, 7]] * 6, greedy(8), use_tqdm=False)
    assert used and set(used) == {8}
    assert prompts == [32]  # 18 tokens
    llm.close()


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    make_tiny("Qwen3ForCausalLM", tmp_path)
    prompts = prompts_of(2, 6)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB, ignore_eos=True)
    found = []
    for options in ({"device": "cpu"}, {"device": "cuda", "dtype": "bfloat16"}):
        llm = LLM(str(tmp_path), **{**COMMON, "max_logprobs": -1, **options})
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append(torch.tensor([[o.outputs[0].logprobs[0][i].logprob for i in range(VOCAB)] for o in outputs]).exp())
        llm.close()
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert error < 0.15, f"relative error of the probabilities {error:.3f}"


def test_memory_is_measured_and_a_lack_of_it_told(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    options = {key: value for key, value in COMMON.items() if key != "kv_cache_memory_bytes"}
    with pytest.raises(ConfigError, match=r"no memory is left for the KV cache.*gpu_memory_utilization"):
        LLM(str(tmp_path), device="cuda", gpu_memory_utilization=0.001, **options)
    total = torch.cuda.get_device_properties(0).total_memory
    llm = LLM(str(tmp_path), device="cuda", gpu_memory_utilization=0.3, **options)
    assert 0.25 * total < torch.cuda.memory_reserved() < 0.33 * total  # of this process: others may share the GPU
    assert llm.generate([[5, 6]], greedy(4), use_tqdm=False)
    llm.close()
