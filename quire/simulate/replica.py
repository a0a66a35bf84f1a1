"""One replica under a virtual clock: the real scheduler, driven in the order and at the times of the engine's loop.

A step is planned a little before the device wants it, while the one before it runs; what came of that one is committed
when it ends (engine/loop.py). With pipeline stages, as many plans are out as there are stages, and a request is in one
of them at a time. How long a step takes is cost.py's. Must not know: routers, servers, how latencies are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import OverloadedError
from quire.schema.kv import KVLayout
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.step import StepPlan, StepResult
from quire.simulate.cost import CachedPrefix, CostModel, load_of
from quire.simulate.devices import HostModel

NEVER = float("inf")
_TOKEN = [7]

Emit = Callable[[float, list[EngineOutput]], None]  # when they leave the engine, and what


class FlyingStep(NamedTuple):
    plan: StepPlan
    end: float


class Replica:
    def __init__(
        self, settings: SchedulerSettings, layout: KVLayout, cost: CostModel, host: HostModel, emit: Emit
    ) -> None:
        self.cost, self.host, self._emit = cost, host, emit
        self.time = 0.0
        self.scheduler = Scheduler(settings, layout, clock=lambda: self.time)
        self.busy_seconds = 0.0  # of the device
        self.num_steps = 0
        self.wake_at = NEVER  # when it must be woken next
        self._inbox: list[EngineRequest] = []
        self._flying: deque[FlyingStep] = deque()
        self._stage_free = [0.0] * cost.topology.pipeline_size
        self._next_plan = 0.0
        self._block_size = layout.groups[0].block_size if len(layout.groups) == 1 else 0
        self._prefixes: dict[str, CachedPrefix] = {}  # of requests that share one whose keys fit the device's cache
        self._began = 0.0  # when the device began the oldest step under way

    def submit(self, now: float, request: EngineRequest) -> None:
        self._inbox.append(request)
        if not self._flying:
            self.wake_at = min(self.wake_at, max(now, self._next_plan if self._next_plan < NEVER else now))

    def wake(self, now: float) -> None:
        """Commit what has ended, plan if it is time to; `wake_at` says when to come again."""
        while self._flying and self._flying[0].end <= now:
            self._commit(self._flying.popleft())
        self.time = now
        may_plan = len(self._flying) < self.scheduler.settings.depth
        if may_plan and (now >= self._next_plan or (self._inbox and not self._flying)):
            self._plan(now)
            may_plan = len(self._flying) < self.scheduler.settings.depth
        self.wake_at = self._flying[0].end if self._flying else NEVER
        if may_plan:
            self.wake_at = min(self.wake_at, self._next_plan)

    def _plan(self, now: float) -> None:
        for request in self._inbox:
            try:
                self.scheduler.add(request)
            except OverloadedError:
                refused = EngineOutput(
                    request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR
                )
                self._emit(now, [refused])
        self._inbox.clear()
        plan = self.scheduler.plan()
        if not plan.grants:
            if not self._flying and self.scheduler.has_unfinished():
                raise RuntimeError(f"nothing can be planned for {self.scheduler.num_waiting} requests that wait")
            self._next_plan = NEVER
            return
        host = self.host
        planning = host.plan_seconds + host.plan_row_seconds * len(plan.grants)
        if not self._flying and now - self._stage_free[-1] > host.least_rest:
            planning += host.idle_seconds
        self._launch(plan, now + planning)
        lead = host.least_lead + host.lead_factor * planning
        self._next_plan = max(now + planning, self._stage_free[0] - lead)

    def _launch(self, plan: StepPlan, ready: float) -> None:
        """Through every stage, each after the step before it there."""
        self._note_prefixes(plan)
        seconds = self.cost.stage_seconds(load_of(plan, self.cost.windows, self._prefixes))
        if not self._flying:
            self._began = ready
        for stage, free in enumerate(self._stage_free):
            ready = max(ready, free) + seconds
            self._stage_free[stage] = ready
        self.busy_seconds += seconds
        self.num_steps += 1
        self._flying.append(FlyingStep(plan, ready))

    def _note_prefixes(self, plan: StepPlan) -> None:
        for name in plan.left:
            self._prefixes.pop(name, None)
        if self.cost.windows != (0,):  # which blocks a window still reads is not followed
            return
        for row in plan.joined:
            if row.blocks and row.blocks[0]:
                prefix = CachedPrefix(row.blocks[0][-1], len(row.blocks[0]) * self._block_size)
                if self.cost.keeps(prefix):
                    self._prefixes[row.request_id] = prefix

    def _commit(self, step: FlyingStep) -> None:
        plan, self.time = step.plan, step.end
        self.scheduler.pace.learn(plan.total_tokens, step.end - self._began)
        self._began = step.end
        sampled = [_TOKEN if grant.samples else [] for grant in plan.grants]
        outputs = self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled))
        over = step.end + self.host.commit_seconds + self.host.commit_row_seconds * len(plan.grants)
        self._next_plan = over if self._next_plan == NEVER else max(self._next_plan, over)
        if outputs:
            self._emit(over, outputs)
