"""Everything a plain engine runs without: adapters, drafts, grammars, reasoning, numbers for operators.

Declarations only (option.py says what they mean).
"""

from typing import Any, Literal

from quire.config.model import dtype_name
from quire.config.option import INERT, LATER, Group, group, option
from quire.config.reasons import TEXT_ONLY
from quire.schema.errors import ConfigError


def split_words(given: Any) -> Any:
    """'model,worker' and ['model,worker'] are both two words."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple) or not all(isinstance(word, str) for word in given):
        return given
    return tuple(part.strip() for word in given for part in word.split(",") if part.strip())


@group
class LoRAConfig(Group):
    """Low-rank adapters."""

    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = option(16, "Largest rank.", LATER)
    max_loras: int = option(1, "Adapters in one batch.", LATER, low=1)
    fully_sharded_loras: bool = option(False, "Split both halves of an adapter.", LATER)
    max_cpu_loras: int | None = option(None, "Adapters kept in host memory; unset is max_loras.", LATER)
    lora_dtype: Literal["auto", "bfloat16", "float16"] = option("auto", "Precision of adapters.", LATER, accepts=str,
                                                                choices=("auto", "bfloat16", "float16"),
                                                                take=dtype_name)  # fmt: skip
    target_modules: tuple[str, ...] | None = option(None, "Layers that adapters may change.", LATER,
                                                    name="lora_target_modules")  # fmt: skip
    default_mm_loras: dict[str, str] | None = option(None, "Adapter per kind of media.", LATER)
    enable_tower_connector_lora: bool = option(False, "Adapters in media towers.", LATER)
    specialize_active_lora: bool = option(False, "Graphs per number of adapters.", LATER)
    enable_mixed_moe_lora_format: bool = option(False, "Both forms of expert adapters.", LATER)
    enable_moe_shared_loras: bool = option(False, "One adapter for all experts.", LATER)
    max_lora_cls_labels: int | None = option(None, "Most classes of an adapted classifier.", LATER, low=1)


@group
class SpeculativeConfig(Group):
    """Drafting tokens and checking them."""

    method: str | None = option(None, "Where drafts come from.", flat=False)
    model: str | None = option(None, "Draft model, head or class.", flat=False)
    num_speculative_tokens: int | None = option(None, "Tokens drafted per step.", flat=False, low=1)
    enforce_eager: bool | None = option(None, "No graphs for the drafter.", flat=False)
    draft_tensor_parallel_size: int | None = option(None, "Parts of the drafter.", flat=False, low=1)
    quantization: str | None = option(None, "How the drafter's weights are stored.", flat=False)
    moe_backend: str | None = option(None, "Kernel of its experts.", flat=False)
    attention_backend: str | None = option(None, "Its attention kernel.", flat=False)
    max_model_len: int | None = option(None, "Its context length.", flat=False, low=1)
    revision: str | None = option(None, "Its revision.", flat=False)
    code_revision: str | None = option(None, "Revision of its code.", flat=False)
    disable_padded_drafter_batch: bool = option(False, "Uneven draft batches.", flat=False)
    use_local_argmax_reduction: bool = option(False, "Exchange best tokens only.", flat=False)
    prompt_lookup_max: int | None = option(None, "Longest n-gram matched.", flat=False, low=1)
    prompt_lookup_min: int | None = option(None, "Shortest n-gram matched.", flat=False, low=1)
    parallel_drafting: bool = option(False, "All drafts in one pass.", flat=False)
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = option(
        None, "Draft length by batch size.", flat=False
    )
    suffix_decoding_max_tree_depth: int = option(24, "Depth of the suffix tree.", flat=False, low=1)
    suffix_decoding_max_cached_requests: int = option(10000, "Answers it remembers.", flat=False, low=0)
    suffix_decoding_max_spec_factor: float = option(1.0, "Drafts per matched token.", flat=False, low=0)
    suffix_decoding_min_token_prob: float = option(0.1, "Least frequency of a draft.", flat=False, low=0, high=1)
    draft_load_config: dict[str, Any] | None = option(None, "How its weights are read.", flat=False)
    rejection_sample_method: Literal["standard", "synthetic"] = option("standard", "How drafts are judged.", flat=False)
    synthetic_acceptance_rates: tuple[float, ...] | None = option(None, "Acceptance by position.", flat=False)
    synthetic_acceptance_length: float | None = option(None, "Mean accepted length.", flat=False)
    draft_sample_method: Literal["greedy", "probabilistic"] = option("greedy", "How drafts are drawn.", flat=False)


@group
class DiffusionConfig(Group):
    """Models that denoise blocks of tokens."""

    canvas_length: int | None = option(None, "Tokens per block.", flat=False, low=1)
    max_denoising_steps: int | None = option(None, "Passes per block.", flat=False, low=1)


@group
class StructuredOutputsConfig(Group):
    """Output that must follow a grammar, and where thinking ends."""

    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = option(
        "auto", "Which grammar engine; auto takes the one that does what a constraint needs.", flat=False
    )
    disable_fallback: bool = option(False, "Refuse what that engine does not do, and try no other.", flat=False)
    disable_any_whitespace: bool = option(
        False, "JSON without whitespace; names the backend too (xgrammar, guidance).", flat=False
    )
    disable_additional_properties: bool = option(
        False, "No JSON keys but those a schema names; needs backend guidance.", flat=False
    )
    max_grammar_bytes: int = option(1 << 20, "Longest constraint of one request, in characters.", flat=False, low=1)
    compile_timeout: float = option(
        10.0, "Seconds of the processor that compiling one constraint may take.", flat=False, above=0
    )
    compile_workers: int = option(2, "Constraints compiled at once, each in a process.", flat=False, low=1, high=64)
    reasoning_parser: str = option("", "How the model marks its thinking: a family's name.")
    reasoning_parser_plugin: str = option("", "Python file that registers further reasoning parsers.")
    enable_in_reasoning: bool = option(False, "Grammar inside thinking too.", flat=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disable_any_whitespace and self.backend not in ("xgrammar", "guidance"):
            raise ConfigError(
                f"disable_any_whitespace needs backend xgrammar or guidance; backend is {self.backend!r}",
                param="disable_any_whitespace",
            )
        if self.disable_additional_properties and self.backend != "guidance":
            raise ConfigError(
                f"disable_additional_properties needs backend guidance; backend is {self.backend!r}",
                param="disable_additional_properties",
            )


@group
class ReasoningConfig(Group):
    """Where thinking begins and ends."""

    reasoning_parser: str = option("", "Parser that knows the marks; the same as --reasoning-parser.", flat=False)
    reasoning_start_str: str = option("", "Text that opens it, where there is no parser.", flat=False)
    reasoning_end_str: str = option(
        "", "Text that closes it; with a parser, what a budget that is spent says to close it.", flat=False
    )


@group
class ObservabilityConfig(Group):
    """Metrics and traces."""

    show_hidden_metrics_for_version: str | None = option(
        None, "Show metrics hidden since that version.", INERT, why="no metric of this version is hidden"
    )
    otlp_traces_endpoint: str | None = option(None, "Where a span per request is sent (OpenTelemetry, OTLP).")
    collect_detailed_traces: tuple[Literal["model", "worker", "all"], ...] | None = option(
        None, "Parts whose time a span tells too: model (the forward pass, on CPU), worker (the whole step), all.",
        take=split_words,
    )  # fmt: skip
    kv_cache_metrics: bool = option(False, "Lifetime and reuse of blocks.", LATER)
    kv_cache_metrics_sample: float = option(0.01, "Share of blocks watched.", LATER, above=0, high=1)
    cudagraph_metrics: bool = option(False, "Padding of graphs.", LATER)
    enable_layerwise_nvtx_tracing: bool = option(False, "Marks per layer for profilers.", LATER)
    enable_mfu_metrics: bool = option(False, "Share of the device's arithmetic used.", LATER)
    enable_mm_processor_stats: bool = option(False, "Times of media processing.", INERT, flat=False, why=TEXT_ONLY)
    enable_logging_iteration_details: bool = option(False, "A log line per step.", LATER)
    custom_histogram_buckets: dict[str, tuple[float, ...]] | None = option(
        None, "Limits of histograms by metric name, where the usual ones do not fit."
    )
    per_request_spec_decode_metrics: Literal["detailed", "none", "summary"] = option(
        "none", "Draft numbers per request.", INERT, why="this version drafts no tokens"
    )
    jit_monitor_mode: Literal["warn", "error"] = option(
        "warn", "When something compiles late.", INERT, why="nothing is compiled after a start"
    )
    jit_monitor_verbose: bool = option(False, "Log every late compile.", INERT, why="nothing is compiled after a start")


@group
class ProfilerConfig(Group):
    """Recording what the device does, between start_profile and stop_profile."""

    profiler: Literal["torch", "cuda"] | None = option(
        None, "Which profiler: torch writes a trace file, cuda opens the window of an outside profiler.", flat=False
    )
    torch_profiler_dir: str = option("", "Folder of traces; needs profiler torch.", flat=False)
    torch_profiler_with_stack: bool = option(True, "Record Python stacks.", flat=False)
    torch_profiler_with_flops: bool = option(False, "Count operations.", flat=False)
    torch_profiler_use_gzip: bool = option(True, "Compress traces.", flat=False)
    torch_profiler_dump_cuda_time_total: bool = option(True, "Log a table of the device's time.", flat=False)
    torch_profiler_record_shapes: bool = option(False, "Record shapes.", flat=False)
    torch_profiler_with_memory: bool = option(False, "Record memory.", flat=False)
    ignore_frontend: bool = option(
        False, "Not in the front end.", INERT, flat=False, why="only workers are recorded in this version"
    )
    delay_iterations: int = option(0, "Steps before recording.", LATER, flat=False, low=0)
    max_iterations: int = option(0, "Steps recorded; 0 is all.", LATER, flat=False, low=0)
    warmup_iterations: int = option(0, "Discarded steps of a schedule.", LATER, flat=False, low=0)
    active_iterations: int = option(5, "Recorded steps of a schedule.", LATER, flat=False, low=1)
    wait_iterations: int = option(0, "Idle steps of a schedule.", LATER, flat=False, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.profiler == "torch") != bool(self.torch_profiler_dir):
            raise ConfigError(
                "profiler_config: profiler='torch' and torch_profiler_dir go together, got "
                f"profiler={self.profiler!r} and torch_profiler_dir={self.torch_profiler_dir!r}",
                param="profiler_config",
            )


@group
class LoggingConfig(Group):
    """What is written to the log."""

    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"] | None = option(
        None, "Least level that is written; unset takes QUIRE_LOGGING_LEVEL.",
        take=lambda given: given.upper() if isinstance(given, str) else given,
    )  # fmt: skip
    log_config_file: str | None = option(
        None, "A JSON file with a Python logging configuration (dictConfig); unset takes QUIRE_LOGGING_CONFIG_PATH."
    )
    logging_config: dict[str, Any] | None = option(None, "The same as a mapping.")
    log_format: Literal["text", "json"] = option("text", "json: each record is one line of JSON. Quire's own.")
