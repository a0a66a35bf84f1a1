"""Bodies that come slowly, many at once, and connections too many: each has a limit and an answer that names it."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quire.server.limits import OTHER_FILES, room_for_connections
from quire.server.state import BodyBudget
from tests.server.hosted import Hosted, hosted, wait_until

BODY = b'{"prompt": "abc", "max_tokens": 2}'
CONNECTIONS = 6


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    with hosted(tmp_path_factory.mktemp("hasty"), "--body-timeout", "1") as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """It waits for a body longer than a test takes."""
    flags = ("--body-timeout", "600", "--max-connections", str(CONNECTIONS), "--max-inflight-body-bytes", "1500000",
             "--max-request-bytes", "1000000")  # fmt: skip
    with hosted(tmp_path_factory.mktemp("slow"), *flags) as server:
        yield server


def connect(server: Hosted) -> socket.socket:
    address = urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    opened = socket.create_connection((address.hostname, address.port), timeout=30)
    opened.settimeout(30)
    return opened


def head(length: int | None, path: str = "/v1/completions") -> bytes:
    size = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s\r\n\r\n" % (path.encode(), size)


def answer(opened: socket.socket) -> tuple[int, bytes, dict[str, object]]:
    """Status, head and error of what comes until the connection is closed."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := opened.recv(65536):
            found += piece
    above, _, body = found.partition(b"\r\n\r\n")
    return int(above.split()[1]), above.lower(), json.loads(body)["error"]


def until_busy(server: Hosted, message: bytes) -> tuple[bytes, dict[str, object]]:
    """Sends it again until what was sent before has reached the server, which then refuses it: head and error."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with connect(server) as opened:
            with contextlib.suppress(ConnectionError):
                opened.sendall(message.replace(b"Host: x", b"Host: x\r\nConnection: close", 1))
            status, above, error = answer(opened)
            if status == 503:
                return above, error
    raise AssertionError("it is never too much")


def test_a_body_that_never_comes(hasty: Hosted) -> None:
    for length, sent in ((len(BODY), BODY[:5]), (500_000, b""), (None, b""), (None, b"5\r\n" + BODY[:5] + b"\r\n")):
        with connect(hasty) as opened:
            began = time.monotonic()
            opened.sendall(head(length) + sent)
            status, _, error = answer(opened)
            assert status == 408 and "--body-timeout" in str(error["message"]), error
            assert error["code"] == 408 and 0.5 < time.monotonic() - began < 60


def test_a_byte_now_and_then_is_not_enough(hasty: Hosted) -> None:
    with connect(hasty) as opened:
        opened.sendall(head(100_000))
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 60:
                opened.sendall(b" ")
                opened.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    assert b"408" in opened.recv(65536)
                    return
    raise AssertionError("it goes on")


def test_a_body_in_pieces_is_read(server: Hosted) -> None:
    """Within the time there is: pieces are no fault."""
    with connect(server) as opened:
        opened.sendall(head(len(BODY)))
        for number in range(0, len(BODY), 8):
            time.sleep(0.01)
            opened.sendall(BODY[number : number + 8])
        assert opened.recv(65536).startswith(b"HTTP/1.1 200")


def test_bodies_in_flight(server: Hosted) -> None:
    """Two that have come nearly whole leave no room for a third; when they are gone, there is room again."""
    with connect(server) as first:
        first.sendall(head(900_000) + b" " * 800_000)
        above, error = until_busy(server, head(900_000) + b" " * 900_000)
        assert b"retry-after: 1" in above and "--max-inflight-body-bytes" in str(error["message"])
        assert server.complete().status_code == 200  # small ones go on
        first.sendall(b" " * 100_000)
        assert answer_status(first) == 400  # no JSON
    with connect(server) as third:
        third.sendall(head(900_000) + b" " * 900_000)
        assert answer_status(third) == 400


def test_a_body_of_wide_characters_counts_for_more(server: Hosted) -> None:
    """Alone it is read; beside another that leaves room for its bytes and not for what reading them takes, it waits."""
    body = json.dumps({"prompt": "x" * 780_000 + "\U0001f600", "max_tokens": 1}).encode()
    with connect(server) as alone:
        alone.sendall(head(len(body)) + body)
        assert answer_status(alone) == 400  # too long for the model
    with connect(server) as first:
        first.sendall(head(500_000) + b" " * 400_000)
        until_busy(server, head(len(body)) + body)
        first.sendall(b" " * 100_000)
        assert answer_status(first) == 400  # no JSON


def answer_status(opened: socket.socket) -> int:
    return int(opened.recv(65536).split()[1])


def test_connections_have_a_limit(server: Hosted) -> None:
    wait_until(lambda: server.get("/health").status_code == 200)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(server)) for _ in range(CONNECTIONS)]
        for one in held[:2]:
            one.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        above, error = until_busy(server, head(len(BODY)) + BODY)
        assert b"retry-after" in above and "--max-connections" in str(error["message"])
        assert str(CONNECTIONS) in str(error["message"]) and b"connection: close" in above
        with connect(server) as silent:  # one that asks nothing is not kept either
            began = time.monotonic()
            assert silent.recv(10) == b"" and time.monotonic() - began < 20
        with contextlib.ExitStack() as many:
            flood = [many.enter_context(connect(server)) for _ in range(100)]
            assert answer_status(held[0]) == 200  # those that were there are served
            del flood
    wait_until(lambda: server.complete().status_code == 200)
    server.wait_for_line("as many as --max-connections allows")


def test_without_limits_there_is_no_timer(tmp_path: Path) -> None:
    with hosted(tmp_path / "model", "--body-timeout", "0") as server, connect(server) as opened:
        opened.sendall(head(len(BODY)) + BODY[:5])
        opened.settimeout(2.5)
        with pytest.raises(TimeoutError):
            opened.recv(10)
        opened.sendall(BODY[5:])
        opened.settimeout(30)
        assert answer_status(opened) == 200


def test_room_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: limits.__setitem__(0, given[0]))
    assert room_for_connections(None) == 1024 - OTHER_FILES
    assert room_for_connections(10) == 10
    assert room_for_connections(5000) == 1024 - OTHER_FILES
    limits[:] = [1024, 4096]
    assert room_for_connections(2000) == 2000 and limits[0] == 2000 + OTHER_FILES
    assert room_for_connections(None) == 4096 - OTHER_FILES and limits[0] == 4096
    limits[:] = [64, 64]
    assert room_for_connections(None) == 32
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert room_for_connections(None) == 65536


def test_a_budget_takes_what_fits() -> None:
    budget = BodyBudget(10)
    budget.take(6)
    with pytest.raises(Exception, match="6 bytes of other bodies; at most 10"):
        budget.take(5)
    budget.take(4)
    budget.give(10)
    assert budget.used == 0
