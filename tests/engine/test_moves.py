"""KV blocks that leave the device and come back, or change their place, on a real model: the text stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.executor.base import WorkerProtocol, one_model
from quire.executor.inproc import InProcessExecutor
from quire.sched.kv_layout import place
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from quire.schema.step import Move, StepPlan
from tests.tiny_models import write_tiny

PROMPT = tuple(range(20, 55))  # two blocks of 16, and three tokens
NUM_SLOTS = 16


class Steps:
    """A scheduler over a real worker, one step after another."""

    def __init__(self, folder: Path) -> None:
        args = EngineArgs(
            model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
            max_num_batched_tokens=64, block_size=16, device="cpu",
        )  # fmt: skip
        self.executor = InProcessExecutor(args.create_engine_config())
        info = one_model(self.executor.ask(WorkerProtocol.load))
        layout = place(info.specs, 0, num_blocks=12, max_model_len=64, max_num_seqs=4)
        self.executor.ask(WorkerProtocol.init_kv, layout)
        self.executor.worker.model_runner.copies.reserve(NUM_SLOTS)
        self.scheduler = Scheduler(SchedulerSettings(max_model_len=64), layout)
        self.moves: list[Move] = []
        self.num_cached = 0

    def add(self, name: str, prompt: tuple[int, ...] = PROMPT) -> None:
        params = ResolvedParams(temperature=0.0, ignore_eos=True)
        self.scheduler.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=9))

    def run(self) -> list[int]:
        """The tokens of what was added last."""
        said: list[int] = []
        while self.scheduler.has_unfinished():
            plan: StepPlan = self.scheduler.plan()
            self.moves += plan.moves
            self.executor.forward(plan)
            for output in self.scheduler.commit(plan, self.executor.sample(plan.step, None).result()):
                said += output.new_token_ids
                self.num_cached = output.num_cached_tokens
        return said

    def names(self) -> list[tuple[int, bytes]]:
        named = self.scheduler.kv.pool.named
        return [(group, name) for group, found in enumerate(named) for name in found]


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    write_tiny("LlamaForCausalLM", tmp_path)
    made = Steps(tmp_path)
    yield made
    made.executor.shutdown()


def bring_back(steps: Steps, slots: dict[tuple[int, bytes], int]) -> None:
    request, kv = steps.scheduler.requests["again"], steps.scheduler.kv
    for group, size in kv.growing:
        for index in range(len(PROMPT) // size):
            assert kv.moves.bring(request, group, index, slots[group, kv.name_of(request, group, index)])


@pytest.mark.parametrize("after", [False, True])
def test_blocks_that_left_come_back_as_they_were(steps: Steps, after: bool) -> None:
    steps.add("first")
    expected, moves = steps.run(), steps.scheduler.kv.moves
    slots = {found: slot for slot, found in enumerate(steps.names())}
    for (group, name), slot in slots.items():
        assert moves.save(group, name, slot, after=after)
    steps.add("other", tuple(range(200, 233)))  # the plan that carries them, and writes other blocks
    steps.run()
    assert steps.scheduler.reset_prefix_cache()
    for slot in steps.executor.worker.model_runner.kv.slots:
        slot.zero_()
    steps.add("again")
    bring_back(steps, slots)
    assert (steps.run(), steps.num_cached) == (expected, 32)
    assert steps.scheduler.reset_prefix_cache()
    steps.executor.worker.model_runner.copies.slots.zero_()
    steps.add("again")
    bring_back(steps, slots)
    assert steps.run() != expected, "what came back was not read"


def test_a_block_at_another_place_is_the_same_block(steps: Steps) -> None:
    steps.add("first")
    expected = steps.run()
    before: dict[Any, int] = {(g, n): steps.scheduler.kv.pool.named[g][n] for g, n in steps.names()}
    for group, name in before:
        assert steps.scheduler.kv.moves.relocate(group, name)
    steps.add("again")
    assert (steps.run(), steps.num_cached) == (expected, 32)
    after = {(g, n): steps.scheduler.kv.pool.named[g][n] for g, n in before}
    assert len(steps.moves) == len(before) and all(before[one] != after[one] for one in before)
