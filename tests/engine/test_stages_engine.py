"""Pipeline parallelism through the whole engine. Stages are threads where that shows all there is to see, and processes
for what depends on them: their wire, their death. `make ranks` adds two ranks in each of two stages."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.base import env
from quire.schema.errors import EngineDeadError
from tests.engine.test_ranks_engine import LINEARS, OPTIONS, answers, gone
from tests.thread_stages import PATIENCE, ThreadStages
from tests.tiny_adapters import write_adapter
from tests.tiny_models import make_tiny, write_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
THREADS = "tests.thread_stages:ThreadStages"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_adapter(make_tiny("LlamaForCausalLM", made), made / "adapter", targets=(*LINEARS, "lm_head", "embed_tokens"))
    return made


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    yield
    ThreadStages.watch = None


def all_of(llm: LLM, folder: Path) -> list[Any]:
    try:
        return answers(llm, folder)
    finally:
        llm.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return all_of(LLM(str(folder), enable_lora=True, **OPTIONS), folder)


def test_two_processes_answer_as_one(folder: Path, expected: list[Any]) -> None:
    """Greedy and drawn tokens, penalties, log probabilities of outputs and prompts, a grammar, an adapter: all bits."""
    llm = LLM(str(folder), pipeline_parallel_size=2, enable_lora=True, **OPTIONS)
    assert llm.collective_rpc("tests.rank_probe:rank_of") == [0, 1]
    parallel = llm.llm_engine.vllm_config.parallel_config
    assert (parallel.world_size, parallel.distributed_executor_backend) == (2, "mp")
    assert all_of(llm, folder) == expected


def test_two_ranks_in_each_of_two_stages(folder: Path, expected: list[Any], request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--every-architecture"):
        pytest.skip("five processes: make ranks")
    llm = LLM(str(folder), tensor_parallel_size=2, pipeline_parallel_size=2, enable_lora=True, **OPTIONS)
    assert llm.collective_rpc("tests.rank_probe:rank_of") == [0, 1, 2, 3]
    tokens = [[one[0] for one in result[:-1]] for result in all_of(llm, folder)]
    assert tokens == [[one[0] for one in result[:-1]] for result in expected]


@pytest.mark.parametrize("stages", [2, 4])
def test_threads_answer_as_one(stages: int, folder: Path, expected: list[Any]) -> None:
    llm = LLM(
        str(folder), pipeline_parallel_size=stages, distributed_executor_backend=THREADS, enable_lora=True, **OPTIONS
    )
    assert all_of(llm, folder) == expected


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Qwen3NextForCausalLM", "DeepseekV2ForCausalLM"])
def test_short_of_blocks_in_chunks_with_prefixes(name: str, tmp_path: Path) -> None:
    """Windows, states and latent attention; prompts that share a prefix, in chunks; too few blocks for all at once."""
    write_tiny(name, tmp_path)
    options = OPTIONS | dict(num_gpu_blocks_override=22, max_num_batched_tokens=16, block_size=8)
    shared = [(7 * i) % 90 + 3 for i in range(26)]
    prompts = [{"prompt_token_ids": [*shared, 5 + i, 9, 11]} for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens, preempted = [], 0
    for more in ({}, dict(pipeline_parallel_size=2, distributed_executor_backend=THREADS)):
        llm = LLM(str(tmp_path), **options, **more)
        try:
            scheduler = llm.llm_engine.front.client.loop.scheduler
            plain = scheduler.planner.preempt

            def counted(request: Any, plain: Any = plain) -> None:
                nonlocal preempted
                preempted += 1
                plain(request)

            scheduler.planner.preempt = counted
            done = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            tokens.append([[one.outputs[0].token_ids for one in turn] for turn in done])
        finally:
            llm.close()
    assert tokens[0] == tokens[1] and preempted > 0


def test_both_stages_work_at_the_same_time(folder: Path) -> None:
    """The second stage does not end a step before the first has begun the next one, while there is a next one: without
    several plans under way, that never happens."""
    begun, plans = threading.Condition(), []
    steps: dict[int, set[int]] = {0: set(), 1: set()}
    out: set[int] = set()
    waited = 0

    def watch(what: str, stage: int, step: int) -> None:
        nonlocal waited
        with begun:
            if what == "begin":
                steps[stage].add(step)
                out.add(step)
                plans.append(len(out))
                begun.notify_all()
            elif stage == 1:
                if waited < 10 and 0 < step < 12:
                    assert begun.wait_for(lambda: max(steps[0]) > step, PATIENCE), "one plan at a time"
                    waited += 1
                out.discard(step)

    ThreadStages.watch = watch
    llm = LLM(str(folder), pipeline_parallel_size=2, distributed_executor_backend=THREADS, **OPTIONS)
    try:
        prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(4)]
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        assert all(len(one.outputs[0].token_ids) == 16 for one in llm.generate(prompts, params, use_tqdm=False))
        scheduler = llm.llm_engine.front.client.loop.scheduler
        assert (scheduler.settings.depth, scheduler.settings.overlap) == (2, 1)
    finally:
        llm.close()
    assert waited == 10 and max(plans) == 2


def test_an_abort_in_the_middle_and_a_killed_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)

    async def scene() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), pipeline_parallel_size=2, **OPTIONS))
        begun = asyncio.Event()

        async def ask(name: str, turns: int = 1000) -> Any:
            tokens: list[int] = []
            try:
                for turn in range(turns):
                    async for one in llm.generate({"prompt_token_ids": [5, 6]}, params, f"{name} {turn}"):
                        tokens = list(one.outputs[0].token_ids)
                        begun.set()
            except EngineDeadError as dead:
                return str(dead)
            return tokens

        whole = await ask("first", 1)
        begun.clear()
        others = [asyncio.create_task(ask(f"other {i}", 1)) for i in range(2)]
        aborted = asyncio.create_task(ask("aborted", 1))
        await asyncio.wait_for(begun.wait(), 60)
        aborted.cancel()
        for tokens in await asyncio.wait_for(asyncio.gather(*others), 60):
            assert tokens == whole and len(tokens) == 90
        begun.clear()
        asking = [asyncio.create_task(ask(f"request {i}")) for i in range(3)]
        await asyncio.wait_for(begun.wait(), 60)
        pids = await llm.collective_rpc("tests.rank_probe:pid_of")
        os.kill(pids[0], signal.SIGKILL)
        for said in await asyncio.wait_for(asyncio.gather(*asking), 60):
            assert f"engine is dead: worker 0, pipeline stage 0 (process {pids[0]}) was killed by SIGKILL" in said
        llm.shutdown()
        for _ in range(600):
            if all(map(gone, pids)):
                break
            await asyncio.sleep(0.1)
        assert all(map(gone, pids))

    asyncio.run(scene())
