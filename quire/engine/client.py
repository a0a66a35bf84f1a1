"""EngineClient: how the Python and HTTP interfaces reach an engine, and the client of one in this process.

In: EngineRequest, request ids to abort, control verbs. Out: Outputs, either fetched turn by turn (`receive`) or
streamed from a thread (`stream`). When an engine dies, by an exception or by any other cause, everything that waits
for it fails at once with one EngineDeadError that says why, and everything later does too. The client of an engine in a
process of its own is process_client.py. Must not know: prompts, text, how outputs become results.
"""

from __future__ import annotations

import faulthandler
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from quire.base.log import logger
from quire.base.turns import HeldSignals, ThreadTurns
from quire.engine.pulse import Pulse
from quire.schema.errors import ConfigError, EngineDeadError, rebuild_error
from quire.schema.messages import (
    Abort,
    ControlCall,
    ControlReply,
    EngineOutput,
    EngineReady,
    EngineRequest,
    FromEngine,
    Outputs,
    Stop,
)

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.loop import EngineLoop, Inbox

log = logger(__name__)
Result = TypeVar("Result")
CLOSED = "it was shut down"
CLOSE_PATIENCE_S = 10.0  # that the step under way may take when an engine in this process is closed


class Sink(Protocol):
    """Where streamed outputs go. Called from one thread of the client."""

    def take(self, outputs: Outputs) -> None: ...
    def died(self, error: EngineDeadError) -> None: ...


class Liveness(Protocol):
    """What can be seen of an engine without asking it: Pulse, or that of several."""

    def silence(self, waiting_since: float | None) -> float:
        """Seconds without progress although there is work; 0.0 when all is well."""


@runtime_checkable
class PlacingClient(Protocol):
    """A client of several engines: every request has its place on one of them before it is submitted."""

    ranks: Sequence[int]  # of the engines, in the order of their places
    readies: Sequence[EngineReady]

    @property
    def lost(self) -> Mapping[int, str]:
        """Why engines are gone, by rank, while others go on."""

    def place(self, requests: Sequence[EngineRequest], rank: int | None = None) -> int: ...

    def begin_close(self, reason: str = "") -> None:
        """Before `close`, if this is no shutdown: why the engines have to stop."""


class EngineClient(Protocol):
    @property
    def dead(self) -> EngineDeadError | None:
        """Why it is gone, once it is."""

    @property
    def pulse(self) -> Liveness:
        """When it last got anywhere; read without asking it."""

    def wait_ready(self) -> EngineReady:
        """Finish starting. Raises what the engine raised if it could not start."""

    def submit(self, requests: Sequence[EngineRequest]) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...

    def receive(self) -> Outputs:
        """The outputs of one turn; waits for them. Not to be called while nothing is in flight, nor with stream()."""

    def stream(self, sink: Sink) -> None:
        """From now on deliver outputs to the sink, from another thread, until close."""

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Run a control verb and wait for its value; raises what it raised."""

    def begin_call(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same without waiting; only after stream()."""

    def show_stacks(self) -> None:
        """Let it write to standard error what its threads are doing; works for one that is stuck."""

    def close(self) -> None:
        """Orderly end; whatever is still in flight fails. May be called twice."""


class Calls:
    """Control calls that wait for their reply."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}

    def open(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ControlCall, Future[Any]]:
        call = ControlCall(call_id=next(self._ids), verb=verb, args=list(args), kwargs=kwargs)
        future: Future[Any] = Future()
        self._waiting[call.call_id] = future
        future.set_running_or_notify_cancel()  # from here on nobody but the engine settles it
        return call, future

    def answer(self, reply: ControlReply) -> None:
        future = self._waiting.pop(reply.call_id, None)
        if future is None:
            return  # its caller stopped waiting
        if reply.error is not None:
            future.set_exception(rebuild_error(reply.error_kind, reply.error))
        else:
            future.set_result(reply.value)

    def forget(self, call_id: int) -> None:
        self._waiting.pop(call_id, None)

    def fail(self, error: EngineDeadError) -> None:
        while self._waiting:
            _, future = self._waiting.popitem()
            future.set_exception(error)


def wait_for(verb: str, future: Future[Any], timeout: float | None) -> Any:
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no answer to {verb!r} within {timeout} s") from None


class InProcessClient:
    """The loop itself, turned by whoever calls `receive`, or by a thread of its own after `stream`.

    Several threads may call: nobody touches the loop during another's step."""

    def __init__(self, config: EngineConfig) -> None:
        self.dead: EngineDeadError | None = None
        self.pulse = Pulse()
        self._config = config
        self._loop: EngineLoop | None = None
        self._inbox: Inbox = queue.SimpleQueue()
        self._turns = ThreadTurns()  # at the loop, while it has no thread
        self._thread: threading.Thread | None = None
        self._sink: Sink | None = None  # None: nobody is to be told of the end
        self._calls = Calls()
        self._ending = threading.Lock()  # of who closes the loop: whoever takes it first, or as the two below say
        self._has_ended = False  # the thread runs no more steps
        self._is_left = False  # the loop is the thread's to close

    @property
    def loop(self) -> EngineLoop:
        self._check_alive()
        if self._loop is None:
            raise RuntimeError("wait_ready() was not called")
        return self._loop

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)

    def wait_ready(self) -> EngineReady:
        from quire.engine.start import start_engine  # lazy

        started = start_engine(self._config, self.pulse)
        self._loop = started.loop
        ready: EngineReady = started.ready
        return ready

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        self._check_alive()
        if self._thread is None:
            self._turns.take(self._submit_here, requests)
            return
        for request in requests:
            self._inbox.put(request)

    def _submit_here(self, requests: Sequence[EngineRequest]) -> None:
        loop = self.loop  # of this turn: another thread may have closed it since
        with HeldSignals():
            for request in requests:
                loop.submit(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._check_alive()
        ids = tuple(request_ids)
        if self._thread is None:
            self._turns.take(self._abort_here, ids)
        else:
            self._inbox.put(Abort(request_ids=ids))

    def _abort_here(self, request_ids: tuple[str, ...]) -> None:
        loop = self.loop
        with HeldSignals():
            loop.abort(request_ids)

    def receive(self) -> Outputs:
        return self._turns.take(self._step)

    def _step(self) -> Outputs:
        loop, outputs = self.loop, list[EngineOutput]()
        try:
            self._whole(lambda: outputs.extend(loop.step()))
        except BaseException:  # that of a signal's handler, after the step
            loop.keep(outputs)
            raise
        return Outputs(outputs=outputs, stats=loop.take_stats())

    def _whole(self, work: Callable[[], Result]) -> Result:
        """What must not be cut in two: where it is, or fails, that is the engine's end."""
        with HeldSignals():
            try:
                return work()
            except Exception as failed:
                raise self._die(failed) from failed
            except BaseException as interrupt:  # a second Ctrl-C
                self._die(interrupt)
                raise

    def stream(self, sink: Sink) -> None:
        if self._config.parallel_config.distributed_executor_backend == "external_launcher":
            raise ConfigError(
                "distributed_executor_backend='external_launcher' is for LLM and LLMEngine: what is streamed depends "
                "on when requests come, and the ranks would not agree",
                param="distributed_executor_backend",
                value="external_launcher",
            )
        self._sink = sink
        self._thread = threading.Thread(target=self._turn, args=(self.loop,), name="engine loop", daemon=True)
        self._thread.start()

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if self._thread is not None:
            return wait_for(verb, self.begin_call(verb, *args, **kwargs), timeout)
        call, future = self._calls.open(verb, args, kwargs)
        try:
            self._calls.answer(self._turns.take(self._call_here, call))
        finally:
            self._calls.forget(call.call_id)
        return future.result()

    def _call_here(self, call: ControlCall) -> ControlReply:
        loop = self.loop
        self._whole(lambda: loop.settle(0))
        reply = loop.call(call)
        while reply is None:  # a verb that waits for running requests: they run here
            self._whole(lambda: loop.keep(loop.step()))
            reply = next((r for r in loop.take_replies() if r.call_id == call.call_id), None)
        return reply

    def begin_call(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)
        call, future = self._calls.open(verb, args, kwargs)
        self._inbox.put(call)
        if self.dead is not None:  # it died between the question and the answer
            self._calls.fail(self.dead)
        return future

    def close(self) -> None:
        with HeldSignals(), self._ending:  # of several threads one closes the loop
            loop, died = self._loop, self.dead is not None
            if loop is None:
                return
            self.dead = self.dead or EngineDeadError(CLOSED)
            self._loop = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._inbox.put(Stop())
            self._thread.join(CLOSE_PATIENCE_S)
            if self._leave_to_thread():
                log.error("A step did not end within %.0f s: the engine is left to it", CLOSE_PATIENCE_S)
                sink, self._sink, died = self._sink, None, True
                if sink is not None:
                    sink.died(self.dead)
        if not died:
            self._turns.take(loop.close)
        self._calls.fail(self.dead)

    def _leave_to_thread(self) -> bool:
        """Whether a step is still under way, which has the worker: it is closed after that step, if that ends."""
        with self._ending:
            self._is_left = not self._has_ended
            return self._is_left

    def _close_if_left(self, loop: EngineLoop) -> None:
        """Called by the thread, at its end."""
        with self._ending:
            self._has_ended = True
            if not self._is_left:
                return
        try:
            loop.close()
        except Exception as wrong:  # nobody is left who could be told
            log.error("The worker of an engine that was closed could not be shut down", exc_info=wrong)

    def show_stacks(self) -> None:
        faulthandler.dump_traceback(all_threads=True)

    def _turn(self, loop: EngineLoop) -> None:
        def emit(message: FromEngine) -> None:
            if isinstance(message, Outputs):
                if (sink := self._sink) is not None:
                    sink.take(message)
            elif isinstance(message, ControlReply):
                self._calls.answer(message)

        try:
            loop.run(self._inbox, emit)
            error = EngineDeadError(CLOSED)
        except Exception as failed:  # noqa: BLE001  # the root of the engine's thread: every caller gets what ended it
            error = self._die(failed)
        self._close_if_left(loop)
        self._calls.fail(error)
        if (sink := self._sink) is not None:
            sink.died(error)

    def _die(self, failed: BaseException) -> EngineDeadError:
        log.error("The engine died", exc_info=failed)
        reason = failed.reason if isinstance(failed, EngineDeadError) else f"{type(failed).__name__}: {failed}"
        self.dead = EngineDeadError(reason)
        if self._loop is not None:
            try:
                self._loop.close()
            except Exception as further:  # a broken worker may not even end well; the first failure is the reason
                log.error("Its worker could not be shut down", exc_info=further)
        return self.dead
