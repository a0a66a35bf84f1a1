"""The engine's composition root: build executor, KV layout and scheduler into a loop, here or in a process of its own.

In: a resolved EngineConfig. `start_engine` gives the loop to whoever lives in the same process; `main` is the first
function of an engine process: it serves its client, or several, until the one that started it says stop. Any exception
in the loop, a worker or the thread that reads the mailbox ends the process, after its last word (EngineDied) says why:
an engine that lives hears. The only engine file that knows concrete classes of many packages.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import traceback
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from quire.base.clock import Laps, now
from quire.base.codec import Codec, CodecError, Frame
from quire.base.log import logger
from quire.base.sockets import Hub, PeerGoneError
from quire.config.local import object_of
from quire.config.logs import apply_logging
from quire.engine.adapters import EngineAdapters
from quire.engine.charge import Charge
from quire.engine.control import reply_with_error
from quire.engine.loop import EngineLoop, failed_output
from quire.engine.masking import make_masks
from quire.engine.pulse import Pulse
from quire.engine.route import OWNER, Routes
from quire.engine.together import unpack
from quire.executor.base import Executor, WorkerProtocol, make_executor, one_model
from quire.sched.kv_layout import fit_length, place
from quire.sched.scheduler import Scheduler
from quire.schema.errors import ConfigError, InputError, kind_of, message_of
from quire.schema.kv import KVLayout, ModelInfo
from quire.schema.messages import (
    ControlReply,
    EngineDied,
    EngineReady,
    EngineRequests,
    FromEngine,
    Hello,
    Left,
    Outputs,
    Stop,
    ToEngine,
)
from quire.schema.stats import StartPhase

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.observe.kv_events import EventPublisher

log = logger(__name__)
DIED = 1  # exit code after EngineDied
_LAST_WORDS_S = 5.0
_LONGEST_NUMBER = 6  # digits of a client's


class Started(NamedTuple):
    loop: EngineLoop
    ready: EngineReady


class EngineBoot(msgspec.Struct, kw_only=True):
    """What an engine process is started with."""

    folder: str  # where the mailboxes are
    config: msgspec.Raw  # msgpack of EngineConfig
    shared: bool = False  # clients other than the owner may join


def mailbox(client: int) -> str:
    return f"client-{client}"


def start_engine(config: EngineConfig, pulse: Pulse | None = None) -> Started:
    """Load the model, place the KV cache, warm up."""
    laps = Laps()
    began = now()
    scheduler_class = _scheduler_class(config)  # located before the model is loaded, as are addresses for events
    kv_events = _event_publisher(config)
    executor = make_executor(config)
    try:
        laps.mark("device")
        info = one_model(executor.ask(WorkerProtocol.load))
        laps.mark("load")
        free_bytes = min(executor.ask(WorkerProtocol.free_bytes))  # every rank holds the same blocks
        laps.mark("profile")
        layout, max_model_len = _place(config, info, free_bytes)
        executor.ask(WorkerProtocol.init_kv, layout)
        laps.mark("kv")
        executor.ask(WorkerProtocol.warm_up)
        laps.mark("warm_up")
    except BaseException:
        executor.shutdown()
        if kv_events is not None:
            kv_events.close()
        raise
    depth = 1 + config.scheduler_config.async_scheduling
    scheduler = scheduler_class(config, layout, max_model_len=max_model_len, depth=depth)
    phases = _phases(laps, executor)
    seconds = {phase.name: phase.seconds for phase in phases if not phase.inside} | {"total": now() - began}
    ready = EngineReady(
        num_blocks=layout.num_blocks,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        block_size=config.cache_config.block_size,
        start_seconds=seconds,
        phases=phases,
        pid=os.getpid(),
    )
    log.info("Engine ready in %.1f s (%s): %d KV blocks", seconds["total"], _told(phases), layout.num_blocks)
    masks = make_masks(config, info.vocab_size)
    slots = scheduler.planner.adapters
    adapters = None if slots is None else EngineAdapters(executor, slots)
    loop = EngineLoop(executor, scheduler, pulse=pulse, masks=masks, kv_events=kv_events, adapters=adapters)
    if config.observability_config.collect_detailed_traces:
        loop.charge = Charge(scheduler.requests)
    return Started(loop, ready)


def _event_publisher(config: EngineConfig) -> EventPublisher | None:
    """As kv_events_config says; None: nothing is published."""
    events = config.kv_events_config
    if events is None:
        return None
    if not events.publishes:
        if events.publisher == "zmq":
            log.warning("kv_events_config names a publisher, but enable_kv_cache_events is off: nothing is published")
        return None
    if not config.cache_config.enable_prefix_caching:
        log.warning("KV events are on and prefix caching is off: there is nothing to publish")
    from quire.observe.kv_events import EventPublisher  # lazy

    publisher: EventPublisher = EventPublisher(
        events.endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.topic,
        buffer_steps=events.buffer_steps,
        hwm=events.hwm,
        max_queue_size=events.max_queue_size,
    )
    return publisher


def _scheduler_class(config: EngineConfig) -> type[Scheduler]:
    named = config.scheduler_config.scheduler_cls
    if named is None:
        return Scheduler
    try:
        located = object_of(named)
    except ImportError as wrong:
        raise ConfigError(f"scheduler_cls {named!r} cannot be imported: {wrong}", param="scheduler_cls") from None
    if not (isinstance(located, type) and issubclass(located, Scheduler)):
        raise ConfigError(
            f"scheduler_cls {named!r} is not made from quire.sched.scheduler.Scheduler", param="scheduler_cls"
        )
    return located


def _phases(laps: Laps, executor: Executor) -> tuple[StartPhase, ...]:
    """The engine's own phases, and after each what the worker measured inside it."""
    try:
        inner = executor.call("start_laps", [], {}, None)[0]
    except AttributeError:  # a worker of somebody else's, which measures nothing
        inner = []
    phases: list[StartPhase] = []
    for name, seconds, _ in laps.taken:
        phases += [StartPhase(*lap) for lap in inner if lap[2] == name]
        phases.append(StartPhase(name, seconds))
    return tuple(phases)


def _told(phases: tuple[StartPhase, ...]) -> str:
    """device 4.31 (cuda 0.40), load 0.52, ..."""
    words = []
    for phase in phases:
        if not phase.inside:
            parts = ", ".join(f"{p.name} {p.seconds:.2f}" for p in phases if p.inside == phase.name)
            words.append(f"{phase.name} {phase.seconds:.2f}" + (f" ({parts})" if parts else ""))
    return ", ".join(words)


def _place(config: EngineConfig, info: ModelInfo, free_bytes: int) -> tuple[KVLayout, int]:
    """The KV layout, and the context length: the one requested, or (-1) the longest that fits."""
    num_blocks = config.cache_config.num_gpu_blocks_override
    chunk = config.scheduler_config.max_num_batched_tokens
    max_model_len = config.model_config.max_model_len
    if config.model_config.original_max_model_len == -1:
        max_model_len = fit_length(
            info.specs, free_bytes, longest=max_model_len, num_blocks=num_blocks, max_num_batched_tokens=chunk
        )
    layout = place(
        info.specs,
        free_bytes,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=chunk,
    )
    return layout, max_model_len


def main(boot_bytes: bytes) -> None:
    """An engine process, from its boot bytes to its end."""
    boot = msgspec.msgpack.decode(boot_bytes, type=EngineBoot)
    hub = Hub(boot.folder, mine="engine")
    hub.open(mailbox(OWNER))
    post = _Post(hub, Routes() if boot.shared else None)
    try:
        from quire.config import EngineConfig  # lazy

        config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
        apply_logging(config.logging_config)
        started = start_engine(config, Pulse(boot.folder))
        gc.collect()
        gc.freeze()  # what the start made stays: later collections need not look through it
        post.greet(OWNER, started.ready)
        _serve(started, post)
    except BaseException as failed:  # noqa: BLE001  # the root of the engine process: whatever ended it is its last message
        post.emit(EngineDied(reason=message_of(failed), details=traceback.format_exc(), error_kind=kind_of(failed)))
        hub.close(linger=_LAST_WORDS_S)
        os._exit(DIED)
    hub.close(linger=_LAST_WORDS_S)
    os._exit(0)  # the receiving thread still holds the hub, and nothing is left to save


class _Post:
    """What the engine says, and to whom."""

    def __init__(self, hub: Hub, routes: Routes | None) -> None:
        self.hub = hub
        self.routes = routes
        self._codec: Codec[FromEngine] = Codec(FromEngine)

    def greet(self, client: int, ready: EngineReady) -> None:
        self.send(client, msgspec.structs.replace(ready, client=client))

    def emit(self, message: FromEngine) -> None:
        if self.routes is None:
            self.send(OWNER, message)
            return
        for client, part in self.routes.deliver(message):
            self.send(client, part)

    def send(self, client: int, message: FromEngine) -> None:
        try:
            frames = self._codec.encode(message)
        except CodecError as wrong:  # only a verb's value can be foreign to the codec
            if not isinstance(message, ControlReply):
                raise
            frames = self._codec.encode(reply_with_error(message.call_id, InputError(str(wrong))))
        self.hub.send(mailbox(client), frames)


def _serve(started: Started, post: _Post) -> None:
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    receiver = _Receiver(started.ready, post, inbox)
    threading.Thread(target=receiver.run, name="engine inbox", daemon=True).start()
    started.loop.run(inbox, post.emit)
    if receiver.failed is not None:
        raise receiver.failed
    started.loop.close()


class _Receiver:
    """The thread that reads the mailbox and decodes off the loop's thread."""

    def __init__(self, ready: EngineReady, post: _Post, inbox: queue.SimpleQueue[ToEngine]) -> None:
        self._ready = ready
        self._post = post
        self._inbox = inbox
        self._codec: Codec[ToEngine] = Codec(ToEngine)
        self.failed: Exception | None = None  # why it stopped reading, unless it was asked to

    def run(self) -> None:
        """Until the mailbox is closed, or something goes wrong: either way the loop ends."""
        try:
            while True:
                self._read()
        except PeerGoneError:
            pass
        except Exception as failed:  # noqa: BLE001  # the root of the receiving thread: the loop raises it once it has stopped
            self.failed = failed
        self._inbox.put(Stop())

    def _read(self) -> None:
        sender, frames = self._post.hub.receive()
        client = _client_of(sender)
        if client is None:
            log.error("A message to the engine names no sender, and is left out: %.40r", sender)
            return
        try:
            message = self._codec.decode(frames)
        except CodecError as wrong:
            log.error("A message to the engine could not be read: %s", wrong)
            self._answer_unreadable(client, frames, wrong)
        else:
            self._take(client, message)

    def _take(self, client: int, message: ToEngine) -> None:
        routes = self._post.routes
        if isinstance(message, EngineRequests):
            for request in unpack(message):
                self._take(client, request)
        elif routes is None:
            self._inbox.put(message)
        elif isinstance(message, Hello):
            self._inbox.put(routes.leave(client))  # of one that had this number before
            self._post.hub.open(mailbox(client))
            self._post.greet(client, self._ready)  # the first word it hears: only now may others follow
            routes.join(client)
        elif isinstance(message, Left):
            self._post.hub.drop(mailbox(message.client))
            self._inbox.put(routes.leave(message.client))
        else:
            self._inbox.put(routes.arrive(client, message))

    def _answer_unreadable(self, client: int, frames: list[Frame], wrong: CodecError) -> None:
        """Whoever waits for the answer must hear of it, if the message still says who that is."""
        try:
            message = msgspec.msgpack.decode(frames[0] if frames else b"")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        if not isinstance(message, dict):
            return
        requests = message.get("requests", [message])
        named = (
            [one.get("request_id") for one in requests if isinstance(one, dict)] if isinstance(requests, list) else []
        )
        if ids := [name for name in named if isinstance(name, str)]:
            refused = InputError(str(wrong))
            self._post.send(client, Outputs(outputs=[failed_output(name, refused) for name in ids]))
        elif isinstance(call_id := message.get("call_id"), int):
            self._post.send(client, reply_with_error(call_id, InputError(str(wrong))))


def _client_of(sender: bytes) -> int | None:
    """The number of a client, as base/sockets.py puts it before a message; None: it is no such number."""
    return int(sender) if len(sender) <= _LONGEST_NUMBER and sender.isdigit() else None
