"""A wire between processes: each end owns a mailbox (PULL) and drops frames into the other's (PUSH).

In: frames (base/codec.py makes them). Out: frames, in the order sent. A Wire has one other end, a Hub has many. On one
host the mailboxes are ipc files (0600) in a folder only this user may enter; between hosts they are TCP ports, to which
only those can connect who know the run's secret (base/curve.py), and every message carries a seal (base/seal.py): what
comes without a valid one is dropped and logged. A sender never blocks and never loses a frame while the peer lives;
where a network has lost some nevertheless, the receiver is told so, and whose they were. Connections over TCP are asked
now and then whether they still are one; a silent one is made anew.
Whether a peer of this host lives is asked of a file descriptor that becomes readable when it dies (base/procs.py).
Must not know what the frames mean.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from quire.base import env
from quire.base.codec import MAX_BYTES, Frame
from quire.base.folders import make_folder, remove_folder, sweep_folders
from quire.base.log import logger
from quire.base.seal import MissedError, Seal, SealError

if TYPE_CHECKING:
    from quire.base.curve import Curve

log = logger(__name__)

_LONGEST_PATH = 100  # a unix socket's path is limited to about 107 bytes
_SILENT_S = 30.0  # without an answer, at least, before a connection over TCP is taken to be broken
_SILENT_LIMITS = 6  # or so many times NODE_TIMEOUT_S
_ASKED = 3  # times within that
_LONGEST_TTL_MS = 6_553_599  # that ZeroMQ takes
_LAST_WORDS_MS = 300  # after a death notice: how long frames already on their way may take to arrive


class PeerGoneError(ConnectionError):
    """The other end is dead and everything it sent has been read."""


class FramesLostError(PeerGoneError):
    """A connection broke and was made anew, and what was on its way meanwhile is lost: no more of what this sender says
    can be relied on. `sender`: as Hub.receive names it."""

    def __init__(self, message: str, sender: bytes = b"") -> None:
        super().__init__(message)
        self.sender = sender


def private_folder() -> str:
    """A new folder for mailboxes that no other user can enter (mode 0700). Those of killed processes go."""
    sweep_folders()
    folder = make_folder()
    if len(os.fsencode(folder)) > _LONGEST_PATH - len("/client-99"):
        remove_folder(folder)
        raise OSError(f"the temporary folder {folder!r} is too long a path for a socket: set TMPDIR to a shorter one")
    return folder


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    return made


def _keep_asking(made: zmq.Socket[bytes]) -> None:
    """Before it is bound or connected. ZeroMQ's own thread asks and answers, whatever this process is busy with."""
    silent = min(_LONGEST_TTL_MS, int(1000 * max(_SILENT_S, _SILENT_LIMITS * env.NODE_TIMEOUT_S.get())))
    made.setsockopt(zmq.HEARTBEAT_IVL, silent // _ASKED)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent)
    made.setsockopt(zmq.HEARTBEAT_TTL, silent)


class _Mailboxes:
    """Where the mailboxes of a run are: in a folder, or, if it has a secret, at addresses."""

    def __init__(self, folder: str, secret: bytes | None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder = folder
        self._curve = None if secret is None else _curve(secret)

    def inbox(self, name: str) -> _Inbox:
        address, made = self._address(name), _socket(self.context, zmq.PULL)
        if self._curve is not None:
            self._curve.guard(self.context, made)
        if address.startswith("tcp://"):
            _keep_asking(made)
        try:
            return _Inbox(self.context, made, address)
        except BaseException:
            made.close(linger=0)
            self.context.term()
            raise

    def outbox(self, name: str, folder: str = "") -> zmq.Socket[bytes]:
        """`folder`: of another run, where the mailbox is."""
        address, made = self._address(name, folder), _socket(self.context, zmq.PUSH)
        try:
            if self._curve is not None:
                self._curve.use(made)
            if address.startswith("tcp://"):
                _keep_asking(made)
            made.connect(address)
        except BaseException:
            made.close(linger=0)
            raise
        return made

    def _address(self, name: str, folder: str = "") -> str:
        """Of a mailbox: its name within the folder, or a TCP address in full."""
        if "://" not in name:
            return f"ipc://{folder or self._folder}/{name}"
        if not name.startswith("tcp://"):
            raise ValueError(f"the mailbox address {name!r} is neither a name nor tcp://host:port")
        if self._curve is None:
            raise ValueError(f"the mailbox address {name!r} can be reached from outside, and the run has no secret")
        return name


def _curve(secret: bytes) -> Curve:
    from quire.base.curve import Curve  # lazy

    made: Curve = Curve(secret)
    return made


class _Inbox:
    """A mailbox: one thread reads it, any thread may close it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mailbox: zmq.Socket[bytes], address: str) -> None:
        self._context, self._socket = context, mailbox
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.bind(address)
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reading = threading.Lock()
        self._closed = False

    def receive(self, timeout: float | None, notices: Sequence[int] = ()) -> list[Frame] | None:
        try:
            with self._reading:
                if self._closed:
                    raise PeerGoneError("this end of the wire is closed")
                return self._receive(None if timeout is None else max(0, int(timeout * 1000)), notices)
        except zmq.ContextTerminated:
            raise PeerGoneError("this end of the wire was closed") from None
        finally:
            if self._closed:
                self._close_socket()

    def _receive(self, milliseconds: int | None, notices: Sequence[int]) -> list[Frame] | None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for notice in notices:
            poller.register(notice, zmq.POLLIN)
        ready = dict(poller.poll(milliseconds))
        if not ready:
            return None
        if self._socket not in ready and not self._socket.poll(_LAST_WORDS_MS):
            raise PeerGoneError("the other end is dead")
        return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]

    def close(self) -> None:
        """A receive under way ends with PeerGoneError."""
        self._closed = True
        self._close_socket()
        self._context.term()  # ends a poll in another thread, and waits until the socket is closed

    def _close_socket(self) -> None:
        """Unless a thread reads: it will, when it is done. Called after `_closed` was set, and after a reader let go of
        the lock, so that one of the two closes it, however they meet."""
        if self._reading.acquire(blocking=False):
            self._socket.close(linger=0)
            self._reading.release()


class Wire:
    """One end of two. `send` may be called by any thread; `receive` only by one.

    `sender`, if given, goes before every message: the other end is a Hub, where many drop their frames.
    `mine`, `theirs`: names of mailboxes within the folder, or TCP addresses, which need a secret. "": `connect` says
    later where the other end is.
    """

    def __init__(
        self, folder: str, *, mine: str, theirs: str, sender: bytes | None = None, secret: bytes | None = None
    ) -> None:
        self.folder = folder
        self._mailboxes = _Mailboxes(folder, secret)
        self._inbox = self._mailboxes.inbox(mine)
        self.address = self._inbox.address
        self._outbox: zmq.Socket[bytes] | None = None
        try:
            if theirs:
                self._outbox = self._mailboxes.outbox(theirs)
        except BaseException:
            self._inbox.close()
            raise
        self._seal, self._sender = None if secret is None else Seal(secret), sender or b""
        self._lead: list[Frame] = [] if sender is None else [sender]
        self._sending = threading.Lock()
        self._closed = False

    def connect(self, theirs: str) -> None:
        """Once, if it was not known before."""
        with self._sending:
            if self._closed or self._outbox is not None:
                raise PeerGoneError("this end of the wire is closed, or connected")
            self._outbox = self._mailboxes.outbox(theirs)

    def send(self, frames: Sequence[Frame]) -> None:
        with self._sending:
            if self._closed or self._outbox is None:
                raise PeerGoneError("this end of the wire is closed, or nobody knows where the other is")
            if self._seal is not None:
                frames = self._seal.close(_from(self._sender), frames)
            self._outbox.send_multipart([*self._lead, *frames], copy=len(frames) == 1)

    def receive(self, timeout: float | None = None, *, notice: int | None = None) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds. `notice`: a descriptor that turns readable at death."""
        while True:
            frames = self._inbox.receive(timeout, () if notice is None else (notice,))
            if frames is None or self._seal is None:
                return frames
            if (inner := _opened(self._seal, _to(self._sender), frames)) is not None:
                return inner

    def close(self, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds until everything sent has left. A receive under way ends with PeerGoneError."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
            if self._outbox is not None:
                self._outbox.close(linger=int(linger * 1000))
        self._inbox.close()

    def remove_folder(self) -> None:
        remove_folder(self.folder)


class Hub:
    """The one end of many wires: a mailbox that all senders share, and a way back to each."""

    def __init__(self, folder: str, *, mine: str, secret: bytes | None = None) -> None:
        self.folder = folder
        self._mailboxes = _Mailboxes(folder, secret)
        self._inbox = self._mailboxes.inbox(mine)
        self.address = self._inbox.address
        self._seal = None if secret is None else Seal(secret)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._sending = threading.Lock()
        self._closed = False

    def open(self, name: str, address: str | None = None, *, folder: str = "", mailbox: str = "") -> None:
        """A way to the peer whose mailbox is called so; a second time for a peer that came anew. `address`: where it
        is, if not in the folder; the seals of what is sent there name the peer. `folder`, `mailbox`: another folder
        and what it is called there, if that is a hub too."""
        with self._sending:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            if name in self._outboxes:
                self._outboxes.pop(name).close(linger=0)
            self._outboxes[name] = self._mailboxes.outbox(address or mailbox or name, folder)

    def drop(self, name: str, linger: float = 0.0) -> None:
        """That peer is gone: what it has not read is thrown away, after `linger` seconds, which nobody waits for."""
        with self._sending:
            if (outbox := self._outboxes.pop(name, None)) is not None:
                outbox.close(linger=int(linger * 1000))

    def send(self, name: str, frames: Sequence[Frame]) -> None:
        """Does nothing if that peer is gone."""
        with self._sending:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            if (outbox := self._outboxes.get(name)) is not None:
                if self._seal is not None:
                    frames = self._seal.close(_to(name.encode()), frames)
                outbox.send_multipart(frames, copy=len(frames) == 1)

    def receive(self, notices: Sequence[int] = (), timeout: float | None = None) -> tuple[bytes, list[Frame]] | None:
        """The next message and its sender, or None after `timeout` seconds. `notices`: descriptors, of which one turns
        readable when a peer dies."""
        while True:
            frames = self._inbox.receive(timeout, notices)
            if frames is None:
                return None
            sender = bytes(frames[0])
            if self._seal is None:
                return sender, frames[1:]
            if (inner := _opened(self._seal, _from(sender), frames[1:], sender)) is not None:
                return sender, inner

    def close(self, linger: float = 0.0) -> None:
        with self._sending:
            if self._closed:
                return
            self._closed = True
            for outbox in self._outboxes.values():
                outbox.close(linger=int(linger * 1000))
        self._inbox.close()


def _from(sender: bytes) -> bytes:
    """The channel of what a wire's end says to its hub."""
    return b"from " + sender


def _to(receiver: bytes) -> bytes:
    """The channel of what a hub says to one of its wires, which is named there as its sender frame says."""
    return b"to " + receiver


def _opened(seal: Seal, channel: bytes, frames: Sequence[Frame], sender: bytes = b"") -> list[Frame] | None:
    try:
        return seal.open(channel, frames)
    except MissedError as missed:
        raise FramesLostError(f"messages were lost on the network: {missed}", sender) from None
    except SealError as wrong:
        log.warning("A message from outside was dropped: %s", wrong)
        return None
