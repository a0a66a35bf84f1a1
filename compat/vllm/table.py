"""The documented import paths and what they mean in Quire. One line per name; a module exists because it has a line.

A value is "quire module" (the names keep their spelling), or "quire module:other name" for a single name.
"""

from __future__ import annotations

# (vllm module, Quire module, names). The same vllm module may come more than once.
SAME: tuple[tuple[str, str, str], ...] = (
    ("vllm", "quire.llm.offline", "LLM"),
    ("vllm", "quire.llm.stepper", "LLMEngine"),
    ("vllm", "quire.config", "EngineArgs AsyncEngineArgs"),
    ("vllm", "quire.schema.params", "SamplingParams PoolingParams"),
    ("vllm", "quire.schema.prompt", "PromptType TextPrompt TokensPrompt"),
    ("vllm", "quire.schema.outputs", "RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput EmbeddingOutput"
     " EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput"),
    ("vllm.beam_search", "quire.llm.beam", "BeamSearchInstance BeamSearchOutput BeamSearchSequence"),
    ("vllm.config", "quire.config", "AttentionConfig CUDAGraphMode CacheConfig CompilationConfig CompilationMode"
     " DeviceConfig ECTransferConfig EPLBConfig KVEventsConfig KVTransferConfig LoRAConfig LoadConfig ModelConfig"
     " MultiModalConfig ObservabilityConfig ParallelConfig PassConfig PoolerConfig ProfilerConfig SchedulerConfig"
     " SpeculativeConfig SpeechToTextConfig StructuredOutputsConfig"),
    ("vllm.engine.arg_utils", "quire.config", "EngineArgs AsyncEngineArgs"),
    ("vllm.engine.llm_engine", "quire.llm.stepper", "LLMEngine"),
    ("vllm.entrypoints.cli.main", "quire.cli.main", "main"),
    ("vllm.entrypoints.llm", "quire.llm.offline", "LLM"),
    ("vllm.inputs", "quire.schema.prompt", "EmbedsPrompt PromptType SingletonPrompt TextPrompt TokensPrompt"),
    ("vllm.logprobs", "quire.schema.outputs", "FlatLogprobs Logprob LogprobsOnePosition PromptLogprobs SampleLogprobs"),
    ("vllm.outputs", "quire.schema.outputs", "RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput"
     " EmbeddingOutput EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput"
     " ScoringRequestOutput"),
    ("vllm.pooling_params", "quire.schema.params", "PoolingParams"),
    ("vllm.sampling_params", "quire.schema.params", "BeamSearchParams RequestOutputKind SamplingParams"
     " StructuredOutputsParams RepetitionDetectionParams"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.parsers", "DeltaMessage"),
    ("vllm.entrypoints.openai.engine.protocol", "vllm.parsers", "DeltaFunctionCall DeltaMessage DeltaToolCall"
     " ExtractedToolCallInformation FunctionCall ToolCall"),
    ("vllm.entrypoints.openai.protocol", "vllm.parsers", "DeltaFunctionCall DeltaMessage DeltaToolCall"
     " ExtractedToolCallInformation FunctionCall ToolCall"),
    ("vllm.entrypoints.openai.tool_parsers", "vllm.parsers", "ToolParser ToolParserManager"),
    ("vllm.entrypoints.openai.tool_parsers.abstract_tool_parser", "vllm.parsers", "ToolParser ToolParserManager"),
    ("vllm.reasoning", "vllm.parsers", "ReasoningParser ReasoningParserManager"),
    ("vllm.reasoning.abs_reasoning_parsers", "vllm.parsers", "ReasoningParser ReasoningParserManager"),
    ("vllm.tool_parsers", "vllm.parsers", "ToolParser ToolParserManager"),
    ("vllm.tool_parsers.abstract_tool_parser", "vllm.parsers", "ToolParser ToolParserManager"),
    ("vllm.tracing", "quire.observe.tracing", "SpanAttributes TRACE_HEADERS is_otel_available"),
    ("vllm.utils", "quire.config", "FlexibleArgumentParser"),
    ("vllm.utils.argparse_utils", "quire.config", "FlexibleArgumentParser"),
    ("vllm.v1.engine.async_llm", "quire.llm.online", "AsyncLLM"),
    ("vllm.v1.engine.exceptions", "quire.schema.errors", "EngineDeadError EngineGenerateError"),
    ("vllm.v1.engine.llm_engine", "quire.llm.stepper", "LLMEngine"),
    ("vllm.v1.metrics.reader", "quire.observe.reader", "Counter Gauge Histogram Metric Vector"),
    ("vllm.v1.sample.logits_processor", "quire.sampling.processors", "AdapterLogitsProcessor BatchUpdate"
     " LogitsProcessor MoveDirectionality RequestLogitsProcessor"),
    ("vllm.v1.sample.logits_processor.builtin", "quire.sampling.processors", "process_dict_updates"),
)  # fmt: skip

# Names that are spelled differently here, or need a few lines of their own (vllm/shims.py).
OTHER: dict[str, str] = {
    "vllm:AsyncLLMEngine": "quire.llm.online:AsyncLLM",
    "vllm:bc_linter_include": "vllm.shims:mark",
    "vllm:bc_linter_skip": "vllm.shims:mark",
    "vllm.config:VllmConfig": "quire.config:EngineConfig",
    "vllm.distributed:cleanup_dist_env_and_memory": "vllm.shims:cleanup_dist_env_and_memory",
    "vllm.engine.async_llm_engine:AsyncLLMEngine": "quire.llm.online:AsyncLLM",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "quire.server.openai.chat_protocol:ChatRequest",  # noqa: E501
    "vllm.entrypoints.openai.protocol:ChatCompletionRequest": "quire.server.openai.chat_protocol:ChatRequest",
    "vllm.logger:init_logger": "vllm.shims:init_logger",
    "vllm.platforms:current_platform": "vllm.shims:current_platform",
    "vllm.scripts:main": "quire.cli.main:main",
    "vllm.utils.network_utils:get_ip": "quire.base.net:host_ip",
    "vllm.utils.network_utils:get_open_port": "quire.base.net:free_port",
    "vllm.utils:get_ip": "quire.base.net:host_ip",
    "vllm.utils:get_open_port": "quire.base.net:free_port",
}

# Documented names that Quire does not have, and why. A module name covers all below it.
MISSING: dict[str, str] = {
    "vllm:ModelRegistry": "models from outside the package are not built yet",
    "vllm:initialize_ray_cluster": "Ray is not built yet",
    "vllm.assets": "image, audio and video input are not built yet",
    "vllm.benchmarks": "the load generator is not built yet",
    "vllm.distributed.device_communicators": "several devices are not built yet",
    "vllm.distributed.kv_events": "the publisher of KV events is not built yet",
    "vllm.distributed.kv_transfer": "KV connectors are not built yet",
    "vllm.distributed.parallel_state": "several devices are not built yet",
    "vllm.distributed.utils": "several devices are not built yet",
    "vllm.entrypoints.api_server": "the HTTP server is not built yet",
    "vllm.entrypoints.openai": "the HTTP server is not built yet",
    "vllm.forward_context": "KV connectors are not built yet",
    "vllm.lora": "LoRA adapters are not built yet",
    "vllm.model_executor": "these are vLLM's own models and loaders",
    "vllm.multimodal": "image, audio and video input are not built yet",
    "vllm.v1.core": "these are the insides of vLLM's scheduler",
    "vllm.v1.request": "these are the insides of vLLM's scheduler",
}


def names() -> dict[str, dict[str, str]]:
    """Module -> name -> where it is in Quire."""
    found: dict[str, dict[str, str]] = {"vllm.envs": {}, "vllm.version": {}}
    for module, target, spelled in SAME:
        found.setdefault(module, {}).update({name: f"{target}:{name}" for name in spelled.split()})
    for key, target in OTHER.items():
        module, _, name = key.partition(":")
        found.setdefault(module, {})[name] = target
    return found
