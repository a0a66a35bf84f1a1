"""What crosses between a client and an engine, in process or over a socket. msgspec encodes it; nothing is pickled."""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from quire.schema.media import MediaItem
from quire.schema.params import PoolingParams, ResolvedParams, sampling_of
from quire.schema.stats import RequestTimes, StartPhase, StepStats
from quire.schema.step import LogprobRows, Pooled

_ADDRESS = re.compile(r"tcp://([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3}):([0-9]{1,5})", re.ASCII)
_LAST_PORT = 65535


def check_address(address: str) -> None:
    """Of a mailbox on another machine; "" is none."""
    match = _ADDRESS.fullmatch(address)
    if address and not (match and max(map(int, match.groups()[:4])) < 256 and 0 < int(match[5]) <= _LAST_PORT):
        raise ValueError(f"{address[:80]!r} is not the address of a mailbox")


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One sequence to generate, or to pool. n>1 arrives as n of these that share `parent_id`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: ResolvedParams | PoolingParams
    seed: int  # resolved: the request's own (plus the sibling's index) or drawn by the client
    max_tokens: int  # resolved: the request's own, cut to what fits the model
    eos_token_id: int | None = None  # ends the text unless ignore_eos
    priority: int = 0
    arrival: float = 0.0  # wall-clock seconds; only for reporting and for order between equal priorities
    cache_salt: str | None = None
    tenant: int = 0  # whose it is, for fair scheduling: opaque, and nothing about a key can be learned from it
    parent_id: str | None = None
    lora_id: int = 0
    lora_name: str | None = None
    lora_path: str | None = None  # None: the engine has loaded it
    lora_generation: int = 0  # which load of all: what an earlier one has computed is another's. Set by the engine
    media: tuple[MediaItem, ...] = ()  # in the order of their positions; ranges do not overlap
    trace_headers: dict[str, str] = {}
    continues: bool = False  # the prompt ends within an answer, which is gone on with
    thinking: bool | None = None  # False: the request switched thinking off, which a prompt need not show

    @property
    def sampling(self) -> ResolvedParams:
        return sampling_of(self.params)


class OneOfMany(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An EngineRequest within EngineRequests: what is its own, and where the rest of it stands."""

    request_id: str
    common: int  # place in EngineRequests.commons
    prompt: int  # place in EngineRequests.prompts
    seed: int
    max_tokens: int
    arrival: float = 0.0
    parent_id: str | None = None


class EngineRequests(msgspec.Struct, frozen=True, kw_only=True, tag="requests"):
    """Requests that were submitted together: whatever several of them share travels once (engine/together.py)."""

    commons: tuple[EngineRequest, ...]  # without an id and a prompt
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[OneOfMany, ...]

    def __post_init__(self) -> None:
        for one in self.requests:
            if not (0 <= one.common < len(self.commons) and 0 <= one.prompt < len(self.prompts)):
                raise ValueError(f"request {one.request_id!r} names what is not there")


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    request_ids: tuple[str, ...]


class ControlCall(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """A verb of engine/control.py with plain arguments."""

    call_id: int
    verb: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Orderly shutdown: abort what runs, answer, leave."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First word of a client that joins an engine which others use too; EngineReady is the answer."""

    address: str = ""  # of its mailbox, if it is on another machine

    def __post_init__(self) -> None:
        check_address(self.address)


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """Said by the owner of the engine: that client is gone, and its requests with it."""

    client: int


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """Said by another engine that has experts together with this one: it begins a step, which needs all of them."""

    step: int


ToEngine = EngineRequest | EngineRequests | Abort | ControlCall | Stop | Hello | Left | Wake


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """News of one request since the last step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id that ended it; None for end-of-text
    logprobs: LogprobRows | None = None  # parallel to new_token_ids
    prompt_logprobs: LogprobRows | None = None  # a further piece, positions in order, starting at position 1
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when first scheduled
    times: RequestTimes | None = None  # with the first and the last output
    error: str | None = None  # why finish_reason is ERROR
    error_kind: str = ""  # as in ControlReply
    limit: str = ""  # the option whose limit refused it
    pooled: Pooled | None = None  # with the last output of a request that is pooled


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    outputs: list[EngineOutput]
    stats: StepStats | None = None
    engine: int = 0  # place of the engine among several; set by their client, never by an engine


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    call_id: int
    value: Any = None
    error: str | None = None
    error_kind: str = ""  # class name in schema/errors.py or a builtin, so that the caller raises the same kind


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """First word of an engine: it is loaded, and these things were measured."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    block_size: int
    max_concurrency: float = 0.0  # requests of max_model_len tokens that the KV cache has room for; 0: it has no blocks
    start_seconds: dict[str, float] = {}  # the outer phases by name, and "total"
    phases: tuple[StartPhase, ...] = ()  # all of them, in order of their ends
    client: int = 0  # which client of the engine this answers; part of the names it gives to requests
    pid: int = 0  # process the engine runs in
    address: str = ""  # of its mailbox, if other machines may join; told to its owner


class EngineDied(msgspec.Struct, frozen=True, kw_only=True, tag="died"):
    reason: str
    details: str = ""  # traceback text for the log
    error_kind: str = ""  # as in ControlReply; for an engine that could not start


FromEngine = Outputs | ControlReply | EngineReady | EngineDied
