"""Small parts for scheduler tests: layouts, requests, and a loop that answers plans with scripted tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.kv import KVGroup, KVKind, KVLayout
from quire.schema.media import ArrayData, MediaItem
from quire.schema.messages import EngineOutput, EngineRequest
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, StepPlan, StepResult

EOS = 2


def layout(num_blocks: int, *groups: tuple[KVKind, int, int]) -> KVLayout:
    """Groups as (kind, block size, window); full attention with blocks of 4 unless said."""
    made = [
        KVGroup(kind=kind, block_size=size, window=window, layers=(f"layer{i}",))
        for i, (kind, size, window) in enumerate(groups or ((KVKind.FULL, 4, 0),))
    ]
    return KVLayout(num_blocks=num_blocks, page_bytes=1, groups=tuple(made), slots=(), specs=())


def item(offset: int, length: int, key: str) -> MediaItem:
    return MediaItem(
        modality="image", key=key, offset=offset, length=length, arrays={"pixels": ArrayData((0,), "uint8", b"")}
    )


def request(name: str, prompt: int | list[int] = 6, max_tokens: int = 8, **more: Any) -> EngineRequest:
    """A prompt given by its length holds tokens that differ by request, so nothing is shared by accident."""
    ids = [sum(name.encode()) * 100 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = more.pop("params", None) or ResolvedParams()
    more["media"] = tuple(item(*where) for where in more.pop("media_keys", ()))
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(ids), params=params, seed=0, max_tokens=max_tokens, eos_token_id=EOS,
        **more,
    )  # fmt: skip


class Bench:
    """A scheduler and the plans it has out. `tokens(grant)` says what a sampling grant brings; 7 unless told.
    `drafts(name)` is what its next one verifies."""

    def __init__(self, num_blocks: int = 64, *groups: tuple[KVKind, int, int], **settings: Any) -> None:
        settings.setdefault("max_model_len", 64)
        self.time = 0.0
        self.scheduler = Scheduler(SchedulerSettings(**settings), layout(num_blocks, *groups), clock=self.clock)
        self.flights: deque[StepPlan] = deque()
        self.tokens: Callable[[Grant], list[int]] = lambda grant: [7]
        self.drafts: Callable[[str], list[int]] = lambda name: []
        self.seen: dict[str, list[EngineOutput]] = {}

    def clock(self) -> float:
        self.time += 1.0
        return self.time

    def add(self, *given: EngineRequest) -> None:
        for one in given:
            self.scheduler.add(one)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        if plan.grants:
            self.flights.append(plan)
        return plan

    def commit(self, **result: Any) -> list[EngineOutput]:
        """Answer the oldest plan that is out."""
        plan = self.flights.popleft()
        sampled = [self.tokens(grant) if grant.samples else [] for grant in plan.grants]
        drafts = {grant.request_id: self.drafts(grant.request_id) for grant in plan.grants if grant.samples}
        result = {"drafts": drafts, **result}
        outputs = self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled, **result))
        for output in outputs:
            self.seen.setdefault(output.request_id, []).append(output)
        self.scheduler.audit()
        return outputs

    def step(self, **result: Any) -> StepPlan:
        plan = self.plan()
        while self.flights:
            self.commit(**result)
        return plan

    def finish(self, patience: int = 500) -> None:
        while self.scheduler.has_unfinished():
            self.step()
            patience -= 1
            assert patience, "requests do not end"

    def output(self, name: str) -> list[int]:
        return [token for output in self.seen.get(name, []) for token in output.new_token_ids]

    @property
    def num_free(self) -> int:
        return self.scheduler.kv.pool.num_free


def counts(plan: StepPlan) -> dict[str, int]:
    return {grant.request_id: grant.count for grant in plan.grants}
