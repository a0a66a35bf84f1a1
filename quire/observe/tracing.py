"""Traces: which headers carry a caller's trace, and what a request's span says.

A Tracer gets one RequestTrace when a caller's request has ended (tracers.py makes it). Must not know: HTTP, or how
spans are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from quire.schema.outputs import RequestMetrics
from quire.schema.params import ResolvedParams

TRACE_HEADERS: Final = ("traceparent", "tracestate")
DETAILS: Final = ("model", "worker", "all")


class SpanAttributes:
    """Names as in vLLM's traces; the first six and the finish reasons are OpenTelemetry's own."""

    GEN_AI_USAGE_COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
    GEN_AI_USAGE_PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
    GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
    GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
    GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
    GEN_AI_REQUEST_ID = "gen_ai.request.id"
    GEN_AI_REQUEST_N = "gen_ai.request.n"
    GEN_AI_USAGE_NUM_SEQUENCES = "gen_ai.usage.num_sequences"
    GEN_AI_LATENCY_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
    GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
    GEN_AI_LATENCY_E2E = "gen_ai.latency.e2e"
    GEN_AI_LATENCY_TIME_IN_MODEL_FORWARD = "gen_ai.latency.time_in_model_forward"
    GEN_AI_LATENCY_TIME_IN_MODEL_EXECUTE = "gen_ai.latency.time_in_model_execute"
    GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL = "gen_ai.latency.time_in_model_prefill"
    GEN_AI_LATENCY_TIME_IN_MODEL_DECODE = "gen_ai.latency.time_in_model_decode"
    GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE = "gen_ai.latency.time_in_model_inference"


@dataclass(frozen=True)
class RequestTrace:
    """A caller's request that has ended, all n answers of it."""

    request_id: str
    headers: Mapping[str, str]
    params: ResolvedParams
    max_tokens: int  # what it could generate, whether asked for or not
    num_prompt_tokens: int
    metrics: RequestMetrics
    ended: float  # wall clock
    finish_reasons: tuple[str, ...]
    error: str | None = None
    forward_seconds: float = 0.0  # of the steps it was in; only measured when asked for
    execute_seconds: float = 0.0

    def attributes(self, model: str, details: frozenset[str]) -> dict[str, str | int | float | tuple[str, ...]]:
        """Phases that it did not live to see are left out."""
        name, times, params = SpanAttributes, self.metrics, self.params
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            name.GEN_AI_RESPONSE_MODEL: model,
            name.GEN_AI_RESPONSE_FINISH_REASONS: self.finish_reasons,
            name.GEN_AI_REQUEST_ID: self.request_id,
            name.GEN_AI_REQUEST_TEMPERATURE: params.temperature,
            name.GEN_AI_REQUEST_TOP_P: params.top_p,
            name.GEN_AI_REQUEST_MAX_TOKENS: self.max_tokens,
            name.GEN_AI_REQUEST_N: params.n,
            name.GEN_AI_USAGE_NUM_SEQUENCES: params.n,
            name.GEN_AI_USAGE_PROMPT_TOKENS: self.num_prompt_tokens,
            name.GEN_AI_USAGE_COMPLETION_TOKENS: times.num_generation_tokens,
            name.GEN_AI_LATENCY_E2E: self.ended - times.arrival_time,
        }
        if times.scheduled_ts:
            attributes[name.GEN_AI_LATENCY_TIME_IN_QUEUE] = times.scheduled_ts - times.queued_ts
        if times.first_token_ts:
            last = max(times.last_token_ts, times.first_token_ts)
            attributes[name.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN] = times.first_token_latency
            attributes[name.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL] = times.first_token_ts - times.scheduled_ts
            attributes[name.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE] = last - times.first_token_ts
            attributes[name.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE] = last - times.scheduled_ts
        if details & {"model", "all"}:
            attributes[name.GEN_AI_LATENCY_TIME_IN_MODEL_FORWARD] = self.forward_seconds
        if details & {"worker", "all"}:
            attributes[name.GEN_AI_LATENCY_TIME_IN_MODEL_EXECUTE] = self.execute_seconds
        return attributes


class Tracer(Protocol):
    def ended(self, trace: RequestTrace) -> None: ...
    def close(self) -> None:
        """Send what has not been sent."""


def trace_headers(headers: Mapping[str, str]) -> dict[str, str] | None:
    """The part of a request's headers that says which trace it belongs to, if it says."""
    carried = {name: value for name in TRACE_HEADERS if (value := headers.get(name)) is not None}
    return carried or None
