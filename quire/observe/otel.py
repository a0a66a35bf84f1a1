"""OtelTracer: a request's span through the OpenTelemetry SDK, sent in batches from a thread of the SDK.

Loaded only when traces are asked for (extra `otel`). Protocol, headers, service name, sampling and time-outs are the
standard OTEL_* environment variables, most of which the SDK reads by itself.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.base import env, registry
from quire.base.log import logger
from quire.observe.tracing import RequestTrace

log = logger(__name__)
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter:OTLPSpanExporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter",
}
_SPAN = "llm_request"
_NANOSECONDS = 1_000_000_000


class OtelTracer:
    def __init__(self, endpoint: str, *, model: str, details: frozenset[str] = frozenset()) -> None:
        protocol = env.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.get() or env.OTEL_EXPORTER_OTLP_PROTOCOL.get()
        exporter: SpanExporter = registry.load(_EXPORTERS[protocol])(endpoint=endpoint)
        self._provider = TracerProvider(resource=_resource())
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._context = TraceContextTextMapPropagator()
        self._model = model
        self._details = details
        log.info("Traces are sent to %s (%s)", endpoint, protocol)

    def ended(self, trace: RequestTrace) -> None:
        span = self._tracer.start_span(
            _SPAN,
            context=self._context.extract(trace.headers),
            kind=SpanKind.SERVER,
            start_time=int(trace.metrics.arrival_time * _NANOSECONDS),
        )
        if span.is_recording():
            span.set_attributes(trace.attributes(self._model, self._details))
            if trace.error is not None:
                span.set_status(Status(StatusCode.ERROR, trace.error))
        span.end(end_time=int(trace.ended * _NANOSECONDS))

    def close(self) -> None:
        self._provider.shutdown()


def _resource() -> Resource:
    """As OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say; the service is called quire if they do not name it."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "quire"}))
    return resource
