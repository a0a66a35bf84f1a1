"""Steps that were started before the tokens of those before them were looked at: drafters read the states of both, and
draft as if nothing had come late; while nothing is worth drafting, grants have no room for drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quire.drafting.proposer import Proposal
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.kv import KVGroup, KVKind, KVLayout, KVSpec
from quire.schema.step import NewRow, StepPlan, StepResult
from quire.worker.drafts import Drafts
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
    from quire.config.drafting import SpeculativeConfig
    from quire.drafting.lengths import DraftLengths

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
