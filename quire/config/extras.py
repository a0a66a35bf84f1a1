"""Optional features of an engine: adapters, grammars, reasoning, metrics and logs.

Declarations only (see option.py).
"""

from typing import Any, Literal

from quire.config.model import dtype_name
from quire.config.option import Group, group, option
from quire.schema.errors import ConfigError


def split_at_commas(value: Any) -> Any:
    """'model,worker' and ['model,worker'] both have two entries."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        return value
    return tuple(part.strip() for word in value for part in word.split(",") if part.strip())


@group
class LoRAConfig(Group):
    """Low-rank adapters."""

    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = option(
        16, "Largest rank of an adapter; memory for it is set aside in every slot."
    )
    max_loras: int = option(1, "Adapters in one batch.", low=1, high=1024)
    fully_sharded_loras: bool = option(
        False,
        "Split both A and B among the ranks of tensor parallelism, instead of the one that is cut with the matrix.",
    )
    max_cpu_loras: int | None = option(None, "Adapters in host memory; unset, and 0, is max_loras.")
    lora_dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        "Precision of adapters; auto is the model's, and bfloat16 on CPU beside weights of fewer bits.",
        take=dtype_name,
    )
    target_modules: tuple[str, ...] | None = option(
        None, "Names of layers that adapters may change; an adapter of any other is refused.",
        name="lora_target_modules", take=split_at_commas,
    )  # fmt: skip
    default_mm_loras: dict[str, str] | None = option(
        None, "Folder of an adapter for each kind of media (image, video, audio): requests that bring this kind and no "
        "other of those listed get it, unless they name an adapter.",
    )  # fmt: skip


@group
class DiffusionConfig(Group):
    """Models that denoise blocks of tokens."""


@group
class StructuredOutputsConfig(Group):
    """Output constrained by a grammar, and the reasoning parser."""

    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = option(
        "auto", "Grammar backend; auto picks one that supports the constraint.", flat=False
    )
    disable_fallback: bool = option(False, "Refuse constraints that backend lacks, and try no other.", flat=False)
    disable_any_whitespace: bool = option(
        False, "JSON without whitespace; needs backend xgrammar or guidance.", flat=False
    )
    disable_additional_properties: bool = option(
        False, "Only the JSON keys that a schema lists; needs backend guidance.", flat=False
    )
    max_grammar_bytes: int = option(1 << 20, "Longest constraint of one request, in characters.", flat=False, low=1)
    compile_timeout: float = option(10.0, "CPU seconds that compiling one constraint may take.", flat=False, above=0)
    compile_workers: int = option(2, "Constraints compiled in parallel, each in a process.", flat=False, low=1, high=64)
    reasoning_parser: str = option("", "Parser of the model's reasoning, by name.")
    reasoning_parser_plugin: str = option("", "Python file that registers further reasoning parsers.")
    enable_in_reasoning: bool = option(False, "Constrain the reasoning too.", flat=False)

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
    """Where reasoning starts and ends."""

    reasoning_parser: str = option("", "Parser that knows the tags; the same as --reasoning-parser.", flat=False)
    reasoning_start_str: str = option("", "Tag that opens reasoning, if there is no parser.", flat=False)
    reasoning_end_str: str = option(
        "", "Tag that closes it; with a parser, the text inserted when the budget is used up.", flat=False
    )


@group
class ObservabilityConfig(Group):
    """Metrics and traces."""

    otlp_traces_endpoint: str | None = option(None, "OTLP endpoint that receives a span per request (OpenTelemetry).")
    collect_detailed_traces: tuple[Literal["model", "worker", "all"], ...] | None = option(
        None, "Additional times in a span: model (the forward pass, on CPU), worker (the complete step), all.",
        take=split_at_commas,
    )  # fmt: skip
    custom_histogram_buckets: dict[str, tuple[float, ...]] | None = option(
        None, "Histogram buckets by metric name, instead of the defaults."
    )


@group
class ProfilerConfig(Group):
    """Profiling of the device, between start_profile and stop_profile."""

    profiler: Literal["torch", "cuda"] | None = option(
        None, "Which profiler: torch writes a trace file, cuda marks the range for an external profiler.", flat=False
    )
    torch_profiler_dir: str = option("", "Folder for traces; needs profiler torch.", flat=False)
    torch_profiler_with_stack: bool = option(True, "Record Python stacks.", flat=False)
    torch_profiler_with_flops: bool = option(False, "Count operations.", flat=False)
    torch_profiler_use_gzip: bool = option(True, "Compress traces.", flat=False)
    torch_profiler_dump_cuda_time_total: bool = option(True, "Log a table of the device's time.", flat=False)
    torch_profiler_record_shapes: bool = option(False, "Record shapes.", flat=False)
    torch_profiler_with_memory: bool = option(False, "Record memory.", flat=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.profiler == "torch") != bool(self.torch_profiler_dir):
            raise ConfigError(
                "profiler_config: profiler='torch' and torch_profiler_dir must be set together, got "
                f"profiler={self.profiler!r} and torch_profiler_dir={self.torch_profiler_dir!r}",
                param="profiler_config",
            )


@group
class LoggingConfig(Group):
    """What is written to the log."""

    log_level: Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"] | None = option(
        None, "Lowest level that is logged; unset takes QUIRE_LOGGING_LEVEL.",
        take=lambda value: value.upper() if isinstance(value, str) else value,
    )  # fmt: skip
    log_config_file: str | None = option(
        None, "A JSON file with a Python logging configuration (dictConfig); unset takes QUIRE_LOGGING_CONFIG_PATH."
    )
    logging_config: dict[str, Any] | None = option(None, "The same as a mapping.")
    aggregate_engine_logging: bool = option(False, "With several engines, one periodic line for all of them.")
    log_format: Literal["text", "json"] = option("text", "json: one JSON object per line. Quire only.")
