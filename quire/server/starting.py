"""What every process of a server does when it starts: open the engine, say why that failed, tell that all is ready. And
what whoever started the engines does at the end of a server that failed: tell their machines that this is no shutdown.

Must not know: sockets, which processes there are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from quire.base.clock import Laps
from quire.base.log import logger
from quire.engine.client import EngineClient, PlacingClient
from quire.schema.errors import EngineDeadError, QuireError, message_of
from quire.schema.messages import EngineReady

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.server import ServerConfig
    from quire.llm.online import AsyncLLM

log = logger(__name__)


class StartError(QuireError):
    """The engine could not start, by a fault that is no refusal of ours."""


def open_engine(options: ServerConfig, config: EngineConfig, **how: Any) -> AsyncLLM:
    """The engine's front, with the lines about requests that were asked for."""
    from quire.llm.online import AsyncLLM  # lazy
    from quire.llm.request_log import LogRules  # lazy

    rules = LogRules(options.enable_log_outputs, options.enable_log_deltas, options.max_log_len)
    return AsyncLLM(config, log_requests=options.enable_log_requests, log_rules=rules, **how)


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """Whatever keeps an engine from starting leaves as one line: the cause, and what to do."""
    try:
        yield
    except QuireError:
        raise
    except Exception as failed:
        raise StartError(
            f"the engine could not start: {type(failed).__name__}: {failed} ({_remedy(failed)})"
        ) from failed


@contextlib.contextmanager
def failures_told(client: EngineClient) -> Iterator[Callable[[int], int]]:
    """For what a server does with its engines. Other machines that have some of them are told why it cannot go on: the
    error that leaves this block, or a status that is not 0, which whoever gets one passes on by this."""

    def tell(reason: str) -> None:
        if isinstance(client, PlacingClient):
            client.begin_close(reason)

    def passed_on(status: int) -> int:
        if status:
            dead = client.dead
            tell(f"it ended with status {status}; its log says why" if dead is None else dead.reason)
        return status

    try:
        yield passed_on
    except Exception as failed:
        tell(f"it could not go on: {message_of(failed)}")
        raise


def raise_again(dead: EngineDeadError | None) -> None:
    """The end of an engine is told when it comes, and once more as the last line: others are logged while the server
    stops."""
    if dead is not None:
        raise EngineDeadError(dead.reason)


def _remedy(failed: Exception) -> str:
    words = f"{type(failed).__name__} {failed}".lower()
    if "out of memory" in words or "outofmemory" in words or isinstance(failed, MemoryError):
        return "lower --max-model-len, --max-num-seqs or --gpu-memory-utilization, or free memory"
    if isinstance(failed, ImportError):
        return "install what is missing"
    if isinstance(failed, TimeoutError):
        return "raise QUIRE_ENGINE_START_TIMEOUT_S"
    return "the traceback above is the engine's; `quire collect-env` has what a bug report needs"


def say_ready(config: EngineConfig, options: ServerConfig, ready: EngineReady, url: str, laps: Laps) -> None:
    tokens = ready.num_blocks * ready.block_size
    log.info(
        "KV cache: %d tokens in %d blocks of %d, enough for %.1f requests of %d tokens; at most %d run at once",
        tokens, ready.num_blocks, ready.block_size, tokens / ready.max_model_len, ready.max_model_len,
        config.scheduler_config.max_num_seqs * len(config.parallel_config.engine_ranks),
    )  # fmt: skip
    spent = {name: seconds for name, seconds, _ in laps.taken}
    before = max(0.0, spent["engine"] - ready.start_seconds.get("total", 0.0))  # its interpreter and first imports
    phases = [f"{phase.name} {phase.seconds:.2f}" for phase in ready.phases if not phase.inside]
    inside = ", ".join((f"process {before:.2f}", *phases))
    parts = [f"{name} {seconds:.2f}" + (f" ({inside})" if name == "engine" else "") for name, seconds, _ in laps.taken]
    own = sum(spent.values())
    whole = _seconds_of_life()
    if whole is not None and whole > own:
        parts.insert(0, f"imports {whole - own:.2f}")
    log.info("Ready after %.2f s: %s", whole or own, ", ".join(parts))
    chat = "" if options.disable_console else "chat at /, "
    log.info("Listening at %s (%sAPI below /v1, pages at /docs, metrics at /metrics); Ctrl-C stops", url, chat)


def _seconds_of_life() -> float | None:
    """Since this process began, interpreter and imports included; None where the system does not say."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return uptime - ticks / os.sysconf("SC_CLK_TCK")
