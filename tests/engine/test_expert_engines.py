"""Experts divided among the ranks of several engines (data parallel and expert parallel): the answers of one engine, no
deadlock whoever has requests, and one end for all; and experts that move between ranks meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.schema.errors import EngineDeadError
from tests.tiny_models import VOCAB, write_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
OPTIONS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_model_len=96, num_gpu_blocks_override=60, max_num_batched_tokens=48
)
SPREAD: dict[str, Any] = dict(data_parallel_size=2, enable_expert_parallel=True)
MOVING: dict[str, Any] = dict(enable_eplb=True, eplb_config={"step_interval": 5, "num_redundant_experts": 1})
STAGES: dict[str, Any] = dict(pipeline_parallel_size=2)


def prompts(seed: int, count: int = 5) -> list[Any]:
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(4, VOCAB) for _ in range(rng.choice((2, 9, 40, 70)))]} for _ in range(count)
    ]


def answers(folder: Path, **options: Any) -> tuple[list[list[int]], list[list[float]], list[Any]]:
    """Of requests that end at different times: tokens, their log probabilities, and experts by rank. Twice, because
    weights that are read again must come to where their experts are by then."""
    params = [SamplingParams(temperature=0.0, max_tokens=4 + 5 * i, ignore_eos=True, logprobs=0) for i in range(5)]
    with LLM(str(folder), **OPTIONS, **options) as llm:
        done = [one.outputs[0] for one in llm.generate(prompts(3), params, use_tqdm=False)]
        steps, moved = zip(*llm.collective_rpc("tests.rank_probe:moves_of"), strict=True)
        assert len(set(steps)) == 1 and (min(moved) > 0) is ("enable_eplb" in options)
        if moved[0]:
            llm.collective_rpc("reload_weights")
            assert llm.reset_prefix_cache()
            again = [one.outputs[0] for one in llm.generate(prompts(3), params, use_tqdm=False)]
            assert [one.token_ids for one in again] == [one.token_ids for one in done]
        tables = [
            [table[token].logprob for token, table in zip(one.token_ids, one.logprobs, strict=True)] for one in done
        ]
        return [list(one.token_ids) for one in done], tables, llm.collective_rpc("tests.rank_probe:experts_of")


@pytest.mark.parametrize(
    ("mixture", "placement", "ranks", "other"),
    [
        ("Qwen3MoeForCausalLM", "round_robin", 2, {}),
        ("Llama4ForCausalLM", "linear", 1, MOVING),  # where weights multiply what goes in: a row for each choice
        ("MixtralForCausalLM", "linear", 1, STAGES),
        pytest.param("Qwen3MoeForCausalLM", "linear", 2, STAGES, marks=pytest.mark.long),  # eight processes
    ],
)
def test_two_engines_with_half_of_the_experts_each_answer_as_one(
    mixture: str, placement: str, ranks: int, other: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny(mixture, tmp_path)
    tokens, logprobs, (whole,) = answers(tmp_path)
    more = dict(expert_placement_strategy=placement, tensor_parallel_size=ranks, **SPREAD, **other)
    shared_tokens, shared_logprobs, shares = answers(tmp_path, **more)
    assert shared_tokens == tokens
    for own, expected in zip(shared_logprobs, logprobs, strict=True):
        assert own == pytest.approx(expected, abs=1e-4)
    copies, stages = 1 if other == MOVING else 0, 2 if other == STAGES else 1
    assert len(shares) == 2 * ranks * stages
    if stages > 1:  # workers of an engine follow each other, stage by stage: each stage has its own layers
        engines = [shares[: len(shares) // 2], shares[len(shares) // 2 :]]
        shares = [first + second for own in engines for first, second in zip(own[:ranks], own[ranks:], strict=True)]
    assert [sum(layer) - copies for layer in zip(*shares, strict=True)] == whole
    assert all(0 < own < every for share in shares for own, every in zip(share, whole, strict=True))


@pytest.mark.parametrize("other", [MOVING, STAGES], ids=["moving", "stages"])
def test_whoever_has_requests_nobody_waits_for_ever_and_all_end_together(
    other: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Requests of one engine only, of both, come and go, some are given up; then one engine is killed."""
    if other == STAGES and not request.config.getoption("--every-architecture"):
        pytest.skip("--every-architecture")
    write_tiny("MixtralForCausalLM", tmp_path)
    rng, choices = random.Random(7), prompts(5, 12)

    async def ask(llm: AsyncLLM, name: str, engine: int | None, length: int, gives_up: bool) -> int:
        params, count = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True), 0
        async for output in llm.generate(rng.choice(choices), params, name, data_parallel_rank=engine):
            count = len(output.outputs[0].token_ids)
            if gives_up and count > length // 2:
                await llm.abort(name)
                break
        return count

    async def scene() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tmp_path), **OPTIONS, **SPREAD, **other))
        for turn in range(12):
            engines = [[0], [1], [0, 1, None, 1], [None] * 6][turn % 4]
            lengths = [rng.randrange(1, 12) for _ in engines]
            asked = [
                ask(llm, f"{turn}-{i}", engine, length, rng.random() < 0.3)
                for i, (engine, length) in enumerate(zip(engines, lengths, strict=True))
            ]
            counts = await asyncio.wait_for(asyncio.gather(*asked), 120)
            assert all(counts)
            if rng.random() < 0.3:
                await asyncio.sleep(0.05)  # all engines come to rest
        counted = await llm.collective_rpc("tests.rank_probe:moves_of")
        assert counted[0] == counted[1] and (min(counted[0]) > 0) is (other == MOVING)
        endless = [asyncio.create_task(ask(llm, f"last-{i}", 0, 90, False)) for i in range(2)]
        pids = await llm.collective_rpc("tests.rank_probe:pid_of")
        os.kill(pids[-1], signal.SIGKILL)
        who = r"engine 1: worker 1, pipeline stage 1" if other == STAGES else "engine 1"
        for one in endless:
            with pytest.raises(EngineDeadError, match=rf"{who} \(process \d+\) was killed by SIGKILL.* cannot go on"):
                while await asyncio.wait_for(one, 60):
                    one = asyncio.create_task(ask(llm, f"again-{id(one)}", 0, 90, False))
        with pytest.raises(EngineDeadError, match="engine 1"):
            await ask(llm, "later", 0, 2, False)
        llm.shutdown()

    asyncio.run(scene())
