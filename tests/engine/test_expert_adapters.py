"""Adapters of experts that several engines share (data parallel and expert parallel), as processes: the answers of one
engine, whichever engine has which adapters; one that cannot be read fails its own requests, and nobody waits for it.
tests/models/test_adapter_engines.py has more architectures, with engines as threads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
from quire.schema.errors import InputError
from tests.engine.lora_answers import NUM_TOKENS, PROMPT, check_like_merged, start
from tests.tiny_adapters import TinyAdapter, expert_modules, linear_modules, write_adapter
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
SHARED: dict[str, Any] = dict(data_parallel_size=2, enable_expert_parallel=True)
OPTIONS: dict[str, Any] = dict(
    device="cpu", dtype="float32", enable_lora=True, max_loras=1, max_cpu_loras=2, max_lora_rank=8, max_model_len=64,
    kv_cache_memory_bytes=1 << 24,
)  # fmt: skip
Answer = tuple[list[int], list[float]]  # tokens, and their log probabilities


def write_three(model: Any, folder: Path) -> list[TinyAdapter]:
    """Of experts and all else, of other experts only, of none."""
    everything = linear_modules(model, None) | expert_modules(model, (0, 1, 3))
    return [
        write_adapter(model, folder / "everything", modules=everything, rank=5, seed=1),
        write_adapter(model, folder / "experts", modules=expert_modules(model, (1, 2)), rank=8, seed=2, strength=1.0),
        write_adapter(model, folder / "attention", targets=("q_proj", "o_proj"), rank=8, seed=3),
    ]


def answer_of(output: Any) -> Answer:
    (one,) = output.outputs
    tokens = list(one.token_ids)
    return tokens, [table[token].logprob for token, table in zip(tokens, one.logprobs, strict=True)]


PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


class Engines:
    """Two that share experts, and what one that has all of them answers with the same adapters."""

    def __init__(self, folder: Path, wanted: dict[str, Answer]) -> None:
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **OPTIONS, **SHARED))
        self._wanted, self._names = wanted, itertools.count()

    async def answer(self, engine: int, lora: LoRARequest | None) -> Answer:
        prompt: Any = {"prompt_token_ids": PROMPT}
        stream = self.llm.generate(
            prompt, PARAMS, f"r{next(self._names)}", lora_request=lora, data_parallel_rank=engine
        )
        last = [output async for output in stream][-1]
        return answer_of(last)

    async def check(self, *asked: tuple[int, LoRARequest | None]) -> None:
        """All at once."""
        answers = await asyncio.wait_for(asyncio.gather(*(self.answer(*one) for one in asked)), 60)
        for (engine, lora), (tokens, scores) in zip(asked, answers, strict=True):
            wanted, expected = self._wanted["" if lora is None else lora.lora_path]
            assert tokens == wanted, (engine, lora)
            assert scores == pytest.approx(expected, abs=1e-4), (engine, lora)

    async def refused(self, engine: int, lora: LoRARequest) -> None:
        with pytest.raises(InputError, match=lora.lora_name):
            await asyncio.wait_for(self.answer(engine, lora), 60)


def wanted_of(folder: Path, adapters: Sequence[TinyAdapter]) -> dict[str, Answer]:
    """By the adapter's folder."""
    loras = [None, *[LoRARequest(f"a{i}", i, adapter.path) for i, adapter in enumerate(adapters, 1)]]
    prompts: Any = [{"prompt_token_ids": PROMPT}] * len(loras)
    with start(folder, device="cpu") as llm:
        outputs = llm.generate(prompts, PARAMS, lora_request=loras, use_tqdm=False)
    answers = {"" if lora is None else lora.lora_path: answer_of(one) for lora, one in zip(loras, outputs, strict=True)}
    assert len({tuple(scores) for _, scores in answers.values()}) == len(loras), "adapters change nothing"
    return answers


def test_two_engines_answer_as_one(tmp_path: Path) -> None:
    """With one slot and room for two adapters in each."""
    model = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model")
    adapters = write_three(model, tmp_path)
    engines = Engines(tmp_path / "model", wanted_of(tmp_path / "model", adapters))
    first, second, third = (LoRARequest(f"a{i}", i, one.path) for i, one in enumerate(adapters, 1))
    broken = write_adapter(model, tmp_path / "broken", modules=expert_modules(model, (0,)), rank=16, seed=4)

    async def scene() -> None:
        llm = engines.llm
        assert llm.vllm_config.parallel_config.experts_span_engines
        await engines.check((0, first), (1, second), (0, None), (1, None), (1, third))
        await engines.check((0, second), (0, first), (0, third))  # the other one rests, then idles beside
        await engines.check((1, None), (1, first))
        await engines.check(*[(engine, lora) for lora in (first, second, third, None) for engine in (0, 1, 1)])
        bad, gone = LoRARequest("broken", 4, broken.path), LoRARequest("gone", 5, str(tmp_path / "gone"))
        await asyncio.gather(
            engines.check((0, first), (1, second)), engines.refused(0, bad), engines.refused(1, bad),
            engines.refused(1, gone), engines.check((1, None), (0, third)),
        )  # fmt: skip
        assert await llm.add_lora(second) and await llm.remove_lora(1)
        await engines.check((1, second), (0, LoRARequest("a1", 1, third.lora_path)))  # another folder under the same id
        await engines.check((0, LoRARequest("a1", 1, first.lora_path)), (1, LoRARequest("a1", 1, third.lora_path)))
        llm.shutdown()

    asyncio.run(scene())


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        dict(tensor_parallel_size=2, fully_sharded_loras=True, expert_placement_strategy="round_robin"),
        dict(pipeline_parallel_size=2),
        dict(enable_eplb=True, eplb_config={"step_interval": 2, "num_redundant_experts": 1}),
    ],
    ids=["ranks", "stages", "moving"],
)
def test_ranks_of_engines(more: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model")
    adapters = write_three(model, tmp_path)
    with start(tmp_path / "model", max_loras=3, **SHARED, **more) as llm:
        for _ in range(3):
            check_like_merged(llm, model, adapters, different=4)
        moved = llm.collective_rpc("tests.rank_probe:moves_of")
        assert all((count > 0) is ("enable_eplb" in more) for _, count in moved)
