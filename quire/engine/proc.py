"""The engine's composition root: build executor, KV layout and scheduler into a loop, here or in a process of its own.

In: a resolved EngineConfig. `start_engine` gives the loop to whoever lives in the same process; `main` is the first
function of an engine process: it serves a wire until it is told to stop. Any exception in the loop or a worker ends
the process, after its last word (EngineDied) says why. The only engine file that knows concrete classes of many rooms.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from quire.base import registry
from quire.base.clock import now
from quire.base.codec import Codec, CodecError, Frame
from quire.base.log import logger
from quire.base.sockets import PeerGoneError, Wire
from quire.config.local import thing_of
from quire.engine.control import kind_of, message_of, reply_with_error
from quire.engine.loop import EngineLoop, failed_output
from quire.executor.base import make_executor
from quire.sched.kv_layout import fit_length, place
from quire.sched.scheduler import Scheduler
from quire.schema.errors import InputError
from quire.schema.kv import KVLayout, ModelInfo
from quire.schema.messages import ControlReply, EngineDied, EngineReady, FromEngine, Outputs, Stop, ToEngine

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
CONFIG = "quire.config:EngineConfig"
DIED = 1  # exit code after EngineDied
_LAST_WORDS_S = 5.0


class Started(NamedTuple):
    loop: EngineLoop
    ready: EngineReady


class Boot(msgspec.Struct, kw_only=True):
    """What an engine process is started with."""

    folder: str  # where the mailboxes are
    config: msgspec.Raw  # msgpack of EngineConfig


def start_engine(config: EngineConfig) -> Started:
    """Load the model, place the KV cache, warm up."""
    seconds: dict[str, float] = {}
    began = now()

    def mark(phase: str) -> None:
        seconds[phase] = now() - began - sum(seconds.values())

    executor = make_executor(config)
    try:
        mark("device")
        info = executor.load()
        mark("load")
        free_bytes = executor.free_bytes()
        mark("profile")
        layout, max_model_len = _place(config, info, free_bytes)
        executor.init_kv(layout)
        mark("kv")
        executor.warm_up()
        mark("warm_up")
    except BaseException:
        executor.shutdown()
        raise
    ahead = int(config.scheduler_config.async_scheduling)
    named = config.scheduler_config.scheduler_cls
    scheduler = (Scheduler if named is None else thing_of(named))(
        config, layout, max_model_len=max_model_len, look_ahead=ahead
    )
    seconds["total"] = now() - began
    ready = EngineReady(
        num_blocks=layout.num_blocks,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        block_size=config.cache_config.block_size,
        start_seconds=seconds,
    )
    phases = ", ".join(f"{phase} {seconds[phase]:.2f}" for phase in seconds if phase != "total")
    log.info("Engine ready in %.1f s (%s): %d KV blocks", seconds["total"], phases, layout.num_blocks)
    return Started(EngineLoop(executor, scheduler, ahead=ahead), ready)


def _place(config: EngineConfig, info: ModelInfo, free_bytes: int) -> tuple[KVLayout, int]:
    """The KV layout, and the context length: the one asked for, or (-1) the longest that fits."""
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
    boot = msgspec.msgpack.decode(boot_bytes, type=Boot)
    wire = Wire(boot.folder, mine="engine", theirs="client")
    codec: Codec[FromEngine] = Codec(FromEngine)
    try:
        config = msgspec.msgpack.decode(boot.config, type=registry.load(CONFIG))
        started = start_engine(config)
        wire.send(codec.encode(started.ready))
        _serve(started.loop, wire, codec)
    except BaseException as failed:
        reason = EngineDied(reason=message_of(failed), details=traceback.format_exc(), error_kind=kind_of(failed))
        wire.send(codec.encode(reason))
        wire.close(linger=_LAST_WORDS_S)
        os._exit(DIED)
    wire.close(linger=_LAST_WORDS_S)
    os._exit(0)  # the receiving thread still holds the wire, and nothing is left to save


def _serve(loop: EngineLoop, wire: Wire, codec: Codec[FromEngine]) -> None:
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def emit(message: FromEngine) -> None:
        try:
            frames = codec.encode(message)
        except CodecError as wrong:  # only a verb's value can be foreign to the codec
            if not isinstance(message, ControlReply):
                raise
            frames = codec.encode(reply_with_error(message.call_id, InputError(str(wrong))))
        wire.send(frames)

    threading.Thread(target=_receive, args=(wire, inbox, emit), name="engine inbox", daemon=True).start()
    loop.run(inbox, emit)
    loop.executor.shutdown()


def _receive(wire: Wire, inbox: queue.SimpleQueue[ToEngine], emit: Callable[[FromEngine], None]) -> None:
    """Decode off the loop's thread."""
    codec: Codec[ToEngine] = Codec(ToEngine)
    while True:
        try:
            frames = wire.receive()
        except PeerGoneError:
            inbox.put(Stop())
            return
        if frames is None:
            continue
        try:
            inbox.put(codec.decode(frames))
        except CodecError as wrong:
            log.error("A message to the engine could not be read: %s", wrong)
            _answer_unreadable(frames[0], wrong, emit)


def _answer_unreadable(frame: Frame, wrong: CodecError, emit: Callable[[FromEngine], None]) -> None:
    """Whoever waits for the answer must hear of it, if the message still says who that is."""
    try:
        message = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    if not isinstance(message, dict):
        return
    if isinstance(request_id := message.get("request_id"), str):
        emit(Outputs(outputs=[failed_output(request_id, InputError(str(wrong)))]))
    elif isinstance(call_id := message.get("call_id"), int):
        emit(reply_with_error(call_id, InputError(str(wrong))))
