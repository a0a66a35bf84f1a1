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
from typing import TYPE_CHECKING, Any

from quire.schema.errors import InputError, OverloadedError
from quire.server.body import JsonLimits
from quire.server.callers import Salts, new_secret
from quire.server.served import ServedNames
from quire.server.tool_server import ToolServer
from quire.text.chat import choose_template
from quire.text.parse.choose import ParserChoice
from quire.text.tokenizer import Tokenizer

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
    engine: AsyncLLM
    config: EngineConfig
    options: ServerConfig
    served: ServedNames
    default_sampling: dict[str, Any]
    chat_template: str | None  # the server's own, as text; None: the model's
    salts: Salts  # of the prefix cache
    parsers: ParserChoice = field(default_factory=ParserChoice)
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
        config = engine.vllm_config
        template = options.chat_template
        if template is not None and engine.tokenizer is not None:
            template = choose_template(engine.tokenizer, template)  # a wrong one is found now, not at the first chat
        return cls(
            engine=engine,
            config=config,
            options=options,
            served=ServedNames.of(config, options, engine.front.inputs.max_model_len),
            default_sampling=dict(config.model_config.default_sampling),
            chat_template=template,
            salts=Salts(options.keys if options.prefix_cache_per_key else (), secret or new_secret()),
            parsers=choose_parsers(config, options, engine.tokenizer),
            tool_server=ToolServer.of(options.tool_server),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        found = self.engine.tokenizer
        if found is None:
            raise InputError("the server has no tokenizer (skip_tokenizer_init): only token ids can be sent and got")
        return found

    @cached_property
    def bodies(self) -> BodyBudget:
        options = self.options
        return BodyBudget(max(options.max_inflight_body_bytes, options.max_request_bytes))

    @cached_property
    def json_limits(self) -> JsonLimits:
        options = self.options
        return JsonLimits(options.max_json_depth, options.max_json_values, options.max_request_token_ids)

    @cached_property
    def keeps_special(self) -> tuple[bool, bool]:
        """Whether special tokens must stay in an answer's text: without tools, with them."""
        return self.parsers.keeps_special_tokens(with_tools=False), self.parsers.keeps_special_tokens(with_tools=True)

    def close(self) -> None:
        self.templates.shutdown(wait=False, cancel_futures=True)


def choose_parsers(config: EngineConfig, options: ServerConfig, tokenizer: Tokenizer | None = None) -> ParserChoice:
    """By the options' names; a wrong one is a ConfigError. Without a tokenizer only the names are checked."""
    reasoning = config.structured_outputs_config
    return ParserChoice.of(
        tokenizer,
        tool=options.tool_call_parser,
        reasoning=reasoning.reasoning_parser,
        tool_plugin=options.tool_parser_plugin,
        reasoning_plugin=reasoning.reasoning_parser_plugin,
    )
