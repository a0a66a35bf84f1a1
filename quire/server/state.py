"""ServerState: all that the routes of one API process share, at `app.state.quire`.

Made once by whoever starts the server; routes read it. Only InFlightCount changes. Must not know: HTTP, dialects.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from quire.schema.errors import OverloadedError
from quire.server.adapters import ServerAdapters
from quire.server.body import JsonLimits
from quire.server.callers import Salts, Tenants, new_secret
from quire.server.served import ServedModels
from quire.server.tool_server import ToolServer

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.server import ServerConfig
    from quire.llm.online import AsyncLLM

_TEMPLATES = 4  # chat templates of requests rendered at the same time, each in a process of its own


class InFlightCount:
    """Requests in flight, or a part of them. Touched by one event loop."""

    def __init__(self) -> None:
        self.count = 0


class BodyBudget:
    """Bytes of bodies that are being received and read, as body.memory_bytes counts them. Touched by one event loop."""

    TRIM_EACH = 1 << 25  # bytes of bodies, between two times that what they left free is given back to the system

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._untrimmed = 0

    def take(self, count: int) -> None:
        if count and self.used + count > self.most:
            raise OverloadedError(
                f"the server is reading {self.used} bytes of other bodies; at most {self.most} are read at the same "
                "time (--max-inflight-body-bytes), try again later",
                limit="max_inflight_body_bytes",
            )
        self.used += count

    def give(self, count: int) -> None:
        self.used -= count
        self._untrimmed += count

    def wants_trim(self) -> bool:
        """True once for every so many bytes: reading them took memory that nobody uses now."""
        if self._untrimmed < self.TRIM_EACH:
            return False
        self._untrimmed = 0
        return True


@dataclass(frozen=True)
class ServerState:
    engine: AsyncLLM  # the process's own: its health, metrics and lanes; requests go to the engine of their ServedModel
    config: EngineConfig  # of that engine
    options: ServerConfig
    served: ServedModels
    adapters: ServerAdapters
    salts: Salts | None  # of the prefix cache; None: all requests share its blocks
    tenants: Tenants | None  # that the scheduler is fair to; None: everybody is one
    tool_server: ToolServer | None = None
    load: InFlightCount = field(default_factory=InFlightCount)
    started_at: float = field(default_factory=time.time)
    prefix: str = field(default_factory=lambda: secrets.token_hex(4))  # with a serial: a request id of its own
    serials: Iterator[int] = field(default_factory=itertools.count)
    # a lane of their own: templates that take all the time they have hold up no other work
    templates: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_TEMPLATES, thread_name_prefix="template")
    )
    templates_load: InFlightCount = field(default_factory=InFlightCount)

    @classmethod
    def of(cls, engine: AsyncLLM, options: ServerConfig, secret: bytes | None = None) -> ServerState:
        """`secret`: what the API processes of one server agree on."""
        secret, served = secret or new_secret(), ServedModels.of(engine, options)
        return cls(
            engine=engine,
            config=engine.vllm_config,
            options=options,
            served=served,
            adapters=ServerAdapters(served),
            salts=Salts.of(options.keys, secret) if options.prefix_cache_per_key else None,
            tenants=Tenants.of(options.fair_scheduling, options.keys, secret),
            tool_server=ToolServer.of(options.tool_server),
        )

    @cached_property
    def bodies(self) -> BodyBudget:
        options = self.options
        return BodyBudget(max(options.max_inflight_body_bytes, options.max_request_bytes))

    @cached_property
    def json_limits(self) -> JsonLimits:
        options = self.options
        return JsonLimits(options.max_json_depth, options.max_json_values, options.max_request_token_ids)

    def trouble(self) -> str | None:
        """Why no request can be served now; None when all is well."""
        if not self.engine.is_running:
            return str(self.engine.dead_error)
        silent, limit = self.engine.stalled_for(), self.options.engine_stall_timeout
        if limit and silent > limit:
            return (
                f"requests are in the engine and no step finished for {silent:.0f} s (engine_stall_timeout={limit:g})"
            )
        return None

    def close(self) -> None:
        self.templates.shutdown(wait=False, cancel_futures=True)
