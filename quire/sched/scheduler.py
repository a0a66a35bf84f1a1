"""The scheduler: plan() says what the next step computes, commit() takes in what came of it. Nothing else runs.

Several plans may be out at once (`depth`), and one request in several of them (`overlap`): planning ahead of a device
wants both, stages of a pipeline want depth alone. Plans are committed in order. A result that comes back for a request
which ended or was preempted meanwhile carries an old epoch and is dropped.
Owns: the life of requests from add to their last output. How a step is filled is planner.py, where KV lies kv_cache.py,
when a text ends request.py. Must not know: devices, text, sockets. Time only stamps records.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from quire.base import env
from quire.base.clock import now as monotonic
from quire.sched import audit
from quire.sched.adapter import LoadedAdapter
from quire.sched.events import Event
from quire.sched.gates import Hold, TokenPace
from quire.sched.kv_cache import KVCache
from quire.sched.planner import Planner
from quire.sched.request import POLICIES, Ending, Request, append, ends
from quire.sched.settings import SchedulerSettings
from quire.sched.tally import SchedulerCounts
from quire.schema.errors import ConfigError, InputError, OverloadedError
from quire.schema.kv import KVLayout
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.params import PoolingParams
from quire.schema.stats import NO_DRAFTS, NO_LOOKUPS, CacheStats, StepStats
from quire.schema.step import FORBIDS_ALL, Grant, LogprobRows, Pooled, RowToken, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig


POOLED = Ending(FinishReason.STOP)


class Scheduler:
    def __init__(
        self,
        config: EngineConfig | SchedulerSettings,
        layout: KVLayout,
        *,
        max_model_len: int | None = None,
        depth: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """With a configuration, `max_model_len` and `depth` are given too; settings hold both already."""
        if not isinstance(config, SchedulerSettings):
            if max_model_len is None or depth is None:
                raise TypeError("Scheduler(config, layout) needs max_model_len and depth")
            config = SchedulerSettings.from_config(config, max_model_len=max_model_len, depth=depth)
        if config.policy not in POLICIES:
            raise ConfigError(f"scheduling_policy={config.policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        self.settings = config
        self.audits = env.AUDIT.get()  # after every step
        self.kv = KVCache(
            layout,
            caching=config.prefix_caching,
            algorithm=config.hash_algorithm,
            seed=config.hash_seed,
            joins_media=config.joined_media,
            events=config.events,
            max_chunk=config.max_num_batched_tokens,
        )
        self.tally, self.pace = SchedulerCounts(), TokenPace(min(TokenPace.LEAST, config.latency_tokens))
        self.clock = clock
        self.planner = Planner(config, self.kv, self.tally, clock, self.pace)
        self.drafts = config.num_drafts > 0
        # With one plan at a time the next one knows what rows have drafted; plans ahead have to assume the most.
        self.knows_drafts = self.drafts and config.depth == 1
        self.limits_overlap = config.overlap is not None and config.overlap < config.depth
        self.news: list[RowToken] = []  # what workers that do not sample have to be news, where overlap is limited
        self.requests: dict[str, Request] = {}
        self.flights: deque[tuple[int, list[Request]]] = deque()  # plans out: step, requests parallel to its grants
        self.step = 0
        self.num_added = 0

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: EngineRequest) -> None:
        """Its lengths were checked where it was made (engine/inputs.py): 0 < prompt < max_model_len, max_tokens > 0.
        One that is pooled brings no token, so its prompt may have max_model_len tokens."""
        settings = self.settings
        self.check_room(request)
        if request.request_id in self.requests:
            raise InputError(f"request id {request.request_id!r} is in use by a request that has not finished")
        if request.media or self.kv.cross:
            self._check_media(request)
        length = len(request.prompt_token_ids)
        pooled = isinstance(request.params, PoolingParams)
        limit = length + 1 if pooled else min(length + request.max_tokens, settings.max_model_len)
        num_drafts = 0 if pooled or self.knows_drafts else settings.num_drafts
        new = Request(request, limit=limit, queued=self.clock(), num_drafts=num_drafts)
        if (peak := self.kv.peak(new)) > self.kv.pool.num_blocks:
            raise InputError(
                f"{length} prompt tokens and max_tokens={request.max_tokens} may need {peak} KV blocks, but there are "
                f"only {self.kv.pool.num_blocks}"
            )
        self.num_added += 1
        new.order = POLICIES[settings.policy](new, self.num_added)
        new.rank = new.order[0]
        if request.lora_generation and self.planner.adapters is not None:
            self.planner.adapters.admit_request(new)
        self.requests[new.id] = new
        self.planner.waiting.add(new)

    def _check_media(self, request: EngineRequest) -> None:
        encoder = self.planner.encoder
        if encoder is not None:
            encoder.check(request)
        elif not self.kv.cross:
            raise InputError("this model takes no media, and no embeddings as a prompt", param="multi_modal_data")

    def check_room(self, request: EngineRequest, *, num_paused: int = 0, num_paused_tokens: int = 0) -> None:
        """OverloadedError if too much waits already. `num_paused`: what waits elsewhere, as the engine is paused."""
        settings = self.settings
        if settings.max_num_queued is None and settings.max_num_queued_tokens is None:
            return
        queued = self.num_waiting + num_paused
        if settings.max_num_queued is not None and queued >= settings.max_num_queued:
            raise OverloadedError(
                f"{queued} requests are waiting and max_num_queued_reqs={settings.max_num_queued}; try again later",
                limit="max_num_queued_reqs",
            )
        tokens, limit = self.planner.waiting.num_tokens + num_paused_tokens, settings.max_num_queued_tokens
        if limit is not None and queued and tokens + len(request.prompt_token_ids) > limit:
            raise OverloadedError(
                f"{tokens} prompt tokens are waiting, this request has {len(request.prompt_token_ids)}, and "
                f"max_num_queued_tokens={limit}; try again later",
                limit="max_num_queued_tokens",
            )

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[EngineOutput]:
        """End these now; ids that are unknown (or just finished) are ignored."""
        aborted = [request for name in request_ids if (request := self.requests.get(name)) is not None]
        return [self._finish(request, Ending(reason)) for request in dict.fromkeys(aborted)]

    def hold(self, request_id: str, reason: Hold) -> None:
        """Do not let it join before this reason, and every other it is held for, was released."""
        request = self.requests.get(request_id)
        if request is None:
            raise KeyError(f"request {request_id!r} cannot be held ({reason}): it is not known, or has ended")
        self.planner.holds.add(request_id, reason)
        if not request.running:
            self.planner.waiting.hold(request)

    def release(self, request_id: str, reason: Hold) -> None:
        """This holder lets go. A request that has ended meanwhile, or was not held for this reason, is ignored."""
        holds, request = self.planner.holds, self.requests.get(request_id)
        holds.remove(request_id, reason)
        if request is not None and not request.running and not holds.bars(request):
            self.planner.waiting.release(request)

    def has_runnable(self) -> bool:
        """Whether some request waits for nothing but its turn."""
        return len(self.requests) > len(self.planner.holds)

    def fail(self, request_id: str, error: str) -> list[EngineOutput]:
        """End it with an error of its own; unknown ids are ignored."""
        request = self.requests.get(request_id)
        return [] if request is None else [self._finish(request, Ending(FinishReason.ERROR), error=error)]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix. Running requests hold blocks: either they start again, or this returns False."""
        if reset_running_requests:
            while self.planner.running.items:
                self.planner.preempt(self.planner.running.items[-1])
        if self.planner.running.items:
            return False
        self.kv.moves.clear()
        self.kv.pool.clear()
        if self.planner.encoder is not None:
            self.planner.encoder.clear()
        return True

    def users_of(self, adapter: LoadedAdapter) -> list[str]:
        """Requests that have this adapter, and have not ended."""
        return [name for name, request in self.requests.items() if request.adapter is adapter]

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
        assert len(self.flights) < self.settings.depth, f"{len(self.flights)} plans are out already"
        self.step += 1
        filled = self.planner.fill()
        if not filled.grants:
            return StepPlan(step=self.step, grants=())
        self.flights.append((self.step, filled.requests))
        left, self.planner.left = tuple(self.planner.left), []
        news, self.news = tuple(self.news), []
        encoder = self.planner.encoder
        encode, freed = ((), ()) if encoder is None else encoder.take_plan()
        return StepPlan(
            step=self.step,
            grants=tuple(filled.grants),
            joined=tuple(filled.joined),
            left=left,
            total_tokens=sum([grant.count for grant in filled.grants]),
            sampled=news,
            moves=self.kv.moves.take() if self.kv.moves.waiting else (),
            encode=encode,
            free_encoded=freed,
            adapters=() if self.planner.adapters is None else self.planner.adapters.take_placements(),
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in the result of the oldest plan that is out; news of every request that has some."""
        if not plan.grants:
            return []
        step, requests = self.flights.popleft()
        assert step == plan.step == result.step, f"step {step} is due; got plan {plan.step}, result {result.step}"
        if self.limits_overlap:
            for grant, request in zip(plan.grants, requests, strict=True):
                request.num_flights -= request.epoch == grant.epoch
        now, kv, prompt_tokens, generated_tokens = self.clock(), self.kv, 0, 0
        outputs: list[EngineOutput] = []
        plain = result.logprobs is None and not (result.prompt_logprobs or result.failed)
        for index, (grant, request, new) in enumerate(zip(plan.grants, requests, result.sampled, strict=True)):
            if request.epoch != grant.epoch:
                continue
            if not plain and request.id in result.failed:
                outputs.append(self._lose(request, result.failed[request.id]))
                continue
            if grant.start < request.num_prompt:
                prompt_tokens += min(grant.count, request.num_prompt - grant.start)
            request.computed += grant.count
            ending = None
            if grant.samples:
                if not new:
                    outputs.append(self._finish_pooled(request, result))
                    continue
                if self.drafts:
                    self._take_drafts(request, grant, result, len(new))
                if len(new) == 1:  # nearly always: as `append` does it, without the call
                    tokens, token = request.tokens, new[0]
                    tokens.append(token)
                    if token in request.stops or len(tokens) >= request.watch_from:
                        ending = ends(request, token)
                else:
                    new, ending = append(request, new)
                generated_tokens += len(new)
                if self.limits_overlap and ending is None:
                    end = len(request.tokens)
                    self.news += [RowToken(request.id, end - len(new) + i, token) for i, token in enumerate(new)]
            if request.computed >= request.next_block:
                kv.commit(request)
            if plain and ending is None and request.last_token is not None:
                if new:
                    request.last_token = now
                    outputs.append(
                        EngineOutput(request_id=request.id, new_token_ids=new, num_cached_tokens=request.num_cached)
                    )
                continue
            logprobs, prompt_logprobs = _logprobs(result, index, grant, request, len(new))
            if new or prompt_logprobs is not None:
                outputs.append(self._report(request, new, ending, now, logprobs, prompt_logprobs))
        self.tally.step = step
        self.tally.prompt_tokens += prompt_tokens
        self.tally.generated_tokens += generated_tokens
        if self.audits:
            self.audit()
        elif not self.requests:
            kv.check_idle()
        return outputs

    def _take_drafts(self, request: Request, grant: Grant, result: StepResult, num_new: int) -> None:
        """What came of the drafts that a grant verified, and how many its next one will."""
        if grant.num_drafts:
            request.take_back(grant.num_drafts + 1 - num_new)
        if num_verified := result.verified.get(request.id, 0):
            self.tally.drafts.add(num_verified, num_new - 1)
        most = 0 if result.no_drafts else self.settings.num_drafts
        if self.knows_drafts:
            most = min(most, len(result.drafts.get(request.id, ())))
        if most != request.num_drafts:
            request.expect_drafts(most)

    def _report(
        self,
        request: Request,
        new: list[int],
        ending: Ending | None,
        now: float,
        logprobs: LogprobRows | None,
        prompt_logprobs: LogprobRows | None,
    ) -> EngineOutput:
        """An output with more to say than new tokens: the first one, the last one, or log probabilities."""
        first = bool(new) and request.last_token is None
        if first:
            request.times.first_token = now
        if new:
            request.last_token = now
        if ending is not None:
            return self._finish(request, ending, new, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return EngineOutput(
            request_id=request.id,
            new_token_ids=new,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached,
            times=copy.copy(request.times) if first else None,
        )

    def _finish_pooled(self, request: Request, result: StepResult) -> EngineOutput:
        """Its prompt is computed, and it was to be pooled."""
        pooled = result.pooled.get(request.id)
        assert pooled is not None, f"no token came back for {request.id}, and no reason why"
        if request.computed >= request.next_block:
            self.kv.commit(request)
        return self._finish(request, POOLED, pooled=pooled)

    def _lose(self, request: Request, reason: str) -> EngineOutput:
        """A worker gave it up. That no token was left to choose is due to what the request asked for."""
        last = self._finish(request, Ending(FinishReason.ERROR), error=reason)
        return msgspec.structs.replace(last, error_kind=InputError.__name__) if reason == FORBIDS_ALL else last

    def _finish(
        self,
        request: Request,
        ending: Ending,
        new: list[int] | None = None,
        *,
        logprobs: LogprobRows | None = None,
        prompt_logprobs: LogprobRows | None = None,
        pooled: Pooled | None = None,
        error: str | None = None,
    ) -> EngineOutput:
        """Its last output. Blocks go back at once: what is in flight for it runs before anything planned later."""
        planner = self.planner
        if request.adapter is not None and planner.adapters is not None:
            if request.running:
                planner.adapters.leave(request)
            planner.adapters.end_request(request)
        spoilt = error is not None
        if planner.encoder is not None and request.source.media:
            spoilt = planner.encoder.end(request, failed=spoilt)
        if request.running:
            planner.running.remove(request)
            planner.left.append(request.id)
            self.kv.release(request, spoilt=spoilt)
        else:
            planner.waiting.remove(request)
        request.running = False
        request.epoch += 1
        planner.holds.forget(request.id)
        del self.requests[request.id]
        request.times.last_token = request.last_token or 0.0
        return EngineOutput(
            request_id=request.id,
            new_token_ids=new or [],
            finish_reason=ending.reason,
            stop_reason=ending.stop_id,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached,
            times=request.times,
            pooled=pooled,
            error=error,
        )

    # ------------------------------------------------------------------ what others may know

    def stats(
        self, *, plan_seconds: float = 0.0, forward_seconds: float = 0.0, commit_seconds: float = 0.0
    ) -> StepStats:
        """The step just committed; counts start anew with each call."""
        tally, pool, adapters = self.tally, self.kv.pool, self.planner.adapters
        running, waiting = ((), ()) if adapters is None else adapters.names_in_use()
        report = StepStats(
            step=tally.step,
            running=self.num_running,
            waiting=self.num_waiting,
            prompt_tokens=tally.prompt_tokens,
            generated_tokens=tally.generated_tokens,
            preempted=tally.preempted,
            kv_usage=1.0 - pool.num_free / max(1, pool.num_blocks),
            cache=CacheStats(queries=tally.queries, hits=tally.hits),
            plan_seconds=plan_seconds,
            forward_seconds=forward_seconds,
            commit_seconds=commit_seconds,
            running_adapters=running,
            waiting_adapters=waiting,
            drafts=tally.drafts.take() if self.drafts else NO_DRAFTS,
            media=NO_LOOKUPS if self.planner.encoder is None else self.planner.encoder.take_counts(),
        )
        tally.queries = tally.hits = tally.prompt_tokens = tally.generated_tokens = tally.preempted = 0
        return report

    def take_events(self) -> list[Event]:
        """What happened in the prefix cache since the last call; always empty unless events were asked for."""
        events = self.kv.pool.events
        if not events:
            return []
        self.kv.pool.events = []
        return events

    def audit(self) -> None:
        """Every block accounted for, every count within its bounds; AssertionError says what is not."""
        audit.check(self)


def _logprobs(
    result: StepResult, index: int, grant: Grant, request: Request, num_tokens: int
) -> tuple[LogprobRows | None, LogprobRows | None]:
    """The log probabilities of the tokens kept, and of prompt positions that have not gone out before.

    A grant's prompt rows begin at position start + 1: a position's hidden state scores the token after it.
    """
    rows = result.logprobs[index] if result.logprobs is not None else None
    if rows is not None and num_tokens < len(rows.ranks):
        rows = cut_rows(rows, 0, num_tokens)
    prompt = result.prompt_logprobs.get(request.id)
    if prompt is not None:
        seen, upto = request.num_prompt_logprobs, grant.start + len(prompt.ranks)
        prompt = cut_rows(prompt, max(0, seen - grant.start), len(prompt.ranks)) if seen < upto else None
        request.num_prompt_logprobs = max(seen, upto)
    return rows, prompt


def cut_rows(rows: LogprobRows, first: int, last: int) -> LogprobRows:
    return LogprobRows(rows.token_ids[first:last], rows.logprobs[first:last], rows.ranks[first:last])
