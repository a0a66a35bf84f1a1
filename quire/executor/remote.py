"""Workers in processes of their own: any number, reached by rank over one hub, on this host or by TCP.

What travels: to a worker WorkerCall (a verb of `WorkerProtocol`, or a call by name), back from it WorkerJoined once and
then WorkerReply. Types of arguments and answers are read from `WorkerProtocol` (base.py), so a new verb needs nothing
here. Verbs run in the order sent; a step's result is read in a thread of its own, so that the next step can be started
meanwhile. `forward` and, but for the rank that answers for all, `sample` are not answered: a failure there is said all
the same, and ends the executor as a death does. So does a step that takes longer than any should: signs of life say
what a worker is doing, and for how long (beats.py).
Where workers run is the matter of a `Launch` (members.py): processes of this host, other machines (nodes.py), Ray
(ray.py). Nothing is pickled. Over TCP connections are encrypted, and only made with, and every message is sealed with a
secret of this run, which a worker process gets through its standard input. Must not know what a plan means.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import cache
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, get_type_hints

import msgspec

from quire.base import env, registry
from quire.base.clock import now
from quire.base.codec import Codec, CodecError
from quire.base.folders import remove_folder
from quire.base.log import logger
from quire.base.seal import new_secret
from quire.base.sockets import Hub, PeerGoneError, Wire, private_folder
from quire.base.streams import StreamHub, StreamWire
from quire.executor.alike import difference, remarks, statement
from quire.executor.base import WORKER, Answer, Arguments, PendingResult, WorkerProtocol, resolve_verb
from quire.executor.beats import Activity, Pulses, StepLimit, WorkerBeat, stacks
from quire.executor.members import SAID, Launch, WorkerBoot, on_this_host, why_dead, why_lost
from quire.schema.errors import EngineDeadError, InputError, QuireError, kind_of, message_of, rebuild_error
from quire.schema.step import Mask, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
CONFIG = "quire.config:EngineConfig"
_HUB = "executor"
_MEETING = "meeting"
_PATIENCE = 5.0  # seconds that a worker may take to leave
_NOBODY = -1  # call id of an WorkerCall that is not answered
_STEP_VERBS = ("forward", "sample", "idle_step")


class WorkerCall(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    call_id: int
    verb: str
    args: msgspec.Raw  # of a verb of `WorkerProtocol`: msgpack of its arguments in order; of a call: of CallArguments
    is_call: bool = False


class CallArguments(msgspec.Struct, frozen=True, array_like=True):
    args: list[Any]
    kwargs: dict[str, Any]


class WorkerJoined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    rank: int
    address: str  # of its mailbox
    about: dict[str, str] = {}  # what it must have in common with the others (alike.py), if it may differ


class WorkerReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    rank: int
    call_id: int
    value: msgspec.Raw
    error: str | None = None
    error_kind: str = ""


class _Types(NamedTuple):
    args: Any  # a tuple type
    answer: Any


@cache
def types_of(verb: str) -> _Types:
    """Of a verb's arguments and its answer, as declared in `WorkerProtocol`; LookupError: there is no such verb."""
    declared = vars(WorkerProtocol).get(verb)
    if verb.startswith("_") or not callable(declared):
        raise LookupError(f"a worker has no verb {verb!r}")
    hints = get_type_hints(declared)
    answer = hints.pop("return")
    args = tuple[tuple(hints.values())] if hints else tuple[()]  # type: ignore[misc]
    return _Types(args, StepResult if answer is PendingResult else answer)


class _UnheardError(Exception):
    """A worker failed where nobody waits for its answer."""

    def __init__(self, worker: str, error: Exception | None) -> None:
        super().__init__(f"{worker} failed: {error}")
        self.error = error or RuntimeError("an answer came that nobody asked for")


class RemoteExecutor:
    """As an Executor. `host`: an address of this machine, on which to listen for workers by TCP; None: they are here.
    `stages`: into how many groups of equal size the workers are divided, in the order of ranks; the first of the last
    group answers for a step. `nodes`: into how many machines, likewise. `launch`: what starts the workers. `meeting`:
    where they find each other, if not here."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_workers: int = 1,
        host: str | None = None,
        worker: str = WORKER,
        config_type: str = CONFIG,
        stages: int = 1,
        nodes: int = 1,
        launch: Launch = on_this_host,
        meeting: str = "",
    ) -> None:
        self.num_workers, self._stages, self._nodes = num_workers, stages, nodes
        self._answering = num_workers - num_workers // stages
        self._folder = private_folder()
        secret = None if host is None else new_secret()
        mine = _HUB if host is None else f"tcp://{host}:*"
        self._hub: Hub | StreamHub
        if secret is None:
            self._hub = StreamHub(self._folder, mine=mine)
        else:
            self._hub = Hub(self._folder, mine=mine, secret=secret)
        self._ids = itertools.count()
        self._open: dict[tuple[int, int], Future[msgspec.Raw]] = {}  # by rank and call
        self._lock = threading.Lock()
        self._dead: EngineDeadError | None = None
        self._when_dead: Callable[[EngineDeadError], None] | None = None
        self._joined = [Future[None]() for _ in range(num_workers)]
        self._about: dict[int, dict[str, str]] = {}
        self._pulses = Pulses(num_workers, env.WORKER_TIMEOUT_S.get())
        self._steps = StepLimit(env.EXECUTE_MODEL_TIMEOUT_SECONDS.get(), self._pulses.patience)
        boot = msgspec.Raw(msgspec.msgpack.encode(config))
        ranks = range(num_workers)
        boots = [
            WorkerBoot(
                rank=rank,
                num_workers=num_workers,
                meeting="" if num_workers == 1 else meeting or f"file://{self._folder}/{_MEETING}",
                folder=self._folder,
                mine=f"worker-{rank}" if host is None else f"tcp://{host}:*",
                theirs=_HUB if host is None else self._hub.address,
                secret=secret,
                worker=worker,
                config_type=config_type,
                config=boot,
                beat_s=self._steps.beat_s or self._pulses.patience or 0.0,
                step_limit_s=self._steps.limit,
            )
            for rank in ranks
        ]
        try:
            self._members = launch(boots, [self._name(rank) for rank in ranks])
        except BaseException:
            self._hub.close()
            remove_folder(self._folder)
            raise
        self._reader = threading.Thread(target=self._read, name="executor inbox", daemon=True)
        self._reader.start()

    def _name(self, rank: int) -> str:
        """Of a worker in logs and errors."""
        stage = f", pipeline stage {rank // (self.num_workers // self._stages)}" if self._stages > 1 else ""
        node = f" on node {rank // (self.num_workers // self._nodes)}" if self._nodes > 1 else ""
        return f"worker {rank}{stage}{node}"

    # ---- the verbs ---------------------------------------------------------------------------------------------

    def ask(
        self,
        verb: Callable[Concatenate[WorkerProtocol, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        if kwargs:
            raise TypeError(f"arguments of {verb.__name__} cross a wire in order, without names: {sorted(kwargs)}")
        kind = types_of(verb.__name__).answer
        replies = self._send(verb.__name__, args, range(self.num_workers))
        self._await_all(verb.__name__, replies)
        if verb.__name__ == WorkerProtocol.warm_up.__name__:  # the start is over
            self._pulses.watch()
        return [msgspec.msgpack.decode(reply.result(), type=kind) for reply in replies]

    def _await_all(self, verb: str, replies: list[Future[msgspec.Raw]]) -> None:
        limit = env.ENGINE_START_TIMEOUT_S.get()
        failed, late = _settled(replies, limit)
        if failed is not None:
            raise self._explained(failed)
        if late:
            raise EngineDeadError(f"no answer to {verb!r} within {limit} s from {'; '.join(map(self._name, late))}")

    def forward(self, plan: StepPlan) -> None:
        self._send("forward", (plan,), ())

    def sample(self, step: int, mask: Mask | None) -> PendingResult:
        (reply,) = self._send("sample", (step, mask), (self._answering,))
        return _RemoteResult(reply, self._explained)

    def call(self, verb: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        try:
            encoded = msgspec.msgpack.encode(CallArguments(args, kwargs))
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise InputError(f"arguments of {verb!r} cannot cross to a worker's process: {wrong}") from None
        replies = self._post(verb, encoded, range(self.num_workers), is_call=True)
        failed, late = _settled(replies, timeout)
        if failed is not None:
            raise failed
        if late:
            raise TimeoutError(f"no answer from the workers within {timeout} s")
        return [msgspec.msgpack.decode(reply.result()) for reply in replies]

    def call_function(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], timeout: float | None
    ) -> list[Any]:
        raise InputError(
            "a callable cannot cross to a worker in another process: give its import path ('module:function')"
        )

    def shutdown(self) -> None:
        """WorkerCall the workers to leave, and see to it that they do."""
        with self._lock:
            closing = self._dead is None
            self._dead = self._dead or EngineDeadError("the executor was shut down")
        if closing:
            for rank in range(self.num_workers):
                self._hub.send(str(rank), _TO.encode(WorkerCall(_NOBODY, "shutdown", _RAW_NOTHING)))
        deadline = now() + (_PATIENCE if closing else 0.0)
        for member in self._members:
            member.stop(max(0.0, deadline - now()))
        self._hub.close()
        self._reader.join(_PATIENCE)
        for member in self._members:
            member.close()
        remove_folder(self._folder)

    def when_dead(self, tell: Callable[[EngineDeadError], None]) -> None:
        """Call this once a worker is gone, in some thread; at once if one is already."""
        with self._lock:
            self._when_dead, dead = tell, self._dead
        if dead is not None:
            tell(dead)

    # ---- the wire ----------------------------------------------------------------------------------------------

    def _send(self, verb: str, args: tuple[Any, ...], answering: range | tuple[int, ...]) -> list[Future[msgspec.Raw]]:
        return self._post(verb, msgspec.msgpack.encode(args), answering, is_call=False)

    def _post(
        self, verb: str, args: bytes, answering: range | tuple[int, ...], *, is_call: bool
    ) -> list[Future[msgspec.Raw]]:
        for rank, joined in enumerate(self._joined):
            self._await_start(rank, joined)
        call_id, replies = next(self._ids), []
        with self._lock:
            if self._dead is not None:
                raise self._dead
            for rank in answering:
                self._open[rank, call_id] = Future()
                replies.append(self._open[rank, call_id])
        for rank in range(self.num_workers):
            answered = call_id if rank in answering else _NOBODY
            self._hub.send(str(rank), _TO.encode(WorkerCall(answered, verb, msgspec.Raw(args), is_call)))
        return replies

    def _await_start(self, rank: int, joined: Future[None]) -> None:
        try:
            joined.result(env.ENGINE_START_TIMEOUT_S.get())
        except TimeoutError:
            limit = f"{env.ENGINE_START_TIMEOUT_S.get()} s (QUIRE_ENGINE_START_TIMEOUT_S)"
            raise EngineDeadError(f"{self._name(rank)} did not start within {limit}") from None

    def _read(self) -> None:
        """Sort what comes back, until a worker is gone or has failed where nobody waits for its answer."""
        try:
            while True:
                received = self._hub.receive([member.notice for member in self._members], self._pulses.patience)
                self._check_pulses()
                if received is None:
                    continue
                sender, frames = received
                message = _FROM.decode(frames)
                if sender != str(message.rank).encode() or not 0 <= message.rank < self.num_workers:
                    raise CodecError(f"a message of rank {message.rank} was sent by {sender[:20]!r}")
                self._take(message)
        except (PeerGoneError, CodecError) as gone:
            self._die(EngineDeadError(why_lost(self._members) or why_dead(self._members) or str(gone)))
        except _UnheardError as failed:
            explained = self._explained(failed.error)
            self._die(explained if isinstance(explained, EngineDeadError) else EngineDeadError(str(failed)))
        except Exception as broken:  # the root of a thread: without it, whoever waits would wait for ever
            log.exception("The workers' answers cannot be read any more")
            self._die(EngineDeadError(f"the workers' answers cannot be read any more: {broken!r}"))

    def _explained(self, failed: BaseException) -> BaseException:
        """What a worker answered, unless that came of another worker's death."""
        why = "" if isinstance(failed, QuireError) else why_lost(self._members)
        return EngineDeadError(why) if why else failed

    def _check_pulses(self) -> None:
        if silent := self._pulses.silent():
            names = "; ".join(map(self._name, silent))
            limit = f"{self._pulses.limit:g} s (QUIRE_WORKER_TIMEOUT_S)"
            raise PeerGoneError(f"no sign of life within {limit} from {names}: the process hangs or is stopped")

    def _take(self, message: WorkerJoined | WorkerReply | WorkerBeat) -> None:
        self._pulses.hear(message.rank)
        if isinstance(message, WorkerBeat):
            if why := self._steps.exceeded(message, self._name, self.num_workers):
                raise PeerGoneError(why)
            return
        if isinstance(message, WorkerJoined):
            self._join(message)
            return
        error = None if message.error is None else rebuild_error(message.error_kind, message.error)
        with self._lock:
            waiting = self._open.pop((message.rank, message.call_id), None)
        if waiting is None:
            raise _UnheardError(self._name(message.rank), error)
        if error is None:
            waiting.set_result(message.value)
            return
        waiting.set_exception(error)

    def _join(self, message: WorkerJoined) -> None:
        self._about[message.rank] = message.about
        ranks = sorted(self._about)
        statements = [self._about[rank] for rank in ranks]
        if why := difference(statements, lambda place: self._name(ranks[place])):
            raise PeerGoneError(why)
        if len(ranks) == self.num_workers:
            for remark in remarks(statements, self._name):
                log.warning("%s", remark)
        self._hub.open(str(message.rank), message.address)
        self._joined[message.rank].set_result(None)

    def _die(self, why: EngineDeadError) -> None:
        with self._lock:
            self._dead = self._dead or why
            waiting, self._open = self._open, {}
            tell = self._when_dead
        for reply in waiting.values():
            reply.set_exception(self._dead)
        for joined in self._joined:
            if not joined.done():
                joined.set_exception(self._dead)
        if tell is not None:
            tell(self._dead)


def _settled(replies: list[Future[msgspec.Raw]], limit: float | None) -> tuple[BaseException | None, list[int]]:
    """Wait until all have answered or one has failed: the others may be waiting for that one. The failure of the first
    rank that has one, and the ranks that have not answered."""
    done, late = wait(replies, limit, return_when=FIRST_EXCEPTION)
    failed = next((reply.exception() for reply in replies if reply in done and reply.exception() is not None), None)
    return failed, [rank for rank, reply in enumerate(replies) if reply in late]


class _RemoteResult:
    def __init__(self, reply: Future[msgspec.Raw], explain: Callable[[BaseException], BaseException]) -> None:
        self._reply, self._explain = reply, explain

    def result(self) -> StepResult:
        if (failed := self._reply.exception()) is not None:
            raise self._explain(failed)
        return msgspec.msgpack.decode(self._reply.result(), type=StepResult)


_TO: Codec[WorkerCall] = Codec(WorkerCall)
_FROM: Codec[WorkerJoined | WorkerReply | WorkerBeat] = Codec(WorkerJoined | WorkerReply | WorkerBeat)
_RAW_NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))
_NIL = msgspec.Raw(msgspec.msgpack.encode(None))


# ---- the worker's end ------------------------------------------------------------------------------------------


def main(boot: bytes) -> None:
    """A worker process, from its boot bytes to its end."""
    os._exit(serve_worker(msgspec.msgpack.decode(boot, type=WorkerBoot)))


def serve_worker(place: WorkerBoot) -> int:
    """A worker in this process, until it is told to leave: 0, or SAID if it could not be made and has said why."""
    name = str(place.rank).encode()
    wire: Wire | StreamWire
    if place.secret is None:
        wire = StreamWire(place.folder, theirs=place.theirs, sender=name)
    else:
        wire = Wire(place.folder, mine=place.mine, theirs=place.theirs, sender=name, secret=place.secret)
    end = _End(place.rank, wire)
    if place.beat_s > 0:
        args = place.beat_s, place.step_limit_s
        threading.Thread(target=end.beat, args=args, name="signs of life", daemon=True).start()
    if place.secret is None:  # here, where all have the environment of the engine
        joined = WorkerJoined(place.rank, place.mine)
    else:
        joined = WorkerJoined(place.rank, wire.address, statement())
    wire.send(_FROM.encode(joined))
    try:
        config = msgspec.msgpack.decode(place.config, type=registry.load(place.config_type))
        worker = registry.load(place.worker)(
            config, rank=place.rank, num_workers=place.num_workers, meeting=place.meeting
        )
    except Exception as failed:  # noqa: BLE001  # a process root: the engine hears why
        end.fail(_NOBODY, failed)
        wire.close(linger=_PATIENCE)
        return SAID
    end.serve(worker)
    wire.close(linger=_PATIENCE)
    return 0


class _End:
    """Runs what is asked for, in order; a thread waits for results of steps."""

    def __init__(self, rank: int, wire: Wire | StreamWire) -> None:
        self._rank, self._wire = rank, wire
        self._results: queue.SimpleQueue[tuple[int, PendingResult]] = queue.SimpleQueue()
        self._called, self._read = Activity(), Activity()  # of the thread that runs calls, and that which reads results

    def serve(self, worker: WorkerProtocol) -> None:
        """Until `shutdown` was asked for, or nobody is left who could."""
        threading.Thread(target=self._read_results, name="results", daemon=True).start()
        while True:
            try:
                frames = self._wire.receive()
            except PeerGoneError:
                return
            assert frames is not None
            call = _TO.decode(frames)
            is_step = call.verb in _STEP_VERBS and not call.is_call
            try:
                if is_step:
                    self._called.begin(call.verb)
                value = _run(worker, call)
            except Exception as failed:  # noqa: BLE001  # said to whoever asked
                self.fail(call.call_id, failed)
                continue
            finally:
                self._called.end()
            if call.verb == "shutdown" and not call.is_call:
                return
            if call.verb == "warm_up" and not call.is_call:
                gc.collect(1)  # not what was imported, which is old
                gc.freeze()  # what the start made stays: later collections need not look through it
            if call.verb == "sample" and not call.is_call:
                self._results.put((call.call_id, value))
            elif call.call_id != _NOBODY:
                self._answer(call.call_id, value)

    def beat(self, seconds: float, limit: float) -> None:
        was_late = False
        with contextlib.suppress(PeerGoneError):  # closed: the process ends
            while True:
                time.sleep(seconds)
                beat = max(
                    self._called.as_beat(self._rank), self._read.as_beat(self._rank), key=lambda one: one.seconds
                )
                is_late = 0 < limit <= beat.seconds
                if is_late and not was_late:
                    log.error("A step has been in %r for %.1f s\n%s", beat.doing, beat.seconds, stacks())
                was_late = is_late
                self._wire.send(_FROM.encode(beat))

    def _read_results(self) -> None:
        while True:
            call_id, pending = self._results.get()
            self._read.begin("result")
            try:
                result = pending.result()
            except Exception as failed:  # noqa: BLE001  # said to whoever asked
                self.fail(call_id, failed)
                continue
            finally:
                self._read.end()
            if call_id != _NOBODY:
                self._answer(call_id, result)

    def _answer(self, call_id: int, value: Any) -> None:
        try:
            encoded = msgspec.Raw(msgspec.msgpack.encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            self.fail(call_id, InputError(f"the answer cannot cross to another process: {wrong}"))
            return
        self._wire.send(_FROM.encode(WorkerReply(self._rank, call_id, encoded)))

    def fail(self, call_id: int, failed: Exception) -> None:
        self._wire.send(_FROM.encode(WorkerReply(self._rank, call_id, _NIL, message_of(failed), kind_of(failed))))


def _run(worker: WorkerProtocol, call: WorkerCall) -> Any:
    if call.is_call:
        arguments = msgspec.msgpack.decode(call.args, type=CallArguments)
        return resolve_verb(call.verb)(worker, *arguments.args, **arguments.kwargs)
    args = msgspec.msgpack.decode(call.args, type=types_of(call.verb).args)
    return getattr(worker, call.verb)(*args)
