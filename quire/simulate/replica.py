"""One replica under a virtual clock: the real scheduler, driven in the order and at the times of the engine's loop.

A step is planned a little before the device wants it, as far as the loop knows from earlier steps (its own Lead and
StepTimes), while the one before it runs. What came of that one is committed when it ends, or once the loop's thread has
launched a step without a graph. With pipeline stages, as many plans are out as there are stages, and a request is in
one of them at a time. How long a step takes is cost.py's. Must not know: routers, servers, how latencies are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.config.graphs import LARGEST
from quire.engine.loop import Lead, StepTimes
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import OverloadedError
from quire.schema.kv import KVLayout
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.step import StepPlan, StepResult
from quire.simulate.cost import CachedPrefix, CostModel, load_of
from quire.simulate.devices import HostModel

NEVER = float("inf")
LARGEST_MIXED = 2048  # tokens of the largest graph of a step with prompts (worker/mixed_graphs.py)
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
        self._num_layers = cost.topology.stage_layers(cost.shape)
        self._host_free = 0.0  # when the loop's thread has nothing to do
        self._is_waiting = True  # nothing could be planned: for a request, or for a step to end
        self._step_times, self._leads = StepTimes(), (Lead(), Lead())  # the latter of decodes, and of prompts
        self._block_size = layout.groups[0].block_size if len(layout.groups) == 1 else 0
        self._prefixes: dict[str, CachedPrefix] = {}  # of requests that share one whose keys fit the device's cache
        self._began = 0.0  # when the device began the oldest step under way

    def submit(self, now: float, request: EngineRequest) -> None:
        self._inbox.append(request)
        if not self._flying:
            self._is_waiting = False
        self.wake_at = min(self.wake_at, max(now, self._plan_at()))

    def wake(self, now: float) -> None:
        """Commit what has ended, plan if it is time to; `wake_at` says when to come again."""
        while self._flying and self._flying[0].end <= now:
            self._commit(self._flying.popleft())
        self.time = now
        if now >= self._plan_at():
            self._plan(now)
        self.wake_at = min(self._flying[0].end if self._flying else NEVER, max(now, self._plan_at()))

    def _plan_at(self) -> float:
        """When the loop plans: shortly before the device wants a step, as far as it knows (EngineLoop._linger)."""
        flying = self._flying
        if self._is_waiting or len(flying) >= self.scheduler.settings.depth:
            return NEVER
        if not flying or self.scheduler.limits_overlap:
            return self._host_free
        lead = self._leads[bool(self._inbox) or self.scheduler.num_waiting > 0]
        expected = self._step_times.expect(flying[0].plan.total_tokens)
        return max(self._host_free, self._began + expected - lead.seconds())

    def _plan(self, now: float) -> None:
        num_new = len(self._inbox)
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
            self._is_waiting = True
            return
        host = self.host
        planning = host.plan_seconds + host.plan_row_seconds * len(plan.grants) + host.add_seconds * num_new
        if not self._flying and now - self._stage_free[-1] > host.least_rest:
            planning += host.idle_seconds
        self._launch(plan, now + planning)
        self._leads[plan.total_tokens > len(plan.grants)].learn(self._host_free - now)

    def _launch(self, plan: StepPlan, ready: float) -> None:
        """Through every stage, each after the step before it there."""
        self._note_prefixes(plan)
        load = load_of(plan, self.cost.windows, self._prefixes)
        seconds, launching = self.cost.stage_seconds(load), self._launching_seconds(plan)
        self._host_free = ready + launching
        if not self._flying:
            self._began = ready
        for stage, free in enumerate(self._stage_free):
            ready = max(max(ready, free) + seconds, ready + launching)
            self._stage_free[stage] = ready
        self.busy_seconds += seconds
        self.num_steps += 1
        self._flying.append(FlyingStep(plan, ready))

    def _launching_seconds(self, plan: StepPlan) -> float:
        """Of kernels one by one, in a step that has no graph."""
        largest = LARGEST_MIXED if plan.total_tokens > len(plan.grants) else LARGEST
        return self.host.eager_layer_seconds * self._num_layers if plan.total_tokens > largest else 0.0

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
        seconds = step.end - self._began
        self.scheduler.pace.learn(plan.total_tokens, seconds)
        self._step_times.learn(plan.total_tokens, seconds)
        self._began = step.end
        sampled = [_TOKEN if grant.samples else [] for grant in plan.grants]
        outputs = self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled))
        over = max(step.end, self._host_free) + self.host.commit_seconds
        self._host_free = over + self.host.commit_row_seconds * len(plan.grants)
        self._is_waiting = False
        if outputs:
            self._emit(self._host_free, outputs)
