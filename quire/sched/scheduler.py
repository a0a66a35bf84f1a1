"""The scheduler: plan() says what the next step computes, commit() takes in what came of it. Nothing else runs.

Several plans may be out at once (`look_ahead` + 1); they are committed in order. A result that comes back for a request
which ended or was preempted meanwhile carries an old epoch and is dropped.
Owns: the life of requests from add to their last output. How a step is filled is planner.py, where KV lies kv_cache.py,
when a text ends stop.py. Must not know: devices, text, sockets. Time only stamps records.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire.base import env
from quire.base.clock import now as monotonic
from quire.sched import audit, stop
from quire.sched.events import Event
from quire.sched.kv_cache import KVCache
from quire.sched.order import POLICIES
from quire.sched.planner import Planner
from quire.sched.request import Request
from quire.sched.settings import SchedulerSettings
from quire.sched.stop import Ending
from quire.sched.tally import Tally
from quire.schema.errors import ConfigError, InputError, OverloadedError
from quire.schema.kv import KVLayout
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.stats import CacheStats, StepStats
from quire.schema.step import Grant, LogprobRows, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig


class Scheduler:
    def __init__(
        self,
        config: EngineConfig | SchedulerSettings,
        layout: KVLayout,
        *,
        max_model_len: int | None = None,
        look_ahead: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """With a configuration, `max_model_len` and `look_ahead` are given too; settings hold both already."""
        if not isinstance(config, SchedulerSettings):
            if max_model_len is None or look_ahead is None:
                raise TypeError("Scheduler(config, layout) needs max_model_len and look_ahead")
            config = SchedulerSettings.from_config(config, max_model_len=max_model_len, look_ahead=look_ahead)
        if config.policy not in POLICIES:
            raise ConfigError(f"scheduling_policy={config.policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        self.settings = config
        self.kv = KVCache(
            layout,
            caching=config.prefix_caching,
            algorithm=config.hash_algorithm,
            events=config.events,
            max_chunk=config.max_num_batched_tokens,
        )
        self.tally = Tally()
        self.clock = clock
        self.planner = Planner(config, self.kv, self.tally, clock)
        self.requests: dict[str, Request] = {}
        self.flights: deque[tuple[int, list[Request]]] = deque()  # plans out: step, requests parallel to its grants
        self.step = 0
        self.num_added = 0

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: EngineRequest) -> None:
        settings, queued = self.settings, self.num_waiting
        if settings.max_num_queued is not None and queued >= settings.max_num_queued:
            raise OverloadedError(f"{queued} requests are waiting and max_num_queued_reqs={settings.max_num_queued}")
        if request.request_id in self.requests:
            raise InputError(f"request id {request.request_id!r} is in use by a request that has not finished")
        length = len(request.prompt_token_ids)
        if not 0 < length < settings.max_model_len:
            raise InputError(
                f"the prompt has {length} tokens; it must have at least 1, and leave room for one more within "
                f"max_model_len={settings.max_model_len}",
                param="prompt",
                value=length,
            )
        if request.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
        limit = min(length + request.max_tokens, settings.max_model_len)
        new = Request(request, limit=limit, queued=self.clock())
        if (peak := self.kv.peak(new)) > self.kv.pool.num_blocks:
            raise InputError(
                f"{length} prompt tokens and max_tokens={request.max_tokens} may need {peak} KV blocks, but there are "
                f"only {self.kv.pool.num_blocks}"
            )
        self.num_added += 1
        new.order = POLICIES[settings.policy](new, self.num_added)
        self.requests[new.id] = new
        self.planner.waiting.add(new)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[EngineOutput]:
        """End these now; ids that are unknown (or just finished) are ignored."""
        found = [request for name in request_ids if (request := self.requests.get(name)) is not None]
        return [self._finish(request, Ending(reason)) for request in dict.fromkeys(found)]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix. Running requests hold blocks: either they start again, or this returns False."""
        if reset_running_requests:
            while self.planner.running.items:
                self.planner.preempt(self.planner.running.items[-1])
        if self.kv.pool.num_free < self.kv.pool.num_blocks:
            return False
        self.kv.pool.clear()
        self.tally.queries = self.tally.hits = 0
        return True

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.planner.running)

    @property
    def num_waiting(self) -> int:
        return len(self.planner.waiting)

    # ------------------------------------------------------------------ a step

    def plan(self) -> StepPlan:
        """What to compute next; empty when nothing can be. Rows to free travel with the next plan that is not empty."""
        assert len(self.flights) <= self.settings.look_ahead, f"{len(self.flights)} plans are out already"
        self.step += 1
        draft = self.planner.draft()
        if not draft.grants:
            return StepPlan(step=self.step, grants=())
        self.flights.append((self.step, draft.requests))
        left, self.planner.left = tuple(self.planner.left), []
        return StepPlan(
            step=self.step,
            grants=tuple(draft.grants),
            joined=tuple(draft.joined),
            left=left,
            total_tokens=sum([grant.count for grant in draft.grants]),
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in the result of the oldest plan that is out; news of every request that has some."""
        if plan.empty:
            return []
        step, requests = self.flights.popleft()
        assert step == plan.step == result.step, f"step {step} is due; got plan {plan.step}, result {result.step}"
        now, kv, tally = self.clock(), self.kv, self.tally
        outputs: list[EngineOutput] = []
        plain = result.logprobs is None and not (result.prompt_logprobs or result.drafts or result.failed)
        for index, (grant, request, new) in enumerate(zip(plan.grants, requests, result.sampled, strict=True)):
            if request.epoch != grant.epoch:
                continue
            if not plain and request.id in result.failed:
                outputs.append(self._finish(request, Ending(FinishReason.ERROR), error=result.failed[request.id]))
                continue
            if grant.start < request.num_prompt:
                tally.prompt_tokens += min(grant.count, request.num_prompt - grant.start)
            request.computed += grant.count
            ending = None
            if grant.samples:
                if grant.drafts:
                    request.judge(len(new) - 1)
                new, ending = stop.append(request, new)
                tally.generated_tokens += len(new)
            if request.computed >= request.next_block:
                kv.commit(request)
            if plain and ending is None and request.last_token is not None:
                if new:
                    request.last_token = now
                    outputs.append(
                        EngineOutput(request_id=request.id, new_token_ids=new, num_cached_tokens=request.num_cached)
                    )
            elif (output := self._report(request, grant, new, ending, _Extras(result, index), now)) is not None:
                outputs.append(output)
        if not self.requests or env.AUDIT.get():
            self.audit()
        return outputs
