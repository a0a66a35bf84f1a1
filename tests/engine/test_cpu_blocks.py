"""Blocks that follow each other in one compiled call: the same bits as one by one, and each where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.attention.cpu import CpuAttention
from quire.base import env
from quire.config import EngineArgs
from quire.loader.load import load_model
from quire.ops.cpu.block import BlocksCall
from quire.ops.cpu.native import kernels
from tests import paged
from tests.tiny_adapters import write_adapter
from tests.tiny_models import make_tiny, write_tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
PROMPTS = [{"prompt_token_ids": [7, 9, 30, 4, 11, 80, 21, 6, 45]}, {"prompt_token_ids": [5, 6]}]


def answers(llm: LLM) -> list[Any]:
    return bits(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def bits(outputs: list[Any]) -> list[Any]:
    return [[sorted((t, e.logprob) for t, e in entry.items()) for entry in one.outputs[0].logprobs] for one in outputs]


# one rotation; full and window groups in turn; a dense layer before mixtures; two rotations and none
@pytest.mark.parametrize(
    ("arch", "stretches"),
    [
        ("LlamaForCausalLM", [4]),
        ("MinistralForCausalLM", [4]),
        ("Dots1ForCausalLM", [1, 0]),
        ("SmolLM3ForCausalLM", [4]),
    ],
)
def test_one_call_or_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, stretches: list[int]
) -> None:
    layers = {} if arch in ("Dots1ForCausalLM", "MinistralForCausalLM") else {"num_hidden_layers": 4}
    write_tiny(arch, tmp_path, **layers)
    sizes: list[int] = []
    run = BlocksCall.__call__
    monkeypatch.setattr(BlocksCall, "__call__", lambda self, *given: sizes.append(self._count) or run(self, *given))
    llm = LLM(
        str(tmp_path), quantization="int8_wo", max_model_len=64, kv_cache_memory_bytes=8 << 20, device="cpu",
        enable_prefix_caching=False,
    )  # fmt: skip
    try:
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        assert [len(stretch._wholes) for stretch in model._stretches] == stretches
        at_once = answers(llm)
        assert sizes and set(sizes) == {count for count in stretches if count}
        sizes.clear()
        seen: list[int] = []
        hook = model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        assert answers(llm) == at_once and seen and not sizes  # whoever watches a layer sees it
        hook.remove()
        model.finish_weights()  # new objects: addresses are taken again
        assert answers(llm) == at_once and sizes
    finally:
        llm.close()


@pytest.fixture
def same_bits() -> Iterator[None]:
    """Which requests share a step depends on when adapters are read: bits must not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_BATCH_INVARIANT", "1")
        env.forget_all()
        yield
    env.forget_all()


@pytest.mark.parametrize("options", [{"quantization": "int8_wo"}, {"dtype": "bfloat16"}, {"lora_dtype": "bfloat16"}])
def test_adapters_in_one_call_or_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_bits: None, options: dict[str, Any]
) -> None:
    """Steps of the base model and two adapters, one of which takes the other's slot later."""
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    loras = [
        LoRARequest(f"a{n}", n, write_adapter(model, tmp_path / f"a{n}", seed=n, rank=(2, 8, 5)[n - 1]).path)
        for n in (1, 2, 3)
    ]
    with_adapters: list[bool] = []
    run, refuses = BlocksCall.__call__, False

    def counted(self: BlocksCall, x: Any, delta: Any, turns: Any, rows: Any = None) -> Any:
        if refuses and rows is not None:
            return None
        with_adapters.append(rows is not None)
        return run(self, x, delta, turns, rows)

    monkeypatch.setattr(BlocksCall, "__call__", counted)

    def both() -> list[Any]:
        prompts: Any = [PROMPTS[0]] * 3 + [PROMPTS[1]]
        requests = [[None, loras[0], loras[1], loras[0]], [loras[2], loras[0], None, loras[2]]]
        return [bits(llm.generate(prompts, PARAMS, lora_request=some, use_tqdm=False)) for some in requests]

    with LLM(
        str(tmp_path / "model"), max_model_len=64, kv_cache_memory_bytes=8 << 20, device="cpu", enable_lora=True,
        max_loras=2, max_lora_rank=8, enable_prefix_caching=False, **options,
    ) as llm:  # fmt: skip
        at_once = both()
        assert any(with_adapters)
        assert len({str(one) for one in at_once[0] + at_once[1]}) == 6, "of eight, two are asked twice"
        refuses = True
        with_adapters.clear()
        assert both() == at_once and not any(with_adapters)


def test_weights_that_are_replaced_are_read_from_then_on(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    config = EngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True).create_engine_config()
    model: Any = load_model(config, "cpu")
    run = paged.Paged(model, [prompt["prompt_token_ids"] for prompt in PROMPTS], block_size=4)

    def logits() -> torch.Tensor:
        run.done = [0, 0]
        return torch.cat(run.whole())

    before = logits()
    assert all(stretch._call is not None for stretch in model._stretches)
    down = model.layers[0].mlp.down
    down.weight = torch.nn.Parameter(2 * down.weight, requires_grad=False)
    model.finish_weights()
    after = logits()
    assert (after - before).norm() > 1e-3 * before.norm()
    hook = model.layers[0].register_forward_hook(lambda *_: None)  # layer by layer
    torch.testing.assert_close(after, logits(), rtol=1e-4, atol=1e-4)
    hook.remove()


class ForeignCache:
    """A cache of a backend that the kernels know nothing of: only that backend can look inside."""

    def __init__(self, inside: Any) -> None:
        self.spec, self.inside = inside.spec, inside


class ForeignPlan:
    run_fused = None

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def run(self, q: Any, k: Any, v: Any, cache: Any, **given: Any) -> Any:
        return self._plan.run(q, k, v, cache.inside, **given)


class ForeignAttention(CpuAttention):
    def __init__(self) -> None:
        super().__init__(native=False)
        inside = self.plan
        self.plan = lambda *given: ForeignPlan(inside(*given))

    def make_cache(self, *given: Any) -> Any:
        return ForeignCache(super().make_cache(*given))


def test_another_backend_s_cache_leaves_blocks_to_their_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    config = EngineArgs(
        model=str(tmp_path), dtype="float32", max_model_len=64, skip_tokenizer_init=True
    ).create_engine_config()
    model: Any = load_model(config, "cpu")
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    wanted = paged.Paged(model, prompts, block_size=4).whole()
    assert all(stretch._call is not None for stretch in model._stretches)
    monkeypatch.setattr(paged, "select_backend", lambda *_: ForeignAttention())
    found = paged.Paged(model, prompts, block_size=4).whole()
    assert all(stretch._wholes and stretch._call is None for stretch in model._stretches)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
