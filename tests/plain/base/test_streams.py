"""base/streams.py: frames over unix streams, of any size, with senders that never wait and deaths that are told."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.base.codec import Frame
from quire.base.sockets import PeerGoneError
from quire.base.streams import StreamHub, StreamWire

PATIENCE_S = 60.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StreamHub]:
    made = StreamHub(str(tmp_path), mine="hub")
    yield made
    made.close()


def wire_of(hub: StreamHub, name: str = "0") -> StreamWire:
    return StreamWire(hub.folder, theirs="hub", sender=name.encode())


def joined(hub: StreamHub, name: str = "0") -> StreamWire:
    """One whose name the hub knows."""
    wire = wire_of(hub, name)
    wire.send([b"here"])
    assert plain(hub.receive(timeout=PATIENCE_S)) == (name.encode(), [b"here"])
    return wire


def plain(received: tuple[bytes, list[Frame]] | None) -> tuple[bytes, list[bytes]] | None:
    return None if received is None else (received[0], [bytes(frame) for frame in received[1]])


def test_messages_keep_their_order_and_their_sender(hub: StreamHub) -> None:
    wires = [wire_of(hub, str(number)) for number in range(3)]
    for turn in range(50):
        for number, wire in enumerate(wires):
            wire.send([b"%d" % turn, b"", b"x" * (number * 1000)])
    found: dict[bytes, list[list[bytes]]] = {}
    for _ in range(150):
        received = plain(hub.receive(timeout=PATIENCE_S))
        assert received is not None
        found.setdefault(received[0], []).append(received[1])
    for number in range(3):
        assert found[b"%d" % number] == [[b"%d" % turn, b"", b"x" * (number * 1000)] for turn in range(50)]
    for number in range(3):
        hub.send(str(number), [b"to %d" % number])
    assert [[bytes(frame) for frame in wire.receive()] for wire in wires] == [[b"to %d" % n] for n in range(3)]
    assert hub.receive(timeout=0.01) is None


def test_a_sender_does_not_wait_for_who_does_not_read(hub: StreamHub) -> None:
    """Far more than the system's buffer takes, in both directions, and nobody reads until all of it is sent."""
    wire = joined(hub)
    large = [os.urandom(3 << 20), b"beside", os.urandom(5)]
    many = [b"%d" % number for number in range(3000)]  # frames: more than the system takes in one call
    for end in (lambda frames: hub.send("0", frames), wire.send):
        changed = bytearray(b"before" * 100_000)
        for message in (large, many, [changed], [b"last"]):
            end(message)
        changed[:6] = b"after!"
    for receive in (wire.receive, lambda: hub.receive(timeout=PATIENCE_S)[1]):  # type: ignore[index]
        assert [bytes(frame) for frame in receive()] == large
        assert [bytes(frame) for frame in receive()] == many
        assert [bytes(frame) for frame in receive()] == [b"before" * 100_000]
        assert [bytes(frame) for frame in receive()] == [b"last"]


def test_what_was_sent_leaves_before_a_wire_closes(hub: StreamHub) -> None:
    wire = joined(hub)
    wire.send([b"x" * (8 << 20)])
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(wire.close, PATIENCE_S)
        received = hub.receive(timeout=PATIENCE_S)
        assert received is not None and len(received[1][0]) == 8 << 20
        closing.result(PATIENCE_S)
    with pytest.raises(PeerGoneError):
        wire.send([b"more"])
    hub.send("0", [b"to nobody"])  # nothing happens


def test_closing_ends_a_receive_under_way(hub: StreamHub) -> None:
    wire = joined(hub)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(hub.receive), pool.submit(wire.receive)
        time.sleep(0.05)
        hub.close()
        for one in waiting:
            with pytest.raises(PeerGoneError):
                one.result(PATIENCE_S)
    with pytest.raises(PeerGoneError):
        hub.send("0", [b"x"])
    with pytest.raises(PeerGoneError):
        hub.receive()


def test_last_words_are_heard_before_the_death(hub: StreamHub) -> None:
    notice, closing = os.pipe()
    try:
        wire, other = joined(hub), joined(hub, "1")
        wire.send([b"last words"])
        wire.close()
        os.close(closing)
        threading.Timer(0.05, other.send, ([b"a complaint"],)).start()
        said = [plain(hub.receive([notice], PATIENCE_S)) for _ in range(2)]
        assert said == [(b"0", [b"last words"]), (b"1", [b"a complaint"])]
        with pytest.raises(PeerGoneError, match="the other end is dead"):
            hub.receive([notice], PATIENCE_S)
    finally:
        os.close(notice)


@pytest.mark.parametrize(
    "nonsense", [b"\xff" * 64, b"\x00" * 64, b"\x01\x00\x00\x00" + b"\xff" * 8 + b"x"], ids=["frames", "none", "bytes"]
)
def test_who_speaks_nonsense_is_dropped(hub: StreamHub, nonsense: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(f"{hub.folder}/hub")
        caller.sendall(nonsense)
        wire = joined(hub)
        assert hub.receive(timeout=0.05) is None
        caller.settimeout(PATIENCE_S)
        assert caller.recv(1) == b""
    wire.send([b"goes on"])
    assert plain(hub.receive(timeout=PATIENCE_S)) == (b"0", [b"goes on"])


def test_only_this_user_can_connect(hub: StreamHub) -> None:
    assert stat.S_IMODE(os.stat(f"{hub.folder}/hub").st_mode) == 0o600
