"""Tensor parallelism through the whole engine: worker processes that share a model answer as one, and fail as one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
from quire.base import env
from quire.ops.cpu.native import kernels
from quire.schema.errors import EngineDeadError
from quire.schema.params import StructuredOutputsParams
from tests.pooling_models import make_pooling
from tests.tiny_adapters import write_adapter
from tests.tiny_models import make_tiny, write_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
PROMPTS = [
    {"prompt_token_ids": [7, 9, 30, 4, 11, 80, 21, 6, 45]},
    {"prompt_token_ids": [5, 6]},
    {"prompt_token_ids": [200, 12, 33, 150, 99, 41]},
]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc"]}, "n": {"type": "integer"}},
    "required": ["kind"],
}
OPTIONS: dict[str, Any] = dict(device="cpu", dtype="float32", max_model_len=96, num_gpu_blocks_override=60)


def pids_of(llm: LLM) -> list[int]:
    return llm.collective_rpc("tests.rank_probe:pid_of")


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_adapter(make_tiny("LlamaForCausalLM", made), made / "adapter", targets=(*LINEARS, "lm_head", "embed_tokens"))
    return made


def requests() -> tuple[list[Any], list[SamplingParams]]:
    """Greedy and drawn, with and without seeds, log probabilities, a grammar."""
    more = dict(max_tokens=12, ignore_eos=True)
    params = [
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, **more),
        SamplingParams(temperature=1.0, seed=3, top_p=0.9, n=2, **more),
        SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2, **more),
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    ]
    return [*PROMPTS, "Say: ", PROMPTS[0]], [*params, params[0]]


def answers(llm: LLM, folder: Path) -> list[Any]:
    """The last with an adapter of every matrix."""
    prompts, params = requests()
    loras = [None] * (len(prompts) - 1) + [LoRARequest("mine", 1, str(folder / "adapter"))]
    done = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    return [[(one.token_ids, one.logprobs) for one in result.outputs] + [result.prompt_logprobs] for result in done]


def values_of(tables: Any) -> list[tuple[int, float]]:
    return [(token, entry.logprob) for table in tables or () if table for token, entry in sorted(table.items())]


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), tensor_parallel_size=2, enable_lora=True, **OPTIONS)
    yield llm
    llm.close()


def test_two_ranks_answer_as_one(folder: Path, two: LLM) -> None:
    one = LLM(str(folder), enable_lora=True, **OPTIONS)
    expected = answers(one, folder)
    one.close()
    assert expected[0][0][0] != expected[-1][0][0]  # the adapter changes the answer
    shared = answers(two, folder)
    for own, other in zip(shared, expected, strict=True):
        assert [tokens for tokens, _ in own[:-1]] == [tokens for tokens, _ in other[:-1]]
        tables = (
            [*(logprobs for _, logprobs in own[:-1]), own[-1]],
            [*(logprobs for _, logprobs in other[:-1]), other[-1]],
        )
        for mine, theirs in zip(*tables, strict=True):
            mine, theirs = values_of(mine), values_of(theirs)
            assert [token for token, _ in mine] == [token for token, _ in theirs]
            assert [value for _, value in mine] == pytest.approx([value for _, value in theirs], abs=1e-4)
    assert two.llm_engine.vllm_config.parallel_config.distributed_executor_backend == "mp"


def test_each_rank_is_a_process_that_holds_its_part(two: LLM) -> None:
    pids = pids_of(two)
    assert len({*pids, os.getpid()}) == 3
    sizes = two.collective_rpc("tests.rank_probe:weight_bytes")
    assert sizes[0] == sizes[1] < 0.6 * sum(sizes) and two.collective_rpc("tests.rank_probe:rank_of") == [0, 1]
    assert two.collective_rpc("tests.rank_probe:how_summed") == ["NativeSum" if kernels() else "function"] * 2


def test_a_single_rank_sums_over_itself_if_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def tokens_of(**more: Any) -> tuple[list[Any], Any]:
        llm = LLM(str(folder), distributed_executor_backend="mp", **more, **OPTIONS)
        try:
            done = llm.generate(PROMPTS, greedy, use_tqdm=False)
            found = llm.collective_rpc("tests.rank_probe:sums_of") if more else None
            return [one.outputs[0].token_ids for one in done], found
        finally:
            llm.close()

    plain, _ = tokens_of()
    monkeypatch.setenv("QUIRE_JOIN_ALONE", "1")
    env.forget_all()
    summed, ((backend, count, graphs),) = tokens_of(seed=0)
    assert summed == plain
    assert backend == "gloo" and count == 2 * 4 and graphs == 0


@pytest.mark.parametrize(
    ("shared", "number"),
    [("1", signal.SIGKILL), ("0", signal.SIGKILL), ("1", signal.SIGSTOP)],
    ids=["shared", "gloo", "stopped"],
)
def test_a_lost_rank_fails_every_request_and_is_named(
    shared: str, number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine in this process; tests/server/test_ranks_server.py has it in one of its own."""
    monkeypatch.setenv("QUIRE_SHARED_SUMS", shared)
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()

    async def scene() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), tensor_parallel_size=2, **OPTIONS))
        begun = asyncio.Event()

        async def ask(name: str) -> str:
            params = SamplingParams(max_tokens=90, ignore_eos=True)
            try:
                for turn in range(1000):  # one after another: some step is always under way
                    async for _ in llm.generate({"prompt_token_ids": [5, 6]}, params, f"{name} {turn}"):
                        begun.set()
            except EngineDeadError as dead:
                return str(dead)
            return ""

        asking = [asyncio.create_task(ask(f"request {i}")) for i in range(3)]
        await asyncio.wait_for(begun.wait(), 60)
        pids = await llm.collective_rpc("tests.rank_probe:pid_of")
        os.kill(pids[1], number)
        lost = time.monotonic()
        told = await asyncio.wait_for(asyncio.gather(*asking), 60)
        assert number == signal.SIGSTOP or time.monotonic() - lost < 2.0
        how = "was killed by SIGKILL" if number == signal.SIGKILL else "has been stopped by a signal for 1.0 s"
        for said in told:
            assert f"engine is dead: worker 1 (process {pids[1]}) {how}" in said
        with pytest.raises(EngineDeadError, match="worker 1"):
            async for _ in llm.generate("again", SamplingParams(), "later"):
                pass
        llm.shutdown()
        for _ in range(600):
            if all(map(gone, pids)):
                break
            await asyncio.sleep(0.1)
        assert all(map(gone, pids))

    asyncio.run(scene())


def test_ranks_that_are_stopped_for_a_moment_go_on(two: LLM) -> None:
    """Each again and again, while the other waits for it."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    ask = lambda: [one.outputs[0].token_ids for one in two.generate(PROMPTS, params, use_tqdm=False)]  # noqa: E731
    expected, pids, answers = ask(), pids_of(two), list[Any]()
    over = threading.Event()

    def go_on() -> None:
        try:
            while not over.is_set():
                answers.append(ask())
        except EngineDeadError as dead:
            answers.append(str(dead))

    asking = threading.Thread(target=go_on)
    asking.start()
    try:
        for pid in pids * 3:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(pid, signal.SIGCONT)
    finally:
        over.set()
        asking.join(60)
    assert answers and all(answer == expected for answer in answers), answers[-1]


def test_a_rank_that_never_comes_to_a_sum_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives and shows signs of life; the other one waits inside of a sum."""
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "5")
    env.forget_all()
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        assert len(llm.generate(PROMPTS, params, use_tqdm=False)) == 3
        llm.collective_rpc("tests.rank_probe:stall", args=(1,))
        limit = r"a step did not end within 5 s \(QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS\): "
        waits = r"worker 0 has been in 'forward' for [\d.]+ s, at \w+ \([\w.]+:\d+\); "
        stuck = r"worker 1 has been in 'forward' for [\d.]+ s, at wait \(threading.py:\d+\)"
        with pytest.raises(EngineDeadError, match=limit + waits + stuck):
            llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_ranks_have_a_list_of_processors_each_and_divide_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("QUIRE_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    monkeypatch.delenv("QUIRE_CPU_KVCACHE_SPACE")
    env.forget_all()
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm:
        assert llm.collective_rpc("tests.rank_probe:processors_of") == [[first], [second]]
        free = llm.collective_rpc("free_bytes")
        assert sum(free) <= 4 << 30 and len(free) == 2 and min(free) > 0


def test_a_pooling_model(tmp_path: Path) -> None:
    make_pooling("BertModel", tmp_path)
    options = OPTIONS | {"max_model_len": 48}
    vectors = []
    for size in (1, 2):
        llm = LLM(str(tmp_path), tensor_parallel_size=size, **options)
        try:
            vectors.append([one.outputs.embedding for one in llm.embed(["cat mat dog", "river"], use_tqdm=False)])
        finally:
            llm.close()
    for one, other in zip(*vectors, strict=True):
        assert one == pytest.approx(other, abs=1e-5) and any(one)


def test_one_rank_in_a_process_of_its_own(folder: Path) -> None:
    llm = LLM(str(folder), distributed_executor_backend="mp", **OPTIONS)
    try:
        assert len(pids := pids_of(llm)) == 1 and pids[0] != os.getpid()
    finally:
        llm.close()


def test_ranks_with_whole_experts(tmp_path: Path) -> None:
    write_tiny("Qwen3MoeForCausalLM", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    more = dict(tensor_parallel_size=2, enable_expert_parallel=True, expert_placement_strategy="round_robin")
    answers = []
    for options in ({}, more):
        with LLM(str(tmp_path), **options, **OPTIONS) as llm:
            answers.append([list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)])
            counts = llm.collective_rpc("tests.rank_probe:experts_of")
    assert answers[0] == answers[1]
    assert len(counts) == 2 and counts[0] == counts[1] and set(counts[0]) == {2}  # of four, in every layer
