"""Connections that are kept between requests: closed when idle for long, never over a request that has arrived."""

from __future__ import annotations

import asyncio
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import uvicorn
import uvloop

from quire.base import env
from quire.config.server import server_config
from quire.server.limits import limited_protocol

KEPT_SECONDS = 1


class Server(NamedTuple):
    port: int
    loop: asyncio.AbstractEventLoop

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def server() -> Iterator[Server]:
    """On the loop that `quire serve` has."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=limited_protocol(server_config()), log_level="warning", lifespan="off",
        timeout_keep_alive=KEPT_SECONDS,
    )  # fmt: skip
    running, up, loops = uvicorn.Server(config), threading.Event(), list[asyncio.AbstractEventLoop]()

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await running.serve()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        up.wait(0.01)
    yield Server(running.servers[0].sockets[0].getsockname()[1], loops[0])
    running.should_exit = True
    thread.join(60)


def ask(connection: http.client.HTTPConnection) -> bytes:
    connection.request("POST", "/", body=b"{}")
    return answer(connection)


def answer(connection: http.client.HTTPConnection) -> bytes:
    response = connection.getresponse()
    assert response.status == 200
    return response.read()


def test_a_request_that_has_arrived_when_time_is_up_is_answered(server: Server) -> None:
    """The loop is kept busy while it reads from another connection, until the time is up and the request lies in the
    socket: what it runs next is the timer."""
    busy, sent = threading.Event(), threading.Event()

    class Busy(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            busy.set()
            assert sent.wait(60)

    opened = asyncio.run_coroutine_threadsafe(server.loop.create_server(Busy, "127.0.0.1", 0), server.loop).result(60)
    connection = server.connect()
    assert ask(connection) == b"ok"
    with socket.create_connection(opened.sockets[0].getsockname()) as other:
        other.sendall(b"x")
        assert busy.wait(60)
        connection.request("POST", "/", body=b"{}")
        time.sleep(KEPT_SECONDS + 0.2)
        sent.set()
        assert answer(connection) == b"ok"
    assert ask(connection) == b"ok"  # and it is kept further on
    connection.close()
    server.loop.call_soon_threadsafe(opened.close)


def test_an_idle_connection_is_closed(server: Server) -> None:
    connection = server.connect()
    assert ask(connection) == b"ok"
    assert connection.sock.recv(1) == b""


@pytest.mark.parametrize("later", [b"\r\n", b"{}"], ids=["an empty line", "the rest of an answered request"])
def test_what_is_no_request_does_not_keep_a_connection(server: Server, later: bytes) -> None:
    connection = server.connect()
    connection.putrequest("POST", "/")
    connection.putheader("Content-Length", str(len(later.strip())))
    connection.endheaders()
    assert answer(connection) == b"ok"
    connection.sock.sendall(later)
    assert connection.sock.recv(1) == b""


def test_idle_connections_are_kept_longer_than_by_clients_and_proxies() -> None:
    assert env.HTTP_TIMEOUT_KEEP_ALIVE.get() > 60


def test_a_connection_that_was_reset_leaves_nothing_to_do(server: Server) -> None:
    broken: list[dict[str, Any]] = []
    server.loop.call_soon_threadsafe(server.loop.set_exception_handler, lambda loop, what: broken.append(what))
    connection = server.connect()
    assert ask(connection) == b"ok"
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    later = server.connect()
    assert ask(later) == b"ok"
    assert later.sock.recv(1) == b""  # its time is up, and with it that of the one before
    assert not broken
