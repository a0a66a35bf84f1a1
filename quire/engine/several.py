"""SeveralEngines: the client of engines that are replicas of each other, for callers who know of one.

In: requests, each placed on one engine by a router, or on the one that its caller names. Out: the outputs of all of
them, with the place of the engine they came from. A control verb goes to every living engine, and its answers become
one by the verb's own rule (control.py). An engine that dies fails its own requests at once and gets no more; the
others go on. Only when the last one is gone is this client dead. Engines that have experts together are no replicas:
none can go on without the others, and the death of one is the end of all.
Must not know: prompts, text, how an engine is started, or how one is chosen (sched/router.py).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import msgspec

from quire.base.clock import now
from quire.base.log import logger
from quire.engine.client import CLOSED, EngineClient, Sink, wait_for
from quire.engine.control import VERBS
from quire.sched.router import Router
from quire.schema.errors import PEERS_LOST, EngineDeadError, kind_of, message_of, rebuild_error
from quire.schema.messages import EngineOutput, EngineReady, EngineRequest, FinishReason, Outputs
from quire.schema.stats import StepStats

log = logger(__name__)
_FURTHER_REASONS_S = 2.0  # after one engine could not start, for others to say the same
_TRUE_REASON_S = 1.0  # after the death of one of several engines that cannot go on alone, for the true reason
_NOTHING = StepStats(step=0, running=0, waiting=0, prompt_tokens=0, generated_tokens=0, preempted=0, kv_usage=0.0)


class MemberClient(EngineClient, Protocol):
    """The client of one of several engines."""

    def abandon(self) -> None:
        """Make its process leave while another thread waits for it to be ready."""

    def begin_close(self, reason: str = "") -> None:
        """Tell it to stop, without waiting. `reason`: why it has to, unless it is shut down."""

    def client_left(self, client: int) -> None: ...


class SeveralEngines:
    """As an EngineClient. `ranks`: the data-parallel ranks of the members, in their order (their places)."""

    def __init__(
        self,
        members: Sequence[MemberClient],
        ranks: Sequence[int],
        router: Router,
        *,
        started_here: bool = True,
        together: bool = False,
    ) -> None:
        """`started_here`: all must start. Else another process has seen to that, and some may have died since.
        `together`: none can go on without the others."""
        self.members, self.ranks = tuple(members), tuple(ranks)
        self._started_here, self._is_closing = started_here, False
        self.readies: tuple[EngineReady, ...] = ()
        self._merged = _Merged(self.ranks, router, together=together)
        self.pulse = SeveralPulses(self.members, self._merged)

    @property
    def dead(self) -> EngineDeadError | None:
        return self._merged.dead

    @property
    def lost(self) -> Mapping[int, str]:
        """Why engines are gone, by data-parallel rank, while others go on."""
        return dict(self._merged.reasons)

    def wait_ready(self) -> EngineReady:
        """All start at the same time. Where some cannot, everyone's reason is named, and none is left."""
        failed, readies = self._await_all()
        if failed and (self._started_here or not readies):
            error = self._start_error(failed)
            self.begin_close(_as_death(error).reason)
            self.close()
            raise error
        first = next(iter(readies.values()))
        for place, member in enumerate(self.members):
            if place in readies:
                member.stream(_MemberSink(self._merged, place))
            else:
                self._merged.died(place, _as_death(failed[place]))
        nothing = msgspec.structs.replace(first, num_blocks=0)
        self.readies = tuple(readies.get(place, nothing) for place in range(len(self.members)))
        num_blocks = sum(ready.num_blocks for ready in self.readies)
        max_model_len = min(ready.max_model_len for ready in self.readies)
        together = sum(ready.max_concurrency for ready in self.readies)
        return msgspec.structs.replace(
            first, num_blocks=num_blocks, max_model_len=max_model_len, max_concurrency=together
        )

    def _await_all(self) -> tuple[dict[int, BaseException], dict[int, EngineReady]]:
        """By place: why it could not start, or what it said once it had."""
        pool = ThreadPoolExecutor(len(self.members), thread_name_prefix="engine start")
        waiting = [pool.submit(member.wait_ready) for member in self.members]
        failed: dict[int, BaseException] = {}
        try:
            _, late = wait(waiting, return_when=FIRST_EXCEPTION)
            if late:  # one has failed
                wait(late, _FURTHER_REASONS_S if self._started_here else None)
        finally:
            for place, (member, one) in enumerate(zip(self.members, waiting, strict=True)):
                if not one.done():
                    member.abandon()
                elif (error := one.exception()) is not None:
                    failed[place] = error
            pool.shutdown()
        return failed, {i: one.result() for i, one in enumerate(waiting) if one.exception() is None}

    def _start_error(self, failed: Mapping[int, BaseException]) -> BaseException:
        """Of the kind that the first has; each reason once, with the engines that had it."""
        first, names = next(iter(failed.values())), dict[str, list[str]]()
        for place, error in failed.items():
            reason = _as_death(error).reason
            names.setdefault(reason, []).append(str(self.ranks[place]))
        words = [f"engine{'s' * (len(them) > 1)} {', '.join(them)}: {reason}" for reason, them in names.items()]
        if isinstance(first, EngineDeadError):
            return EngineDeadError("; ".join(words))
        return rebuild_error(kind_of(first), "; ".join(words))

    # ---- requests ----------------------------------------------------------------------------------------------

    def place(self, requests: Sequence[EngineRequest], rank: int | None = None) -> int:
        """Where these, the answers to one prompt, go to: the engine of this rank, or the router's choice."""
        return self._merged.place(requests, None if rank is None else self.ranks.index(rank))

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Each to the engine it was placed on."""
        parts: dict[int, list[EngineRequest]] = {}
        for request in requests:
            if (place := self._merged.place_of(request.request_id)) is not None:
                parts.setdefault(place, []).append(request)
        for place, part in parts.items():
            with contextlib.suppress(EngineDeadError):  # its death is told to each of its requests
                self.members[place].submit(part)

    def abort(self, request_ids: Iterable[str]) -> None:
        for place, part in self._merged.end(request_ids).items():
            with contextlib.suppress(EngineDeadError):
                self.members[place].abort(part)

    def receive(self) -> Outputs:
        return self._merged.fetch()

    def stream(self, sink: Sink) -> None:
        self._merged.stream(sink)

    # ---- control -----------------------------------------------------------------------------------------------

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return wait_for(verb, self.begin_call(verb, *args, **kwargs), timeout)

    def begin_call(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        known = VERBS.get(verb)
        replies: dict[int, Future[Any]] = {}
        for place in self._merged.living():
            with contextlib.suppress(EngineDeadError):
                replies[self.ranks[place]] = self.members[place].begin_call(verb, *args, **kwargs)
            if replies and known is not None and known.once:
                break
        if not replies:
            raise self.dead or EngineDeadError()
        return _together(replies, (lambda values: values[0]) if known is None else known.merge)

    def show_stacks(self) -> None:
        for place in self._merged.living():
            self.members[place].show_stacks()

    def client_left(self, client: int) -> None:
        """A client that had joined all of them is gone: its requests end."""
        for place in self._merged.living():
            with contextlib.suppress(EngineDeadError):
                self.members[place].client_left(client)

    def begin_close(self, reason: str = "") -> None:
        """Tell all of them to stop, once, without waiting. `reason`: why they have to, unless this is a shutdown."""
        if not self._is_closing:
            self._is_closing = True
            self._merged.close()
            for member in self.members:
                member.begin_close(reason)

    def close(self) -> None:
        self.begin_close()  # they leave at the same time
        for member in self.members:
            member.close()


class SeveralPulses:
    def __init__(self, members: Sequence[EngineClient], merged: _Merged) -> None:
        self._members, self._merged = members, merged

    def silence(self, waiting_since: float | None) -> float:
        """Of the living engine that is silent the longest. Since when requests wait is known for each engine."""
        return max((self._members[i].pulse.silence(since) for i, since in self._merged.waiting().items()), default=0.0)


class _MemberSink:
    """What one engine says."""

    def __init__(self, merged: _Merged, place: int) -> None:
        self._merged, self._place = merged, place

    def take(self, outputs: Outputs) -> None:
        self._merged.take(self._place, outputs)

    def died(self, error: EngineDeadError) -> None:
        self._merged.died(self._place, error)


class _Merged:
    """What the members' threads fill. Knows nothing of the client, so that one can be collected."""

    def __init__(self, ranks: Sequence[int], router: Router, *, together: bool = False) -> None:
        self._is_together = together
        self._ending: threading.Timer | None = None
        self._is_told = False  # that all are dead
        self.reasons: dict[int, str] = {}  # by rank
        self.dead: EngineDeadError | None = None
        self._ranks, self._router = ranks, router
        self._lock = threading.Lock()  # over the router; never held while a sink is called
        self._since = [0.0] * len(ranks)  # when the first of the requests that an engine now has was placed
        self._sink: Sink | None = None
        self._fetched: queue.SimpleQueue[Outputs | None] = queue.SimpleQueue()

    def place(self, requests: Sequence[EngineRequest], requested: int | None) -> int:
        router, first = self._router, requests[0]
        with self._lock:
            if self.dead is not None or not router.living:
                raise EngineDeadError(self.dead.reason if self.dead is not None else "no engine is left")
            if requested is not None and requested not in router.living:
                raise EngineDeadError(self.reasons[self._ranks[requested]])
            place = router.choose(first) if requested is None else requested
            if not router.unfinished[place]:
                self._since[place] = now()
            for request in requests:
                router.place(request.request_id, place)
        return place

    def place_of(self, request_id: str) -> int | None:
        with self._lock:
            return self._router.engine_of(request_id)

    def end(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """They need not go on; which of them run where."""
        parts: dict[int, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                if (place := self._router.engine_of(request_id)) is not None:
                    parts.setdefault(place, []).append(request_id)
                    self._router.finish(request_id)
        return parts

    def living(self) -> list[int]:
        with self._lock:
            return list(self._router.living)

    def waiting(self) -> dict[int, float | None]:
        """Since when each living engine has had requests of ours."""
        with self._lock:
            return {i: self._since[i] if self._router.unfinished[i] else None for i in self._router.living}

    def take(self, place: int, outputs: Outputs) -> None:
        with self._lock:
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self._router.finish(output.request_id)
        self._tell(msgspec.structs.replace(outputs, engine=place))

    def died(self, place: int, error: EngineDeadError) -> None:
        rank = self._ranks[place]
        name = f"engine {rank}"
        reason = error.reason if error.reason.startswith(name) else f"{name}: {error.reason}"
        with self._lock:
            if rank in self.reasons:
                return
            self.reasons[rank] = reason
            if self._is_together and self.dead is None:
                # an engine that only misses another may be heard before the notice of that one's death
                seconds = _TRUE_REASON_S if PEERS_LOST in reason else 0.0
                self._end_within(seconds)
                return
            lost, num_living = self._router.lose(place), len(self._router.living)
            if not num_living and self.dead is None:
                self.dead = EngineDeadError("; ".join(self.reasons[one] for one in sorted(self.reasons)))
            dead = self.dead
        if dead is None:
            log.error(
                "%s; %d requests are lost, %d of %d engines go on", reason, len(lost), num_living, len(self._ranks)
            )
        self._fail(place, lost, reason)
        if dead is not None and not num_living:
            self._end(dead)

    def _end_within(self, seconds: float) -> None:
        if self._ending is not None:
            if seconds:
                return
            self._ending.cancel()
        self._ending = threading.Timer(seconds, self._end_together)
        self._ending.daemon = True
        self._ending.start()

    def _end_together(self) -> None:
        with self._lock:
            if self.dead is not None and not self._router.living:
                return  # done, as two deaths came at once
            own = [self.reasons[rank] for rank in sorted(self.reasons)]
            causes = [reason for reason in own if PEERS_LOST not in reason] or own
            why = EngineDeadError(f"{'; '.join(causes)}; engines that share experts cannot go on alone")
            dead = self.dead = self.dead or why  # it may be closed by now
            lost = {place: self._router.lose(place) for place in tuple(self._router.living)}
        log.error("%s; %d requests are lost", dead.reason, sum(map(len, lost.values())))
        for place, requests in lost.items():
            self._fail(place, requests, dead.reason)
        self._end(dead)

    def _fail(self, place: int, lost: Iterable[str], reason: str) -> None:
        death = EngineDeadError(reason)
        failed = [
            EngineOutput(request_id=one, new_token_ids=[], finish_reason=FinishReason.ERROR, error=str(death),
                         error_kind=kind_of(death))
            for one in lost
        ]  # fmt: skip
        self._tell(Outputs(outputs=failed, stats=_NOTHING, engine=place))

    def _end(self, dead: EngineDeadError) -> None:
        with self._lock:
            was_told, self._is_told = self._is_told, True
        if was_told:
            return
        self._fetched.put(None)
        if self._sink is not None:
            self._sink.died(dead)

    def fetch(self) -> Outputs:
        outputs = self._fetched.get()
        if outputs is None:
            self._fetched.put(None)
            raise EngineDeadError(self.dead.reason if self.dead is not None else "")
        return outputs

    def stream(self, sink: Sink) -> None:
        self._sink = sink
        if self.dead is not None:
            sink.died(self.dead)

    def close(self) -> None:
        self.dead = self.dead or EngineDeadError(CLOSED)
        self._fetched.put(None)

    def _tell(self, outputs: Outputs) -> None:
        if self._sink is None:
            self._fetched.put(outputs)
        else:
            self._sink.take(outputs)


def _as_death(error: BaseException) -> EngineDeadError:
    return error if isinstance(error, EngineDeadError) else EngineDeadError(message_of(error))


def _together(replies: Mapping[int, Future[Any]], merge: Callable[[list[Any]], Any]) -> Future[Any]:
    """One answer of several, by rank, once all have come. An engine that died meanwhile need not answer."""
    whole: Future[Any] = Future()
    whole.set_running_or_notify_cancel()
    lock, left = threading.Lock(), [len(replies)]

    def settle(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        errors = {rank: error for rank, one in replies.items() if (error := one.exception()) is not None}
        real = {rank: error for rank, error in errors.items() if not isinstance(error, EngineDeadError)}
        values = [one.result() for one in replies.values() if one.exception() is None]
        if not real and values:
            whole.set_result(merge(values))
            return
        rank, error = next(iter((real or errors).items()))
        if values:  # only some failed
            error = rebuild_error(kind_of(error), f"engine {rank}: {message_of(error)}")
        whole.set_exception(error)

    for reply in replies.values():
        reply.add_done_callback(settle)
    return whole
