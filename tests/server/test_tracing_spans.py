"""Traces: one span per request, sent to a collector that lives in this test, with the caller's trace as its parent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.base import env
from quire.config.server import server_config
from quire.observe.tracing import SpanAttributes, trace_headers
from quire.schema.errors import ConfigError, EngineGenerateError, MissingExtraError, NotBuiltError
from quire.server.app import build_app
from quire.server.state import ServerState
from tests.fake_engine import use_fake, write_model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Speaks OTLP over HTTP: remembers every span it is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.headers: list[Any] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services |= {
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.server.headers.append(self.headers)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {a.key: plain(a.value) for a in span.attributes}


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> AsyncLLM:
    use_fake(monkeypatch)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=write_model(folder), block_size=4, max_model_len=64, **given)
    )


async def test_a_request_is_a_span_in_the_callers_trace(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(tmp_path, monkeypatch, otlp_traces_endpoint=collector.endpoint, served_model_name="tiny",
                   collect_detailed_traces=["model,worker"])  # fmt: skip
    assert await engine.is_tracing_enabled()
    params = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, n=2, seed=1)
    headers = trace_headers({"traceparent": f"00-{TRACE}-{PARENT}-01", "accept": "*/*"})
    assert headers is not None and list(headers) == ["traceparent"]
    async for _ in engine.generate("hello", params, "with-parent", trace_headers=headers):
        pass
    async for _ in engine.generate("hi", SamplingParams(max_tokens=1), "alone"):
        pass
    engine.shutdown()  # sends what is left
    spans = {attributes(span)["gen_ai.request.id"]: span for span in collector.spans}
    assert set(spans) == {"with-parent", "alone"} and collector.services == {"quire"}
    span = spans["with-parent"]
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, PARENT, "llm_request")
    assert not spans["alone"].parent_span_id
    told = attributes(span)
    assert told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.usage.prompt_tokens"] == 5 and told["gen_ai.usage.completion_tokens"] == 10
    assert told["gen_ai.request.max_tokens"] == 5 and told["gen_ai.request.n"] == 2
    assert told["gen_ai.usage.num_sequences"] == 2
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert told["gen_ai.response.finish_reasons"] == ["length", "length"]
    latency = {k.removeprefix("gen_ai.latency."): v for k, v in told.items() if k.startswith("gen_ai.latency.")}
    assert set(latency) == {
        "e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference", "time_in_model_forward", "time_in_model_execute",
    }  # fmt: skip
    assert latency["time_in_model_inference"] == pytest.approx(
        latency["time_in_model_prefill"] + latency["time_in_model_decode"], abs=1e-6
    )
    assert latency["time_in_model_execute"] > 0 and 0 < latency["time_to_first_token"] <= latency["e2e"] < 60
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(latency["e2e"], abs=1e-3)
    documented = {v for k, v in vars(SpanAttributes).items() if k.startswith("GEN_AI")}
    assert set(told) <= documented


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_the_header_of_an_http_request_is_the_parent(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool
) -> None:
    engine = start(tmp_path, monkeypatch, otlp_traces_endpoint=collector.endpoint)
    app = build_app(ServerState.of(engine, server_config()))
    prompt = {"prompt": "hi"} if route == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
        answer = await client.post(
            f"/v1/{route}",
            json=prompt | {"max_tokens": 3, "stream": stream, "n": 2},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "mine"},
        )
    assert answer.status_code == 200, answer.text
    engine.shutdown()
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.trace_state == "vendor=1"
    assert "mine" in attributes(span)["gen_ai.request.id"]
    assert attributes(span)["gen_ai.usage.completion_tokens"] == 6


async def test_failures_and_aborts_are_spans_too(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(tmp_path, monkeypatch, otlp_traces_endpoint=collector.endpoint)
    with pytest.raises(EngineGenerateError):
        async for _ in engine.generate("hello", SamplingParams(max_tokens=5, extra_args={"fail_at": 2}), "fails"):
            pass
    slow = SamplingParams(max_tokens=50, extra_args={"sleep": 0.01})
    async with contextlib.aclosing(engine.generate("hello", slow, "left")) as stream:
        await anext(stream)
    engine.shutdown()
    spans = {attributes(span)["gen_ai.request.id"]: span for span in collector.spans}
    assert spans["fails"].status.code == 2 and "cannot go on" in spans["fails"].status.message
    assert attributes(spans["fails"])["gen_ai.response.finish_reasons"] == ["error"]
    assert spans["left"].status.code == 0
    assert attributes(spans["left"])["gen_ai.response.finish_reasons"] == ["abort"]
    assert "gen_ai.latency.time_in_model_forward" not in attributes(spans["left"]), "only when asked for"


async def test_without_an_endpoint_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()
    engine = start(tmp_path, monkeypatch)
    assert engine.front.tracer is None and not await engine.is_tracing_enabled()
    async for _ in engine.generate("hi", SamplingParams(max_tokens=1), "r", trace_headers={"traceparent": "x"}):
        pass
    engine.shutdown()


@pytest.mark.parametrize("given, words", [
    (dict(collect_detailed_traces=["model"]), "needs otlp_traces_endpoint"),
    (dict(otlp_traces_endpoint="localhost:4317"), "must be a URL"),
    (dict(otlp_traces_endpoint="http://localhost:4317", collect_detailed_traces=["no"]), "collect_detailed_traces"),
])  # fmt: skip
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        AsyncEngineArgs(model=write_model(tmp_path), **given).create_engine_config()


def test_a_gpu_measures_no_forward_pass(tmp_path: Path) -> None:
    args = AsyncEngineArgs(
        model=write_model(tmp_path), otlp_traces_endpoint="http://localhost:4317", collect_detailed_traces=["all"],
        device="cuda",
    )  # fmt: skip
    with pytest.raises(NotBuiltError, match="on CPU only"):
        args.create_engine_config()


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.config.checks.find_spec", lambda name: None)
    args = AsyncEngineArgs(model=write_model(tmp_path), otlp_traces_endpoint="http://localhost:4317")
    with pytest.raises(MissingExtraError, match=r'opentelemetry.sdk.*pip install "quire-llm\[otel\]"'):
        args.create_engine_config()


def test_a_wrong_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    env.forget_all()
    with pytest.raises(env.VariableError, match=r"grpc, http/protobuf"):
        env.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.get()
