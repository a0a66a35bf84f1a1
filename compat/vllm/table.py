"""The documented import paths and what they mean in Quire. One line per name; a module exists because it has a line.

A value is "quire module" (the names keep their spelling), or "quire module:other name" for a single name.
"""

from __future__ import annotations

# (vllm module, Quire module, names). The same vllm module may come more than once.
SAME: tuple[tuple[str, str, str], ...] = (
    ("vllm", "quire.llm.offline", "LLM"),
    ("vllm", "quire.llm.engine", "LLMEngine"),
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
    ("vllm.config", "vllm.configs", "ConfigType OptimizationLevel SupportsMetricsInfo get_attr_docs"
     " get_cached_compilation_config get_current_vllm_config is_init_field iter_architecture_defaults"
     " set_current_vllm_config str_dtype_to_torch_dtype try_match_architecture_defaults update_config"),
    ("vllm.config", "quire.config", "DiffusionConfig KernelConfig MambaConfig OffloadConfig PrefetchOffloadConfig"
     " ReasoningConfig UVAOffloadConfig WeightTransferConfig"),
    ("vllm.config.attention", "quire.config", "AttentionConfig"),
    ("vllm.config.cache", "quire.config", "CacheConfig"),
    ("vllm.config.compilation", "quire.config", "CUDAGraphMode CompilationConfig CompilationMode PassConfig"),
    ("vllm.config.device", "quire.config", "DeviceConfig"),
    ("vllm.config.diffusion", "quire.config", "DiffusionConfig"),
    ("vllm.config.ec_transfer", "quire.config", "ECTransferConfig"),
    ("vllm.config.kernel", "quire.config", "KernelConfig"),
    ("vllm.config.kv_events", "quire.config", "KVEventsConfig"),
    ("vllm.config.kv_transfer", "quire.config", "KVTransferConfig"),
    ("vllm.config.load", "quire.config", "LoadConfig"),
    ("vllm.config.lora", "quire.config", "LoRAConfig"),
    ("vllm.config.mamba", "quire.config", "MambaConfig"),
    ("vllm.config.model", "quire.config", "ModelConfig"),
    ("vllm.config.model", "vllm.configs", "iter_architecture_defaults str_dtype_to_torch_dtype"
     " try_match_architecture_defaults"),
    ("vllm.config.multimodal", "quire.config", "MultiModalConfig"),
    ("vllm.config.observability", "quire.config", "ObservabilityConfig"),
    ("vllm.config.offload", "quire.config", "OffloadConfig PrefetchOffloadConfig UVAOffloadConfig"),
    ("vllm.config.parallel", "quire.config", "EPLBConfig ParallelConfig"),
    ("vllm.config.pooler", "quire.config", "PoolerConfig"),
    ("vllm.config.profiler", "quire.config", "ProfilerConfig"),
    ("vllm.config.reasoning", "quire.config", "ReasoningConfig"),
    ("vllm.config.scheduler", "quire.config", "SchedulerConfig"),
    ("vllm.config.speculative", "quire.config", "SpeculativeConfig"),
    ("vllm.config.speech_to_text", "quire.config", "SpeechToTextConfig"),
    ("vllm.config.structured_outputs", "quire.config", "StructuredOutputsConfig"),
    ("vllm.config.utils", "vllm.configs", "ConfigType SupportsMetricsInfo get_attr_docs is_init_field update_config"),
    ("vllm.config.vllm", "vllm.configs", "OptimizationLevel get_cached_compilation_config get_current_vllm_config"
     " set_current_vllm_config"),
    ("vllm.config.weight_transfer", "quire.config", "WeightTransferConfig"),
    ("vllm.assets.audio", "vllm.refused", "AudioAsset"),
    ("vllm.assets.image", "vllm.refused", "ImageAsset"),
    ("vllm.assets.video", "vllm.refused", "VideoAsset"),
    ("vllm.benchmarks.datasets", "vllm.shims", "SampleRequest get_samples"),
    ("vllm.distributed", "vllm.shims", "destroy_distributed_environment destroy_model_parallel"),
    *((module, "vllm.ranks", "get_dp_group get_ep_group get_pp_group get_tensor_model_parallel_rank"
       " get_tensor_model_parallel_world_size get_tp_group get_world_group is_global_first_rank"
       " model_parallel_is_initialized")
      for module in ("vllm.distributed", "vllm.distributed.parallel_state")),
    ("vllm.distributed.kv_events", "quire.observe.kv_events", "EventBatch"),
    ("vllm.distributed.kv_events", "quire.sched.events", "AllBlocksCleared BlockRemoved BlockStored KVCacheEvent"
     " MEDIUM_GPU"),
    ("vllm.distributed.kv_events", "vllm.events", "ExternalBlockHash KVEventBatch"),
    ("vllm.distributed.parallel_state", "vllm.shims", "cleanup_dist_env_and_memory destroy_distributed_environment"
     " destroy_model_parallel"),
    ("vllm.distributed.weight_transfer.base", "vllm.refused", "WeightTransferUpdateRequest"),
    ("vllm.distributed.weight_transfer.nccl_common", "vllm.refused", "trainer_init"),
    ("vllm.distributed.weight_transfer.nccl_engine", "vllm.refused", "NCCLTrainerSendWeightsArgs"
     " NCCLWeightTransferEngine"),
    ("vllm.distributed.weight_transfer.packed_tensor", "vllm.refused", "packed_nccl_broadcast_producer"),
    ("vllm.inputs", "vllm.interfaces", "MultiModalDataDict"),
    ("vllm.inputs.data", "quire.schema.prompt", "EmbedsPrompt ExplicitEncoderDecoderPrompt PromptType SingletonPrompt"
     " TextPrompt TokensPrompt build_explicit_enc_dec_prompt to_enc_dec_tuple_list zip_enc_dec_prompts"),
    ("vllm.inputs.llm", "quire.schema.prompt", "EmbedsPrompt PromptType SingletonPrompt TextPrompt TokensPrompt"),
    ("vllm.inputs.llm", "vllm.interfaces", "MultiModalDataDict"),
    ("vllm.lora.resolver", "quire.server.resolvers", "LoRAResolver LoRAResolverRegistry"),
    ("vllm.lora.request", "quire.schema.adapters", "LoRARequest"),
    ("vllm.multimodal", "vllm.interfaces", "ModalityData MultiModalDataDict MultiModalUUIDDict"),
    ("vllm.multimodal.image", "quire.media.exchange", "convert_image_mode"),
    ("vllm.multimodal.inputs", "vllm.interfaces", "ModalityData MultiModalDataDict MultiModalUUIDDict"),
    ("vllm.multimodal.media", "vllm.refused", "MediaConnector"),
    ("vllm.multimodal.utils", "quire.media.exchange", "encode_audio_base64 encode_image_base64"
     " fetch_audio fetch_image fetch_video"),
    ("vllm.multimodal.utils", "vllm.refused", "encode_video_base64"),
    ("vllm.plugins", "vllm.shims", "load_general_plugins"),
    ("vllm.renderers", "vllm.shims", "resolve_chat_template"),
    ("vllm.renderers.hf", "vllm.shims", "resolve_chat_template"),
    ("vllm.tokenizers", "vllm.shims", "get_tokenizer"),
    ("vllm.transformers_utils.tokenizer", "vllm.shims", "get_tokenizer"),
    ("vllm.usage.usage_lib", "quire.config", "UsageContext"),
    ("vllm.v1.sample.logits_processor.interface", "quire.sampling.processors", "BatchUpdate LogitsProcessor"
     " MoveDirectionality"),
    ("vllm.engine.arg_utils", "quire.config", "EngineArgs AsyncEngineArgs"),
    ("vllm.engine.arg_utils", "quire.config.flags", "human_readable_int human_readable_int_or_auto optional_type"
     " union_dict_and_str"),
    ("vllm.engine.arg_utils", "vllm.configs", "get_kwargs"),
    ("vllm.envs", "vllm.shims", "enable_envs_cache is_set"),
    *((module, "quire.config", "replace") for module in ("vllm.config", "vllm.config.utils")),
    ("vllm.engine.llm_engine", "quire.llm.engine", "LLMEngine"),
    ("vllm.entrypoints.cli.main", "quire.cli.main", "main"),
    ("vllm.entrypoints.llm", "quire.llm.offline", "LLM"),
    ("vllm.inputs", "quire.schema.prompt", "EmbedsPrompt ExplicitEncoderDecoderPrompt PromptType SingletonPrompt"
     " TextPrompt TokensPrompt build_explicit_enc_dec_prompt to_enc_dec_tuple_list zip_enc_dec_prompts"),
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
    *((module, "quire.server.openai.protocol", "CompletionRequest CompletionResponse StreamOptions ResponseFormat")
      for module in ("vllm.entrypoints.openai.protocol", "vllm.entrypoints.openai.completion.protocol")),
    *((module, "vllm.interfaces", "ResponsesResponse")
      for module in ("vllm.entrypoints.openai.protocol", "vllm.entrypoints.openai.responses.protocol")),
    *((module, "quire.server.openai.responses_protocol", "ResponsesRequest")
      for module in ("vllm.entrypoints.openai.protocol", "vllm.entrypoints.openai.responses.protocol")),
    *((module, "quire.server.openai.models", "ModelCard ModelList ModelPermission")
      for module in ("vllm.entrypoints.openai.protocol", "vllm.entrypoints.openai.models.protocol",
                     "vllm.entrypoints.openai.engine.protocol", "vllm.entrypoints.serve.engine.protocol")),
    *((module, "quire.server.errors", "ErrorInfo ErrorResponse")
      for module in ("vllm.entrypoints.openai.protocol", "vllm.entrypoints.openai.engine.protocol",
                     "vllm.entrypoints.serve.engine.protocol")),
    *((module, "quire.server.tokens", "DetokenizeRequest TokenizeChatRequest TokenizeCompletionRequest"
       " TokenizeResponse")
      for module in ("vllm.entrypoints.openai.protocol", "vllm.entrypoints.serve.tokenize.protocol")),
    ("vllm.entrypoints.anthropic.protocol", "quire.server.anthropic.protocol", "AnthropicCountTokensRequest"
     " AnthropicMessagesRequest"),
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
    ("vllm.tracing", "quire.observe.tracing", "SpanAttributes TRACE_HEADERS"),
    ("vllm.tracing", "quire.observe.tracers", "is_otel_available"),
    ("vllm.utils", "quire.config", "FlexibleArgumentParser"),
    ("vllm.utils.argparse_utils", "quire.config", "FlexibleArgumentParser"),
    ("vllm.v1.engine.async_llm", "quire.llm.online", "AsyncLLM"),
    ("vllm.v1.engine.exceptions", "quire.schema.errors", "EngineDeadError EngineGenerateError"),
    ("vllm.v1.engine.llm_engine", "quire.llm.engine", "LLMEngine"),
    ("vllm.v1.metrics.reader", "quire.observe.reader", "Counter Gauge Histogram Metric Vector"),
    ("vllm.model_executor.models.deepseek_ocr", "quire.sampling.no_repeat", "NGramPerReqLogitsProcessor"),
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
    "vllm.benchmarks.datasets:add_dataset_parser": "quire.bench.flags:add_dataset_flags",
    "vllm.config:VllmConfig": "quire.config:EngineConfig",
    "vllm.config:config": "vllm.shims:mark",
    "vllm.config.utils:config": "vllm.shims:mark",
    "vllm.config.vllm:VllmConfig": "quire.config:EngineConfig",
    "vllm.distributed:cleanup_dist_env_and_memory": "vllm.shims:cleanup_dist_env_and_memory",
    "vllm.engine.async_llm_engine:AsyncLLMEngine": "quire.llm.online:AsyncLLM",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "quire.server.openai.chat_protocol:ChatRequest",  # noqa: E501
    "vllm.entrypoints.chat_utils:resolve_hf_chat_template": "vllm.shims:resolve_chat_template",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse": "quire.server.openai.chat_protocol:ChatResponse",  # noqa: E501
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionStreamResponse": "quire.server.openai.chat_protocol:ChatChunk",  # noqa: E501
    "vllm.entrypoints.openai.completion.protocol:CompletionStreamResponse": "quire.server.openai.protocol:CompletionChunk",  # noqa: E501
    "vllm.entrypoints.openai.engine.protocol:UsageInfo": "quire.server.openai.protocol:Usage",
    "vllm.entrypoints.openai.protocol:ChatCompletionStreamResponse": "quire.server.openai.chat_protocol:ChatChunk",
    "vllm.entrypoints.openai.protocol:CompletionStreamResponse": "quire.server.openai.protocol:CompletionChunk",
    "vllm.entrypoints.openai.protocol:UsageInfo": "quire.server.openai.protocol:Usage",
    "vllm.exceptions:VLLMClientError": "quire.schema.errors:InputError",
    "vllm.exceptions:VLLMValidationError": "quire.schema.errors:InputError",
    "vllm.entrypoints.openai.cli_args:make_arg_parser": "vllm.shims:make_arg_parser",
    "vllm.entrypoints.openai.cli_args:validate_parsed_serve_args": "vllm.shims:validate_parsed_serve_args",
    "vllm.entrypoints.openai.protocol:ChatCompletionResponse": "quire.server.openai.chat_protocol:ChatResponse",
    "vllm.entrypoints.openai.protocol:ChatCompletionRequest": "quire.server.openai.chat_protocol:ChatRequest",
    "vllm.logger:init_logger": "vllm.shims:init_logger",
    "vllm.collect_env:main": "vllm.shims:collect_env",
    "vllm.sampling_params:_MAX_TEMP": "quire.schema.params:MIN_TEMPERATURE",
    "vllm.sampling_params:_SAMPLING_EPS": "quire.schema.params:SAMPLING_EPS",
    "vllm.platforms:current_platform": "vllm.shims:current_platform",
    "vllm.scripts:main": "quire.cli.main:main",
    "vllm.utils.network_utils:get_ip": "quire.base.net:host_ip",
    "vllm.utils.network_utils:get_open_port": "quire.base.net:free_port",
    "vllm.utils:get_ip": "quire.base.net:host_ip",
    "vllm.utils:get_open_port": "quire.base.net:free_port",
}

_RANKS = "these are the insides of vLLM's ranks; docs/features/parallel.md describes Quire's"
_NO_KV_TRANSFER = "this version neither sends nor receives KV"
_NO_WEIGHT_TRANSFER = "weights are read at start-up only"

# Documented names that Quire does not have, and why. A module name covers all below it. What says that a feature does
# not exist has the words of quire/config/unavailable.txt, so that it goes when the feature comes.
MISSING: dict[str, str] = {
    "vllm:initialize_ray_cluster": "an engine finds or starts the cluster itself (distributed_executor_backend='ray')",
    "vllm.attention": "these are the insides of vLLM's attention, and Quire has its own",
    "vllm.assets": "these media are vLLM's own, which Quire does not fetch",
    "vllm.compilation": "no model is compiled: kernels are handwritten",
    "vllm.config:get_layers_from_vllm_config": "these are the insides of vLLM's models",
    "vllm.config:DynamicShapesConfig": "no model is compiled: kernels are handwritten",
    "vllm.config:SpeechToTextParams": "these are the insides of vLLM's transcription, and Quire has its own",
    "vllm.benchmarks": "these are the insides of vLLM's load generator; `vllm bench` starts Quire's",
    "vllm.connections": "these are the insides of vLLM's HTTP client; Quire fetches media itself",
    "vllm.device_allocator": "this version has no sleep mode",
    "vllm.distributed": _RANKS,
    "vllm.distributed.kv_events": "these are the insides of vLLM's publisher of KV events, and Quire has its own",
    "vllm.distributed.kv_transfer": _NO_KV_TRANSFER,
    "vllm.distributed.weight_transfer": _NO_WEIGHT_TRANSFER,
    "vllm.engine.arg_utils": "these are the insides of vLLM's flags, and Quire has its own",
    "vllm.entrypoints": "these are the insides of vLLM's programs; the command is Quire's",
    "vllm.entrypoints.api_server": "Quire has no server without the OpenAI API; `vllm serve` starts the one with it",
    "vllm.entrypoints.openai": "these are the insides of vLLM's HTTP server; `vllm serve` starts Quire's",
    "vllm.env_override": "these are changes that vLLM makes to torch",
    "vllm.inputs.parse": "these are the insides of vLLM's prompts, and Quire has its own",
    "vllm.inputs.preprocess": "these are the insides of vLLM's prompts, and Quire has its own",
    "vllm.logger": "these are the insides of vLLM's log, and Quire has its own",
    "vllm.logging_utils": "these are the insides of vLLM's log, and Quire has its own",
    "vllm.sequence:IntermediateTensors": "these are the insides of vLLM's pipeline stages, and Quire has its own",
    "vllm.forward_context": "these are the insides of vLLM's models and connectors",
    "vllm.lora": "these are the insides of vLLM's adapters, and Quire has its own",
    "vllm.model_executor": "these are vLLM's own models and loaders",
    "vllm.multimodal": "these are the insides of vLLM's media processing, and Quire has its own",
    "vllm.platforms": "these are vLLM's devices; current_platform tells Quire's",
    "vllm.plugins": "these are the insides of vLLM's plug-ins; docs/plugins.md describes Quire's",
    "vllm.profiler": "these are the insides of vLLM's profiler, and Quire has its own",
    "vllm.ray": "an engine finds or starts the cluster itself (distributed_executor_backend='ray')",
    "vllm.scalar_type": "these are the types of vLLM's kernels",
    "vllm.tokenizers": "these are the insides of vLLM's tokenizers, and Quire has its own",
    "vllm.tool_parsers.utils": "these are the insides of vLLM's parsers, and Quire has its own",
    "vllm.transformers_utils": "these are the insides of vLLM's configurations, and Quire has its own",
    "vllm.triton_utils": "these are the insides of vLLM's kernels",
    "vllm.usage": "Quire reports no usage",
    "vllm.utils": "these are helpers of vLLM's own",
    "vllm.v1": "these are the insides of vLLM's engine, and Quire has its own",
    "vllm.v1.metrics.ray_wrappers": "Ray gets no metrics from an engine; /metrics and get_metrics() have them",
    "vllm.v1.core": "these are the insides of vLLM's scheduler",
    "vllm.v1.request": "these are the insides of vLLM's scheduler",
}


# Modules that programs start with `python -m`, and the command of Quire's that they mean.
COMMANDS = {
    "vllm.benchmarks.latency": ("bench", "latency"),
    "vllm.benchmarks.serve": ("bench", "serve"),
    "vllm.benchmarks.throughput": ("bench", "throughput"),
    "vllm.collect_env": ("collect-env",),
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
