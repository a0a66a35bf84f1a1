"""The options of the scheduler, as one small frozen record made from the engine's configuration.

Owns: which options scheduling reads, and the combinations that could never make progress.
Must not know: where an option came from, or any option of another room.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.base import env
from quire.schema.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig

# From here on a step of a CPU takes longer by as much as it is larger: larger ones gain nothing, so a queue of prompts
# is no reason for a step that all streams wait seconds for.
_CPU_TOKENS = 64
_FEW_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    policy: str = "fcfs"
    depth: int = 1  # plans that may be out, made and not yet committed
    overlap: int | None = None  # plans out that one request may be in; None: all of them
    num_drafts: int = 0  # of one request that a step checks at most
    chunked_prefill: bool = True
    long_prefill_threshold: int = 0  # tokens of one prompt per step; 0: no limit
    max_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    latency_goal: float = 0.0  # seconds a decode may wait beside prompts; 0: any
    latency_tokens: int = 512  # that a step holds whatever the goal: fewer cost nearly as much
    latency_deep: int = 8  # steps of waiting prompts from which on the goal does not bind; 0: it always does
    reserve_full_prompt: bool = True
    watermark: float = 0.0
    max_num_queued: int | None = None  # requests that may wait; None: any number
    max_num_queued_tokens: int | None = None  # of their prompts
    prefix_caching: bool = True
    hash_algorithm: str = "sha256"
    hash_seed: bytes = field(default=b"", compare=False, repr=False)
    events: bool = False
    max_loras: int = 0  # adapters in one step; 0: no request may have one
    max_cpu_loras: int = 0  # adapters in host memory
    encoder_tokens: int = 0  # vectors of media that a step encodes, and that are kept; 0: no request may have media
    whole_media: bool = False  # no item is split over two steps
    joined_media: bool = False  # all items of a prompt are in one step, and attend to each other

    def __post_init__(self) -> None:
        for name, least in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("max_model_len", 2)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}", param=name, value=value)
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_model_len="
                f"{self.max_model_len}: without chunked prefill a prompt must fit one step. Raise the first, lower "
                "the second, or set enable_chunked_prefill=True",
                param="max_num_batched_tokens",
            )
        if not self.chunked_prefill and 0 < self.encoder_tokens < self.max_num_batched_tokens:
            raise ConfigError(
                f"encoder_tokens={self.encoder_tokens} is less than max_num_batched_tokens="
                f"{self.max_num_batched_tokens}: without chunked prefill a step must encode all media of a prompt"
            )
        if self.depth < 1 or (self.overlap is not None and not 1 <= self.overlap <= self.depth):
            raise ConfigError(f"depth={self.depth} must be at least 1 and overlap={self.overlap} between 1 and that")
        if not 0.0 <= self.watermark < 1.0 or self.num_drafts < 0:
            raise ConfigError(
                f"watermark={self.watermark} must be in [0, 1), num_drafts={self.num_drafts} not negative"
            )

    @property
    def tenant_credit(self) -> int:
        """Prompt tokens that a tenant can be behind others at most: what a step holds, or a few where the latency goal
        keeps steps small."""
        if self.latency_goal and not self.latency_deep:
            return min(self.max_num_batched_tokens, _FEW_STEPS * self.latency_tokens)
        return self.max_num_batched_tokens

    @classmethod
    def from_config(cls, config: EngineConfig, *, max_model_len: int, depth: int) -> SchedulerSettings:
        options, cache, events = config.scheduler_config, config.cache_config, config.kv_events_config
        lora = config.lora_config
        on_cpu = config.device_config.device == "cpu"
        return cls(
            max_model_len=max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            policy=options.policy,
            depth=depth,
            overlap=1 if config.parallel_config.pipeline_parallel_size > 1 else None,
            num_drafts=config.num_speculative_tokens,
            chunked_prefill=options.enable_chunked_prefill,
            long_prefill_threshold=options.long_prefill_token_threshold if options.enable_chunked_prefill else 0,
            max_partial_prefills=options.max_num_partial_prefills,
            max_long_partial_prefills=options.max_long_partial_prefills,
            latency_goal=options.inter_token_latency_goal_ms / 1000,
            latency_tokens=_CPU_TOKENS if on_cpu else cls.latency_tokens,
            latency_deep=0 if on_cpu else cls.latency_deep,
            reserve_full_prompt=options.scheduler_reserve_full_isl,
            watermark=options.watermark,
            max_num_queued=options.max_num_queued_reqs or None,
            max_num_queued_tokens=options.max_num_queued_tokens or None,
            prefix_caching=cache.enable_prefix_caching,
            hash_algorithm=cache.prefix_caching_hash_algo,
            hash_seed=_hash_seed(),
            events=events is not None and events.publishes,
            encoder_tokens=_encoder_tokens(config, max_model_len),
            whole_media=options.disable_chunked_mm_input or bool(config.model_config.facts.both_ways),
            joined_media=config.model_config.facts.joins_media,
            max_loras=0 if lora is None else lora.max_loras,
            max_cpu_loras=0 if lora is None else lora.max_cpu_loras or lora.max_loras,
        )


def _encoder_tokens(config: EngineConfig, max_model_len: int) -> int:
    """At least the longest input of an encoder-decoder model's encoder."""
    model, size = config.model_config, config.scheduler_config.encoder_cache_size
    if not model.takes_media:
        return 0
    return max(size, model.facts.encoder_length or max_model_len) if model.is_encoder_decoder else size


def _hash_seed() -> bytes:
    """A secret of this process, unless the environment fixes one so that several agree."""
    fixed = env.PYTHONHASHSEED.get()
    return secrets.token_bytes(32) if fixed in ("", "random") else fixed.encode()
