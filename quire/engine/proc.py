"""An engine process: serves its client, or several, until the one that started it says stop.

`main` is its first function. Any exception in the loop, a worker or the thread that reads the mailbox ends the process,
after its last word (EngineDied) says why: an engine that lives hears. What an engine is made of is start.py's.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence

import msgspec

from quire.base.codec import Codec, CodecError, Frame
from quire.base.log import logger
from quire.base.sockets import FramesLostError, Hub, PeerGoneError
from quire.config.logs import apply_logging
from quire.engine.control import reply_with_error
from quire.engine.loop import Inbox, failed_output
from quire.engine.pulse import Pulse
from quire.engine.route import OWNER, Routes
from quire.engine.start import Started, start_engine
from quire.engine.together import unpack
from quire.schema.errors import EngineDeadError, InputError, kind_of, message_of
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
    Wake,
)

log = logger(__name__)
MAILBOX = "engine"
DIED = 1  # exit code after EngineDied
_LAST_WORDS_S = 5.0
_LONGEST_NUMBER = 6  # digits of a client's


class EngineBoot(msgspec.Struct, kw_only=True):
    """What an engine process is started with."""

    folder: str  # where the mailboxes are
    config: msgspec.Raw  # msgpack of EngineConfig
    shared: bool = False  # clients other than the owner may join
    host: str = ""  # address on which clients of other machines may join; needs a secret
    secret: bytes | None = None
    peers: tuple[str, ...] = ()  # folders of the engines that have experts together with this one


def mailbox(client: int) -> str:
    return f"client-{client}"


def main(boot_bytes: bytes) -> None:
    """An engine process, from its boot bytes to its end."""
    boot = msgspec.msgpack.decode(boot_bytes, type=EngineBoot)
    hub = Hub(boot.folder, mine=f"tcp://{boot.host}:*" if boot.host else MAILBOX, secret=boot.secret)
    hub.open(str(OWNER), mailbox=mailbox(OWNER))
    post = _Post(hub, Routes() if boot.shared else None)
    try:
        from quire.config import EngineConfig  # lazy

        config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
        apply_logging(config.logging_config)
        started = start_engine(config, Pulse(boot.folder), _wake(hub, boot.peers) if boot.peers else None)
        gc.collect(1)  # not what was imported, which is old
        gc.freeze()  # what the start made stays: later collections need not look through it
        if boot.host:
            started = started._replace(ready=msgspec.structs.replace(started.ready, address=hub.address))
        post.greet(OWNER, started.ready)
        _serve(started, post)
    except BaseException as failed:  # noqa: BLE001  # the root of the engine process: whatever ended it is its last message
        reason = failed.reason if isinstance(failed, EngineDeadError) else message_of(failed)
        post.emit(EngineDied(reason=reason, details=traceback.format_exc(), error_kind=kind_of(failed)))
        hub.close(linger=_LAST_WORDS_S)
        os._exit(DIED)
    hub.close(linger=_LAST_WORDS_S)
    os._exit(0)  # the receiving thread still holds the hub, and nothing is left to save


def _wake(hub: Hub, peers: Sequence[str]) -> Callable[[int], None]:
    """Mailboxes of other engines are open once these have started, which all do before any has a step."""
    for folder in peers:
        hub.open(folder, folder=folder, mailbox=MAILBOX)
    codec: Codec[ToEngine] = Codec(ToEngine)

    def wake(step: int) -> None:
        for folder in peers:
            hub.send(folder, [str(OWNER).encode(), *codec.encode(Wake(step=step))])

    return wake


class _Post:
    """What the engine says, and to whom."""

    def __init__(self, hub: Hub, routes: Routes | None) -> None:
        self.hub = hub
        self.routes = routes
        self._codec: Codec[FromEngine] = Codec(FromEngine)

    def greet(self, client: int, ready: EngineReady) -> None:
        address = ready.address if client == OWNER else ""  # others have come by it
        self.send(client, msgspec.structs.replace(ready, client=client, address=address))

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
        self.hub.send(str(client), frames)


def _serve(started: Started, post: _Post) -> None:
    inbox: Inbox = queue.SimpleQueue()
    receiver = _Receiver(started.ready, post, inbox)
    threading.Thread(target=receiver.run, name="engine inbox", daemon=True).start()
    started.loop.run(inbox, post.emit)
    if receiver.failed is not None:
        raise receiver.failed
    started.loop.close()


class _Receiver:
    """The thread that reads the mailbox and decodes off the loop's thread."""

    def __init__(self, ready: EngineReady, post: _Post, inbox: Inbox) -> None:
        self._ready = ready
        self._post = post
        self._inbox = inbox
        self._codec: Codec[ToEngine] = Codec(ToEngine)
        self.failed: Exception | None = None  # why it stopped reading, unless it was asked to

    def run(self) -> None:
        """Until the mailbox is closed, or something goes wrong: either way the loop ends."""
        try:
            while True:
                try:
                    self._read()
                except FramesLostError as lost:
                    self._give_up(lost)
        except PeerGoneError:
            pass
        except Exception as failed:  # noqa: BLE001  # the root of the receiving thread: the loop raises it once it has stopped
            self.failed = failed
        self._inbox.put(Stop())

    def _read(self) -> None:
        received = self._post.hub.receive()
        assert received is not None  # without a limit of time
        sender, frames = received
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

    def _give_up(self, lost: FramesLostError) -> None:
        """A client of which something is missing hears no more, and whatever else it says has no effect; the others go
        on. EngineDeadError: it is the owner."""
        client, routes = _client_of(lost.sender), self._post.routes
        if routes is None or client is None or client == OWNER:
            raise EngineDeadError(str(lost)) from None
        if not routes.has(client):
            return
        log.error("Client %d is given up: %s", client, lost)
        self._post.send(client, EngineDied(reason=str(lost), details=str(lost)))
        self._post.hub.drop(str(client), _LAST_WORDS_S)
        self._inbox.put(routes.leave(client))

    def _take(self, client: int, message: ToEngine) -> None:
        routes = self._post.routes
        if isinstance(message, EngineRequests):
            for request in unpack(message):
                self._take(client, request)
        elif routes is None or isinstance(message, Wake):
            self._inbox.put(message)
        elif isinstance(message, Hello):
            self._inbox.put(routes.leave(client))  # of one that had this number before
            address = message.address if self._ready.address else ""
            self._post.hub.open(str(client), address or None, mailbox=mailbox(client))
            self._post.greet(client, self._ready)  # the first word it hears: only now may others follow
            routes.join(client)
        elif isinstance(message, Left):
            self._post.hub.drop(str(message.client))
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
