"""EngineLoop: the one loop. Drain what came in, plan, start the step, commit the previous one, sample, hand out.

In: EngineRequest, Abort, ControlCall. Out: EngineOutput, ControlReply, StepStats. As many steps may be
under way as the scheduler's `depth` says: 1 is synchronous, 2 is asynchronous scheduling. A step is planned no earlier
than the device will want it, so that a request which comes meanwhile is still in it.
One thread runs it. Must not know: sockets, text, tensors, or why the scheduler granted what it granted.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from quire.base.clock import now
from quire.engine.adapters import NOT_ENABLED, EngineAdapters
from quire.engine.charge import Charge
from quire.engine.control import Later, answer, run_verb
from quire.engine.pulse import Pulse
from quire.executor.base import Executor, PendingResult, StepwiseExecutor, WatchedExecutor, WorkerProtocol
from quire.sched.gates import Hold
from quire.schema.errors import (
    EngineDeadError,
    InputError,
    OverloadedError,
    QuireError,
    kind_of,
    message_of,
    rebuild_error,
)
from quire.schema.messages import (
    Abort,
    ControlCall,
    ControlReply,
    EngineOutput,
    EngineRequest,
    FinishReason,
    FromEngine,
    Outputs,
    Stop,
    ToEngine,
    Wake,
)
from quire.schema.params import sampling_of
from quire.schema.stats import StepStats
from quire.schema.step import Mask, StepPlan

if TYPE_CHECKING:
    from quire.engine.lockstep import Lockstep
    from quire.grammar.masks import Masks
    from quire.observe.kv_events import EventPublisher
    from quire.sched.scheduler import Scheduler

Inbox: TypeAlias = "queue.SimpleQueue[ToEngine | EngineDeadError]"  # an error: the workers are gone
_REST = 0.2  # seconds without a request before workers do what their start left out
_COMPILE_WAIT = 0.002  # seconds; requests that come in meanwhile are looked at after it
_STALL_LIMIT = 1000  # turns in a row that could have made progress and did not


class EngineLoop:
    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        pulse: Pulse | None = None,
        masks: Masks | None = None,
        kv_events: EventPublisher | None = None,
        adapters: EngineAdapters | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.executor = executor
        self.lockstep = lockstep  # None: no other engine takes part in its steps
        self.scheduler = scheduler
        self.ahead = scheduler.settings.depth - 1  # steps under way while the next is planned
        self.masks = masks  # None: no request may have a grammar
        self._constrained: set[str] = set()  # requests that masks know; without any, masks are not consulted
        self.kv_events = kv_events  # None: not published
        self.adapters = adapters  # None: no request may have one
        self.paused = False
        self.pulse = pulse  # None: nobody watches
        self._flying: deque[tuple[StepPlan, PendingResult]] = deque()
        self._times_steps = scheduler.settings.latency_goal > 0  # nobody else needs it but `run`
        self._began = 0.0  # when the device began the oldest step under way, as far as is known
        self._step_times = StepTimes()
        self._leads = Lead(), Lead()  # of decodes, and of steps with prompts
        self._live: dict[str, None] = {}  # requests whose end has not been reported, as they came: so they are aborted
        self._deferred: dict[str, EngineRequest] = {}  # came in while paused
        self._news: list[EngineOutput] = []
        self._waiting: list[tuple[int, Later]] = []  # verbs whose answer must wait
        self._replies: list[ControlReply] = []
        self.last_stats: StepStats | None = None
        self._unsaid: StepStats | None = None
        self._moved = False  # requests came or went without a step
        self.charge: Charge | None = None  # for collect_detailed_traces
        self._plan_seconds = 0.0
        self._stalled = 0
        self._ranks = executor if isinstance(executor, StepwiseExecutor) else None  # not None: nothing may go by time
        self._refused: dict[str, QuireError] = {}  # where there are such ranks: by this one, and not told yet
        self._has_new_grammars = False  # since they last agreed on those
        self._has_leftovers = self._ranks is None and lockstep is None  # as far as is known

    @property
    def busy(self) -> bool:
        """False: nothing will happen until something comes in."""
        reads = self.adapters is not None and self.adapters.is_busy
        is_needed = self.lockstep is not None and not self.lockstep.is_resting  # by other engines
        return (
            reads or is_needed or bool(self._flying or self._news or self._replies) or self.scheduler.has_unfinished()
        )

    def is_drained(self) -> bool:
        return not self._live and not self._flying

    # ---- what comes in -----------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        try:
            if self.paused:
                self._hold(request)
                return
            if request.lora_name is not None:
                request = self._with_adapter(request)
            self.scheduler.add(request)
            self._live[request.request_id] = None
        except QuireError as refused:
            self._news.append(failed_output(request.request_id, refused))
        else:
            params = sampling_of(request.params)
            if params.grammar is not None or params.thinking_token_budget is not None:
                self._constrain(request)

    def _with_adapter(self, request: EngineRequest) -> EngineRequest:
        if self.adapters is None:
            raise InputError(NOT_ENABLED, param="lora_request")
        return self.adapters.resolve(request)

    def _constrain(self, request: EngineRequest) -> None:
        """It waits in the queue until its grammar is compiled."""
        if self.masks is None:
            raise RuntimeError(f"request {request.request_id!r} is constrained, and this loop was made without masks")
        self._constrained.add(request.request_id)
        self._has_new_grammars = True
        try:
            if not self.masks.add(request):
                self.scheduler.hold(request.request_id, Hold.GRAMMAR)
        except QuireError as refused:
            self._refuse(request.request_id, refused)

    def _refuse(self, request_id: str, error: QuireError) -> None:
        if self._ranks is None:
            self._fail(request_id, error)
        else:
            self._refused[request_id] = error

    def _fail(self, request_id: str, error: QuireError) -> None:
        outputs = self.scheduler.fail(request_id, str(error))
        self._tell([msgspec.structs.replace(output, error_kind=kind_of(error)) for output in outputs])

    def _hold(self, request: EngineRequest) -> None:
        tokens = sum(len(one.prompt_token_ids) for one in self._deferred.values())
        self.scheduler.check_room(request, num_paused=len(self._deferred), num_paused_tokens=tokens)
        self._deferred[request.request_id] = request
        self._moved = True

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._moved = True
        for request_id in ids:
            if self._deferred.pop(request_id, None):
                self._news.append(
                    EngineOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ABORT)
                )
        self._tell(self.scheduler.abort(ids))

    def live_ids(self) -> list[str]:
        """Requests whose end has not been reported, deferred ones included."""
        return [*self._live, *self._deferred]

    def call(self, call: ControlCall) -> ControlReply | None:
        """Run a verb, between steps. None: the answer comes later, through `take_replies`."""
        self.settle(0)  # a step that fails here is the engine's end, not the verb's
        reply = run_verb(self, call)
        self._publish_events()
        if isinstance(reply, ControlReply):
            return reply
        self._waiting.append((call.call_id, reply))
        self._answer_waiting()
        return None

    def take_replies(self) -> list[ControlReply]:
        replies, self._replies = self._replies, []
        return replies

    def keep(self, outputs: list[EngineOutput]) -> None:
        """Give back what a step returned; the next one returns it first."""
        self._news[:0] = outputs

    # ---- one turn ----------------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """One turn; returns the news since the last one."""
        began = now()
        if self._constrained:
            self._take_compiled()
        if self._ranks is not None and self._has_new_grammars:
            self._agree_on_grammars(self._ranks)
        if self.adapters is not None and self.adapters.is_busy:
            self._take_adapters(self.adapters)
        plan = self.scheduler.plan()
        self._plan_seconds = now() - began
        had_work = bool(plan.grants or self._flying)
        if self.lockstep is not None:
            had_work = self._keep_in_step(plan, self.lockstep) or had_work
        if plan.grants:
            if self.charge is not None:
                self.charge.began(plan)
            self.executor.forward(plan)  # returns at once where the device works by itself
            launched = now()
            self._leads[plan.total_tokens > len(plan.grants)].learn(launched - began)
            if not self._flying:  # one step at a time: the caller may have computed it in forward()
                self._began = launched if self.ahead else began
        self.settle(self._num_kept(plan))  # commit old steps while it does
        if plan.grants:
            self._flying.append((plan, self.executor.sample(plan.step, self._mask(plan))))
        self.settle(self.ahead)
        self._check(had_work)
        self._answer_waiting()
        self._publish_events()
        news, self._news = self._news, []
        if self.pulse is not None:
            self.pulse.beat(busy=self.busy, paused=self.paused)
        return news

    def _keep_in_step(self, plan: StepPlan, lockstep: Lockstep) -> bool:
        """Whether other engines' steps were waited for."""
        if plan.grants:
            lockstep.begin()
        elif not lockstep.is_resting:
            lockstep.idle()
            return True
        return False

    def _num_kept(self, plan: StepPlan) -> int:
        """Steps that may stay under way while this one is sampled. A mask needs every token that came before it, which
        is there if no request is in two steps; where nothing was granted, what the oldest step brings is needed to go
        on."""
        if not plan.grants:
            return len(self._flying) - 1
        overlaps = self.ahead > 1 and not self.scheduler.limits_overlap
        if overlaps and self._constrained and self.masks is not None and self.masks.constrains(plan):
            return 0
        return self.ahead - 1

    def settle(self, remaining: int) -> None:
        """Commit the oldest steps until at most `remaining` are under way."""
        while len(self._flying) > max(remaining, 0):
            plan, pending = self._flying.popleft()
            result = pending.result()
            began = now()
            if self._times_steps:
                self._step_times.learn(plan.total_tokens, began - self._began)
                self.scheduler.pace.learn(plan.total_tokens, began - self._began)
            self._began = began
            if self.charge is not None:
                self.charge.ended(plan, result.forward_seconds)
            outputs = self.scheduler.commit(plan, result)
            if self._constrained and self.masks is not None:
                self.masks.advance(outputs)
                self.masks.propose(result.drafts)
            self._tell(outputs)
            stats = self.scheduler.stats(
                plan_seconds=self._plan_seconds, forward_seconds=result.forward_seconds, commit_seconds=now() - began
            )
            self._unsaid = stats if self._unsaid is None else _add(self._unsaid, stats)
            self.last_stats = stats

    def take_stats(self) -> StepStats | None:
        """The steps committed since the last call, as one record; None if nothing has changed since."""
        stats, self._unsaid = self._unsaid, None
        if stats is None and self._moved:
            stats = self.last_stats = self.scheduler.stats()
        self._moved = False
        if stats is not None and self._deferred:
            stats = msgspec.structs.replace(stats, deferred=len(self._deferred))
        return stats

    def _tell(self, outputs: list[EngineOutput]) -> None:
        self._news.extend(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._live.pop(output.request_id, None)
                if self.masks is not None and output.request_id in self._constrained:
                    self._constrained.remove(output.request_id)
                    self.masks.drop(output.request_id)

    def _mask(self, plan: StepPlan) -> Mask | None:
        """The grammars' rows for a step that was started; what came before it is committed."""
        if self.masks is None or not self._constrained:
            return None
        mask, lost = self.masks.mask(plan)
        for one in lost:  # the step's token for it is thrown away
            if one.error is None:
                self._tell(self.scheduler.abort([one.request_id], FinishReason.STOP))
            elif one.refused:
                self._fail(one.request_id, InputError(one.error))
            else:
                self._tell(self.scheduler.fail(one.request_id, one.error))
        return mask

    def _take_compiled(self) -> None:
        assert self.masks is not None
        if not self.masks.compiling:
            return
        idle = not self._flying and not self._news and self.scheduler.num_running == 0
        if idle or self._ranks is not None:
            self.masks.wait(_COMPILE_WAIT)  # rather than turn in vain
            self._stalled = 0
        for request_id, refused in self.masks.poll():
            self.scheduler.release(request_id, Hold.GRAMMAR)
            if refused is not None:
                self._refuse(request_id, refused)

    def _agree_on_grammars(self, ranks: StepwiseExecutor) -> None:
        """Wait for all that are compiled, since other ranks cannot know how far this one is. What one of them refuses
        (a limit of time, memory or its queue) all refuse."""
        while self.masks is not None and self.masks.compiling:
            self._take_compiled()
        own = {name: (kind_of(error), message_of(error)) for name, error in self._refused.items()}
        self._refused, self._has_new_grammars = {}, False
        for refusals in ranks.gather(msgspec.msgpack.encode(own)):
            for name, (kind, message) in msgspec.msgpack.decode(refusals, type=dict[str, tuple[str, str]]).items():
                error = rebuild_error(kind, message)
                self._fail(name, error if isinstance(error, QuireError) else QuireError(message))

    def _take_adapters(self, adapters: EngineAdapters) -> None:
        """Begin to read what requests wait for, and note what was read; requests whose adapter cannot be read fail."""
        adapters.begin_reads()
        idle = not self._flying and not self._news and self.scheduler.num_running == 0
        self._stalled = 0
        for adapter, error in adapters.take_read(_COMPILE_WAIT if idle else 0.0):
            for request_id in self.scheduler.users_of(adapter):
                self._fail(request_id, InputError(error, param="lora_request"))

    def _publish_events(self) -> None:
        if self.kv_events is not None and (events := self.scheduler.take_events()):
            self.kv_events.publish(events)

    def close(self) -> None:
        """The workers end, and whatever compiles or publishes."""
        if self.kv_events is not None:
            self.kv_events.close()
        if self.masks is not None:
            self.masks.close()
        self.executor.shutdown()

    def _check(self, had_work: bool) -> None:
        """A scheduler with requests that nobody holds, none of which ever runs, is a fault, not a wait."""
        stuck = not had_work and not self._news and self.scheduler.has_runnable()
        self._stalled = self._stalled + 1 if stuck else 0
        if self._stalled > _STALL_LIMIT:
            raise RuntimeError(
                f"nothing could be planned {self._stalled} times in a row: {self.scheduler.num_running} requests "
                f"running, {self.scheduler.num_waiting} waiting"
            )

    # ---- verbs that change the loop ----------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def pause(self, *, abort: bool) -> None:
        self.paused = True
        if abort:
            self.abort(list(self._live))

    def resume(self) -> None:
        self.paused = False
        self._moved = True
        deferred, self._deferred = self._deferred, {}
        for request in deferred.values():
            self.submit(request)

    def _answer_waiting(self) -> None:
        for entry in list(self._waiting):
            call_id, later = entry
            if later.ready():
                self._waiting.remove(entry)
                reply = answer(call_id, later.finish)
                assert isinstance(reply, ControlReply)
                self._replies.append(reply)

    # ---- driven by a queue -------------------------------------------------------------------------------------

    def run(self, inbox: Inbox, emit: Callable[[FromEngine], None]) -> None:
        """Serve a queue until Stop: in an engine process, or in a thread."""
        self._times_steps = True
        if isinstance(self.executor, WatchedExecutor):  # a worker may die while the loop waits for requests
            self.executor.when_dead(inbox.put)
        while self._drain(inbox, emit) and self._linger(inbox, emit):
            outputs = self.step()
            stats = self.take_stats()
            if outputs or stats is not None:
                emit(Outputs(outputs=outputs, stats=stats))
            for reply in self.take_replies():
                emit(reply)

    def _drain(self, inbox: Inbox, emit: Callable[[FromEngine], None]) -> bool:
        """Handle what came in; waits when there is nothing else to do. False: it must stop."""
        block = not self.busy
        while block or not inbox.empty():
            message = self._rest(inbox) if block else inbox.get()
            if block:  # it was idle until now: the time of rest is no delay
                if self.pulse is not None:
                    self.pulse.beat(busy=True, paused=self.paused)
                block = False
            if not self._take(message, emit):
                return False
        return True

    def _rest(self, inbox: Inbox) -> ToEngine | EngineDeadError:
        """Wait for what comes in. If that takes a while, workers do what their start left out, one thing after another:
        a request that comes then waits for one of these at most."""
        seconds = _REST
        while self._has_leftovers:
            try:
                return inbox.get(timeout=seconds)
            except queue.Empty:
                self._has_leftovers = any(self.executor.ask(WorkerProtocol.prepare_idle))
                seconds = 0.0
        return inbox.get()

    def _linger(self, inbox: Inbox, emit: Callable[[FromEngine], None]) -> bool:
        """Take what comes in until the device is about to want its next step. False: it must stop."""
        while self._flying and not self.scheduler.limits_overlap:  # a stage that has none wants its next step now
            tokens = self._flying[0][0].total_tokens
            lead = self._leads[self.scheduler.num_waiting > 0]
            left = self._began + self._step_times.expect(tokens) - lead.seconds() - now()
            if left <= 0:
                break
            try:
                message = inbox.get(timeout=left)
            except queue.Empty:
                break
            if not self._take(message, emit):
                return False
        return True

    def _take(self, message: ToEngine | EngineDeadError, emit: Callable[[FromEngine], None]) -> bool:
        """Handle what came in; False: it must stop."""
        if isinstance(message, EngineDeadError):
            raise message
        if isinstance(message, Stop):
            return False
        if isinstance(message, EngineRequest):
            self.submit(message)
        elif isinstance(message, Abort):
            self.abort(message.request_ids)
        elif isinstance(message, Wake) and self.lockstep is not None:
            self.lockstep.wake(message.step)
        elif isinstance(message, ControlCall) and (reply := self.call(message)) is not None:
            emit(reply)
        return True


class StepTimes:
    """When the device will want its next step: how long one of some size takes, by those that ran lately."""

    KEPT = 8  # steps of one size
    CLASS = 64  # tokens: numbers that round up to the same multiple are one size; smaller ones are by themselves

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        self._recent.setdefault(self._size(tokens), deque(maxlen=self.KEPT)).append(seconds)

    def expect(self, tokens: int) -> float:
        """Seconds that such a step takes at least, as far as is known; 0: it never ran."""
        recent = self._recent.get(self._size(tokens))
        return min(recent) if recent else 0.0

    def _size(self, tokens: int) -> int:
        return tokens if tokens < self.CLASS else -(-tokens // self.CLASS) * self.CLASS


class Lead:
    """How long before its start a step must be planned: by what planning and launching took lately."""

    KEPT = 32  # steps
    FACTOR = 1.5
    LEAST = 0.0005  # seconds: what waking up may cost

    def __init__(self) -> None:
        self._taken: deque[float] = deque(maxlen=self.KEPT)

    def learn(self, seconds: float) -> None:
        self._taken.append(seconds)

    def seconds(self) -> float:
        return self.LEAST + self.FACTOR * max(self._taken, default=0.0)


def failed_output(request_id: str, refused: QuireError) -> EngineOutput:
    return EngineOutput(
        request_id=request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=str(refused),
        error_kind=kind_of(refused),
        limit=refused.limit if isinstance(refused, OverloadedError) else "",
    )


def _add(before: StepStats, after: StepStats) -> StepStats:
    return StepStats(
        step=after.step,
        running=after.running,
        waiting=after.waiting,
        prompt_tokens=before.prompt_tokens + after.prompt_tokens,
        generated_tokens=before.generated_tokens + after.generated_tokens,
        preempted=before.preempted + after.preempted,
        kv_usage=after.kv_usage,
        cache=before.cache + after.cache,
        media=before.media + after.media,
        plan_seconds=before.plan_seconds + after.plan_seconds,
        forward_seconds=before.forward_seconds + after.forward_seconds,
        commit_seconds=before.commit_seconds + after.commit_seconds,
        running_adapters=after.running_adapters,
        waiting_adapters=after.waiting_adapters,
        drafts=before.drafts + after.drafts if after.drafts.num_drafts else before.drafts,
    )
