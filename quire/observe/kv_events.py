"""EventPublisher: batches of KV events to whoever subscribes, numbered, with the last ones kept for who missed some.

Wire, as documented for `--kv-events-config`: a PUB socket sends [topic, number, payload]; the number is 8 bytes, big
endian, from 0; the payload is msgpack of EventBatch. A ROUTER socket at `replay_endpoint` takes [number] from a client
and answers with a message [number, payload] for each batch kept from that one on, then [-1 as 8 bytes, nothing].
In: lists of events, from the engine's thread, which never waits: what does not fit the queue is dropped, and the number
that is missing tells subscribers. Sockets belong to one thread. Must not know what an event means.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from quire.base.log import logger
from quire.schema.errors import ConfigError

log = logger(__name__)
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
_LINGER_MS = 500
_POLL_S = 0.1  # how long a replay may wait where nothing is published
_FULL_EVERY = 1000  # dropped batches per warning


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float  # wall-clock seconds
    events: Sequence[Any]
    data_parallel_rank: int | None = None  # of the engine, if there are several


class EventPublisher:
    """Ends with `close`, after what was published has left."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = 10000,
        hwm: int = 100000,
        max_queue_size: int = 100000,
        data_parallel_rank: int | None = None,
    ) -> None:
        """`data_parallel_rank`: of several engines, each has addresses of its own."""
        self._rank = data_parallel_rank
        self._topic = topic.encode()
        self._next = 0
        self._num_dropped = 0
        self._waiting: queue.Queue[tuple[int, EventBatch] | None] = queue.Queue(max_queue_size)
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publish = self._open(zmq.PUB, endpoint, hwm, "endpoint")
            if replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, replay_endpoint, hwm, "replay_endpoint")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[Any]) -> None:
        number, self._next = self._next, self._next + 1
        try:
            self._waiting.put_nowait((number, EventBatch(time.time(), events, self._rank)))
        except queue.Full:
            if self._num_dropped % _FULL_EVERY == 0:
                log.warning(
                    "KV events: the queue of %d batches is full, batch %d is dropped", self._waiting.maxsize, number
                )
            self._num_dropped += 1

    def close(self) -> None:
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _open(self, kind: int, endpoint: str, hwm: int, option: str) -> zmq.Socket[bytes]:
        """Bound where the address is a place of this machine's choosing, connected where it names another's."""
        endpoint = address_of(endpoint, self._rank or 0)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        binds = kind == zmq.ROUTER or "*" in endpoint or "[::]" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        try:
            socket.bind(endpoint) if binds else socket.connect(endpoint)
        except zmq.ZMQError as wrong:
            raise ConfigError(
                f"kv_events_config.{option}={endpoint!r} cannot be used: {wrong}", param=f"kv_events_config.{option}"
            ) from None
        return socket

    def _run(self) -> None:
        try:
            while self._poll_once():
                pass
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _poll_once(self) -> bool:
        """Send what waits, or answer who asks; False: closed."""
        if self._replay is not None:
            while self._replay.poll(0):
                self._answer(self._replay)
        try:
            item = self._waiting.get(timeout=None if self._replay is None else _POLL_S)
        except queue.Empty:
            return True
        if item is None:
            return False
        number, batch = item
        payload = msgspec.msgpack.encode(batch)
        self._recent.append((number, payload))
        self._publish.send_multipart([self._topic, _bytes(number), payload])
        return True

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """A request that is not one is left alone: nothing could be said that its sender would understand."""
        client, *frames = replay.recv_multipart()
        if not frames or len(frames[-1]) != NUMBER_BYTES or len(frames) > 2:
            log.warning("KV events: a replay was asked for without a number of %d bytes", NUMBER_BYTES)
            return
        first = int.from_bytes(frames[-1], "big")
        for number, payload in self._recent:
            if number >= first:
                replay.send_multipart([client, b"", _bytes(number), payload])
        replay.send_multipart([client, b"", END_OF_REPLAY, b""])


def address_of(endpoint: str, rank: int) -> str:
    """Of an engine: the port plus its rank; where an address has no port, a suffix."""
    if not rank:
        return endpoint
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp:") and port.isdigit():
        return f"{head}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


def _bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
