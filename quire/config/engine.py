"""EngineConfig: the root of the config tree, set through EngineArgs (args.py), resolved in resolve.py, then final.

Plain data all the way down: msgspec encodes it, and another process decodes it without importing anything else.
"""

import dataclasses
from dataclasses import field
from typing import Any, TypeVar

import msgspec

from quire.config.drafting import SpeculativeConfig
from quire.config.extras import (
    LoggingConfig,
    LoRAConfig,
    ObservabilityConfig,
    ProfilerConfig,
    ReasoningConfig,
    StructuredOutputsConfig,
)
from quire.config.kernels import AttentionConfig, CompilationConfig, KernelConfig, MambaConfig
from quire.config.local import describe, is_local
from quire.config.memory import CacheConfig, KVEventsConfig, LoadConfig, OffloadConfig
from quire.config.model import ModelConfig
from quire.config.option import Group, group, option
from quire.config.running import DeviceConfig, ParallelConfig, SchedulerConfig
from quire.schema.errors import ConfigError

G = TypeVar("G", bound=Group)


def level_number(level: Any) -> Any:
    """2, '2' and 'O2' are the same level."""
    return int(level[1:] if level[:1] in "oO" else level) if isinstance(level, str) and level else level


@group
class EngineConfig(Group):
    """Every group, and the options that belong to none."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    attention_config: AttentionConfig = option(
        AttentionConfig, "Attention kernels, as a mapping.", unset=None, flags=("-ac",)
    )
    mamba_config: MambaConfig = field(default_factory=MambaConfig)
    structured_outputs_config: StructuredOutputsConfig = option(
        StructuredOutputsConfig, "Grammars, as a mapping.", unset=None
    )
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    offload_config: OffloadConfig = field(default_factory=OffloadConfig)
    enable_lora: bool = option(False, "Serve low-rank adapters.", unset=None)
    lora_config: LoRAConfig | None = None
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    compilation_config: CompilationConfig = option(
        CompilationConfig, "Compilation and graphs, as a mapping; a number is its mode.", unset=None, flags=("-cc",),
        accepts=CompilationConfig | int,
        take=lambda value: {"mode": value} if isinstance(value, int) else value,
    )  # fmt: skip
    kernel_config: KernelConfig = option(KernelConfig, "Kernels, as a mapping.", unset=None)
    speculative_config: SpeculativeConfig | None = option(
        None, "Speculative decoding: draft tokens and verify them; as a mapping.", flags=("-sc",)
    )
    spec_method: str | None = option(None, "Shorthand for speculative_config.method.")
    spec_model: str | None = option(None, "Shorthand for speculative_config.model.")
    spec_tokens: int | None = option(None, "Shorthand for speculative_config.num_speculative_tokens.", low=1)
    kv_events_config: KVEventsConfig | None = option(None, "Events about cached blocks, as a mapping.")
    profiler_config: ProfilerConfig = option(ProfilerConfig, "Profiling, as a mapping.", unset=None)
    reasoning_config: ReasoningConfig | None = option(None, "Tags of reasoning, as a mapping.")
    additional_config: dict[str, Any] = option({}, "Data for plug-ins; passed through, never read.")
    optimization_level: int = option(
        2, "-O0 to -O3: trade start-up time for speed. 0: no CUDA graphs; the others are equivalent.", low=0,
        high=3, flags=("-O",), take=level_number,
    )  # fmt: skip
    shutdown_timeout: int = option(
        0, "Seconds a stopping server gives running requests to finish; 0 aborts them at once.", low=0
    )
    disable_log_stats: bool = option(False, "No metrics and no periodic log line.")
    fail_on_environ_validation: bool = option(
        False, "Unknown environment variables that start with QUIRE_ or VLLM_ are errors, not warnings."
    )
    tokens_only: bool = option(False, "Token ids in and out: implies skip_tokenizer_init.")
    # results
    quant_config: dict[str, Any] | None = None  # the checkpoint's own, raw
    instance_id: str = ""
    usage_context: str = ""

    @property
    def num_speculative_tokens(self) -> int:
        return (self.speculative_config and self.speculative_config.num_speculative_tokens) or 0

    @property
    def thinks(self) -> bool:
        """Whether the end of this model's reasoning can be recognized."""
        return bool(self.structured_outputs_config.reasoning_parser) or self.reasoning_config is not None

    @property
    def renders_only(self) -> bool:
        """For a server that only tokenizes requests and has no engine."""
        return self.usage_context == "RENDER_SERVER"

    @property
    def max_concurrent_batches(self) -> int:
        """Steps under way at once: one in each pipeline stage, or one ahead of the device."""
        return max(self.parallel_config.pipeline_parallel_size, 1 + self.scheduler_config.async_scheduling)


def encode(config: EngineConfig) -> bytes:
    """For another process; `decode` returns an equal config."""
    check_portable(config)
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> EngineConfig:
    return msgspec.msgpack.decode(data, type=EngineConfig)


def check_portable(config: EngineConfig) -> None:
    """ConfigError if the config names a class that only this process can import."""
    named = {
        "logits_processors": config.model_config.logits_processors,
        "scheduler_cls": (config.scheduler_config.scheduler_cls,),
        "distributed_executor_backend": (config.parallel_config.distributed_executor_backend,),
    }
    for name, values in named.items():
        for value in values:
            if value is not None and is_local(value):
                raise ConfigError(
                    f"{name} names {describe(value)}, which an engine in another process cannot import: move it into "
                    "an importable module, or run the engine in this process (QUIRE_ENABLE_V1_MULTIPROCESSING=0)",
                    param=name,
                )


def replace(config: G, **changes: Any) -> G:
    """A copy with changed values, validated again; a dotted key such as cache_config.block_size sets a nested field."""
    direct = {key: value for key, value in changes.items() if "." not in key}
    for key, value in changes.items():
        head, dot, rest = key.partition(".")
        if dot:
            direct[head] = replace(direct.get(head, getattr(config, head)), **{rest: value})
    return dataclasses.replace(config, **direct)
