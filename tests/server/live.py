"""A server under test: the whole app on a port of the system's choice, over the fake worker or the embedded model.

`live(...)` is a context manager; requests go over real sockets. The engine runs in this process unless asked otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from quire.config import AsyncEngineArgs
from quire.config.server import server_config
from quire.llm.online import AsyncLLM
from quire.server.app import build_app
from quire.server.host import socket_settings
from quire.server.limits import limited_protocol
from quire.server.route import App
from quire.server.state import ServerState
from tests.fake_engine import use_fake, write_model

START_S = 60.0


@dataclass
class Live:
    url: str
    state: ServerState
    engine: AsyncLLM
    loop: asyncio.AbstractEventLoop
    app: App

    def client(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **kwargs)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **kwargs)


@contextlib.contextmanager
def live(
    model: str | None = None,
    *,
    own_process: bool = False,
    engine: dict[str, Any] | None = None,
    fake: bool = False,
    plain_loop: bool = False,
    **options: Any,
) -> Iterator[Live]:
    """`fake`: the worker that repeats its prompt, in this engine and not in those that are started while it lives.
    `plain_loop`: an event loop in Python, which can be watched, under the protocol that a server has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "1" if own_process else "0")
        from quire.base import env

        env.forget_all()
        if fake:
            use_fake(patch)
        args = {"disable_log_stats": True, **(engine or {})}
        if model is not None:
            args["model"] = model
        front = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        env.forget_all()
    state = ServerState.of(front, server_config(**options))
    app = build_app(state)
    listening = socket.create_server(("127.0.0.1", 0))
    http: Any = limited_protocol(state.options, app.sockets) if plain_loop or app.sockets else "httptools"
    loop = "asyncio" if plain_loop else "uvloop"
    config = uvicorn.Config(app, loop=loop, http=http, log_level="warning", lifespan="off", access_log=False,
                            **socket_settings(app.sockets))  # fmt: skip
    server = uvicorn.Server(config)
    up = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        up.set()
        await server.serve([listening])

    thread = threading.Thread(target=lambda: uvicorn.run and _run(config, main()), daemon=True)
    thread.start()
    try:
        assert up.wait(START_S)
        yield Live(f"http://127.0.0.1:{listening.getsockname()[1]}", state, front, loops[0], app)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(START_S)
        state.close()
        front.shutdown()
        listening.close()


def _run(config: uvicorn.Config, main: Any) -> None:
    factory = config.get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


@contextlib.contextmanager
def live_fake(folder: Path, **given: Any) -> Iterator[Live]:
    """Over the worker that repeats its prompt."""
    given.setdefault("served_model_name", ["fake", "alias"])
    engine = {"max_model_len": 512, "served_model_name": given.pop("served_model_name"), **given.pop("engine", {})}
    with live(write_model(folder), engine=engine, fake=True, **given) as server:
        yield server


def events(text: str) -> list[Any]:
    """The chunks of a stream. It must be well formed and end with [DONE]."""
    pieces = text.split("\n\n")
    assert pieces[-1] == "" and pieces[-2] == "data: [DONE]", text[-200:]
    assert all(piece.startswith("data: ") for piece in pieces[:-1]), text
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refused request, which has all four fields."""
    assert response.status_code == status, response.text[:500]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return error
