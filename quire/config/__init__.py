"""User options and what is resolved from them: frozen config groups, EngineArgs, flags, and resolution.

Names are loaded on first use, so `import quire.config` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.base.registry import load

if TYPE_CHECKING:
    from quire.config.args import AsyncEngineArgs as AsyncEngineArgs
    from quire.config.args import EngineArgs as EngineArgs
    from quire.config.args import UsageContext as UsageContext
    from quire.config.engine import decode as decode
    from quire.config.engine import encode as encode
    from quire.config.engine import replace as replace
    from quire.config.groups import *  # noqa: F403
    from quire.config.parser import FlexibleArgumentParser as FlexibleArgumentParser

_GROUPS = (
    "AttentionConfig", "CUDAGraphMode", "CacheConfig", "CompilationConfig", "CompilationMode", "DeviceConfig",
    "DiffusionConfig", "ECTransferConfig", "EPLBConfig", "EngineConfig", "FaultToleranceConfig", "KVEventsConfig",
    "KVTransferConfig", "KernelConfig", "LoRAConfig", "LoadConfig", "LoggingConfig", "MambaConfig", "ModelConfig",
    "ModelFacts", "MultiModalConfig", "ObservabilityConfig", "OffloadConfig", "ParallelConfig", "PassConfig",
    "PoolerConfig", "PrefetchOffloadConfig", "ProfilerConfig", "ReasoningConfig", "SchedulerConfig",
    "SpeculativeConfig", "SpeechToTextConfig", "StructuredOutputsConfig", "UVAOffloadConfig", "WeightTransferConfig",
)  # fmt: skip
_PATHS = {
    **{name: f"quire.config.groups:{name}" for name in _GROUPS},
    "EngineArgs": "quire.config.args:EngineArgs",
    "AsyncEngineArgs": "quire.config.args:AsyncEngineArgs",
    "UsageContext": "quire.config.args:UsageContext",
    "FlexibleArgumentParser": "quire.config.parser:FlexibleArgumentParser",
    "decode": "quire.config.engine:decode",
    "encode": "quire.config.engine:encode",
    "replace": "quire.config.engine:replace",
}


def __getattr__(name: str) -> Any:
    if name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = load(_PATHS[name])
    return value
