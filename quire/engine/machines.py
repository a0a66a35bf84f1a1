"""Engines of one server on several machines: the first has the server, the others (`quire serve --headless`) join it.

    the server's machine (Machines)                      another one (run_engines)
    listens at data_parallel_address             <-----  proves that it knows the operators' key (base/lifeline.py),
                                                         says which engines it has, of which model, by which options
    refuses it, or sends the run's secret        ----->  starts them; each has a mailbox on TCP (base/sockets.py)
    its clients join them there (RemoteEngine)   <-----  where each mailbox is; how an engine ended; when each last
                                                         got anywhere
    leave, and why                               ----->  all end

Requests and outputs go between clients and engines over the mailboxes, not through here. From the first word on each
side knows within a limit (QUIRE_NODE_TIMEOUT_S) when the other is gone: a lost machine is the end of its engines, the
end of the server is the end of all. Must not know: prompts, how an engine is made, or which one a request goes to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire import __version__
from quire.base import env
from quire.base.clock import now
from quire.base.folders import remove_folder
from quire.base.lifeline import Lifeline, LostError, address_towards, call, close_at_signals
from quire.base.log import logger
from quire.base.seal import new_secret
from quire.base.sockets import private_folder
from quire.config.agreement import differences, statement
from quire.config.engines import config_of_engine
from quire.config.nodes import address_of, listen, node_key
from quire.engine.process_client import AttachedClient, Begun, Mailbox, ProcessClient, begin_engine, write_end
from quire.engine.pulse import Beat, Pulse
from quire.executor.members import Departure
from quire.schema.errors import EngineDeadError, kind_of, message_of, rebuild_error
from quire.schema.messages import EngineReady, Outputs, check_address

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
SERVER = 999_999  # the client that the server's first process is; API processes count from 1
_ADDRESS, _PORT = "data_parallel_address", "data_parallel_rpc_port"
_SILENCE_S = 10.0  # unless NODE_TIMEOUT_S is set: a program's own code may hold up the thread that sends
_PATIENCE_S = 10.0  # that a machine may take to leave
_LOOK_S = 0.2  # between two looks at the pulses of engines


class EnginesHello(msgspec.Struct, frozen=True, tag="hello"):
    version: str
    size: int  # data_parallel_size
    first: int  # rank
    number: int
    stated: dict[str, Any]  # config/agreement.py


class EngineOpen(msgspec.Struct, frozen=True, tag="open"):
    """An engine is ready."""

    rank: int
    address: str  # of its mailbox

    def __post_init__(self) -> None:
        check_address(self.address)


class EngineEnded(msgspec.Struct, frozen=True, tag="ended"):
    rank: int
    reason: str
    error_kind: str = ""  # as in EngineDied


class EnginePulse(msgspec.Struct, frozen=True, tag="pulse"):
    rank: int
    age: float  # seconds since it last got anywhere
    busy: bool
    paused: bool
    steps: int


class MachineStops(msgspec.Struct, frozen=True, tag="stops"):
    """Somebody there has told it to."""


class EnginesWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    hidden: bytes  # the run's secret, as Lifeline.hide makes it


class EnginesRefused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class EnginesLeave(msgspec.Struct, frozen=True, tag="leave"):
    """The server ends, or all engines of the machine have."""

    reason: str = ""  # why it could not go on; "": it was shut down


_FROM = msgspec.msgpack.Decoder(EnginesHello | EngineOpen | EngineEnded | EnginePulse | MachineStops)
_TO = msgspec.msgpack.Decoder(EnginesWelcome | EnginesRefused | EnginesLeave)
_encode = msgspec.msgpack.encode


class Meeting(NamedTuple):
    """Where machines find the server, and what both have to know."""

    address: str
    port: int  # 0: on the server's side, any
    key: bytes


def _meeting(config: EngineConfig) -> Meeting:
    """As operators say it."""
    parallel = config.parallel_config
    address = address_of(parallel.data_parallel_master_ip, _ADDRESS)
    return Meeting(address, parallel.data_parallel_rpc_port, node_key("engines on several machines", _ADDRESS))


def _limit() -> float:
    """Seconds of silence after which the other side is lost."""
    return env.NODE_TIMEOUT_S.get() if env.NODE_TIMEOUT_S.is_set() else _SILENCE_S


def _names(ranks: Sequence[int]) -> str:
    return f"engine{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ---- the machine with the server -------------------------------------------------------------------------------


class Seat:
    """One engine of another machine, as its server knows it. The folder holds its pulse and, later, why it ended."""

    def __init__(self, rank: int) -> None:
        self.rank, self.folder = rank, private_folder()
        self.departure = Departure()
        self.pulse = Pulse(self.folder)
        self.address = ""
        self.error_kind = ""
        self.machine: _RemoteMachine | None = None
        self.settled = threading.Event()  # it is ready, or never will be

    def open(self, address: str) -> None:
        self.address = address
        self.settled.set()

    def end(self, reason: str, error_kind: str = "") -> None:
        if self.departure.reason is None:
            self.error_kind = error_kind
            write_end(self.folder, reason)
            self.departure.end(reason, is_lost=True)
        self.settled.set()

    def close(self) -> None:
        self.departure.close()
        remove_folder(self.folder)


class RemoteEngine(AttachedClient):
    """The server's client of an engine of another machine, which may not have joined yet."""

    def __init__(self, seat: Seat, machines: Machines) -> None:
        self._seat, self._machines = seat, machines
        mailbox = Mailbox(seat.folder, seat.departure.notice, host=machines.address, secret=machines.secret)
        super().__init__(mailbox, SERVER)

    def wait_ready(self) -> EngineReady:
        seat, limit = self._seat, env.ENGINE_START_TIMEOUT_S.get()
        try:
            seat.settled.wait(limit)
            if seat.departure.reason is not None:
                raise self._why_not(seat.departure.reason)
            if not seat.address:
                what = "it was not ready" if seat.machine else "no machine that has it joined"
                raise EngineDeadError(f"{what} within {limit} s (QUIRE_ENGINE_START_TIMEOUT_S)")
            self.mailbox = self.mailbox._replace(address=seat.address)
            self._reader.wire.connect(seat.address)
            self._greet()
        except BaseException:
            self._finalizer()
            raise
        return super().wait_ready()

    def _why_not(self, reason: str) -> BaseException:
        kind = self._seat.error_kind
        return rebuild_error(kind, reason) if kind else EngineDeadError(reason)

    def abandon(self) -> None:
        self._seat.end("others could not start")

    def begin_close(self, reason: str = "") -> None:
        super().begin_close(reason)
        self._machines.leave(reason)

    def forget(self) -> None:
        """Nobody was asked to join."""
        self._finalizer()

    def close(self) -> None:
        self._machines.close()
        super().close()
        self._machines.clear(self._seat)


class _RemoteMachine:
    """One that has joined."""

    def __init__(self, lifeline: Lifeline, seats: Sequence[Seat]) -> None:
        self.lifeline, self.seats, self.left = lifeline, seats, threading.Event()
        self.name = f"{lifeline.peer} with {_names([seat.rank for seat in seats])}"

    def follow(self, secret: bytes) -> None:
        """Until it is gone. The root of a thread: however this ends, the machine's engines do."""
        mine = {seat.rank: seat for seat in self.seats}
        try:
            self.lifeline.send(_encode(EnginesWelcome(self.lifeline.hide(secret))))
            while True:
                message = _FROM.decode(self.lifeline.receive())
                if isinstance(message, MachineStops):
                    self._end(f"machine {self.name} was stopped there")
                elif not isinstance(message, EnginesHello) and message.rank in mine:
                    self._hear(mine[message.rank], message)
        except (LostError, msgspec.DecodeError) as lost:
            self._end(f"machine {self.name} is lost: {lost}")
        except Exception as failed:  # ours: whoever waits for its engines must not wait for ever
            log.error("Hearing from machine %s failed", self.name, exc_info=failed)
            self._end(f"hearing from machine {self.name} failed: {message_of(failed)}")
        finally:
            self.lifeline.close()
            self.left.set()

    def _hear(self, seat: Seat, message: EngineOpen | EngineEnded | EnginePulse) -> None:
        if isinstance(message, EngineOpen):
            log.info("Engine %d on %s is ready", seat.rank, self.lifeline.peer)
            seat.open(message.address)
        elif isinstance(message, EnginePulse):
            seat.pulse.copy(Beat(now() - max(0.0, message.age), message.busy, message.paused, max(0, message.steps)))
        else:
            seat.end(message.reason, message.error_kind)
            if all(one.departure.reason is not None for one in self.seats):
                self.leave("its engines have ended")

    def _end(self, reason: str) -> None:
        for seat in self.seats:
            seat.end(reason)

    def leave(self, reason: str) -> None:
        self.lifeline.send(_encode(EnginesLeave(reason)))


class Machines:
    """Listens for machines until all engines have one."""

    def __init__(
        self, config: EngineConfig, meeting: Meeting | None = None, closed: Callable[[], None] | None = None
    ) -> None:
        """`meeting`: not as the options say. `closed`: called once all have left, maybe several times."""
        parallel = config.parallel_config
        self.address, port, key = meeting or _meeting(config)
        self.secret, self._closed = new_secret(), closed
        self._size, self._has_engines = parallel.data_parallel_size, parallel.data_parallel_size_local > 0
        self._stated = statement(config)  # of the server, and of the first engines, whoever has them
        self._engines_stated = self._stated if self._has_engines else None
        self._lock, self._machines = threading.Lock(), list[_RemoteMachine]()
        self._is_left = False
        self._seats, self.members = dict[int, Seat](), list[RemoteEngine]()
        try:
            for rank in parallel.engine_ranks[parallel.data_parallel_size_local :]:
                self._seats[rank] = Seat(rank)
                self.members.append(RemoteEngine(self._seats[rank], self))
            with self._lock:  # whoever joins at once finds the listener here
                self._listener = listen(
                    self.address, port, key, self._welcome, limit=_limit(), who="the server", params=(_ADDRESS, _PORT)
                )
        except BaseException:
            for member in self.members:
                member.forget()
            for seat in self._seats.values():
                seat.close()
            raise
        self.port = self._listener.port
        log.info("Waiting for %s at %s:%d", _names(list(self._seats)), self.address, self.port)

    def _welcome(self, lifeline: Lifeline) -> None:
        """The root of a thread."""
        machine = None
        try:
            machine = self._admit(lifeline)
        except (LostError, msgspec.DecodeError) as wrong:
            log.warning("A machine left at once: %s", wrong)
        except Exception as failed:  # ours: it must not beat on as if it were one of the server's
            log.error("A machine at %s could not be admitted", lifeline.peer, exc_info=failed)
        if machine is None:
            lifeline.close()
            return
        machine.follow(self.secret)

    def _admit(self, lifeline: Lifeline) -> _RemoteMachine | None:
        """None: it was refused."""
        hello = _FROM.decode(lifeline.receive())
        with self._lock:
            reason = self._why_not(hello)
            if reason:
                log.warning("%s was refused: %s", lifeline.peer, reason)
                lifeline.send(_encode(EnginesRefused(reason)))
                return None
            assert isinstance(hello, EnginesHello)
            machine = self._seat(hello, lifeline)
        log.info("%s has joined", machine.name)
        return machine

    def _seat(self, hello: EnginesHello, lifeline: Lifeline) -> _RemoteMachine:
        seats = [self._seats[rank] for rank in range(hello.first, hello.first + hello.number)]
        machine = _RemoteMachine(lifeline, seats)
        for seat in seats:
            seat.machine = machine
        self._machines.append(machine)
        self._engines_stated = self._engines_stated or hello.stated
        if all(seat.machine for seat in self._seats.values()):
            self._listener.close()
        return machine

    def _why_not(self, hello: Any) -> str:
        if not isinstance(hello, EnginesHello):
            return "it did not say what it has"
        if self._is_left:
            return "the server ends"
        if hello.version != __version__:
            return f"Quire is {hello.version} there and {__version__} here"
        if hello.size != self._size:
            return f"data_parallel_size is {hello.size} there and {self._size} here"
        ranks = range(hello.first, hello.first + hello.number)
        if not 0 < hello.number <= self._size or ranks[0] not in self._seats or ranks[-1] not in self._seats:
            expected = _names(list(self._seats))
            return f"it has {hello.number} engines from {hello.first} on, and the server waits for {expected}"
        if taken := [rank for rank in ranks if self._seats[rank].machine]:
            return f"{_names(taken)} have a machine already: each machine has a data_parallel_start_rank of its own"
        return differences(self._stated, hello.stated, model_only=not self._has_engines) or (
            differences(self._engines_stated, hello.stated) if self._engines_stated is not None else ""
        )

    def leave(self, reason: str = "") -> None:
        """Tell all of them to, once. `reason`: why the server could not go on, unless it was shut down."""
        with self._lock:
            is_left, self._is_left = self._is_left, True
            machines = list(self._machines)
        if not is_left:
            self._listener.close()
            for machine in machines:
                machine.leave(reason)

    def close(self) -> None:
        """Wait until they have left."""
        self.leave()
        deadline = now() + _PATIENCE_S
        for machine in self._machines:
            machine.left.wait(max(0.0, deadline - now()))
            machine.lifeline.close()
        if self._closed is not None:
            self._closed()

    def end(self, rank: int, reason: str) -> None:
        """Whoever started an engine knows that it is gone, or never was."""
        if (seat := self._seats.get(rank)) is not None:
            seat.end(reason)

    def clear(self, seat: Seat) -> None:
        """Its client is closed."""
        if self._seats.pop(seat.rank, None) is not None:
            seat.close()


# ---- the others ------------------------------------------------------------------------------------------------


def run_engines(config: EngineConfig, *, meeting: Meeting | None = None, stall_s: float = 0.0) -> None:
    """Engines for a server on another machine, until that ends: returns if it was shut down. EngineDeadError: it did
    not end well. `meeting`: not as the options say. `stall_s`: seconds without progress after which an engine with work
    shows its stacks; 0: never."""
    parallel = config.parallel_config
    leader, port, key = meeting or _meeting(config)
    ranks, where = parallel.ranks_here, f"{leader if meeting else parallel.data_parallel_master_ip}:{port}"
    host = env.HOST_IP.get() or address_towards(leader)
    log.info("%s of %d: joining the server at %s", _names(ranks).capitalize(), parallel.data_parallel_size, where)
    begun = [begin_engine(shared=True, name=f"engine {rank} on {host}") for rank in ranks]
    try:
        stated = statement(config)
        try:
            patience = float(env.ENGINE_START_TIMEOUT_S.get())
            lifeline = call(leader, port, key, limit=_limit(), patience=patience)
        except LostError as lost:
            raise EngineDeadError(f"{_names(ranks)} could not join the server at {where}: {lost}") from None
        stop = close_at_signals(lifeline, _encode(MachineStops()))
        try:
            hello = EnginesHello(__version__, parallel.data_parallel_size, ranks[0], len(ranks), stated)
            lifeline.send(_encode(hello))
            _join(_Engines(config, begun, lifeline, host, stall_s), where)
        except (LostError, msgspec.DecodeError) as lost:
            if not stop.is_set():
                raise EngineDeadError(f"the server at {where} is lost: {lost}") from None
        finally:
            lifeline.close()
    finally:
        for one in begun:
            one.end()


def _join(engines: _Engines, where: str) -> None:
    reply = _TO.decode(engines.lifeline.receive())
    if isinstance(reply, EnginesRefused):
        raise EngineDeadError(f"{_names(engines.ranks)} were refused by the server at {where}: {reply.reason}")
    try:
        if isinstance(reply, EnginesWelcome):
            engines.start(engines.lifeline.hide(reply.hidden))
        while not isinstance(reply, EnginesLeave):
            reply = _TO.decode(engines.lifeline.receive())
    finally:
        engines.close()
    if len(engines.reasons) == len(engines.ranks):
        raise EngineDeadError("; ".join(engines.reasons[rank] for rank in sorted(engines.reasons)))
    if reply.reason:
        raise EngineDeadError(f"the server at {where} ended: {reply.reason}")
    log.info("The server was shut down")


class _Engines:
    """Those of this machine."""

    def __init__(
        self, config: EngineConfig, begun: Sequence[Begun], lifeline: Lifeline, host: str, stall_s: float
    ) -> None:
        self.lifeline, self.ranks = lifeline, config.parallel_config.ranks_here
        self.reasons: dict[int, str] = {}  # by rank: why it ended before it was told to
        self.is_closing = False
        self._config, self._begun, self._host, self._stall_s = config, begun, host, stall_s
        self._engines: list[_Engine] = []
        self._closed = threading.Event()

    def start(self, secret: bytes) -> None:
        for place, (rank, begun) in enumerate(zip(self.ranks, self._begun, strict=True)):
            config = config_of_engine(self._config, place)
            client = ProcessClient(config, shared=True, begun=begun, host=self._host, secret=secret)
            self._engines.append(_Engine(rank, client, self))
        for engine in self._engines:
            threading.Thread(target=engine.run, name=f"start of engine {engine.rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="pulses", daemon=True).start()

    def ended(self, rank: int, error: BaseException) -> None:
        if self.is_closing:
            return
        dead = isinstance(error, EngineDeadError)
        reason = self.reasons[rank] = error.reason if isinstance(error, EngineDeadError) else message_of(error)
        log.error("%s", reason)
        self.lifeline.send(_encode(EngineEnded(rank, reason, "" if dead else kind_of(error))))

    def _watch(self) -> None:
        """Say when an engine got anywhere; one that does not shows what it is doing."""
        latest, stuck = dict[int, Beat](), set[int]()
        while not self._closed.wait(_LOOK_S):
            for engine in self._engines:
                pulse, rank = engine.client.pulse, engine.rank
                beat = pulse.read()
                if beat != latest.get(rank) and beat.steps:
                    latest[rank] = beat
                    word = EnginePulse(rank, max(0.0, now() - beat.time), beat.busy, beat.paused, beat.steps)
                    self.lifeline.send(_encode(word))
                silence = pulse.silence(None)
                if self._stall_s and silence > self._stall_s and rank not in stuck and rank not in self.reasons:
                    stuck.add(rank)
                    log.error("Engine %d is stuck: no step finished for %.0f s; its stacks follow", rank, silence)
                    engine.client.show_stacks()
                elif not silence:
                    stuck.discard(rank)

    def close(self) -> None:
        self.is_closing = True
        self._closed.set()
        for engine in self._engines:  # they leave at the same time
            engine.client.begin_close()
        for engine in self._engines:
            engine.client.close()


class _Engine:
    """One of them: a Sink of what its owner is told, which is its end alone."""

    def __init__(self, rank: int, client: ProcessClient, engines: _Engines) -> None:
        self.rank, self.client, self._engines = rank, client, engines

    def run(self) -> None:
        try:
            self.client.wait_ready()
        except Exception as failed:  # noqa: BLE001  # whatever it is, the server says it
            self._engines.ended(self.rank, failed)
            return
        self.client.stream(self)
        self._engines.lifeline.send(_encode(EngineOpen(self.rank, self.client.mailbox.address)))

    def take(self, outputs: Outputs) -> None:
        pass

    def died(self, error: EngineDeadError) -> None:
        self._engines.ended(self.rank, error)
