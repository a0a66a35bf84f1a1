"""KV caches in 8 bits on a GPU: kernels against float32 arithmetic over keys and values rounded by the test, engines
against the CPU's with the same cache, and tokens that do not depend on chunks, prefix hits, preemption or graphs.

Bounds. Kernels: those of the same kernels over a cache of 16 bits (test_attention.py): codes are exact in 16 bits.
Engines in float32, log probabilities of prompts: the median within 0.001 of the CPU's with the same cache (codes on the
border between two may differ here and there), and the mean within OPTIONS of those with a cache of 32 bits, which is
1.6 times or more what the CPU's cache of that kind moves them by.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.base import env, native
from tests.attention_case import RULE_NAMES, RULES, CodedCase
from tests.tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
MIX = [(12, 5), (1500, 1), (90, 90), (3, 1), (1700, 310), (60, 0), (128, 1), (2, 2), (700, 64)]
DECODES = [(n, 1) for n in (700, 33, 2100, 1, 64, 129, 900)]
FORMS: dict[str, dict[str, Any]] = {
    "e4m3": {"form": "float8_e4m3fn", "scales": (0.013, 0.37)},
    "e5m2": {"form": "float8_e5m2", "scales": (0.0007, 0.02)},
    "int8": {"form": "int8"},
}
OPTIONS = {"fp8": 0.6, "fp8_e5m2": 1.1, "int8_per_token_head": 0.15}
COMMON: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 32 << 20, "seed": 0, "skip_tokenizer_init": True,
}  # fmt: skip


def backend(**options: Any) -> Any:
    from quire.attention.triton import TritonAttention

    return TritonAttention(**{"fixed": False, **options})


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit, found = LIMITS[dtype], found.float().cpu()
    assert (found - expected).norm() <= limit * expected.norm()
    torch.testing.assert_close(found, expected, rtol=4 * limit, atol=4 * limit)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMS[request.param]


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_any_mix_under_any_rule(form: dict[str, Any], rule: dict[str, Any], dtype: torch.dtype) -> None:
    for fixed in (False, True):
        case = CodedCase(MIX, heads=8, kv_heads=2, size=128, rule=rule, dtype=dtype, device="cuda", **form)
        close(case.run(backend(fixed=fixed))[0], case.reference(), dtype)
    decodes = CodedCase(DECODES, heads=8, kv_heads=2, size=128, rule=rule, dtype=dtype, device="cuda", **form)
    found, _ = decodes.run(backend(), static=9)
    close(found[: len(DECODES)], decodes.reference(), dtype)
    assert not found[len(DECODES) :].any()


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 5, 8, 24])
def test_sizes_and_groups(form: dict[str, Any], size: int, group: int) -> None:
    rng = random.Random(size * group)
    dtype, page = rng.choice(HALVES), rng.choice([16, 32, 64, 48])
    shape: dict[str, Any] = {"heads": 2 * group, "kv_heads": 2, "size": size, "block_size": page, "dtype": dtype}
    case = CodedCase(MIX, **shape, device="cuda", seed=size, **form)
    close(case.run(backend(), mirror=True)[0], case.reference(), dtype)


@pytest.mark.parametrize("heads", [16, 128])
def test_latent(form: dict[str, Any], heads: int) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": 1, "size": 576, "value": -512, "dtype": torch.bfloat16}
    for lens, how in ((MIX, {}), (DECODES, {"static": 8})):
        case = CodedCase(lens, **shape, device="cuda", **form)
        found = case.run(backend(), **how)[0]
        close(found[: sum(case.counts)], case.reference(), torch.bfloat16)


def test_rows_that_share_a_prefix(form: dict[str, Any]) -> None:
    lens = [(2048 + 40 * i, 1) for i in range(32)]
    case = CodedCase(
        lens, heads=16, kv_heads=8, size=128, block_size=64, dtype=torch.bfloat16, device="cuda",
        shared=(1920, tuple(range(32))), **form,
    )  # fmt: skip
    attention = backend()
    plan = attention.plan(case.step(static=32), case.group())
    found = plan.run(*case.inputs(), case.cache(attention), **case.options())
    close(found, case.reference(), torch.bfloat16)
    ((work,),) = plan._made.values()
    assert work.shared.info.tolist()[:2] == [1920, 32]


def test_fixed_results_depend_on_nothing_else(form: dict[str, Any]) -> None:
    """The same query, alone or in company, in any chunking, eager or captured: the same bits."""
    case = CodedCase(
        [(1200, 340), (890, 1), (277, 277)], heads=8, kv_heads=2, size=128, dtype=torch.bfloat16, device="cuda", **form
    )
    attention = backend(fixed=True)
    whole, cache = case.run(attention)
    close(whole, case.reference(), torch.bfloat16)
    q, options = case.inputs()[0], case.options()
    for lens, places in [
        ([(1200, 1), (890, 1)], [339, 340]),
        ([(1160, 300), (890, 1), (250, 130)], [*range(300), 340, *range(461, 591)]),
    ]:
        part = CodedCase.__new__(CodedCase)
        part.__dict__.update(case.__dict__, lens=lens, contexts=[c for c, _ in lens], counts=[n for _, n in lens])
        plan = attention.plan(part.step(), case.group())
        assert torch.equal(plan.run(q[places], None, None, cache, **options), whole[places])


def test_from_the_fused_product_on(form: dict[str, Any]) -> None:
    """Codes, scales and results as the reference's; prompts that the library computes read what the cache holds."""
    from quire.attention.library import Library
    from quire.ops.qkv import QkvPrep, prepare_qkv

    lens = [(12, 5), (1500, 1), (2048, 2048)]
    case = CodedCase(lens, heads=8, kv_heads=2, size=128, dtype=torch.bfloat16, device="cuda", **form)
    attention, step = backend(library=Library(least=1024, worth=0)), case.step()
    angle = torch.rand((sum(case.counts), 1, 32), generator=torch.Generator().manual_seed(0))
    pairs = (angle.cos(), angle.cos()), (-angle.sin(), angle.sin())
    cos, sin = (torch.cat(pair, -1).bfloat16().cuda() for pair in pairs)
    weight = torch.rand(128, generator=torch.Generator().manual_seed(1)).bfloat16().cuda() + 0.5
    prep = QkvPrep(8, 2, weight, weight, 1e-5, 0.0, False, cos, sin, False)
    qkv = torch.cat(case.inputs(), 1).flatten(1)
    expected, cache = case.cache(attention), case.cache(attention)
    q = prepare_qkv.reference(qkv.clone(), prep, expected.keys, expected.values, step.slots, False, expected.scales)
    exact = attention.plan(step, case.group()).run(q, None, None, expected, **case.options())
    options = {name: value for name, value in case.options().items() if name != "v_size"}
    plan = attention.plan(step, case.group())
    found = plan.run_fused(qkv, prep, cache, **options)
    assert plan.lists.prompts(next(iter(plan._made)))
    at = step.slots // case.page, step.slots % case.page
    for pages, others in ((cache.keys, expected.keys), (cache.values, expected.values)):
        apart = (pages[at].float() - others[at].float()).abs()
        if form["form"] == "int8":  # norms rounded to 16 bits in another order move some codes by one
            assert (apart > 1).float().mean() < 1e-3 and (apart > 0).float().mean() < 0.06
        else:
            assert (apart > 0).float().mean() < 0.02
    close(found, exact.float().cpu(), torch.bfloat16)


# --- whole engines


def prompts_of(seed: int, count: int = 8) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    tails = [[rng.randrange(4, VOCAB) for _ in range(rng.choice([2, 7, 19, 33, 70]))] for _ in range(count)]
    return [{"prompt_token_ids": stem + tail if i % 2 else tail} for i, tail in enumerate(tails)]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{**COMMON, "device": "cuda", **options})


def logprobs_of(llm: LLM, prompts: list[dict[str, Any]]) -> torch.Tensor:
    """Of every prompt token but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    values = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        pairs = zip(prompt["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True)
        values += [near[token].logprob for token, near in pairs]
    return torch.tensor(values)


def run(folder: Path, **options: Any) -> torch.Tensor:
    llm = open_llm(folder, **options)
    try:
        return logprobs_of(llm, prompts_of(3))
    finally:
        llm.close()


def scales_of(llm: LLM) -> dict[str, list[float]]:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return {layer: cache.layer_scales.tolist() for layer, cache in runner.scaled.items()}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_log_probabilities_are_the_cpus(arch: str, name: str, tmp_path: Path) -> None:
    if name == "int8_per_token_head" and native.library() is None:
        pytest.skip(f"the CPU has this cache with compiled kernels only: {native.why_not()}")
    make_tiny(arch, tmp_path)
    coded = run(tmp_path, kv_cache_dtype=name)
    assert (coded - run(tmp_path, kv_cache_dtype=name, device="cpu")).abs().median() < 1e-3
    assert (coded - run(tmp_path)).abs().mean() < OPTIONS[name]


@pytest.mark.parametrize("arch", ["DeepseekV3ForCausalLM", "GptOssForCausalLM"])
def test_latent_models_and_sinks(arch: str, tmp_path: Path) -> None:
    make_tiny(arch, tmp_path)
    coded = run(tmp_path, kv_cache_dtype="fp8")
    assert (coded - run(tmp_path, kv_cache_dtype="fp8", device="cpu")).abs().median() < 1e-3


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_do_not_depend_on_how_they_were_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs or none, chunks, cached prefixes, too few blocks: the same tokens, in batch-invariant mode."""
    make_tiny("Qwen3ForCausalLM", tmp_path)
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    params, prompts = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), prompts_of(5, 12)
    runs: list[dict[str, Any]] = [
        {}, {"enforce_eager": True}, {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 16},
        {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 16},
    ]  # fmt: skip
    try:
        answers = []
        for options in runs:
            llm = open_llm(tmp_path, kv_cache_dtype=name, **options)
            for _ in range(2):  # the second time from the prefix cache
                answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
            llm.close()
        assert all(answer == answers[0] for answer in answers)
    finally:
        monkeypatch.undo()
        env.forget_all()


def test_a_cache_in_fp8_holds_twice_as_many_tokens(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    blocks = {}
    for name in ("auto", "fp8"):
        llm = open_llm(tmp_path, kv_cache_dtype=name, dtype="bfloat16")
        blocks[name] = llm.llm_engine.model_executor.driver_worker.worker.kv_memory.layout.num_blocks
        llm.close()
    assert blocks["fp8"] == 2 * blocks["auto"]


def test_the_first_step_measures_scales(tmp_path: Path) -> None:
    """As on a CPU, from the first prompt, which no graph may compute; later steps keep them."""
    make_tiny("Qwen3ForCausalLM", tmp_path)
    first = prompts_of(7, 1)
    measured = []
    for device in ("cuda", "cpu"):
        llm = open_llm(tmp_path, kv_cache_dtype="fp8", calculate_kv_scales=True, device=device)
        assert all(pair == [1.0, 1.0] for pair in scales_of(llm).values())
        llm.generate(first, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        measured.append(scales_of(llm))
        llm.generate(prompts_of(8), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert scales_of(llm) == measured[-1]
        llm.close()
    # Of later layers not to the last digit: a code on the border between two may go either way in the first.
    for layer, pair in measured[0].items():
        assert pair == pytest.approx(measured[1][layer], rel=5e-3) and pair != [1.0, 1.0]


def test_a_checkpoint_that_was_made_for_fp8(tmp_path: Path) -> None:
    """auto takes it, with the checkpoint's scales; other scales give other numbers."""
    make_tiny("LlamaForCausalLM", tmp_path, num_hidden_layers=2)
    plain = run(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.02)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.01])
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = open_llm(tmp_path)
    assert llm.llm_engine.vllm_config.cache_config.cache_dtype == "fp8"
    assert [pytest.approx(pair) for pair in scales_of(llm).values()] == [[0.02, 0.01]] * 2
    coded = logprobs_of(llm, prompts_of(3))
    llm.close()
    assert 0 < (coded - plain).abs().mean() < OPTIONS["fp8"]
