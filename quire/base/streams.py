"""A wire between processes of one host with nobody in between: unix stream sockets, written and read by their callers.

As Hub and Wire of sockets.py have it for mailboxes in a folder, in a quarter of the time: with ZeroMQ a message wakes a
thread at each end before it wakes its reader. The hub listens at a file (0600) in a folder that only this user may
enter; a wire connects once, and says first who it is.

    on the stream: for each message  number of frames (u32), the length of each (u64), the frames

A sender never blocks: what does not fit the system's buffer is left to a thread that waits for room. Must not know what
the frames mean.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence

from quire.base.clock import now
from quire.base.codec import MAX_BYTES, Frame
from quire.base.log import logger
from quire.base.sockets import LAST_WORDS_MS, PeerGoneError

log = logger(__name__)
_COUNT, _LENGTH_BYTES = struct.Struct("<I"), 8
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MOST_FRAMES = 4097  # of a codec, and a sender's name
_AT_ONCE = 256  # frames that are handed to the system as they are
_COPIED_BYTES = 1 << 14  # of a message up to which a copy of it takes less time than a call with several buffers
_FEW_BYTES, _MANY_BYTES = 1 << 16, 1 << 20  # that are read at once, of messages that begin, and of one that goes on
_CLOSED = "this end of the wire is closed"


class StreamError(PeerGoneError):
    """What came is no message: nothing after it can be read."""


class _StreamEnd:
    """One end of a connection. Any thread may send; one reads."""

    def __init__(self, connection: socket.socket, *, waits: bool) -> None:
        """`waits`: `read` does, until something has come."""
        connection.setblocking(waits)
        self._socket = connection
        self.descriptor = connection.fileno()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # notified when the backlog is gone
        self._backlog: deque[memoryview] = deque()
        self._writer: threading.Thread | None = None
        self._is_broken = False  # the other end is gone
        self._few = bytearray(_FEW_BYTES)  # a new one for every call would take ten times as long as the call
        self._view = memoryview(self._few)
        self._left = bytearray()  # of a message that has not come as a whole

    def send(self, frames: Sequence[Frame]) -> None:
        """Nothing happens if the other end is gone."""
        lengths = [len(frame) for frame in frames]
        header = struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths)
        parts: list[Frame] = [header, *frames]
        if sum(lengths) <= _COPIED_BYTES or len(parts) > _AT_ONCE:
            parts = [b"".join(parts)]
        with self._lock:
            if self._is_broken:
                return
            left = parts if self._backlog else self._write(parts)
            if not left:
                return
            self._backlog.extend(memoryview(bytes(part)) for part in left)  # who sends may change it later
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_on, name="outbox", daemon=True)
                self._writer.start()

    def _write(self, parts: Sequence[Frame]) -> list[Frame]:
        """What the system does not take now."""
        try:
            taken = self._socket.send(parts[0], _FLAGS) if len(parts) == 1 else self._socket.sendmsg(parts, (), _FLAGS)
        except (BlockingIOError, InterruptedError):
            taken = 0
        except OSError:
            self._is_broken = True
            return []
        left: list[Frame] = []
        if len(parts) == 1 and taken == len(parts[0]):
            return left
        for part in parts:
            if taken < len(part):
                left.append(memoryview(part)[taken:] if taken else part)
            taken = max(0, taken - len(part))
        return left

    def _write_on(self) -> None:
        """The root of a thread: until nothing is left to be written."""
        room = select.poll()
        room.register(self.descriptor, select.POLLOUT)
        while True:
            with contextlib.suppress(OSError):
                room.poll()
            with self._lock:
                waiting = list(self._backlog)
                left = [] if self._is_broken else self._write(waiting[:_AT_ONCE])
                self._backlog = deque([*(memoryview(part) for part in left), *waiting[_AT_ONCE:]])
                if self._is_broken or not self._backlog:
                    self._backlog.clear()
                    self._writer = None
                    self._room.notify_all()
                    return

    def read(self) -> list[list[Frame]] | None:
        """The messages that have come as a whole; None: the other end is gone, and everything it sent has been read."""
        try:
            if self._left:  # the rest of a message, which may be large
                data = memoryview(self._socket.recv(_MANY_BYTES))
            else:
                data = self._view[: self._socket.recv_into(self._few)]
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not len(data):
            return None
        if self._left:
            self._left += data
            with memoryview(self._left) as joined:
                messages, used = _messages_in(joined)
            del self._left[:used]
            return messages
        messages, used = _messages_in(data)
        self._left += data[used:]
        return messages

    def close(self, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds until everything sent has left."""
        deadline = now() + linger
        with self._lock:
            while self._backlog and not self._is_broken and (left := deadline - now()) > 0:
                self._room.wait(left)
            self._is_broken = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits at either end is woken
        self._socket.close()


def _messages_in(data: memoryview) -> tuple[list[list[Frame]], int]:
    """Those that are whole, and how many bytes they take."""
    messages: list[list[Frame]] = []
    at = 0
    while len(data) - at >= _COUNT.size:
        (count,) = _COUNT.unpack_from(data, at)
        if not 0 < count <= _MOST_FRAMES:
            raise StreamError(f"a message of {count} frames; there are 1 to {_MOST_FRAMES}")
        first = at + _COUNT.size + count * _LENGTH_BYTES
        if len(data) < first:
            break
        lengths = struct.unpack_from(f"<{count}Q", data, at + _COUNT.size)
        if (total := sum(lengths)) > MAX_BYTES:
            raise StreamError(f"a message of {total} bytes; at most {MAX_BYTES} are allowed")
        if len(data) < first + total:
            break
        whole = memoryview(bytes(data[first : first + total]))
        ends = list(itertools.accumulate(lengths, initial=0))
        messages.append([whole[begin:end] for begin, end in itertools.pairwise(ends)])
        at = first + total
    return messages, at


class StreamWire:
    """One end of two. `send` may be called by any thread; `receive` only by one. `theirs`: the hub's name within the
    folder; `sender`: who this is."""

    def __init__(self, folder: str, *, theirs: str, sender: bytes) -> None:
        self.folder, self.address = folder, ""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"{folder}/{theirs}")
        except BaseException:
            connection.close()
            raise
        self._stream, self._closed = _StreamEnd(connection, waits=True), False
        self._come: deque[list[Frame]] = deque()
        self._stream.send([sender])

    def send(self, frames: Sequence[Frame]) -> None:
        if self._closed:
            raise PeerGoneError(_CLOSED)
        self._stream.send(frames)

    def receive(self) -> list[Frame]:
        while not self._come:
            if self._closed:
                raise PeerGoneError(_CLOSED)
            messages = self._stream.read()
            if messages is None:
                raise PeerGoneError("the other end is gone")
            self._come.extend(messages)
        return self._come.popleft()

    def close(self, linger: float = 0.0) -> None:
        """A receive under way ends with PeerGoneError."""
        if not self._closed:
            self._closed = True
            self._stream.close(linger)


class StreamHub:
    """The one end of many wires, which listens at a name within the folder."""

    def __init__(self, folder: str, *, mine: str) -> None:
        self.folder, self.address = folder, mine
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"{folder}/{mine}")
            os.chmod(f"{folder}/{mine}", 0o600)
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._woken, self._waking = os.pipe()
        except BaseException:
            self._listener.close()
            raise
        self._readable, self._watched = select.poll(), set[int]()  # only the reader's; and which notices it has
        for descriptor in (self._woken, self._listener.fileno()):
            self._readable.register(descriptor, select.POLLIN)
        self._lock = threading.Lock()  # over what follows
        self._streams: dict[int, _StreamEnd] = {}  # by descriptor
        self._names: dict[int, bytes] = {}  # of those that have said theirs
        self._ways: dict[bytes, _StreamEnd] = {}
        self._closed = False
        self._come: deque[tuple[bytes, list[Frame]]] = deque()
        self._reading = threading.Lock()

    def open(self, name: str, address: str | None = None) -> None:
        """The way to a peer is there as soon as it has said its name."""

    def send(self, name: str, frames: Sequence[Frame]) -> None:
        """Does nothing if that peer is gone."""
        with self._lock:
            if self._closed:
                raise PeerGoneError(_CLOSED)
            way = self._ways.get(name.encode())
        if way is not None:
            way.send(frames)

    def receive(self, notices: Sequence[int] = (), timeout: float | None = None) -> tuple[bytes, list[Frame]] | None:
        """The next message and its sender, or None after `timeout` seconds. `notices`: descriptors, of which one turns
        readable when a peer dies."""
        try:
            with self._reading:
                return self._receive(notices, None if timeout is None else now() + timeout)
        finally:
            if self._closed:
                self._give_back()

    def _receive(self, notices: Sequence[int], until: float | None) -> tuple[bytes, list[Frame]] | None:
        while not self._come:
            if self._closed:
                raise PeerGoneError(_CLOSED)
            for notice in notices:
                if notice not in self._watched:
                    self._watched.add(notice)
                    self._readable.register(notice, select.POLLIN)
            ready = self._wait(until)
            if not ready:
                return None
            if not self._read_all(ready) and not ready.isdisjoint(notices) and not self._hear_last_words():
                raise PeerGoneError("the other end is dead")
        return self._come.popleft()

    def _hear_last_words(self) -> bool:
        """After a death: whether more comes that was on its way, or that others say of it."""
        until = now() + LAST_WORDS_MS / 1000
        for notice in self._watched:
            self._readable.unregister(notice)
        self._watched.clear()
        while not self._come and not self._closed and self._streams and (ready := self._wait(until)):
            self._read_all(ready)
        return bool(self._come)

    def _wait(self, until: float | None) -> set[int]:
        """The descriptors that turned readable; none: it took too long."""
        left = None if until is None else max(0.0, 1000 * (until - now()))
        return {descriptor for descriptor, _ in self._readable.poll(left)}

    def _read_all(self, ready: set[int]) -> bool:
        """Whether anything came: a message, a part of one, or somebody who will send some."""
        came = False
        if self._listener.fileno() in ready:
            with contextlib.suppress(OSError):  # who called has hung up
                self._accept()
                came = True
        for descriptor in ready & self._streams.keys():
            stream = self._streams[descriptor]
            try:
                messages = stream.read()
            except StreamError as wrong:
                log.warning("A connection is dropped: %s", wrong)
                messages = None
            if messages is None:
                self._drop(descriptor, stream)
                continue
            came = True
            for frames in messages:
                self._take(descriptor, stream, frames)
        return came

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        stream = _StreamEnd(connection, waits=False)
        with self._lock:
            self._streams[stream.descriptor] = stream
        self._readable.register(stream.descriptor, select.POLLIN)

    def _take(self, descriptor: int, stream: _StreamEnd, frames: list[Frame]) -> None:
        if (name := self._names.get(descriptor)) is not None:
            self._come.append((name, frames))
            return
        with self._lock:  # the first message is its name
            self._names[descriptor] = name = bytes(frames[0])
            self._ways[name] = stream

    def _drop(self, descriptor: int, stream: _StreamEnd) -> None:
        self._readable.unregister(descriptor)
        with self._lock:
            del self._streams[descriptor]
            name = self._names.pop(descriptor, b"")
            if self._ways.get(name) is stream:
                del self._ways[name]
        stream.close()

    def close(self) -> None:
        """A receive under way ends with PeerGoneError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.write(self._waking, b"x")
        self._give_back()

    def _give_back(self) -> None:
        """Unless a thread reads: it will, when it is done."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            with self._lock:
                streams, self._streams = list(self._streams.values()), {}
                self._ways, self._names = {}, {}
                if self._listener.fileno() >= 0:
                    self._listener.close()
                    os.close(self._woken)
                    os.close(self._waking)
            for stream in streams:
                stream.close()
        finally:
            self._reading.release()
