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
    ("vllm", "quire.config.outside", "ModelRegistry"),
    ("vllm.model_executor.models", "quire.config.outside", "ModelRegistry"),
    ("vllm.model_executor.models.registry", "quire.config.outside", "ModelRegistry"),
    ("vllm.model_executor.model_loader", "quire.loader.sharded", "ShardedStateLoader"),
    ("vllm.plugins", "quire.base.plugins", "call_plugins"),
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
    ("vllm.entrypoints.openai.protocol", "quire.server.openai.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.protocol", "quire.server.openai.responses_protocol", "ResponsesRequest"
     " ResponsesResponse"),
    ("vllm.entrypoints.chat_utils", "vllm.interfaces", "ChatCompletionContentPartParam ChatCompletionMessageParam"
     " ChatTemplateContentFormat ChatTemplateContentFormatOption ConversationMessage CustomChatCompletionMessageParam"
     " load_chat_template make_tool_call_id"),
    ("vllm.engine.protocol", "vllm.interfaces", "EngineClient"),
    ("vllm.logits_process", "vllm.interfaces", "LogitsProcessor NoBadWordsLogitsProcessor"
     " get_bad_words_logits_processors"),
    ("vllm.sequence", "quire.schema.outputs", "RequestMetrics"),
    ("vllm.sequence", "vllm.interfaces", "VLLM_INVALID_TOKEN_ID VLLM_TOKEN_ID_ARRAY_TYPE"),
    ("vllm.tasks", "vllm.interfaces", "GENERATION_TASKS GenerationTask POOLING_TASKS PoolingTask SupportedTask"),
    ("vllm.entrypoints.openai.tool_parsers", "vllm.parsers", "ToolParser ToolParserManager"),
    ("vllm.entrypoints.openai.tool_parsers.abstract_tool_parser", "vllm.parsers", "ToolParser ToolParserManager"),
    ("vllm.reasoning", "vllm.parsers", "ReasoningParser ReasoningParserManager"),
    ("vllm.reasoning.abs_reasoning_parsers", "vllm.parsers", "ReasoningParser ReasoningParserManager"),
    ("vllm.reasoning.basic_parsers", "vllm.parsers", "BaseThinkingReasoningParser"),
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

# Modules of one parser class each, below vllm.tool_parsers (and its older place) and below vllm.reasoning.
TOOL_MODULES = (
    "deepseekv31:DeepSeekV31ToolParser deepseekv32:DeepSeekV32ToolParser deepseekv3:DeepSeekV3ToolParser"
    " ernie45:Ernie45ToolParser functiongemma:FunctionGemmaToolParser gigachat3:GigaChat3ToolParser"
    " glm47_moe:Glm47MoeModelToolParser glm4_moe:Glm4MoeModelToolParser granite_20b_fc:Granite20bFCToolParser"
    " granite:GraniteToolParser hermes:Hermes2ProToolParser hunyuan_a13b:HunyuanA13BToolParser"
    " internlm2:Internlm2ToolParser jamba:JambaToolParser kimi_k2:KimiK2ToolParser"
    " llama4_pythonic:Llama4PythonicToolParser llama:Llama3JsonToolParser longcat:LongcatFlashToolParser"
    " minimax_m2:MinimaxM2ToolParser minimax:MinimaxToolParser mistral:MistralToolParser"
    " olmo3:Olmo3PythonicToolParser openai:OpenAIToolParser phi4mini:Phi4MiniJsonToolParser"
    " pythonic:PythonicToolParser qwen3coder:Qwen3CoderToolParser qwen3xml:Qwen3XMLToolParser"
    " seed_oss:SeedOssToolParser step3:Step3ToolParser xlam:xLAMToolParser"
)
REASONING_MODULES = (
    "deepseek_r1:DeepSeekR1ReasoningParser deepseek_v3:DeepSeekV3ReasoningParser ernie45:Ernie45ReasoningParser"
    " glm4_moe:Glm4MoeModelReasoningParser gptoss:GptOssReasoningParser granite:GraniteReasoningParser"
    " holo2:Holo2ReasoningParser hunyuan_a13b:HunyuanA13BReasoningParser identity:IdentityReasoningParser"
    " minimax_m2:MiniMaxM2ReasoningParser mistral:MistralReasoningParser olmo3:Olmo3ReasoningParser"
    " qwen3:Qwen3ReasoningParser seedoss:SeedOSSReasoningParser step3:Step3ReasoningParser"
)

# Names that are spelled differently here, or need a few lines of their own (vllm/shims.py).
OTHER: dict[str, str] = {
    "vllm:AsyncLLMEngine": "quire.llm.online:AsyncLLM",
    "vllm:bc_linter_include": "vllm.shims:mark",
    "vllm:bc_linter_skip": "vllm.shims:mark",
    "vllm.config:VllmConfig": "quire.config:EngineConfig",
    "vllm.distributed:cleanup_dist_env_and_memory": "vllm.shims:cleanup_dist_env_and_memory",
    "vllm.engine.async_llm_engine:AsyncLLMEngine": "quire.llm.online:AsyncLLM",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "quire.server.openai.chat_protocol:ChatRequest",  # noqa: E501
    "vllm.entrypoints.openai.cli_args:make_arg_parser": "vllm.shims:make_arg_parser",
    "vllm.entrypoints.openai.cli_args:validate_parsed_serve_args": "vllm.shims:validate_parsed_serve_args",
    "vllm.entrypoints.openai.protocol:ChatCompletionResponse": "quire.server.openai.chat_protocol:ChatResponse",
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
    "vllm:initialize_ray_cluster": "Ray is not built yet",
    "vllm.assets": "image, audio and video input are not built yet",
    "vllm.benchmarks": "the load generator is not built yet",
    "vllm.distributed.device_communicators": "several devices are not built yet",
    "vllm.distributed.kv_events": "the publisher of KV events is not built yet",
    "vllm.distributed.kv_transfer": "KV connectors are not built yet",
    "vllm.distributed.parallel_state": "several devices are not built yet",
    "vllm.distributed.utils": "several devices are not built yet",
    "vllm.entrypoints.api_server": "this server without the OpenAI API is not built; `vllm serve` is",
    "vllm.entrypoints.openai": "these are the insides of vLLM's HTTP server; `vllm serve` starts Quire's",
    "vllm.sequence:IntermediateTensors": "several devices are not built yet",
    "vllm.forward_context": "KV connectors are not built yet",
    "vllm.lora": "LoRA adapters are not built yet",
    "vllm.model_executor": "these are vLLM's own models and loaders",
    "vllm.multimodal": "image, audio and video input are not built yet",
    "vllm.v1.core": "these are the insides of vLLM's scheduler",
    "vllm.v1.request": "these are the insides of vLLM's scheduler",
}


# Modules that programs start with `python -m`, and the command of Quire's that they mean.
COMMANDS = {
    "vllm.entrypoints.cli.main": (),
    "vllm.entrypoints.openai.api_server": ("serve",),
    "vllm.entrypoints.openai.run_batch": ("run-batch",),
}


def names() -> dict[str, dict[str, str]]:
    """Module -> name -> where it is in Quire."""
    found: dict[str, dict[str, str]] = {"vllm.envs": {}, "vllm.version": {}, **{module: {} for module in COMMANDS}}
    for module, target, spelled in SAME:
        found.setdefault(module, {}).update({name: f"{target}:{name}" for name in spelled.split()})
    for one in TOOL_MODULES.split():
        module, _, name = one.partition(":")
        for place in ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"):
            found.setdefault(f"{place}.{module}_tool_parser", {})[name] = f"vllm.named:{name}"
    for one in REASONING_MODULES.split():
        module, _, name = one.partition(":")
        found.setdefault(f"vllm.reasoning.{module}_reasoning_parser", {})[name] = f"vllm.named:{name}"
    for key, target in OTHER.items():
        module, _, name = key.partition(":")
        found.setdefault(module, {})[name] = target
    return found
