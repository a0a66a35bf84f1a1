"""GET /metrics of one API process: exact numbers after known requests, read with prometheus_client's parser."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import AsyncEngineArgs, AsyncLLM
from quire.base import env
from quire.config.server import server_config
from quire.server.app import build_app
from quire.server.state import ServerState
from tests.fake_engine import use_fake, write_model


class Site:
    """An app without sockets, and its page of metrics."""

    def __init__(self, engine: AsyncLLM, client: httpx.AsyncClient) -> None:
        self.engine, self.client = engine, client

    async def complete(self, expect: int = 200, **body: Any) -> httpx.Response:
        answer = await self.client.post("/v1/completions", json={"model": "tiny", "temperature": 0} | body)
        assert answer.status_code == expect, answer.text
        return answer

    async def page(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """(sample name, label values beyond model and engine) -> value."""
        answer = await self.client.get("/metrics")
        assert answer.status_code == 200
        found = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name.startswith("vllm:") and sample.name != "vllm:cache_config_info":
                    assert sample.labels["model_name"] == "tiny"
                values = tuple(v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
                found[sample.name, values] = sample.value
        return found

    async def until(self, name: str, value: float, *labels: str) -> None:
        deadline = time.monotonic() + 60
        while (got := (await self.page())[name, labels]) != value:
            assert time.monotonic() < deadline, f"{name} is {got}, not {value}"
            await asyncio.sleep(0.01)


@pytest.fixture(params=[{}])
async def site(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()
    use_fake(monkeypatch)
    given = dict(request.param)
    own = {name: given.pop(name) for name in ("queue_full_status",) if name in given}
    args = AsyncEngineArgs(
        model=write_model(tmp_path), served_model_name=["tiny", "alias"], block_size=4, max_model_len=64,
        generation_config="vllm", **given,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(args)
    app = build_app(ServerState.of(engine, server_config(**own)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield Site(engine, client)
    engine.shutdown()


async def test_exact_numbers_after_known_requests(site: Site) -> None:
    await site.complete(prompt="abcdefghij", max_tokens=5)  # 10 prompt tokens, 5 more, ended by length
    await site.complete(prompt="abcdefghij", max_tokens=7, n=2)  # two more sequences; blocks of 4 are cached by now
    await site.complete(prompt="xy", max_tokens=30, vllm_xargs={"eos_at": 3})  # ended by end of text
    page = await site.page()
    assert page["vllm:prompt_tokens_total", ()] == 32
    assert page["vllm:generation_tokens_total", ()] == 5 + 14 + 3
    assert page["vllm:request_success_total", ("length",)] == 3
    assert page["vllm:request_success_total", ("stop",)] == 1
    assert page["vllm:request_prompt_tokens_count", ()] == 4
    assert page["vllm:request_prompt_tokens_sum", ()] == 32
    assert page["vllm:request_prompt_tokens_bucket", ("2.0",)] == 1
    assert page["vllm:request_prompt_tokens_bucket", ("10.0",)] == 4
    assert page["vllm:request_generation_tokens_sum", ()] == 22
    assert page["vllm:request_params_n_sum", ()] == 1 + 2 + 1
    assert page["vllm:request_params_n_count", ()] == 3
    assert page["vllm:request_params_max_tokens_sum", ()] == 5 + 7 + 7 + 30
    assert page["vllm:request_max_num_generation_tokens_sum", ()] == 5 + 7 + 3
    assert page["vllm:time_to_first_token_seconds_count", ()] == 4
    assert page["vllm:inter_token_latency_seconds_count", ()] == 22 - 4
    assert page["vllm:time_per_output_token_seconds_count", ()] == 22 - 4
    assert page["vllm:e2e_request_latency_seconds_count", ()] == 4
    cached = page["vllm:prompt_tokens_cached_total", ()]
    assert cached == 16, "two whole blocks of 4, for both of n=2"
    assert page["vllm:prompt_tokens_by_source_total", ("local_cache_hit",)] == cached
    assert page["vllm:prompt_tokens_by_source_total", ("local_compute",)] == 32 - cached
    assert page["vllm:prefix_cache_queries_total", ()] == 32 and page["vllm:prefix_cache_hits_total", ()] == cached
    assert page["vllm:iteration_tokens_total_sum", ()] == 32 - cached + 22
    assert page["vllm:num_requests_running", ()] == 0 and page["vllm:kv_cache_usage_perc", ()] == 0
    for phase in ("queue", "prefill", "decode", "inference"):
        assert page[f"vllm:request_{phase}_time_seconds_count", ()] == 4
    assert page["http_requests_total", ("/v1/completions", "POST", "2xx")] == 3
    assert page["http_request_duration_highr_seconds_count", ()] == 3


async def test_probes_and_the_page_itself_are_not_counted(site: Site) -> None:
    for path in ("/health", "/version", "/metrics", "/metrics/"):
        assert (await site.client.get(path)).status_code == 200
    await site.complete(prompt="ab", max_tokens=1)
    assert (await site.client.get("/v1/models")).status_code == 200
    page = await site.page()
    counted = {labels: value for (name, labels), value in page.items() if name == "http_requests_total"}
    assert counted == {("/v1/completions", "POST", "2xx"): 1, ("/v1/models", "GET", "2xx"): 1}


async def test_failures_and_refusals(site: Site) -> None:
    await site.complete(prompt="hello", max_tokens=9, vllm_xargs={"fail_at": 2}, expect=500)
    await site.complete(prompt="hello", max_tokens=9, temperature=-1, expect=400)
    await site.client.request("BREW", "/v1/completions")
    await site.client.get("/no/such/path")
    page = await site.page()
    assert page["vllm:request_success_total", ("error",)] == 1
    assert sum(value for (name, _), value in page.items() if name == "vllm:request_success_total") == 1
    assert page["http_requests_total", ("/v1/completions", "POST", "5xx")] == 1
    assert page["http_requests_total", ("/v1/completions", "POST", "4xx")] == 1
    assert page["http_requests_total", ("none", "GET", "4xx")] == 1
    others = [labels for (name, labels) in page if name == "http_requests_total" and labels[1] == "other"]
    assert len(others) == 1 and others[0][2] == "4xx", "BREW is no label"
    assert not [labels for (name, labels) in page if "/metrics" in labels], "the page does not count itself"


async def test_gauges_follow_requests_that_leave(site: Site) -> None:
    asking = asyncio.create_task(
        site.client.post(
            "/v1/completions", json=dict(prompt="hello", max_tokens=50, vllm_xargs={"sleep": 0.05}, stream=True)
        )
    )
    await site.until("vllm:num_requests_running", 1)
    assert (await site.page())["vllm:kv_cache_usage_perc", ()] > 0
    assert (await site.page())["vllm:gpu_cache_usage_perc", ()] > 0
    await site.engine.abort(site.engine._streams.request_ids())
    await site.until("vllm:num_requests_running", 0)
    await site.until("vllm:kv_cache_usage_perc", 0)
    await site.until("vllm:request_success_total", 1, "abort")
    await asking


async def test_a_paused_engine_defers(site: Site) -> None:
    await site.engine.pause_generation()
    asking = asyncio.create_task(site.complete(prompt="hello", max_tokens=2))
    await site.until("vllm:num_requests_waiting_by_reason", 1, "deferred")
    assert (await site.page())["vllm:num_requests_waiting", ()] == 1
    await site.engine.resume_generation()
    await asking
    await site.until("vllm:num_requests_waiting", 0)


async def test_formats_and_selection(site: Site) -> None:
    asked = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = await site.client.get("/metrics", headers=asked)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    answer = await site.client.get("/metrics", params={"name[]": "vllm:num_requests_running"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [line for line in answer.text.splitlines() if not line.startswith("#")]
    assert samples == ['vllm:num_requests_running{engine="0",model_name="tiny"} 0.0']
    labels = (await site.client.get("/metrics", params={"name[]": "vllm:cache_config_info"})).text
    assert 'block_size="4"' in labels and "num_gpu_blocks=" in labels


@pytest.mark.parametrize("site", [{"disable_log_stats": True}], indirect=True)
async def test_without_stats_only_http_is_counted(site: Site) -> None:
    await site.complete(prompt="abc", max_tokens=1)
    page = await site.page()
    assert page["http_requests_total", ("/v1/completions", "POST", "2xx")] == 1
    assert not [name for name, _ in page if name.startswith("vllm:")]


async def test_the_load_in_a_header_for_whoever_asks(site: Site) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 1}
    for stream in (False, True):
        for form in ("TEXT", "text", "JSON"):
            headers = {"endpoint-load-metrics-format": form}
            answer = await site.client.post("/v1/completions", json={**body, "stream": stream}, headers=headers)
            kind, _, told = answer.headers["endpoint-load-metrics"].partition(" ")
            assert kind == form.upper()
            if kind == "JSON":
                named = json.loads(told)["named_metrics"]
            else:
                named = {
                    k.removeprefix("named_metrics."): float(v) for k, v in (p.split("=") for p in told.split(", "))
                }
            assert set(named) == {"kv_cache_usage_perc", "num_requests_waiting"}
            assert 0.0 <= named["kv_cache_usage_perc"] <= 1.0 and named["num_requests_waiting"] == 0
    for headers in ({}, {"endpoint-load-metrics-format": "XML"}):
        answer = await site.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200 and "endpoint-load-metrics" not in answer.headers
    page = await site.client.get("/v1/models", headers={"endpoint-load-metrics-format": "TEXT"})
    assert "endpoint-load-metrics" not in page.headers


@pytest.mark.parametrize(
    "site", [{"max_num_queued_reqs": 1, "max_num_seqs": 1, "queue_full_status": "429"}], indirect=True
)
async def test_the_status_of_a_full_queue_is_an_option(site: Site) -> None:
    slow = dict(prompt="hello", max_tokens=50, vllm_xargs={"sleep": 0.05})
    asking = [asyncio.create_task(site.complete(**slow))]
    await site.until("vllm:num_requests_running", 1)
    asking.append(asyncio.create_task(site.complete(**slow)))
    await site.until("vllm:num_requests_waiting_by_reason", 1, "capacity")
    for path, form in (("/v1/completions", slow), ("/v1/completions", slow | {"stream": True})):
        answer = await site.client.post(path, json=form)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == 429
    chat = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    answer = await site.client.post("/v1/messages", json=chat)
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"]
    await site.engine.abort(site.engine._streams.request_ids())
    await asyncio.gather(*asking)


@pytest.mark.parametrize("site", [{"max_num_queued_reqs": 1, "max_num_seqs": 1}], indirect=True)
async def test_a_full_queue_is_counted_by_its_limit(site: Site) -> None:
    slow = dict(prompt="hello", max_tokens=50, vllm_xargs={"sleep": 0.05})
    asking = [asyncio.create_task(site.complete(**slow))]
    await site.until("vllm:num_requests_running", 1)
    asking.append(asyncio.create_task(site.complete(**slow)))
    await site.until("vllm:num_requests_waiting_by_reason", 1, "capacity")
    answer = await site.client.post("/v1/completions", json=slow | {"n": 2})
    assert answer.status_code in (429, 503) and answer.headers["retry-after"]
    page = await site.page()
    assert page["vllm:admission_rejections_total", ("max_num_queued_reqs",)] == 1, "a request with n=2 is one"
    assert page["vllm:admission_rejections_total", ("max_num_queued_tokens",)] == 0
    assert page["vllm:request_success_total", ("error",)] == 0
    await site.engine.abort(site.engine._streams.request_ids())
    await asyncio.gather(*asking)
