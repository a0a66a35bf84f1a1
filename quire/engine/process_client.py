"""ProcessClient: of an engine in a process of its own, over a wire. AttachedClient: of one that others started.

In and out as engine/client.py says. A reader thread sorts what comes back. Must not know: prompts, text, how outputs
become results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.base import env, registry
from quire.base.codec import Codec, CodecError, Frame
from quire.base.folders import remove_folder
from quire.base.log import logger
from quire.base.procs import STACKS, Child
from quire.base.sockets import FramesLostError, PeerGoneError, Wire, private_folder
from quire.engine.client import CLOSED, Calls, Sink, wait_for
from quire.engine.pulse import Pulse
from quire.engine.route import OWNER
from quire.engine.together import pack
from quire.schema.errors import EngineDeadError, InputError, QuireError, message_of, rebuild_error
from quire.schema.messages import (
    Abort,
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

log = logger(__name__)
MAIN = "quire.engine.proc:main"
EARLY = "quire.worker.main"  # the slowest import of an engine process
# What an engine itself may have to prove: to other machines, and to a Ray cluster that wants a token.
_KEPT = (*env.NODE_KEY.spellings, "RAY_AUTH_")
_SHUTDOWN_PATIENCE_S = 10.0
_LAST_WORDS_S = 1.0
_ENGINE = "engine"  # name of its mailbox
_END = "end"  # name of a file
_LONGEST_REASON = 4000


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
    """The configuration for other processes: files are located by now, so nobody there needs the hub's token."""
    return dataclasses.replace(config, model_config=dataclasses.replace(config.model_config, hf_token=None))


def begin_engine(*, shared: bool = False, name: str = "the engine") -> Begun:
    """`name`: what messages call it."""
    folder = private_folder()
    life, child_end = os.pipe() if shared else (-1, -1)
    keep = (child_end,) if shared else ()
    child = Child(
        MAIN, None, name=name, litter=folder, keep=keep, early=EARLY, keep_env=_KEPT,
        before_kill=partial(write_end, folder),
    )  # fmt: skip
    if shared:
        os.close(child_end)
    return Begun(folder, life, child)


class Mailbox(NamedTuple):
    """Where a client finds an engine that another process started."""

    folder: str  # of its mailboxes; if it is on another machine, of what is known of it here
    life: int  # descriptor that turns readable when the engine dies
    host: str = ""  # address of this machine for the one that the engine is on; "": it is here
    address: str = ""  # of the engine's mailbox, if it is on another machine
    secret: bytes | None = None  # if it is


class ProcessClient:
    """An engine process at the other end of a wire; a reader thread sorts what comes back.

    `shared`: other clients may join (AttachedClient); `mailbox` is what they need for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        shared: bool = False,
        begun: Begun | None = None,
        peers: Sequence[str] = (),
        host: str = "",
        secret: bytes | None = None,
    ) -> None:
        """`begun`: a process that `begin_engine` has started already, with the same `shared`. `peers`: folders of the
        engines that have experts together with it. `host`: the address of this machine on which clients of others who
        know the `secret` may join it; `mailbox` then has what they need once it is ready."""
        begun = begun or begin_engine(shared=shared)
        self.mailbox = Mailbox(begun.folder, begun.life, secret=secret)
        wire = _wire(self.mailbox, OWNER, theirs="" if host else _ENGINE)
        boot = {"folder": begun.folder, "config": for_children(config), "shared": shared, "peers": peers}
        begun.child.send_boot(msgspec.msgpack.encode(boot | {"host": host, "secret": secret}))
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
        if ready.address:
            self._reader.wire.connect(ready.address)
            self.mailbox = self.mailbox._replace(address=ready.address)
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
        return wait_for(verb, self.begin_call(verb, *args, **kwargs), timeout)

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

    def abandon(self) -> None:
        """Make its process leave while another thread waits in `wait_ready`, which then fails."""
        self._reader.child.stop(0.0)

    def begin_close(self, reason: str = "") -> None:
        """Tell it to stop, without waiting for that; `close` does. `reason`: for other machines, which are told why."""
        self._reader.closing = True
        if self.dead is None and self._reader.started:
            with contextlib.suppress(EngineDeadError):
                self._reader.send(self._codec.encode(Stop()))

    def close(self) -> None:
        self._finalizer()


class AttachedClient(ProcessClient):
    """One of several clients of an engine that another process started, and ends."""

    def __init__(self, mailbox: Mailbox, client: int) -> None:
        """`mailbox`: the owner's ProcessClient.mailbox, its descriptor inherited. `client`: a number that no other
        client of the engine has or had, if it is on another machine."""
        self.mailbox = mailbox
        wire = _wire(mailbox, client, theirs=mailbox.address if mailbox.host else _ENGINE)
        self._connect(wire, _Elsewhere(mailbox.life, mailbox.folder))
        if mailbox.address or not mailbox.host:
            self._greet()

    def _greet(self) -> None:
        wire = self._reader.wire
        self._reader.send(self._codec.encode(Hello(address=wire.address if self.mailbox.host else "")))

    def show_stacks(self) -> None:
        """On another machine, whoever started it sees to that."""
        if not self.mailbox.host:
            super().show_stacks()


class _Elsewhere:
    """An engine process that is not a child of ours."""

    def __init__(self, notice: int, folder: str) -> None:
        self.notice, self._folder = notice, folder

    def why_dead(self) -> str:
        reason = read_end(self._folder)
        return reason or "its process is gone; the log of the process that started it says how it ended"

    def stop(self, patience: float) -> None:
        """Not ours to end."""


def write_end(folder: str, reason: str) -> None:
    """Why an engine is gone that is on another machine or stood still, for clients that only see that it is. Before the
    notice."""
    with contextlib.suppress(OSError), open(os.path.join(folder, _END), "w", encoding="utf-8") as file:
        file.write(reason)


def read_end(folder: str) -> str:
    """Nothing, if nobody has said so."""
    try:
        with open(os.path.join(folder, _END), encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST_REASON)
    except OSError:
        return ""


def _wire(mailbox: Mailbox, client: int, *, theirs: str) -> Wire:
    mine = f"tcp://{mailbox.host}:*" if mailbox.host else f"client-{client}"
    return Wire(mailbox.folder, mine=mine, theirs=theirs, sender=str(client).encode(), secret=mailbox.secret)


class _WireReader:
    """The thread that reads the wire, and what it fills. Knows nothing of the client, so that one can be collected."""

    def __init__(self, wire: Wire, peer: Child | _Elsewhere) -> None:
        self.wire = wire
        self.child = peer
        self.calls = Calls()
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
        outputs = self._fetched.get()
        if outputs is None:
            self._fetched.put(None)
            raise EngineDeadError(self.dead.reason if self.dead else "")
        return outputs

    def end(self, patience: float) -> None:
        """The process was asked to exit; see that it does, then clear up."""
        self.child.stop(patience)
        if isinstance(self.child, Child) and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._die(CLOSED)
        self.wire.close(linger=0.0 if isinstance(self.child, Child) else _LAST_WORDS_S)
        if isinstance(self.child, Child):
            self.child.close()  # not before the thread that waits for its notice has ended
            self.wire.remove_folder()

    def _run(self) -> None:
        linger = 0.0
        try:
            while (error := self._read()) is None:
                pass
        except FramesLostError as lost:
            error, linger = self._die(str(lost)), self._say_goodbye()
        except PeerGoneError:
            error = self._die(CLOSED if self.closing else self.child.why_dead())
        except Exception as failed:  # ours: whoever waits must not wait for ever
            log.error("Reading from the engine failed", exc_info=failed)
            error, linger = self._die(f"reading its messages failed: {message_of(failed)}"), self._say_goodbye()
        if isinstance(self.child, _Elsewhere):
            self.wire.close(linger)  # unless it has just been told, nobody is there to connect to
        if self._sink is not None:
            self._sink.died(error)

    def _say_goodbye(self) -> float:
        """An engine of others that lives need not go on with what was asked of it here. Seconds that this may take."""
        if isinstance(self.child, Child):
            return 0.0
        codec: Codec[ToEngine] = Codec(ToEngine)
        with contextlib.suppress(PeerGoneError):
            self.wire.send(codec.encode(Stop()))
        return _LAST_WORDS_S

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
            log.log(logging.DEBUG if self.closing else logging.ERROR, "The engine died:\n%s", message.details)
            is_told = message.error_kind in ("", EngineDeadError.__name__)  # the latter: of the engine's workers
            return self._die(message.reason if is_told else f"{message.error_kind}: {message.reason}")
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
