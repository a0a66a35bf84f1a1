"""The table of metrics: every name, kind, label set and bucket, declared once.

Names, labels and buckets are vLLM's, so that dashboards keep working; a metric that vLLM has renamed is shown under
its old name too. Only metrics whose feature exists, or whose number is known to be zero, are declared. Label values
are closed sets: nothing that a client sends can become one. Must not know: who counts, or how a page is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.schema.messages import FinishReason

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_SMALL = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_HTTP_FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0,
              30.0, 60.0)  # fmt: skip
_HTTP_COARSE = (0.1, 0.5, 1.0)
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
UP_TO_LENGTH: tuple[float, ...] = ()  # filled in per model: 1, 2, 5, 10, … up to max_model_len

Kind = Literal["counter", "gauge", "histogram", "summary"]
Values = tuple[str, ...]


@dataclass(frozen=True)
class MetricDeclaration:
    """One metric. `labels` are those beyond model_name and engine; `values` every combination they can have."""

    name: str
    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()
    values: tuple[Values, ...] = ((),)
    buckets: tuple[float, ...] = ()
    old_names: tuple[str, ...] = ()
    per_engine: bool = True  # has the label `engine`


def _each(*values: str) -> tuple[Values, ...]:
    return tuple((value,) for value in values)


_REASONS = _each(*(reason.value for reason in FinishReason))
_SOURCES = _each("local_compute", "local_cache_hit", "external_kv_transfer")
_CACHED_SOURCES = _each("local_cache_hit", "external_kv_transfer")
_NO_MFU = "stays 0: enable_mfu_metrics is not in this version"
_NO_TIER = "stays 0: no cache outside the engine is in this version"

TABLE = (
    MetricDeclaration("vllm:estimated_flops_per_gpu", "counter", f"Arithmetic done; {_NO_MFU}."),
    MetricDeclaration("vllm:estimated_read_bytes_per_gpu", "counter", f"Bytes read; {_NO_MFU}."),
    MetricDeclaration("vllm:estimated_write_bytes_per_gpu", "counter", f"Bytes written; {_NO_MFU}."),
    MetricDeclaration("vllm:num_requests_running", "gauge", "Requests that hold a row on the device."),
    MetricDeclaration("vllm:num_requests_waiting", "gauge", "Requests that wait to be scheduled."),
    MetricDeclaration(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "The same by reason: no room yet, or held back although there may be room (a paused engine).",
        ("reason",),
        _each("capacity", "deferred"),
    ),
    MetricDeclaration(
        "vllm:engine_sleep_state",
        "gauge",
        "1 at the state the engine is in.",
        ("sleep_state",),
        _each("awake", "weights_offloaded", "discard_all"),
    ),
    MetricDeclaration(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of KV blocks held; 1 means all.",
        old_names=("vllm:gpu_cache_usage_perc",),
    ),
    MetricDeclaration(
        "vllm:prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        old_names=("vllm:gpu_prefix_cache_queries",),
    ),
    MetricDeclaration(
        "vllm:prefix_cache_hits",
        "counter",
        "Prompt tokens found in the prefix cache.",
        old_names=("vllm:gpu_prefix_cache_hits",),
    ),
    MetricDeclaration(
        "vllm:external_prefix_cache_queries", "counter", f"Tokens looked up outside the engine; {_NO_TIER}."
    ),
    MetricDeclaration("vllm:external_prefix_cache_hits", "counter", f"Tokens found outside the engine; {_NO_TIER}."),
    MetricDeclaration("vllm:mm_cache_queries", "counter", "Media items of prompts, whose vectors were looked up."),
    MetricDeclaration("vllm:mm_cache_hits", "counter", "Media items that needed no encoding."),
    MetricDeclaration("vllm:num_preemptions", "counter", "Times a request lost its blocks and was computed again."),
    MetricDeclaration("vllm:prompt_tokens", "counter", "Prompt tokens processed, cached ones included."),
    MetricDeclaration(
        "vllm:prompt_tokens_by_source", "counter", "Prompt tokens by where they came from.", ("source",), _SOURCES
    ),
    MetricDeclaration("vllm:prompt_tokens_cached", "counter", "Prompt tokens taken from a cache."),
    MetricDeclaration(
        "vllm:prompt_tokens_cached_by_source",
        "counter",
        "Prompt tokens taken from a cache, by which.",
        ("source",),
        _CACHED_SOURCES,
    ),
    MetricDeclaration("vllm:generation_tokens", "counter", "Tokens generated."),
    MetricDeclaration(
        "vllm:request_success", "counter", "Requests that ended, by reason.", ("finished_reason",), _REASONS
    ),
    MetricDeclaration(
        "vllm:admission_rejections",
        "counter",
        "Requests refused because the queue was full, by the limit that was reached.",
        ("reason",),
        _each("max_num_queued_reqs", "max_num_queued_tokens"),
        per_engine=False,
    ),
    MetricDeclaration("vllm:request_prompt_tokens", "histogram", "Prompt tokens per request.", buckets=UP_TO_LENGTH),
    MetricDeclaration(
        "vllm:request_generation_tokens", "histogram", "Tokens generated per request.", buckets=UP_TO_LENGTH
    ),
    MetricDeclaration("vllm:iteration_tokens_total", "histogram", "Tokens per step.", buckets=_STEP_TOKENS),
    MetricDeclaration(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "Most tokens generated by any of a request's n answers.",
        buckets=UP_TO_LENGTH,
    ),
    MetricDeclaration("vllm:request_params_n", "histogram", "n of each request.", buckets=_SMALL),
    MetricDeclaration(
        "vllm:request_params_max_tokens", "histogram", "max_tokens of each request.", buckets=UP_TO_LENGTH
    ),
    MetricDeclaration("vllm:time_to_first_token_seconds", "histogram", "Arrival to first token.", buckets=_FIRST_TOKEN),
    MetricDeclaration(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "From one token to the next.",
        buckets=_TOKEN_GAP,
        old_names=("vllm:time_per_output_token_seconds",),
    ),
    MetricDeclaration(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "A request's mean time between tokens.",
        buckets=_TOKEN_GAP,
    ),
    MetricDeclaration("vllm:e2e_request_latency_seconds", "histogram", "Arrival to end.", buckets=_REQUEST),
    MetricDeclaration("vllm:request_queue_time_seconds", "histogram", "Queued to first grant.", buckets=_REQUEST),
    MetricDeclaration(
        "vllm:request_inference_time_seconds", "histogram", "First grant to last token.", buckets=_REQUEST
    ),
    MetricDeclaration(
        "vllm:request_prefill_time_seconds", "histogram", "First grant to first token.", buckets=_REQUEST
    ),
    MetricDeclaration("vllm:request_decode_time_seconds", "histogram", "First token to last token.", buckets=_REQUEST),
    MetricDeclaration("vllm:request_num_preemptions", "histogram", "Preemptions per request.", buckets=_PREEMPTIONS),
    MetricDeclaration(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "Prompt tokens per request that no cache had.",
        buckets=UP_TO_LENGTH,
    ),
    MetricDeclaration("vllm:cache_config_info", "gauge", "1, with the cache configuration as labels."),
    MetricDeclaration(
        "vllm:lora_requests_info", "gauge", "When it was last true; which adapters run and wait are its labels."
    ),
)


def drafts_table(num_drafts: int) -> tuple[MetricDeclaration, ...]:
    """The metrics of speculative decoding with so many drafts per row and step."""
    positions = _each(*map(str, range(num_drafts)))
    return (
        MetricDeclaration("vllm:spec_decode_num_drafts", "counter", "Times that drafts of a request were verified."),
        MetricDeclaration("vllm:spec_decode_num_draft_tokens", "counter", "Drafted tokens that were verified."),
        MetricDeclaration("vllm:spec_decode_num_accepted_tokens", "counter", "Drafted tokens that were right."),
        MetricDeclaration(
            ACCEPTED_PER_POSITION, "counter", "The same by their position in the draft.", ("position",), positions
        ),
    )


METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "other")
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
OTHER_HANDLER = "none"  # a path that is no route


def http_table(handlers: tuple[str, ...]) -> tuple[MetricDeclaration, ...]:
    """The metrics of a server's HTTP side, for the routes it has. They have no model and no engine."""
    named = (*handlers, OTHER_HANDLER)
    by_status = tuple((h, m, s) for h in named for m in METHODS for s in STATUSES)
    by_method = tuple((h, m) for h in named for m in METHODS)
    per_handler = _each(*named)
    return (
        MetricDeclaration("http_requests", "counter", "Requests answered.", ("handler", "method", "status"), by_status),
        MetricDeclaration("http_request_size_bytes", "summary", "Bytes of request bodies.", ("handler",), per_handler),
        MetricDeclaration(
            "http_response_size_bytes", "summary", "Bytes of response bodies.", ("handler",), per_handler
        ),
        MetricDeclaration(
            "http_request_duration_highr_seconds",
            "histogram",
            "Time to the last byte of the answer, all routes.",
            buckets=_HTTP_FINE,
        ),
        MetricDeclaration(
            "http_request_duration_seconds",
            "histogram",
            "Time to the last byte of the answer.",
            ("handler", "method"),
            by_method,
            buckets=_HTTP_COARSE,
        ),
    )
