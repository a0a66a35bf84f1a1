"""From options to a running server: the listening socket, the engine's process, the processes that speak HTTP.

    one API process:   this process is it, and starts the engine
    several:           this process starts the engine and the API processes, and looks after both (supervisor.py)
The socket is bound first, so that a taken port is known before a model is loaded, but listens only when all is ready.
While the engine's process loads, this one imports what HTTP needs. Must not know: routes, engine internals.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from quire import __version__
from quire.base.clock import Laps
from quire.base.collector import no_collections
from quire.base.log import logger
from quire.base.net import is_loopback, join_host_port, open_listener, open_unix_listener
from quire.engine.absent import AbsentEngine
from quire.engine.client import EngineClient
from quire.engine.connect import start_several
from quire.engine.process_client import Begun, ProcessClient
from quire.schema.errors import ConfigError
from quire.server.starting import failures_told, open_engine, raise_again, say_ready, start_errors

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.server import ServerConfig

log = logger(__name__)
_CERTIFICATE_REQUIRED = 2  # ssl_cert_reqs


def serve(options: ServerConfig, config: EngineConfig, laps: Laps, begun: Sequence[Begun] = ()) -> int:
    """Until it is told to stop (exit status 0) or all engines are dead (1). `begun`: engine processes that wait."""
    with _terminated():
        check_options(options, config)
        with listener(options) as (opened, url):
            say_start(config)
            warn_if_open(options, opened)
            if options.api_server_count > 1:
                from quire.server.supervisor import supervise  # lazy

                status: int = supervise(options, config, opened, url, laps, begun)
                return status
            return _serve_alone(options, config, opened, url, laps, begun)


def check_options(options: ServerConfig, config: EngineConfig) -> None:
    """What is wrong with files, names and texts is said before a model is loaded."""
    if options.tls:
        from quire.server.tls import settings  # lazy

        settings(options)
    if options.tool_call_parser or config.structured_outputs_config.reasoning_parser:
        from quire.server.served import choose_parsers  # lazy

        choose_parsers(config, options)
    if options.chat_template is not None:
        from quire.text.chat import check_template  # lazy

        check_template(options.chat_template)
    if options.lora_modules:
        from quire.server.adapters import check_modules  # lazy

        check_modules(options.lora_modules, config)
    if options.tool_server:
        from quire.server.tool_server import ToolServer  # lazy

        ToolServer.of(options.tool_server)


def _serve_alone(
    options: ServerConfig, config: EngineConfig, opened: socket.socket, url: str, laps: Laps, begun: Sequence[Begun]
) -> int:
    client = _client(config, begun)
    importing = threading.Thread(target=_import_http, name="import HTTP", daemon=True)
    importing.start()
    with start_errors():
        engine = open_engine(options, config, own_process=not options.disable_frontend_multiprocessing, client=client)
    laps.mark("engine")
    importing.join()

    def say() -> None:
        laps.mark("http")
        say_ready(config, options, engine.front.ready, url, laps)

    try:
        from quire.server.host import run  # lazy

        with failures_told(engine.front.client) as passed_on:
            status: int = passed_on(run(engine, options, opened, say))
        dead = engine.front.client.dead if status else None
    finally:
        engine.shutdown()
    raise_again(dead)
    return status


def _client(config: EngineConfig, begun: Sequence[Begun]) -> EngineClient | None:
    """None: the engine runs in this process."""
    parallel = config.parallel_config
    several = parallel.has_several_engines
    if parallel.data_parallel_size_local > 0 and several and not begun:
        raise ConfigError(
            "data_parallel_size above 1 and disable_frontend_multiprocessing exclude each other: several engines need "
            "processes of their own",
            param="disable_frontend_multiprocessing",
        )
    if several:
        return start_several(config, begun=begun)
    return ProcessClient(config, begun=begun[0]) if begun else None


def serve_rendering(options: ServerConfig, config: EngineConfig, laps: Laps) -> int:
    """A server without an engine, until it is told to stop."""
    if options.api_server_count > 1:
        raise ConfigError(
            f"api_server_count is {options.api_server_count}: a server that renders is one process; start several",
            param="api_server_count",
        )
    with _terminated():
        check_options(options, config)
        with listener(options) as (opened, url), start_errors():
            warn_if_open(options, opened)
            engine = open_engine(options, config, client=AbsentEngine(config))
            laps.mark("tokenizer")

            def say() -> None:
                laps.mark("http")
                model = config.model_config
                log.info("Quire %s renders for %s (%s), context %d; nothing is generated here", __version__,
                         model.served_model_name, model.path, model.max_model_len)  # fmt: skip
                log.info("Listening at %s (pages at /docs, metrics at /metrics); Ctrl-C stops", url)

            try:
                from quire.server.host import run  # lazy

                status: int = run(engine, options, opened, say)
            finally:
                engine.shutdown()
    return status


def _import_http() -> None:
    """Takes as long as an engine process needs to begin."""
    with no_collections():
        import quire.server.host  # noqa: F401  # lazy


@contextlib.contextmanager
def listener(options: ServerConfig) -> Iterator[tuple[socket.socket, str]]:
    """The bound socket, and the address that is bound: 0.0.0.0 where it is every address of this host."""
    if options.uds:
        try:
            opened = open_unix_listener(options.uds)
        except OSError as wrong:
            raise ConfigError(f"cannot listen on uds={options.uds!r}: {wrong.strerror or wrong}", param="uds") from None
        try:
            yield opened, f"unix:{options.uds}"
        finally:
            opened.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)
        return
    try:
        opened = open_listener(options.host, options.port)
    except OSError as wrong:
        raise _cannot_listen(options, wrong) from None
    host, port = opened.getsockname()[:2]
    with opened:
        yield opened, f"{'https' if options.tls else 'http'}://{join_host_port(host, port)}"


def _cannot_listen(options: ServerConfig, wrong: OSError) -> ConfigError:
    where = join_host_port(options.host or "0.0.0.0", options.port)
    if wrong.errno == errno.EADDRINUSE:
        return ConfigError(f"{where} is in use by another program: choose another --port", param="port")
    if wrong.errno == errno.EACCES:
        return ConfigError(f"{where} needs more rights: choose a --port of 1024 or above", param="port")
    return ConfigError(f"cannot listen on {where}: {wrong.strerror or wrong}", param="host")


# ---- what a start says ---------------------------------------------------------------------------------------------


def say_start(config: EngineConfig) -> None:
    model = config.model_config
    log.info(
        "Quire %s: %s (%s), %s on %s, context %d", __version__, model.served_model_name, model.path, model.dtype,
        config.device_config.device, model.max_model_len,
    )  # fmt: skip


def warn_if_open(options: ServerConfig, opened: socket.socket) -> None:
    """Where other hosts reach a server that asks for no key and no certificate, its operator should have meant it."""
    if options.uds or options.keys or options.ssl_cert_reqs == _CERTIFICATE_REQUIRED:
        return
    host, port = opened.getsockname()[:2]
    if not is_loopback(host):
        log.warning(
            "Whoever can reach %s may use this server: it asks for no key. Set --api-key (or QUIRE_API_KEY), or listen "
            "for this host alone with --host 127.0.0.1",
            join_host_port(host, port),
        )


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """While starting, SIGTERM ends the program in order: children, sockets and folders go with it."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
