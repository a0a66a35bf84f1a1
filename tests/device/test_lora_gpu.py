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


@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.bfloat16, 16), (torch.float16, 24)])
def test_all_slots_at_once(rows: int, dtype: torch.dtype, rank: int) -> None:
    from quire.ops.triton.lora import add_low_rank

    case = LowRankCase([slot * 7 % 5 for slot in range(rows)], dtype, "cuda", rank=rank, as_columns=True)
    result, right = add_low_rank(case.y.clone(), case.x, case.rows, case.low, early=True).cpu(), case.expected()
    assert ((result.double() - right).norm() / right.norm()).item() < (1e-5 if dtype is torch.float32 else 1e-2)
    base = case.rows.index.cpu() == 0
    assert torch.equal(result[base], case.y.cpu()[base])


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


@pytest.fixture
def skinny() -> Any:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has these instructions")
    return pytest.importorskip("quire.ops.triton.skinny")


@pytest.mark.parametrize("rows", [1, 8, 17, 32])
@pytest.mark.parametrize(("dtype", "rank"), [(torch.bfloat16, 16), (torch.bfloat16, 64), (torch.float16, 8)])
def test_columns_of_matmuls(rows: int, dtype: torch.dtype, rank: int, skinny: Any) -> None:
    """Adapters added by the matmuls of few rows: against float64, in a graph whose rows change slots; rows without have
    the bits of a matmul without."""
    from quire.ops.lora import AdapterRows, AddedLowRank
    from quire.ops.triton import act

    silu = act.gated_form(act.SILU, False)
    for parts, width in (((128, 64, 64), 384), ((320, 64, 128), 1024), ((192, 192), 512)):
        case = LowRankCase([slot * 7 % 5 for slot in range(rows)], dtype, "cuda", rank=rank, parts=parts, width=width,
                           as_columns=True)  # fmt: skip
        weight = (torch.randn(sum(parts), width, generator=torch.Generator().manual_seed(rows)) * width**-0.5).to(dtype)
        plain, weight = case.x.cpu().double() @ weight.double().t(), weight.cuda()
        index = torch.zeros_like(case.rows.index)
        added = AddedLowRank(AdapterRows(index), case.low)
        assert skinny.adds(weight, case.low)

        def multiply(x: Any = case.x, weight: Any = weight, added: Any = added, gated: bool = len(parts) == 2) -> Any:
            if gated:
                return skinny.linear_act(x, weight, None, silu, added, codes={silu: act.SILU}, early=True)
            return skinny.linear_parts(x, weight, None, added, processors=132, early=True).sums

        def wanted(plain: Any = plain, case: Any = case, gated: bool = len(parts) == 2) -> Any:
            y = case.expected(plain)
            gate, up = y.chunk(2, 1) if gated else (y, y)
            return (torch.nn.functional.silu(gate) * up if gated else y).float()

        without = multiply(added=None)
        multiply()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = multiply()
        graph.replay()
        assert torch.equal(out, without)  # no row has an adapter
        for turn in range(3):
            case.rows = AdapterRows((case.rows.index + turn) % 5)
            index.copy_(case.rows.index)
            if turn == 2:  # slots change hands
                case.low.put(1, case.slots[1])
                case.low.put(3, ())
                case.slots[0], case.slots[2] = case.slots[1], ()
            out.fill_(torch.nan)
            graph.replay()
            found, right = (out if len(parts) == 2 else out.sum(0)).float().cpu(), wanted()
            assert ((found - right).norm() / right.norm()).item() < 1e-2
            assert (found - right).abs().max() <= 4e-2 * right.abs().max()
            base = index == 0
            assert torch.equal(out[..., base, :], without[..., base, :])


def test_what_does_not_fit_into_columns(skinny: Any) -> None:
    """Other dtypes, ranks, or parts that do not begin at a tile: the kernels of any shape add it."""
    from quire.ops.lora import AddedLowRank

    half = torch.bfloat16
    for rank, parts, stored in ((24, (128, 64, 64), half), (16, (130, 40, 40), half), (16, (128, 64), torch.float32)):
        case = LowRankCase([1, 2, 0, 3], stored, "cuda", rank=rank, parts=parts, width=384, as_columns=True)
        weight = torch.randn(sum(parts), 384, dtype=half, device="cuda") / 20
        assert not skinny.adds(weight, case.low)
        x, case.x = case.x.to(half), case.x.to(half)
        found = (
            skinny.linear_parts(x, weight, None, AddedLowRank(case.rows, case.low), processors=132)
            .whole()
            .float()
            .cpu()
        )
        right = case.expected(x.cpu().double() @ weight.cpu().double().t()).float()
        assert ((found - right).norm() / right.norm()).item() < 2e-2


def test_engine_in_16_bits(tmp_path: Path, skinny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities beside those of merged weights in float32; steps of few rows add adapters in their matmuls."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 32}  # fmt: skip
    model = make_tiny("LlamaForCausalLM", tmp_path / "model", **sizes)
    adapters = [
        write_adapter(model, tmp_path / f"a{n}", modules=linear_modules(model, targets), seed=n, rank=8 * n)
        for n, targets in ((1, ("q_proj", "v_proj")), (2, None))
    ]
    models, count = [model, *[merge(model, adapter) for adapter in adapters]], 0
    shrunk = skinny._shrunk

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return shrunk(*args, **named)

    monkeypatch.setattr(skinny, "_shrunk", counted)
    llm = LLM(
        str(tmp_path / "model"), dtype="bfloat16", enable_lora=True, max_loras=2, max_lora_rank=16, max_model_len=256,
        kv_cache_memory_bytes=64 << 20, seed=0,
    )  # fmt: skip
    loras = [None, *[LoRARequest(f"a{n}", n, adapter.path) for n, adapter in enumerate(adapters, 1)]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in loras]
    answers = llm.generate(prompts, params, lora_request=loras * len(PROMPTS), use_tqdm=False)
    llm.close()
    assert count  # in a step or, where the start had captured graphs for all of them, in these
    for number, answer in enumerate(answers):
        prompt, out = PROMPTS[number // 3], answer.outputs[0]
        tokens = list(out.token_ids)
        found = torch.tensor([row[token].logprob for token, row in zip(tokens, out.logprobs or [], strict=True)])
        distances = []
        for one in models:
            with torch.no_grad():
                logits = one(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            right = logits.float().log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
            distances.append((found - right).abs().mean().item())
        assert distances[number % 3] < 0.6  # bfloat16 moves this model by 0.4 on a CPU, without adapters by 0.3
        assert min(distances[: number % 3] + distances[number % 3 + 1 :]) > 5 * distances[number % 3]


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
