"""Several API processes on one engine or several: started together, watched, replaced when one dies, ended in order.

In: options, configuration, the bound socket, which every API process inherits. Out: an exit status.
An API process that dies takes its own requests with it and is replaced; the death of the last engine ends everything.
Must not know: HTTP, routes, what a request is.
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from quire.base.clock import Laps, now
from quire.base.log import logger
from quire.base.procs import Child
from quire.engine.connect import start_several
from quire.engine.process_client import Begun, Mailbox, ProcessClient, for_children
from quire.engine.several import SeveralEngines
from quire.schema.errors import EngineDeadError
from quire.schema.messages import Outputs
from quire.server.callers import new_secret
from quire.server.starting import StartError, failures_told, raise_again, say_ready, start_errors

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.server import ServerConfig

log = logger(__name__)
API_MAIN = "quire.server.host:main"
_TRACING = "OTEL_"  # API processes send traces, and their keys are in headers that variables hold
_TOO_MANY_DEATHS, _WITHIN_SECONDS = 5, 60.0
_GRACE_SECONDS = 10.0  # beyond shutdown_timeout, for processes to leave
_LAST_WORDS_SECONDS = 5.0  # for API processes to tell their clients that the engine is dead


def supervise(
    options: ServerConfig, config: EngineConfig, opened: socket.socket, url: str, laps: Laps,
    begun: Sequence[Begun],
) -> int:  # fmt: skip
    client, engines = _start_engines(config, begun)
    try:
        with failures_told(client) as passed_on:
            supervisor = Supervisor(client, engines, options, config, opened)
            try:
                are_known = not config.parallel_config.num_engines_elsewhere
                if are_known:
                    supervisor.start()  # they import and read the tokenizer while the engine loads
                with start_errors():
                    ready = client.wait_ready()
                client.stream(_Nobody())
                if not are_known:  # where engines of other machines are is known once they are ready
                    supervisor.start()
                laps.mark("engine")

                def say() -> None:
                    laps.mark("http")
                    say_ready(config, options, ready, url, laps)

                status = passed_on(supervisor.run(say))
            finally:
                supervisor.end()
        dead = client.dead if status else None
    finally:
        client.close()
    raise_again(dead)
    return status


def _start_engines(
    config: EngineConfig, begun: Sequence[Begun]
) -> tuple[ProcessClient | SeveralEngines, list[ProcessClient]]:
    """The client of all of them, and those of each."""
    if not config.parallel_config.has_several_engines:
        client = ProcessClient(config, shared=True, begun=begun[0] if begun else None)
        return client, [client]
    several = start_several(config, begun=begun, shared=True)
    return several, [one for one in several.members if isinstance(one, ProcessClient)]


def _with_media_memory(config: EngineConfig) -> tuple[EngineConfig, tuple[int, ...]]:
    """Memory for processed media that all API processes share, where that is asked for, and its descriptor."""
    options = config.model_config.multimodal_config
    if options is None or options.mm_processor_cache_type != "shm" or not options.mm_processor_cache_gb:
        return config, ()
    from quire.config import replace  # lazy
    from quire.media.shared_cache import shared_memory  # lazy

    descriptor = shared_memory(int(options.mm_processor_cache_gb * (1 << 30)))
    return replace(config, **{"model_config.multimodal_config.shared_memory": descriptor}), (descriptor,)


class _Nobody:
    """The supervisor asks for nothing, so nothing comes."""

    def take(self, outputs: Outputs) -> None:
        pass

    def died(self, error: EngineDeadError) -> None:
        pass


class _Api:
    """One API process, and the descriptor that says it listens."""

    def __init__(self, number: int, client: int, child: Child, ready: int) -> None:
        self.number, self.client, self.child, self.ready = number, client, child, ready
        self.listens = False


class Supervisor:
    def __init__(
        self,
        client: ProcessClient | SeveralEngines,
        engines: Sequence[ProcessClient],
        options: ServerConfig,
        config: EngineConfig,
        opened: socket.socket,
    ) -> None:
        self._client = client
        self._engines = engines
        self._options = options
        self._config, self._media_memory = _with_media_memory(config)
        self._opened = opened
        self._metrics_folder = os.path.join(engines[0].mailbox.folder, "metrics")
        os.mkdir(self._metrics_folder, 0o700)
        self._secret = new_secret()
        self._apis: dict[int, _Api] = {}
        self._deaths: deque[float] = deque(maxlen=_TOO_MANY_DEATHS)
        self._clients = itertools.count(1)  # numbers by which engines know API processes
        self._received: list[int] = []  # signals

    def start(self) -> None:
        for number in range(1, self._options.api_server_count + 1):
            self._apis[number] = self._start_one(number)

    def _start_one(self, number: int) -> _Api:
        ready, written = os.pipe()
        engines, client = [one.mailbox for one in self._engines], next(self._clients)
        boot = {
            "engines": engines,
            "number": number,
            "client": client,
            "listener": self._opened.fileno(),
            "ready": written,
            "metrics_folder": self._metrics_folder,
            "secret": self._secret,
            "options": self._options,
            "config": for_children(self._config),
        }
        keep = (*(one.life for one in engines), self._opened.fileno(), written, *self._media_memory)
        name = f"API process {number}"
        child = Child(API_MAIN, msgspec.msgpack.encode(boot), name=name, keep=keep, keep_env=_TRACING)
        os.close(written)
        return _Api(number, client, child, ready)

    def run(self, say: Callable[[], None]) -> int:
        """Until told to stop (0), or until it cannot go on (1)."""
        with _signals(self._received) as woken:
            unsaid = True
            while not self._received:
                self._wait(woken)
                if self._client.dead is not None:
                    return self._engine_died()
                if not self._look_after():
                    return 1
                if unsaid and all(api.listens for api in self._apis.values()):
                    say()
                    unsaid = False
            return self._stop(woken)

    def end(self) -> None:
        """Whatever still runs is made to leave."""
        for api in list(self._apis.values()):
            self._drop(api)
        for descriptor in self._media_memory:
            os.close(descriptor)

    def _drop(self, api: _Api) -> None:
        del self._apis[api.number]
        api.child.close()
        os.close(api.ready)

    def _wait(self, woken: int, seconds: float = 0.5) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            if self._client.dead is None:
                for one in self._alive():
                    selector.register(one.life, selectors.EVENT_READ)
            for api in self._apis.values():
                selector.register(api.child.notice, selectors.EVENT_READ)
                if not api.listens:
                    selector.register(api.ready, selectors.EVENT_READ, api)
            for key, _ in selector.select(seconds):
                if isinstance(key.data, _Api):
                    key.data.listens = os.read(key.data.ready, 1) != b""

    def _alive(self) -> list[Mailbox]:
        lost = self._client.lost if isinstance(self._client, SeveralEngines) else {}
        ranks = self._config.parallel_config.engine_ranks
        return [one.mailbox for rank, one in zip(ranks, self._engines, strict=True) if rank not in lost]

    def _look_after(self) -> bool:
        """Replace API processes that died; False when that happens too often."""
        for number, api in list(self._apis.items()):
            if api.child.alive:
                continue
            log.error("%s; its requests are lost, and another takes its place", api.child.why_dead())
            self._client.client_left(api.client)
            self._drop(api)
            self._deaths.append(now())
            if len(self._deaths) == _TOO_MANY_DEATHS and now() - self._deaths[0] < _WITHIN_SECONDS:
                log.error("%d API processes died within %g s: giving up", _TOO_MANY_DEATHS, _WITHIN_SECONDS)
                return False
            if not api.listens:
                raise StartError(f"{api.child.why_dead()} before it could listen; its own lines above say why")
            self._apis[number] = self._start_one(number)
        return True

    def _engine_died(self) -> int:
        log.error("%s", self._client.dead)
        for api in self._apis.values():
            api.child.wait(_LAST_WORDS_SECONDS)
        return 1

    def _stop(self, woken: int) -> int:
        self._opened.close()
        for api in list(self._apis.values()):
            if api.listens:
                api.child.signal(signal.SIGTERM)
            else:  # it has no requests, and does not listen to signals yet either
                self._drop(api)
        deadline = now() + self._config.shutdown_timeout + _GRACE_SECONDS
        while len(self._received) == 1 and now() < deadline:
            if not any(api.child.alive for api in self._apis.values()):
                return 0
            self._wait(woken, 0.1)
        if len(self._received) > 1:
            log.warning("Told to stop again: leaving at once")
            os._exit(128 + self._received[-1])  # the other processes see that this one is gone, and leave too
        log.error("Some API processes did not leave in time")
        return 1


@contextmanager
def _signals(received: list[int]) -> Iterator[int]:
    """Collect SIGTERM and SIGINT; a descriptor turns readable with each."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        os.write(writing, b"s")

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield reading
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
