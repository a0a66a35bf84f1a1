"""base/lifeline.py: who may join, what is refused, and how soon an end is noticed."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from quire.base.lifeline import (
    Lifeline,
    Listener,
    LostError,
    address_towards,
    call,
    free_port,
    interface_of,
    resolve_address,
)

KEY = b"a key that all nodes know"
HOST = "127.0.0.2"
Welcomed = queue.SimpleQueue[Lifeline]
PATIENCE = 4.0  # seconds of silence: more than a crowded machine keeps a thread waiting


@pytest.fixture
def place() -> Iterator[tuple[Listener, Welcomed]]:
    welcomed: Welcomed = queue.SimpleQueue()
    listener = Listener(HOST, 0, KEY, welcomed.put, limit=PATIENCE)
    yield listener, welcomed
    listener.close()


def join(place: tuple[Listener, Welcomed]) -> tuple[Lifeline, Lifeline]:
    caller = call(HOST, place[0].port, KEY, limit=PATIENCE, patience=60.0)
    return caller, place[1].get(timeout=60)


def test_both_ends_speak_in_order_and_hide_a_secret(place: tuple[Listener, Welcomed]) -> None:
    caller, listener = join(place)
    for number in range(20):
        caller.send(f"to {number}".encode())
        listener.send(f"from {number}".encode() * 5000)
    assert [listener.receive() for _ in range(20)] == [f"to {number}".encode() for number in range(20)]
    assert [caller.receive() for _ in range(20)] == [f"from {number}".encode() * 5000 for number in range(20)]
    secret = bytes(range(32))
    assert caller.hide(listener.hide(secret)) == secret != listener.hide(secret)
    time.sleep(PATIENCE + 0.5)  # more than the limit, with nothing said
    caller.send(b"still there")
    assert listener.receive() == b"still there"
    caller.close()
    with pytest.raises(LostError, match=r"closed|broke"):
        listener.receive()
    listener.close()


def test_strangers_are_refused_and_learn_nothing(
    place: tuple[Listener, Welcomed], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LostError, match="another key"):
        call(HOST, place[0].port, b"some other key, also long", limit=PATIENCE, patience=60.0)
    for reply in (b"", bytes(64), b"GET / HTTP/1.1\r\n".ljust(64)):
        with socket.create_connection((HOST, place[0].port), timeout=10) as stranger:
            hello = stranger.recv(1024)
            assert len(hello) == 40
            stranger.sendall(reply)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1024) == b""  # no proof that could be tried against guessed keys
    assert place[1].empty()
    wrong = [record.message for record in caplog.records]
    assert sum("does not know the key" in line for line in wrong) == 3
    assert sum("did not show that it knows the key" in line for line in wrong) == 1
    join(place)  # whoever has it may still come


def test_what_was_heard_cannot_be_said_again(place: tuple[Listener, Welcomed]) -> None:
    """Somebody between the two repeats a message, changes one, or announces one that is too long."""

    def ends(spoil: bytes | None) -> str:
        caller, listener = join(place)
        sent = bytearray()
        plain = caller._connection.sendall  # what goes over the wire
        caller._connection = type("Tap", (), {
            "sendall": lambda _, data: (sent.extend(data), plain(data))[0], "shutdown": lambda *_: None,
            "close": lambda *_: None,
        })()  # fmt: skip
        caller.send(b"leave")
        assert listener.receive() == b"leave"
        with caller._sending:
            plain(bytes(sent) if spoil is None else spoil)
        with pytest.raises(LostError) as lost:
            listener.receive()
        caller.close()
        listener.close()
        return str(lost.value)

    assert "message 0 came where message" in ends(None)
    assert "another secret" in ends(struct.pack("<I", 5) + b"leave" + bytes(40))
    assert "at most" in ends(struct.pack("<I", 2**31))


def test_silence_is_noticed_within_the_limit(place: tuple[Listener, Welcomed]) -> None:
    caller, listener = join(place)
    caller._closed.set()  # it does not beat any more, and its connection stays open: a machine without power
    began = time.monotonic()
    with pytest.raises(LostError, match=rf"nothing was heard for {PATIENCE:g} s"):
        listener.receive()
    assert PATIENCE / 2 < time.monotonic() - began < 60


def test_a_listener_may_come_later_or_never() -> None:
    port, welcomed = free_port(HOST), Welcomed()
    listeners: list[Listener] = []
    timer = threading.Timer(0.6, lambda: listeners.append(Listener(HOST, port, KEY, welcomed.put, limit=PATIENCE)))
    timer.start()
    call(HOST, port, KEY, limit=PATIENCE, patience=20.0).close()
    listeners[0].close()
    with pytest.raises(LostError, match=r"did not answer within 0\.5 s"):
        call(HOST, free_port(HOST), KEY, limit=PATIENCE, patience=0.5)


def test_a_caller_that_is_turned_away_tries_again() -> None:
    """Before anything is proved: strangers may have taken all places."""
    welcomed = Welcomed()
    with socket.create_server((HOST, 0)) as crowd:
        port = crowd.getsockname()[1]

        def turn_away() -> None:
            for _ in range(2):
                crowd.accept()[0].close()
            crowd.close()
            listeners.append(Listener(HOST, port, KEY, welcomed.put, limit=PATIENCE))

        listeners: list[Listener] = []
        thread = threading.Thread(target=turn_away)
        thread.start()
        call(HOST, port, KEY, limit=PATIENCE, patience=20.0).close()
        thread.join(20)
    listeners[0].close()


def test_addresses() -> None:
    assert resolve_address("127.0.0.3") == "127.0.0.3" == resolve_address("127.0.0.3")
    assert address_towards("127.0.0.1").startswith("127.")
    assert interface_of("127.0.0.2") in ("lo", "lo0")
    assert interface_of("203.0.113.77") is None
    with pytest.raises(OSError):
        resolve_address("no-such-host.invalid")
