"""The page of observe/prometheus.py, with what server/middleware.py counts, read back with prometheus_client's own
parsers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.base import env
from quire.observe.declared import METHODS, TABLE, http_table
from quire.observe.metrics import Metrics
from quire.observe.prometheus import Page
from quire.schema.messages import FinishReason
from quire.schema.params import SamplingParams
from quire.schema.stats import RequestTimes, StepStats
from quire.server.middleware import HttpMetrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# What a server of vLLM 0.32 shows, from its own page: name and labels, the _created lines and buckets left out.
VLLM = """
counter estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total
gauge num_requests_running num_requests_waiting num_requests_waiting_by_reason:reason engine_sleep_state:sleep_state
gauge kv_cache_usage_perc cache_config_info
counter prefix_cache_queries_total prefix_cache_hits_total external_prefix_cache_queries_total
counter external_prefix_cache_hits_total mm_cache_queries_total mm_cache_hits_total num_preemptions_total
counter prompt_tokens_total prompt_tokens_by_source_total:source prompt_tokens_cached_total
counter prompt_tokens_cached_by_source_total:source generation_tokens_total request_success_total:finished_reason
counter admission_rejections_total:reason
histogram request_prompt_tokens request_generation_tokens iteration_tokens_total request_max_num_generation_tokens
histogram request_params_n request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds
histogram request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
histogram request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
histogram request_num_preemptions request_prefill_kv_computed_tokens
"""


def samples(text: str, parse: object = parse_text) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = parse(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def pick(text: str, name: str, **labels: str) -> float:
    found = {v for (n, have), v in samples(text).items() if n == name and frozenset(labels.items()) <= have}
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found.pop()


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics("tiny", 2048)
    made.cache_config({"block_size": 16, "cache_dtype": "auto"})
    made.step(StepStats(step=1, running=3, waiting=2, prompt_tokens=9, generated_tokens=1, preempted=1, kv_usage=0.5))
    made.prompt_done(20, 16)
    made.token_times(first=0.3, gaps=[0.02, 0.03])
    times = RequestTimes(queued=1.0, scheduled=1.5, first_token=2.0, last_token=4.0)
    made.request_finished(
        times, arrival=100.0, now=103.0, finish_reason=FinishReason.ERROR, num_prompt_tokens=12,
        num_generation_tokens=5, params=SamplingParams(max_tokens=7), num_cached_tokens=4,
    )  # fmt: skip
    made.parent_finished(2, 5)
    made.rejected("max_num_queued_reqs")
    return made


def test_every_metric_of_the_documented_server_is_there(metrics: Metrics) -> None:
    text = Page([metrics]).render()[0].decode()
    families = {family.name: family for family in parse_text(text)}
    for line in VLLM.split("\n"):
        kind, *names = line.split() or [""]
        for name, _, label in (word.partition(":") for word in names):
            plain = name.removesuffix("_total") if kind == "counter" else name
            family = families[f"vllm:{plain}"]
            assert family.type == kind, name
            for sample in family.samples:
                extra = set(sample.labels) - {"model_name", "engine", "le"}
                if name != "cache_config_info":
                    assert extra == ({label} if label else set()), name
                assert ("engine" in sample.labels) is (name != "admission_rejections_total")


def test_numbers_in_both_formats(metrics: Metrics) -> None:
    page = Page([metrics])
    plain, content_type = page.render("")
    assert content_type.startswith("text/plain; version=")
    text = plain.decode()
    assert pick(text, "vllm:num_requests_running", model_name="tiny", engine="0") == 3
    assert pick(text, "vllm:prompt_tokens_total") == 20
    assert pick(text, "vllm:prompt_tokens_cached_by_source_total", source="local_cache_hit") == 16
    assert pick(text, "vllm:request_success_total", finished_reason="error") == 1
    assert pick(text, "vllm:request_success_total", finished_reason="stop") == 0
    assert pick(text, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
    assert pick(text, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert pick(text, "vllm:cache_config_info", block_size="16") == 1
    assert pick(text, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 0
    assert pick(text, "vllm:time_to_first_token_seconds_bucket", le="0.5") == 1
    assert pick(text, "vllm:inter_token_latency_seconds_count") == 2
    assert pick(text, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.05)
    assert pick(text, "vllm:iteration_tokens_total_sum") == 10
    open_body, open_type = page.render(OPENMETRICS)
    assert open_type.startswith("application/openmetrics-text")
    same = samples(open_body.decode(), parse_openmetrics)
    mine = {key: value for key, value in samples(text).items() if key[0].startswith("vllm:")}
    assert mine and all(same[key] == value for key, value in mine.items() if not key[0].endswith("_created"))


def test_old_names_say_the_same(metrics: Metrics) -> None:
    text = Page([metrics]).render()[0].decode()
    assert pick(text, "vllm:gpu_cache_usage_perc") == pick(text, "vllm:kv_cache_usage_perc") == 0.5
    assert pick(text, "vllm:time_per_output_token_seconds_count") == 2
    assert "vllm:gpu_prefix_cache_hits_total" in text


def test_created_lines_can_be_left_out(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "_created" in Page([metrics]).render()[0].decode()
    monkeypatch.setenv("PROMETHEUS_DISABLE_CREATED_SERIES", "1")
    env.forget_all()
    try:
        assert "_created" not in Page([metrics]).render()[0].decode()
    finally:
        env.forget_all()


def test_some_samples_by_name(metrics: Metrics) -> None:
    text = Page([metrics]).render(names=["vllm:num_requests_running", "vllm:prompt_tokens_total"])[0].decode()
    assert {name for name, _ in samples(text)} == {"vllm:num_requests_running", "vllm:prompt_tokens_total"}


def test_own_process_numbers_only_when_alone(metrics: Metrics) -> None:
    assert b"process_resident_memory_bytes" in Page([metrics]).render()[0]
    assert b"process_resident_memory_bytes" not in Page([metrics], alone=False).render()[0]


def test_two_processes_make_one_page(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, second = (Metrics("tiny", 64, folder=folder) for _ in range(2))
    ours, theirs = (HttpMetrics(["/v1/models"], folder=folder) for _ in range(2))
    first.prompt_done(3, 0)
    second.prompt_done(4, 0)
    ours.answered("/v1/models", "GET", 200, 0.01, received=0, sent=5)
    theirs.answered("/v1/models", "GET", 200, 0.01, received=0, sent=7)
    pages = [Page([a, b], alone=False).render()[0].decode() for a, b in ((first, ours), (second, theirs))]
    for text in pages:
        assert pick(text, "vllm:prompt_tokens_total") == 7
        assert pick(text, "http_requests_total", handler="/v1/models", method="GET", status="2xx") == 2
        assert pick(text, "http_response_size_bytes_sum", handler="/v1/models") == 12
    assert pages[0] == pages[1]


def test_what_clients_send_never_becomes_a_label() -> None:
    http = HttpMetrics(["/v1/models", "/v1/models/{name}"])
    for method, handler, status in (("BREW", "/v1/models", 405), ("GET", "/etc/passwd", 404), ("GET", None, 999)):
        http.answered(handler, method, status, 0.2, received=10, sent=20)
    text = Page([http], alone=False).render()[0].decode()
    labels = re.findall(r"\{.*\}", text)  # values hold clock times, which may have any digits
    assert labels and not re.search("BREW|passwd|999", " ".join(labels))
    assert pick(text, "http_requests_total", handler="/v1/models", method="other", status="4xx") == 1
    assert pick(text, "http_requests_total", handler="none", method="GET", status="4xx") == 1
    assert pick(text, "http_requests_total", handler="none", method="GET", status="5xx") == 1
    assert pick(text, "http_request_size_bytes_sum", handler="none") == 20
    assert pick(text, "http_request_duration_highr_seconds_count") == 3
    sizes = {len(entry.values) for entry in http_table(("/v1/models",))}
    assert max(sizes) == 2 * len(METHODS) * 5, "a bounded number of series per route"


def test_the_table_has_no_name_twice() -> None:
    names = [name for entry in (*TABLE, *http_table(())) for name in (entry.name, *entry.old_names)]
    assert len(names) == len(set(names))
