"""Steps that were started before the tokens of those before them were looked at: drafters read the states of both, and
draft as if nothing had come late; while nothing is worth drafting, grants have no room for drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.drafting import SpeculativeConfig
from quire.drafting.budget import DraftBudget
from quire.drafting.lengths import DraftLengths
from quire.drafting.proposer import MODEL_EVIDENCE, Proposal
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.kv import KVGroup, KVKind, KVLayout, KVSpec
from quire.schema.step import NewRow, StepPlan, StepResult
from quire.worker.drafts import Drafts
from quire.worker.inputs import StepShape
from quire.worker.rows import Rows
from tests.engine.test_draft_heads import COUNT, METHODS, Kind, deepseek, kinds, llama, of, row_of
from tests.engine.test_drafts import LENGTH, ask, same_bits
from tests.tiny_models import VOCAB

__all__ = ["deepseek", "kinds", "llama", "of", "same_bits"]


@pytest.mark.parametrize("method", METHODS)
def test_states_of_later_steps_come_before_tokens(of: Callable[[str], Kind], method: str) -> None:
    """Up to two steps ahead, then a step that verified drafts, then late ones again."""
    kind, rng = of(method), random.Random(method)
    proposer: Any = kind.drafter.proposer(kind.engine.layout, LENGTH)
    text = [rng.randrange(4, VOCAB) for _ in range(9)]
    whole = [*text, *(rng.randrange(4, VOCAB) for _ in range(40))]
    states = kind.states_of(whole)
    proposer.begin(row_of("a", text))
    proposer.read("a", 0, states[:5])  # a prompt in two chunks
    proposer.read("a", 5, states[5:9])
    read, said = 9, 9  # states that were read, tokens that are known

    def say(count: int) -> None:
        nonlocal said
        proposer.extend("a", whole[said : said + count])
        said += count

    for ahead in (0, 1, 2, 1, 2, 1):
        for _ in range(ahead):
            proposer.read("a", read, states[read : read + 1])
            read += 1
        while said < read:
            say(1)
            assert (proposer.behind("a") or 0) > 0
        if said == read:  # the step that led to the last of them
            say(1)
        assert proposer.propose(["a"], COUNT)[0].token_ids == kind.oracle(whole[:said], states[: said - 1], COUNT)
        wrong = torch.randn(2, states.shape[1])
        proposer.read("a", read, torch.cat((states[read : read + 2], wrong)))  # three drafts, of which one is right
        say(2)
        read += 2
        assert proposer.propose(["a"], COUNT)[0].token_ids == kind.oracle(whole[:said], states[: said - 1], COUNT)
    proposer.end("a")


class Never:
    """Drafts that are wrong, until it is told what comes."""

    def __init__(self) -> None:
        self.token = 1

    def begin(self, new: NewRow) -> None: ...
    def extend(self, request_id: str, token_ids: Sequence[int]) -> None: ...
    def end(self, request_id: str) -> None: ...
    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [Proposal([self.token] * count) for _ in request_ids]


def test_no_room_is_planned_for_drafts_that_are_not_worth_it() -> None:
    spec = KVSpec(
        layer="a", kind=KVKind.FULL, block_size=16, num_kv_heads=1, head_size=8, v_head_size=-1, dtype="float32",
        window=0,
    )  # fmt: skip
    group = KVGroup(kind=KVKind.FULL, block_size=16, window=0, layers=("a",))
    layout = KVLayout(num_blocks=400, page_bytes=spec.page_bytes, groups=(group,), slots=(("a",),), specs=(spec,))
    settings = SchedulerSettings(
        max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=4, depth=2, num_drafts=3, prefix_caching=False
    )
    scheduler, rows = Scheduler(settings, layout), Rows((group,), 4, 1024, torch.device("cpu"))
    scheduler.audits = True
    for name in ("r0", "r1"):
        scheduler.add(ask(name, [5, 6, 7], 400, temperature=0.0, ignore_eos=True))
    lengths, proposer = DraftLengths(SpeculativeConfig(method="ngram", num_speculative_tokens=3)), Never()
    lengths.costs.wait, lengths.costs.is_fixed = 0.3, True
    drafts = Drafts(proposer, rows, 3, lengths)
    flying: list[tuple[StepPlan, tuple[Any, ...]]] = []
    planned = []
    for step in range(160):
        plan = scheduler.plan()
        rows.apply(plan)
        drafts.follow(plan)
        grants = drafts.resolve(plan.grants)
        for grant in grants:
            row = rows.row_of[grant.request_id]
            rows.lengths[row] = max(rows.lengths[row], grant.start + grant.count + 1 - grant.num_drafts)
        planned.append(sum(grant.num_drafts for grant in plan.grants))
        flying.append((plan, grants))
        if step == 100:
            proposer.token = 7
        if len(flying) == 2:
            plan, grants = flying.pop(0)
            said = {grant.request_id: [7] for grant in grants}
            drafts.advance(said, len(said), prompts=False, late=not drafts.wants_tokens)
            drafts.of.clear()  # which nothing verifies here
            result = StepResult(step=plan.step, sampled=[[7] for _ in grants], no_drafts=drafts.is_quiet)
            scheduler.commit(plan, result)
    assert planned[10] == 6, "nothing is known yet"
    assert sum(planned[60:100]) == 0, "nothing was right"
    assert planned[-1] == 6, "they are right again"


class Watched:
    """A drafter of one token, whose text is kept; of hidden states if it is to be. What it drafts is wrong, until it is
    told what comes."""

    def __init__(self) -> None:
        self.token, self.num_told = 1, 0
        self.texts: dict[str, list[int]] = {}
        self.reads: Counter[str] = Counter()
        self.has_state: set[str] = set()

    def begin(self, new: NewRow) -> None:
        self.texts[new.request_id] = list(new.token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id] += token_ids
        self.num_told += 1

    def end(self, request_id: str) -> None:
        del self.texts[request_id]

    def behind(self, request_id: str) -> int | None:
        return 1

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [Proposal([self.token] * count, MODEL_EVIDENCE) for _ in request_ids]


class WatchedStates(Watched):
    def a_state(self) -> torch.Tensor:
        return torch.zeros(1, 4)

    def read(self, request_id: str, start: int, states: torch.Tensor) -> None:
        assert states.shape == (1, 4) and float(states[0, 0]) == start, "its own state"
        self.reads[request_id] += 1
        self.has_state.add(request_id)

    def behind(self, request_id: str) -> int | None:
        return 1 if request_id in self.has_state else None


class Device:
    """Drafts beside a device that is a step ahead of the host; all rows say 7."""

    def __init__(self, proposer: Watched, num_rows: int) -> None:
        group = KVGroup(kind=KVKind.FULL, block_size=16, window=0, layers=("a",))
        self.rows, self.names = Rows((group,), num_rows, 4096, torch.device("cpu")), [f"r{i}" for i in range(num_rows)]
        lengths = DraftLengths(SpeculativeConfig(method="draft_model", model="x", num_speculative_tokens=2))
        lengths.costs.wait, lengths.costs.is_fixed = 0.1, True
        budget = DraftBudget(lengths, 0.05, step_seconds=1000.0)  # next to which nothing here takes long
        self.drafts = Drafts(proposer, self.rows, 2, lengths, (proposer, budget))
        self.said = {name: [5, 6, 7] for name in self.names}
        self.apply(StepPlan(step=0, grants=(), joined=tuple(row_of(name, self.said[name]) for name in self.names)))
        self.num_waits = self.num_drafted = 0

    def apply(self, plan: StepPlan) -> None:
        self.rows.apply(plan)
        self.drafts.follow(plan)

    def step(self) -> None:
        drafts, waits, names = self.drafts, self.drafts.wants_tokens, [n for n in self.names if n in self.said]
        if drafts.reader is not None:
            starts = np.array([len(self.said[name]) - 1 for name in names])
            ones = np.ones(len(names), np.int64)
            rows = np.array([self.rows.row_of[name] for name in names])
            shape = StepShape(rows, starts, ones, np.cumsum(ones), ones.astype(bool), np.arange(len(names)))
            drafts.read(shape, torch.from_numpy(starts).float()[:, None].repeat(1, 4), drafts.reader)
        for name in names:
            self.said[name].append(7)
        drafts.advance({name: [7] for name in names}, len(names), prompts=False, late=not waits)
        drafts.resumed()
        self.num_waits += waits
        self.num_drafted += bool(drafts.of)
        drafts.of.clear()  # which nothing verifies here


@pytest.mark.parametrize("kind", [Watched, WatchedStates])
def test_a_drafter_that_is_not_worth_it_is_hardly_asked(kind: type[Watched]) -> None:
    """Neither told of every token, nor given every state, nor waited for; and it is noticed when it is right again."""
    proposer = kind()
    device = Device(proposer, 16)
    for _ in range(80):
        device.step()
    assert device.drafts.is_quiet
    proposer.num_told, device.num_waits = 0, 0
    proposer.reads.clear()
    for step in range(400):
        device.step()
        if step == 203:  # between two times that it is told
            device.apply(StepPlan(step=0, grants=(), left=("r3",)))
            del device.said["r3"]
            assert all(proposer.texts[name] == said for name, said in device.said.items())
    assert proposer.num_told < 16 * 400 * 2 / 7 and device.num_waits <= 400 / 8
    assert len(proposer.reads) <= 5 and sum(proposer.reads.values()) <= 4 * 400
    proposer.token, device.num_drafted = 7, 0
    for _ in range(1600):
        device.step()
    assert device.num_drafted > 100
    assert all(proposer.texts[name] == said for name, said in device.said.items())
    if isinstance(proposer, WatchedStates):
        assert set(proposer.reads) >= set(device.said)
