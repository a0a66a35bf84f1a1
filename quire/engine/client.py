"""EngineClient: how the Python and HTTP interfaces reach an engine, in this process or in one of its own.

In: EngineRequest, request ids to abort, control verbs. Out: Outputs, either fetched turn by turn (`receive`) or
streamed from a thread (`stream`). When an engine dies, by an exception or by any other cause, everything that waits
for it fails at once with one EngineDeadError that says why, and everything later does too.
Must not know: prompts, text, how outputs become results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import logging
import os
import queue
import random
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from quire.base import env, registry
from quire.base.codec import Codec, CodecError, Frame
from quire.base.folders import remove_folder
from quire.base.log import logger
from quire.base.procs import STACKS, Child, held_interrupt
from quire.base.sockets import PeerGoneError, Wire, private_folder
from quire.config.logs import apply_logging
from quire.engine.pulse import Pulse
from quire.engine.route import OWNER
from quire.engine.together import pack
from quire.schema.errors import EngineDeadError, InputError, QuireError, message_of, rebuild_error
from quire.schema.messages import (
    Abort,
    ControlCall,
    ControlReply,
    EngineDied,
    EngineReady,
    EngineRequest,
    FromEngine,
    Hello,
    Left,
    Outputs,
    Stop,
    ToEngine,
)

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.loop import EngineLoop

log = logger(__name__)
MAIN = "quire.engine.proc:main"
EARLY = "quire.worker.main"  # the slowest import of an engine process
_SHUTDOWN_PATIENCE_S = 10.0
_LAST_WORDS_S = 1.0
_CLOSED = "it was shut down"


class Sink(Protocol):
    """Where streamed outputs go. Called from one thread of the client."""

    def take(self, outputs: Outputs) -> None: ...
    def died(self, error: EngineDeadError) -> None: ...


class EngineClient(Protocol):
    @property
    def dead(self) -> EngineDeadError | None:
        """Why it is gone, once it is."""

    @property
    def pulse(self) -> Pulse:
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


class _Calls:
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


def _wait(verb: str, future: Future[Any], timeout: float | None) -> Any:
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no answer to {verb!r} within {timeout} s") from None


class InProcessClient:
    """The loop itself, turned by whoever calls `receive`, or by a thread of its own after `stream`."""

    def __init__(self, config: EngineConfig) -> None:
        self.dead: EngineDeadError | None = None
        self.pulse = Pulse()
        self._config = config
        self._loop: EngineLoop | None = None
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._calls = _Calls()

    @property
    def loop(self) -> EngineLoop:
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)
        if self._loop is None:
            raise RuntimeError("wait_ready() was not called")
        return self._loop

    def wait_ready(self) -> EngineReady:
        from quire.engine.proc import start_engine  # lazy

        started = start_engine(self._config, self.pulse)
        self._loop = started.loop
        ready: EngineReady = started.ready
        return ready

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self._post(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._post(Abort(request_ids=tuple(request_ids)))

    def receive(self) -> Outputs:
        loop = self.loop
        outputs = None
        try:
            with held_interrupt():  # a step cut in two cannot be taken up again
                outputs = loop.step()
        except Exception as failed:
            raise self._die(failed) from failed
        except KeyboardInterrupt as interrupt:
            if outputs is None:
                self._die(interrupt)
            else:
                loop.keep(outputs)
            raise
        return Outputs(outputs=outputs, stats=loop.take_stats())

    def stream(self, sink: Sink) -> None:
        self._thread = threading.Thread(target=self._turn, args=(self.loop, sink), name="engine loop", daemon=True)
        self._thread.start()

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if self._thread is not None:
            return _wait(verb, self.begin_call(verb, *args, **kwargs), timeout)
        loop = self.loop
        call, future = self._calls.open(verb, args, kwargs)
        try:
            with held_interrupt():
                loop.settle(0)
            reply = loop.call(call)
            while reply is None:  # a verb that waits for running requests: they run here
                with held_interrupt():
                    loop.keep(loop.step())
                reply = next((r for r in loop.take_replies() if r.call_id == call.call_id), None)
        except Exception as failed:
            raise self._die(failed) from failed
        self._calls.answer(reply)
        return future.result()

    def begin_call(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)
        call, future = self._calls.open(verb, args, kwargs)
        self._inbox.put(call)
        if self.dead is not None:  # it died between the question and the answer
            self._calls.fail(self.dead)
        return future

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        died = self.dead is not None
        self.dead = self.dead or EngineDeadError(_CLOSED)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._inbox.put(Stop())
            self._thread.join()
        if not died:
            loop.close()
        self._calls.fail(self.dead)

    def show_stacks(self) -> None:
        faulthandler.dump_traceback(all_threads=True)

    def _post(self, message: EngineRequest | Abort) -> None:
        loop = self.loop
        if self._thread is not None:
            self._inbox.put(message)
        elif isinstance(message, EngineRequest):
            loop.submit(message)
        else:
            loop.abort(message.request_ids)

    def _turn(self, loop: EngineLoop, sink: Sink) -> None:
        def emit(message: FromEngine) -> None:
            if isinstance(message, Outputs):
                sink.take(message)
            elif isinstance(message, ControlReply):
                self._calls.answer(message)

        try:
            loop.run(self._inbox, emit)
            error = EngineDeadError(_CLOSED)
        except Exception as failed:  # noqa: BLE001  # the root of the engine's thread: whatever ended it is what every caller is told
            error = self._die(failed)
        self._calls.fail(error)
        sink.died(error)

    def _die(self, failed: BaseException) -> EngineDeadError:
        log.error("The engine died", exc_info=failed)
        self.dead = EngineDeadError(f"{type(failed).__name__}: {failed}")
        if self._loop is not None:
            try:
                self._loop.close()
            except Exception as further:  # a broken worker may not even end well; the first failure is the reason
                log.error("Its worker could not be shut down", exc_info=further)
        return self.dead


class Begun(NamedTuple):
    """An engine process that waits for its configuration, importing what it will need."""

    folder: str  # of its mailboxes
    life: int  # if shared: a descriptor that turns readable once the engine, which holds the other end, died
    child: Child

    def end(self) -> None:
        """See that nothing of it is left, whatever became of it."""
        self.child.close()
        remove_folder(self.folder)


def for_children(config: EngineConfig) -> EngineConfig:
    """What other processes are told: files are found by now, so nobody there needs the hub's token."""
    return dataclasses.replace(config, model_config=dataclasses.replace(config.model_config, hf_token=None))


def begin_engine(*, shared: bool = False) -> Begun:
    folder = private_folder()
    life, held = os.pipe() if shared else (-1, -1)
    child = Child(MAIN, None, name="the engine", litter=folder, keep=(held,) if shared else (), early=EARLY)
    if shared:
        os.close(held)
    return Begun(folder, life, child)


class ProcessClient:
    """An engine process at the other end of a wire; a reader thread sorts what comes back.

    `shared`: other clients may join (AttachedClient); `folder` and `life` are what they need for it.
    """

    def __init__(self, config: EngineConfig, *, shared: bool = False, begun: Begun | None = None) -> None:
        """`begun`: a process that `begin_engine` has started already, with the same `shared`."""
        begun = begun or begin_engine(shared=shared)
        self.folder, self.life = begun.folder, begun.life
        wire = _wire(self.folder, OWNER)
        boot = {"folder": self.folder, "config": for_children(config), "shared": shared}
        begun.child.send_boot(msgspec.msgpack.encode(boot))
        self._connect(wire, begun.child)

    def _connect(self, wire: Wire, peer: Child | _Elsewhere) -> None:
        self.pulse = Pulse(wire.folder)
        self._reader = _WireReader(wire, peer)
        self._codec: Codec[ToEngine] = Codec(ToEngine)
        self._finalizer = weakref.finalize(self, _hang_up, self._reader, self._codec, os.getpid())

    @property
    def dead(self) -> EngineDeadError | None:
        return self._reader.dead

    def wait_ready(self) -> EngineReady:
        """Also says why, at once, when the process dies before it is ready."""
        try:
            ready = self._reader.first_word(env.ENGINE_START_TIMEOUT_S.get())
        except BaseException:
            self._finalizer()
            raise
        self._reader.start()
        self._pid = ready.pid
        return ready

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        try:
            encoded = [self._codec.encode(message) for message in pack(requests)]
        except CodecError as wrong:
            raise InputError(str(wrong)) from wrong
        for frames in encoded:
            self._reader.send(frames)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._reader.send(self._codec.encode(Abort(request_ids=tuple(request_ids))))

    def receive(self) -> Outputs:
        return self._reader.fetch()

    def stream(self, sink: Sink) -> None:
        self._reader.stream(sink)

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return _wait(verb, self.begin_call(verb, *args, **kwargs), timeout)

    def begin_call(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        call, future = self._reader.calls.open(verb, tuple(_by_path(arg) for arg in args), kwargs)
        try:
            frames = self._codec.encode(call)
        except CodecError as wrong:
            self._reader.calls.forget(call.call_id)
            raise InputError(f"arguments of {verb!r}: {wrong}") from wrong
        self._reader.send(frames)
        return future

    def show_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, STACKS)

    def client_left(self, client: int) -> None:
        """A client that had joined is gone: its requests end."""
        self._reader.send(self._codec.encode(Left(client=client)))

    def close(self) -> None:
        self._finalizer()


class AttachedClient(ProcessClient):
    """One of several clients of an engine that another process started, and ends."""

    def __init__(self, folder: str, client: int, life: int) -> None:
        """`life`: the owner's ProcessClient.life, inherited."""
        wire = _wire(folder, client)
        self._connect(wire, _Elsewhere(life))
        self._reader.send(self._codec.encode(Hello()))


class _Elsewhere:
    """An engine process that is not a child of ours."""

    def __init__(self, notice: int) -> None:
        self.notice = notice

    def why_dead(self) -> str:
        return "its process is gone; the log of the process that started it says how it ended"

    def stop(self, patience: float) -> None:
        """Not ours to end."""


def _wire(folder: str, client: int) -> Wire:
    return Wire(folder, mine=f"client-{client}", theirs="engine", sender=str(client).encode())


class _WireReader:
    """The thread that reads the wire, and what it fills. Knows nothing of the client, so that one can be collected."""

    def __init__(self, wire: Wire, peer: Child | _Elsewhere) -> None:
        self.wire = wire
        self.child = peer
        self.calls = _Calls()
        self.dead: EngineDeadError | None = None
        self.started = self.closing = False
        self._fetched: queue.SimpleQueue[Outputs | None] = queue.SimpleQueue()
        self._sink: Sink | None = None
        self._codec: Codec[FromEngine] = Codec(FromEngine)
        self._thread = threading.Thread(target=self._run, name="engine reader", daemon=True)

    def first_word(self, limit: float) -> EngineReady:
        try:
            frames = self.wire.receive(limit, notice=self.child.notice)
        except PeerGoneError:
            raise self._die(f"it died while starting: {self.child.why_dead()}") from None
        if frames is None:
            raise self._die(f"it was not ready after {limit} s (QUIRE_ENGINE_START_TIMEOUT_S)")
        message = self._codec.decode(frames)
        if isinstance(message, EngineDied):
            self._die(message.reason)
            error = rebuild_error(message.error_kind, message.reason)
            level = logging.DEBUG if isinstance(error, QuireError) else logging.ERROR  # a fault, not a refusal
            log.log(level, "The engine could not start:\n%s", message.details)
            raise error
        if not isinstance(message, EngineReady):
            raise self._die(f"its first word was {type(message).__name__}")
        return message

    def start(self) -> None:
        self.started = True
        self._thread.start()

    def stream(self, sink: Sink) -> None:
        self._sink = sink
        if self.dead is not None:
            sink.died(self.dead)

    def send(self, frames: list[Frame]) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)
        with contextlib.suppress(PeerGoneError):  # closed this moment: `dead` follows
            self.wire.send(frames)
        if self.dead is not None:
            self.calls.fail(self.dead)

    def fetch(self) -> Outputs:
        found = self._fetched.get()
        if found is None:
            self._fetched.put(None)
            raise EngineDeadError(self.dead.reason if self.dead else "")
        return found

    def end(self, patience: float) -> None:
        """The process is told to leave; see that it does, then clear up."""
        self.child.stop(patience)
        if isinstance(self.child, Child) and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._die(_CLOSED)
        self.wire.close(linger=0.0 if isinstance(self.child, Child) else _LAST_WORDS_S)
        if isinstance(self.child, Child):
            self.child.close()  # not before the thread that waits for its notice has ended
            self.wire.remove_folder()

    def _run(self) -> None:
        try:
            while (error := self._read()) is None:
                pass
        except PeerGoneError:
            error = self._die(_CLOSED if self.closing else self.child.why_dead())
        except Exception as failed:  # ours: whoever waits must not wait for ever
            log.error("Reading from the engine failed", exc_info=failed)
            error = self._die(f"reading its messages failed: {message_of(failed)}")
        if self._sink is not None:
            self._sink.died(error)

    def _read(self) -> EngineDeadError | None:
        frames = self.wire.receive(notice=self.child.notice)
        if frames is None:
            return None
        message = self._codec.decode(frames)
        if isinstance(message, Outputs):
            if self._sink is None:
                self._fetched.put(message)
            else:
                self._sink.take(message)
        elif isinstance(message, ControlReply):
            self.calls.answer(message)
        elif isinstance(message, EngineDied):
            log.error("The engine died:\n%s", message.details)
            return self._die(f"{message.error_kind}: {message.reason}" if message.error_kind else message.reason)
        return None

    def _die(self, reason: str) -> EngineDeadError:
        self.dead = self.dead or EngineDeadError(reason)
        self.calls.fail(self.dead)
        self._fetched.put(None)
        return self.dead


def _hang_up(reader: _WireReader, codec: Codec[ToEngine], owner: int) -> None:
    if os.getpid() != owner:  # a fork of ours ends; the engine is not its own
        return
    reader.closing = True
    if reader.dead is None and reader.started:
        with contextlib.suppress(EngineDeadError):
            reader.send(codec.encode(Stop()))
        reader.end(_SHUTDOWN_PATIENCE_S)
    else:
        reader.end(0.0)


def _by_path(value: Any) -> Any:
    """A function cannot cross to another process; its import path can."""
    if not callable(value):
        return value
    try:
        return registry.path_of(value)
    except ImportError as unreachable:
        raise InputError(
            f"{unreachable}: put the function into a module, or run the engine in this process "
            "(QUIRE_ENABLE_V1_MULTIPROCESSING=0)"
        ) from None


def make_client(config: EngineConfig, *, own_process: bool) -> EngineClient:
    """`own_process` is the caller's default; QUIRE_ENABLE_V1_MULTIPROCESSING overrules it."""
    apply_logging(config.logging_config)
    asked = env.ENABLE_V1_MULTIPROCESSING.get()
    own_process = own_process if asked is None else asked
    if asked is False:
        # Documented for reproducible runs: asked for by name, an engine in this process seeds this process too.
        log.info("Seeding Python's random with %d, because the engine runs in this process", config.model_config.seed)
        random.seed(config.model_config.seed)
    return ProcessClient(config) if own_process else InProcessClient(config)
