"""A wire between two processes of one host: each end owns a mailbox (PULL) and drops frames into the other's (PUSH).

In: frames (base/codec.py makes them). Out: frames, in the order sent. The mailboxes are ipc files in a folder only
this user may enter. A sender never blocks and never loses a frame while the peer lives. Whether the peer lives is
asked of a file descriptor that becomes readable when it dies (base/procs.py). Must not know what the frames mean.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence

import zmq

from quire.base.codec import Frame

_LONGEST_PATH = 100  # a unix socket's path is limited to about 107 bytes
_LAST_WORDS_MS = 300  # after a death notice: how long frames already on their way may take to arrive


class PeerGoneError(ConnectionError):
    """The other end is dead and everything it sent has been read."""


def private_folder() -> str:
    """A new folder for mailboxes that no other user can enter (mode 0700)."""
    folder = tempfile.mkdtemp(prefix="quire-")
    if len(os.fsencode(folder)) > _LONGEST_PATH - len("/engine"):
        os.rmdir(folder)
        raise OSError(f"the temporary folder {folder!r} is too long a path for a socket: set TMPDIR to a shorter one")
    return folder


class Wire:
    """One end. `send` may be called by any thread; `receive` only by one."""

    def __init__(self, folder: str, *, mine: str, theirs: str) -> None:
        self.folder = folder
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(f"ipc://{folder}/{mine}")
        self._outbox.connect(f"ipc://{folder}/{theirs}")
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._closed = False

    def send(self, frames: Sequence[Frame]) -> None:
        with self._sending:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            self._outbox.send_multipart(frames, copy=len(frames) == 1)

    def receive(self, timeout: float | None = None, *, notice: int | None = None) -> list[Frame] | None:
        """The next message, or None after `timeout` seconds. `notice`: a descriptor that turns readable at death."""
        with self._reading:
            if self._closed:
                raise PeerGoneError("this end of the wire is closed")
            try:
                return self._receive(None if timeout is None else max(0, int(timeout * 1000)), notice)
            except zmq.ContextTerminated:
                self._inbox.close(linger=0)
                raise PeerGoneError("this end of the wire was closed") from None

    def _receive(self, milliseconds: int | None, notice: int | None) -> list[Frame] | None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        if notice is not None:
            poller.register(notice, zmq.POLLIN)
        ready = dict(poller.poll(milliseconds))
        if not ready:
            return None
        if self._inbox not in ready and not self._inbox.poll(_LAST_WORDS_MS):
            raise PeerGoneError("the other end is dead")
        return [frame.buffer for frame in self._inbox.recv_multipart(copy=False)]

    def close(self, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds until everything sent has left. A receive under way ends with PeerGoneError."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
            self._outbox.close(linger=int(linger * 1000))
        if self._reading.acquire(blocking=False):
            self._inbox.close(linger=0)
            self._reading.release()
        self._context.term()  # ends a poll in another thread, which then closes the inbox itself

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
