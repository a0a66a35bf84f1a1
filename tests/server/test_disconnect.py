"""A client that goes takes its requests with it: at once, streamed or not, one prompt or many."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from tests.server.live import Live

PATIENCE_S = 30.0
JSON = b"Content-Type: application/json"
STEP_S = 0.3  # of each row


def running(server: Live) -> tuple[int, float]:
    """Requests in the engine, and the share of KV blocks they hold."""
    scheduler = server.engine.front.client.loop.scheduler
    return scheduler.num_running + scheduler.num_waiting, scheduler.stats().kv_usage


def wait_for(what: Any, wanted: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while (found := what()) != wanted:
        assert time.monotonic() < end, f"still {found!r}, not {wanted!r}"
        time.sleep(0.01)


def send(server: Live, path: str, body: dict[str, Any]) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), PATIENCE_S)
    data = json.dumps(body).encode()
    made.sendall(
        b"POST %s HTTP/1.1\r\nHost: a\r\n%s\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), JSON, len(data), data)
    )
    return made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "path, prompt",
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/completions", {"prompt": ["abc", "de"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_the_engine_is_rid_of_it(fake: Live, path: str, prompt: dict[str, Any], stream: bool) -> None:
    number = 4 if "n" in prompt else 1
    # 200 tokens at this pace last twice as long as is allowed below
    body = {**prompt, "stream": stream, "vllm_xargs": {"sleep": STEP_S}, "max_tokens": 200}
    client = send(fake, path, body)
    wait_for(lambda: running(fake)[0], number)
    if stream:
        assert client.recv(15).startswith(b"HTTP/1.1 200")
    client.close()
    began = time.monotonic()
    wait_for(lambda: fake.state.load.count, 0)
    wait_for(lambda: len(fake.engine.front.outputs), 0)
    wait_for(lambda: running(fake), (0, 0.0))
    # the step under way ends first
    assert time.monotonic() - began < STEP_S * number * 100


def test_a_client_that_never_sends_its_body(fake: Live) -> None:
    host, _, port = fake.url.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), PATIENCE_S)
    made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n%s\r\nContent-Length: 100\r\n\r\n{" % JSON)
    wait_for(lambda: fake.state.load.count, 1)
    made.close()
    wait_for(lambda: fake.state.load.count, 0)
