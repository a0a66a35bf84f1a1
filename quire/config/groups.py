"""Every config group in one module; the declarations are in the files they are imported from."""

from quire.checkpoint.facts import ModelFacts
from quire.config.drafting import SpeculativeConfig
from quire.config.engine import EngineConfig
from quire.config.extras import (
    DiffusionConfig,
    LoggingConfig,
    LoRAConfig,
    ObservabilityConfig,
    ProfilerConfig,
    ReasoningConfig,
    StructuredOutputsConfig,
)
from quire.config.kernels import (
    AttentionConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    KernelConfig,
    MambaConfig,
    PassConfig,
)
from quire.config.memory import (
    CacheConfig,
    ECTransferConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    OffloadConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
    WeightTransferConfig,
)
from quire.config.model import ModelConfig, MultiModalConfig, PoolerConfig, SpeechToTextConfig
from quire.config.running import DeviceConfig, EPLBConfig, FaultToleranceConfig, ParallelConfig, SchedulerConfig

__all__ = [
    "AttentionConfig", "CUDAGraphMode", "CacheConfig", "CompilationConfig", "CompilationMode", "DeviceConfig",
    "DiffusionConfig", "ECTransferConfig", "EPLBConfig", "EngineConfig", "FaultToleranceConfig", "KVEventsConfig",
    "KVTransferConfig", "KernelConfig", "LoRAConfig", "LoadConfig", "LoggingConfig", "MambaConfig", "ModelConfig",
    "ModelFacts", "MultiModalConfig", "ObservabilityConfig", "OffloadConfig", "ParallelConfig", "PassConfig",
    "PoolerConfig", "PrefetchOffloadConfig", "ProfilerConfig", "ReasoningConfig", "SchedulerConfig",
    "SpeculativeConfig", "SpeechToTextConfig", "StructuredOutputsConfig", "UVAOffloadConfig", "WeightTransferConfig",
]  # fmt: skip
