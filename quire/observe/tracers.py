"""make_tracer: OpenTelemetry's, loaded only when --otlp-traces-endpoint is given. Must not know: what a span says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.observe.tracing import Tracer
from quire.schema.errors import MissingExtraError

if TYPE_CHECKING:
    from quire.config import EngineConfig


def make_tracer(config: EngineConfig) -> Tracer | None:
    """None: no traces were asked for."""
    observe = config.observability_config
    if observe.otlp_traces_endpoint is None:
        return None
    try:
        from quire.observe.otel import OtelTracer  # lazy
    except ImportError as missing:
        raise MissingExtraError("otlp_traces_endpoint", "otel", missing.name or "opentelemetry") from None
    return OtelTracer(
        observe.otlp_traces_endpoint,
        model=config.model_config.served_model_name,
        details=frozenset(observe.collect_detailed_traces or ()),
    )


def is_otel_available() -> bool:
    try:
        import quire.observe.otel  # noqa: F401  # lazy
    except ImportError:
        return False
    return True
