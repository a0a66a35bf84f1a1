"""A wire between processes of one host: each end owns a mailbox (PULL) and drops frames into the other's (PUSH).

In: frames (base/codec.py makes them). Out: frames, in the order sent. A Wire has one other end, a Hub has many. The
mailboxes are ipc files (0600) in a folder only this user may enter. A sender never blocks and never loses a frame while
the peer lives. Whether the peer lives is asked of a file descriptor that becomes readable when it dies (base/procs.py).
Must not know what the frames mean.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import zmq

from quire.base.codec import Frame
from quire.base.folders import make_folder, remove_folder, sweep_folders

_LONGEST_PATH = 100  # a unix socket's path is limited to about 107 bytes
_LAST_WORDS_MS = 300  # after a death notice: how long frames already on their way may take to arrive


class PeerGoneError(ConnectionError):
    """The other end is dead and everything it sent has been read."""


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


class _Inbox:
    """A mailbox: one thread reads it, any thread may close it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str) -> None:
        self._context = context
        self._socket = _socket(context, zmq.PULL)
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        self._reading = threading.Lock()
        self._closed = False

    def receive(self, timeout: float | None, notice: int | None) -> list[Frame] | None:
        with self._reading:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            try:
                return self._receive(None if timeout is None else max(0, int(timeout * 1000)), notice)
            except zmq.ContextTerminated:
                self._socket.close(linger=0)
                raise PeerGoneError("this end of the wire was closed") from None

    def _receive(self, milliseconds: int | None, notice: int | None) -> list[Frame] | None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if notice is not None:
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
        if self._reading.acquire(blocking=False):
            self._socket.close(linger=0)
            self._reading.release()
        self._context.term()  # ends a poll in another thread, which then closes the socket itself


class Wire:
    """One end of two. `send` may be called by any thread; `receive` only by one.

    `sender`, if given, goes before every message: the other end is a Hub, where many drop their frames.
    """

    def __init__(self, folder: str, *, mine: str, theirs: str, sender: bytes | None = None) -> None:
        self.folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = _Inbox(self._context, f"{folder}/{mine}")
        self._outbox = _socket(self._context, zmq.PUSH)
        self._outbox.connect(f"ipc://{folder}/{theirs}")
        self._lead: list[Frame] = [] if sender is None else [sender]
        self._sending = threading.Lock()
        self._closed = False

    def send(self, frames: Sequence[Frame]) -> None:
        with self._sending:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            self._outbox.send_multipart([*self._lead, *frames], copy=len(frames) == 1)

    def receive(self, timeout: float | None = None, *, notice: int | None = None) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds. `notice`: a descriptor that turns readable at death."""
        return self._inbox.receive(timeout, notice)

    def close(self, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds until everything sent has left. A receive under way ends with PeerGoneError."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
            self._outbox.close(linger=int(linger * 1000))
        self._inbox.close()

    def remove_folder(self) -> None:
        remove_folder(self.folder)


class Hub:
    """The one end of many wires: a mailbox that all senders share, and a way back to each."""

    def __init__(self, folder: str, *, mine: str) -> None:
        self.folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = _Inbox(self._context, f"{folder}/{mine}")
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._sending = threading.Lock()
        self._closed = False

    def open(self, name: str) -> None:
        """A way to the peer whose mailbox is called so; a second time for a peer that came anew."""
        with self._sending:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            if name in self._outboxes:
                self._outboxes.pop(name).close(linger=0)
            self._outboxes[name] = _socket(self._context, zmq.PUSH)
            self._outboxes[name].connect(f"ipc://{self.folder}/{name}")

    def drop(self, name: str) -> None:
        """That peer is gone: what it has not read is thrown away."""
        with self._sending:
            if (outbox := self._outboxes.pop(name, None)) is not None:
                outbox.close(linger=0)

    def send(self, name: str, frames: Sequence[Frame]) -> None:
        """Does nothing if that peer is gone."""
        with self._sending:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            if (outbox := self._outboxes.get(name)) is not None:
                outbox.send_multipart(frames, copy=len(frames) == 1)

    def receive(self) -> tuple[bytes, list[Frame]]:
        """The next message and its sender."""
        frames = self._inbox.receive(None, None)
        assert frames, "without a limit of time there is a message"
        return bytes(frames[0]), frames[1:]

    def close(self, linger: float = 0.0) -> None:
        with self._sending:
            if self._closed:
                return
            self._closed = True
            for outbox in self._outboxes.values():
                outbox.close(linger=int(linger * 1000))
        self._inbox.close()
