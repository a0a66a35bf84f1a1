"""One API process: an engine client, the app, and uvicorn around them, from the first request to an orderly end.

Stopping (SIGTERM, SIGINT): no new connections; requests in flight may finish for shutdown_timeout seconds and then end
with an error; a second signal ends the process at once. When the engine dies, every open request has its error already,
and the process leaves with status 1. Must not know: how many API processes there are, or who started the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import uvicorn
import uvloop

from quire.base import env
from quire.base.log import logger
from quire.config import EngineConfig
from quire.config.logs import apply_logging
from quire.config.server import ServerConfig
from quire.engine.client import EngineClient
from quire.engine.connect import attach_several
from quire.engine.process_client import AttachedClient, Mailbox
from quire.llm.online import AsyncLLM
from quire.schema.errors import InputError, ShutdownError, counted
from quire.server import tls
from quire.server.adapters import read_modules
from quire.server.app import build_app
from quire.server.console.stats import PATH as CONSOLE_STATS
from quire.server.limits import limited_protocol
from quire.server.middleware import QuietPaths
from quire.server.route import App
from quire.server.starting import open_engine
from quire.server.state import ServerState

log = logger(__name__)
ENGINE_DIED = 1
_FLUSH_SECONDS = 5.0  # for answers that are ready, after everything has ended
_BACKLOG = 2048
_LOOK_SECONDS = 0.2  # between two looks at the engine


class HostBoot(msgspec.Struct, kw_only=True):
    """What an API process is started with, where there are several."""

    engines: tuple[Mailbox, ...]
    number: int  # of this process, from 1; one that replaces another has the same
    client: int  # of the engines: no two ever have the same
    listener: int  # descriptor
    ready: int  # descriptor to write to when it listens
    metrics_folder: str
    secret: bytes  # the same for all of them
    options: msgspec.Raw
    config: msgspec.Raw


def main(boot_bytes: bytes) -> None:
    """An API process of several, from its boot bytes to its end."""
    boot = msgspec.msgpack.decode(boot_bytes, type=HostBoot)
    options = msgspec.msgpack.decode(boot.options, type=ServerConfig)
    config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
    apply_logging(config.logging_config)
    client = _client(boot, options, config)
    engine = open_engine(options, config, client=client, metrics_folder=boot.metrics_folder)

    def say() -> None:
        os.write(boot.ready, b"r")
        os.close(boot.ready)

    opened = socket.socket(fileno=boot.listener)
    status = run(engine, options, opened, say, number=boot.number, secret=boot.secret)
    engine.shutdown()
    os._exit(status)  # nothing is left to save


def _client(boot: HostBoot, options: ServerConfig, config: EngineConfig) -> EngineClient:
    if len(boot.engines) == 1:
        (engine,) = boot.engines
        return AttachedClient(engine, boot.client)
    return attach_several(
        config, boot.engines, client=boot.client, row=boot.number, num_rows=options.api_server_count + 1,
        counts_folder=boot.metrics_folder,
    )  # fmt: skip


def run(
    engine: AsyncLLM, options: ServerConfig, opened: socket.socket, say: Callable[[], None], *, number: int = 0,
    secret: bytes | None = None,
) -> int:  # fmt: skip
    """Serve until told to stop, or until the engine dies; the exit status. `say` is called once it listens.

    Where there are several API processes, `number` counts them from 1, and they share a `secret`.
    """
    state = ServerState.of(engine, options, secret)
    host = Host(state, build_app(state), say, number)
    gc.collect(1)  # not what was imported, which is old
    gc.freeze()  # what lives for ever need not be looked at while requests wait
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(host.serve(opened))
    finally:
        state.close()
    return host.status


class Host:
    def __init__(self, state: ServerState, app: App, say: Callable[[], None], number: int) -> None:
        self.state = state
        self.status = 0
        self._number = number
        self._patience = float(state.config.shutdown_timeout)
        self._server = _ApiServer(_uvicorn_config(state, app, self._patience), say)
        self._ending: asyncio.Task[None] | None = None

    async def _load_adapters(self) -> bool:
        """Those that the options name; False: one of them cannot be loaded, which the log says."""
        try:
            await self.state.adapters.load_modules(read_modules(self.state.options.lora_modules))
            await self.state.adapters.load_media_adapters()
        except InputError as wrong:
            log.error("%s", wrong)
            self.status = ENGINE_DIED
            return False
        return True

    async def serve(self, opened: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop, number)
        if not await self._load_adapters():
            return
        beside = [asyncio.create_task(self._watch_engine())]
        self._server.config.load()
        context = self._server.config.ssl
        if context is not None and self.state.options.enable_ssl_refresh:
            beside.append(asyncio.create_task(tls.refresh(context, self.state.options)))
        try:
            await self._server.serve(sockets=[opened])
        finally:
            for task in (*beside, *([self._ending] if self._ending else [])):
                task.cancel()

    def _told_to_stop(self, number: int) -> None:
        if self._server.should_exit and self._number:
            return  # one signal may come twice, to the group and from the supervisor; the end at once is its business
        if self._server.should_exit:
            log.warning("Told to stop again: leaving at once")
            os._exit(128 + number)  # the engine's process sees that this one is gone, and leaves too
        in_flight = self.state.load.count
        if in_flight:
            log.info("Stopping: %s in flight, with %g s to finish", counted(in_flight, "request"), self._patience)
        else:
            log.info("Stopping")
        self._server.should_exit = True
        self._ending = asyncio.create_task(self._end_requests())

    async def _end_requests(self) -> None:
        """After the time they have, and for as long as one may still come in."""
        await asyncio.sleep(self._patience)
        error = ShutdownError("the server is shutting down; this request was ended before it was finished")
        while True:
            self.state.engine.end_all(error)
            await asyncio.sleep(0.05)

    async def _watch_engine(self) -> None:
        """Until it is dead. A stall is logged once, with the stacks of the engine's threads."""
        engine, stalled = self.state.engine, False
        while engine.is_running:
            words = self.state.trouble()
            if words is not None and not stalled and engine.is_running:
                log.error("The engine is stuck: %s; its stacks follow", words)
                if self._number <= 1:
                    engine.front.client.show_stacks()
            elif words is None and stalled:
                log.warning("The engine goes on")
            stalled = words is not None
            await asyncio.sleep(_LOOK_SECONDS)
        if not self._server.should_exit:
            log.error("%s", engine.dead_error)
            self.status = ENGINE_DIED
            self._server.should_exit = True


class _ApiServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to us and says when it listens."""

    def __init__(self, config: uvicorn.Config, say: Callable[[], None]) -> None:
        super().__init__(config)
        self._say = say

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._say()


def socket_settings(paths: Collection[str]) -> dict[str, Any]:
    """Of uvicorn, where these paths take WebSockets."""
    if not paths:
        return {"ws": "none"}
    from quire.server.websocket import SETTINGS, LimitedSocket  # lazy

    return {"ws": LimitedSocket, **SETTINGS}


def _uvicorn_config(state: ServerState, app: App, patience: float) -> uvicorn.Config:
    options = state.options
    _set_up_logs(options)
    return uvicorn.Config(
        app,
        http=limited_protocol(options, app.sockets),
        **socket_settings(app.sockets),
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=env.HTTP_TIMEOUT_KEEP_ALIVE.get(),
        timeout_graceful_shutdown=int(patience + _FLUSH_SECONDS),
        **tls.settings(options),
    )


def _set_up_logs(options: ServerConfig) -> None:
    """uvicorn's lines go where ours go, unless a logging configuration says otherwise."""
    theirs = logging.getLogger("uvicorn")
    if not theirs.handlers and env.CONFIGURE_LOGGING.get():
        ours = logging.getLogger("quire")
        for handler in ours.handlers:
            theirs.addHandler(handler)
        theirs.propagate = ours.propagate
    quiet = (*options.disable_access_log_for_endpoints, CONSOLE_STATS)  # an open page asks every second
    logging.getLogger("uvicorn.access").addFilter(QuietPaths(quiet))
