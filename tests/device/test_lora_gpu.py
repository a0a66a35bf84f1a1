"""Adapters on a GPU: the kernels against float64, and engines against merged weights in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.base import env
from tests.lora_case import MIXES, LowRankCase
from tests.tiny_adapters import expert_modules, greedy, linear_modules, merge, write_adapter
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 9, 77, 100, 41, 8, 250, 33, 12], [7, 7, 30], list(range(4, 90))]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.bfloat16, 64), (torch.float16, 24)])
def test_kernels(mix: str, dtype: torch.dtype, rank: int) -> None:
    from quire.ops.triton.lora import add_low_rank

    case = LowRankCase(MIXES[mix], dtype, "cuda", rank=rank)
    result = add_low_rank(case.y.clone(), case.x, case.rows, case.low).cpu()
    limit = 1e-4 if dtype is torch.float32 else 0.3
    torch.testing.assert_close(result.double(), case.expected(), rtol=limit, atol=limit)


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_engines(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny(arch, tmp_path / "model")
    modules = linear_modules(model, None) | expert_modules(model, (0, 2))
    adapters = [write_adapter(model, tmp_path / f"a{n}", modules=modules, seed=n, rank=4 * n) for n in (1, 2)]
    models = [model, *[merge(model, adapter) for adapter in adapters]]
    llm = LLM(
        str(tmp_path / "model"), dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8, max_model_len=256,
        kv_cache_memory_bytes=64 << 20, seed=0, **options,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    loras = [None, *[LoRARequest(f"a{n}", n, adapter.path) for n, adapter in enumerate(adapters, 1)]]
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in loras]
    answers = llm.generate(prompts, params, lora_request=loras * len(PROMPTS), use_tqdm=False)
    llm.close()
    expected = [greedy(one, prompt, 8) for prompt in PROMPTS for one in models]
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 255, 256])
def test_kernels_in_a_graph(rows: int, dtype: torch.dtype) -> None:
    """A replay sees the slots of its rows and what lies in them then, bit for bit as without a graph; a row's bits are
    those that it has alone."""
    from quire.ops.lora import AdapterRows
    from quire.ops.triton.lora import add_low_rank

    case = LowRankCase([slot * 7 % 5 for slot in range(rows)], dtype, "cuda", rank=16)
    x, y, index = case.x.clone(), case.y.clone(), torch.zeros_like(case.rows.index)
    captured = AdapterRows(index)
    add_low_rank(y.clone(), x, captured, case.low, early=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = add_low_rank(y.clone(), x, captured, case.low, early=True)
    graph.replay()
    assert torch.equal(out, case.y)  # no row has an adapter
    for turn in range(3):
        index.copy_((case.rows.index + turn) % 5)
        if turn == 2:  # slots change hands
            case.low.put(1, case.slots[1])
            case.low.put(3, ())
        graph.replay()
        eager = add_low_rank(case.y.clone(), case.x, AdapterRows(index.clone()), case.low)
        assert torch.equal(out, eager)
        for row in {0, rows // 2, rows - 1}:
            own = slice(row, row + 1)
            alone = add_low_rank(case.y[own].clone(), case.x[own], AdapterRows(index[own].clone()), case.low)
            assert torch.equal(alone[0], out[row])


def _watch(llm: LLM) -> tuple[Any, list[int], list[int]]:
    """The runner, and the buckets that are replayed from now on: without adapters, and with."""
    runner: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    used: list[list[int]] = [[], []]

    def replay(graphs: Any, seen: list[int], plain: Any) -> None:
        graphs.replay = lambda bucket: seen.append(bucket) or plain(bucket)

    for graphs, seen in zip((runner.graphs, runner.adapter_graphs), used, strict=True):
        replay(graphs, seen, graphs.replay)
    return runner, used[0], used[1]


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_graphs_have_the_bits_of_steps_without(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batch-invariant mode, where padding to a bucket changes nothing: tokens and every log probability."""
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    model = make_tiny(arch, tmp_path / "model")
    adapters = [
        write_adapter(model, tmp_path / f"a{n}", modules=linear_modules(model, targets), seed=n, rank=4 * n)
        for n, targets in ((1, ("q_proj", "v_proj")), (2, None))
    ]
    loras = [None, *[LoRARequest(f"a{n}", n, adapter.path) for n, adapter in enumerate(adapters, 1)]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in loras]
    found = []
    for options in ({}, {"enforce_eager": True}):
        llm = LLM(
            str(tmp_path / "model"), dtype="bfloat16", enable_lora=True, max_loras=2, max_lora_rank=8,
            max_model_len=256, kv_cache_memory_bytes=64 << 20, seed=0, **options,
        )  # fmt: skip
        with_adapters = [] if options else _watch(llm)[2]
        answers = llm.generate(prompts, params, lora_request=loras * len(PROMPTS), use_tqdm=False)
        assert bool(with_adapters) == (not options)
        llm.close()
        found.append([
            [(token, {t: entry.logprob for t, entry in row.items()}) for token, row in zip(
                answer.outputs[0].token_ids, answer.outputs[0].logprobs or [], strict=True)]
            for answer in answers
        ])  # fmt: skip
    assert found[0] == found[1]


def test_replays_after_adapters_changed(tmp_path: Path) -> None:
    """Added, replaced, removed, of further layers, and of layers that no graph holds; base steps replay their own."""
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    some, every = linear_modules(model, ("q_proj", "v_proj")), linear_modules(model, None)
    ends = linear_modules(model, ("embed_tokens", "lm_head"))
    modules = {"some": some, "other": some, "every": every, "ends": some | ends}
    written = {
        name: write_adapter(model, tmp_path / name, modules=own, seed=seed, rank=4)
        for seed, (name, own) in enumerate(modules.items(), 1)
    }
    merged = {name: merge(model, adapter) for name, adapter in written.items()} | {"": model}
    llm = LLM(
        str(tmp_path / "model"), dtype="float32", enable_lora=True, max_loras=2, max_cpu_loras=4, max_lora_rank=8,
        max_model_len=256, kv_cache_memory_bytes=64 << 20, seed=0,
    )  # fmt: skip
    runner, plain, adapted = _watch(llm)
    numbers = {name: number for number, name in enumerate(written, 1)}

    def ask(*names: str) -> None:
        loras = [LoRARequest(n, numbers[n], written[n].path) if n else None for n in names]
        prompts: Any = [{"prompt_token_ids": PROMPTS[i % 3]} for i in range(len(names))]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answers = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        wanted = [greedy(merged[name], PROMPTS[i % 3], 8) for i, name in enumerate(names)]
        assert [list(answer.outputs[0].token_ids) for answer in answers] == wanted, names

    ask("", "")
    assert plain and not adapted
    ask("some")  # while its file is read, base requests beside it would run in steps of their own
    count = len(plain)
    ask("some", "", "some")
    assert adapted and len(plain) == count
    ask("other", "some")
    ask("every", "", "other", "some")
    before = len(adapted)
    ask("ends", "")
    assert len(adapted) == before
    written["some"] = write_adapter(model, tmp_path / "again", modules=some, seed=9, rank=8)
    merged["some"] = merge(model, written["some"])
    ask("some", "")
    assert llm.llm_engine.remove_lora(numbers["every"])
    ask("other", "some", "")
    assert len(adapted) > before
    llm.close()
    assert runner.adapter_graphs.sizes[-1] <= 256


def test_steady_decodes_with_adapters_never_wait(tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    paths = [write_adapter(model, tmp_path / f"a{n}", seed=n, rank=4).path for n in (1, 2)]
    llm = LLM(
        str(tmp_path / "model"), dtype="bfloat16", enable_lora=True, max_loras=2, max_lora_rank=8, max_model_len=256,
        kv_cache_memory_bytes=64 << 20, seed=0,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for i in range(6):
        lora = LoRARequest(f"a{i % 3}", i % 3, paths[i % 3 - 1]) if i % 3 else None
        llm.llm_engine.add_request(f"r{i}", {"prompt_token_ids": PROMPTS[i % 3]}, params, lora_request=lora)
    loop = llm.llm_engine.front.client.loop
    while loop.scheduler.num_waiting or loop.scheduler.num_running < 6:
        llm.llm_engine.step()
    for _ in range(4):
        llm.llm_engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            llm.llm_engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    llm.close()
