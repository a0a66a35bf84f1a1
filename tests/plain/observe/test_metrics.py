"""observe/metrics.py and observe/reader.py: every declared metric moves, and only by what happened."""

from __future__ import annotations

import pytest

from quire.observe.metrics import TABLE, Metrics, one_two_five
from quire.observe.reader import Counter, Gauge, Histogram, Metric
from quire.schema.errors import ConfigError
from quire.schema.messages import FinishReason
from quire.schema.params import ResolvedParams
from quire.schema.stats import CacheStats, RequestTimes, StepStats


def make_step(number: int = 0, **given: object) -> StepStats:
    values = dict(step=number, running=0, waiting=0, prompt_tokens=0, generated_tokens=0, preempted=0, kv_usage=0.0)
    return StepStats(**(values | given))


def find(metrics: Metrics, name: str, **labels: str) -> Metric:
    found = [m for m in metrics.snapshot() if m.name == name and labels.items() <= m.labels.items()]
    assert len(found) == 1, f"{name} {labels}: {len(found)} found"
    return found[0]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    metric = find(metrics, name, **labels)
    assert isinstance(metric, (Counter, Gauge))
    return metric.value


def histogram(metrics: Metrics, name: str) -> Histogram:
    metric = find(metrics, name)
    assert isinstance(metric, Histogram)
    return metric


def finish(metrics: Metrics, times: RequestTimes, **given: object) -> None:
    values: dict[str, object] = dict(
        arrival=100.0,
        now=103.0,
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=12,
        num_generation_tokens=5,
        params=ResolvedParams(max_tokens=7),
        num_cached_tokens=4,
    )
    metrics.request_finished(times, **(values | given))


def test_every_declared_metric_is_in_the_snapshot_with_its_labels() -> None:
    metrics = Metrics("tiny", 2048, engine_index=3)
    metrics.cache_config({"block_size": 16})
    assert "vllm:lora_requests_info" not in {m.name for m in metrics.snapshot()}
    metrics.serve_adapters(4)
    snapshot = metrics.snapshot()
    assert {m.name for m in snapshot} == {entry.name for entry in TABLE}
    assert all(m.labels["model_name"] == "tiny" for m in snapshot)
    assert {m.name for m in snapshot if m.labels.get("engine") != "3"} == {"vllm:admission_rejections"}
    assert find(metrics, "vllm:cache_config_info").labels["block_size"] == "16"
    reasons = {m.labels["finished_reason"] for m in snapshot if m.name == "vllm:request_success"}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}


def test_other_bucket_limits() -> None:
    metrics = Metrics("tiny", 2048, buckets={"request_queue_time_seconds": (0.1, 3), "vllm:request_params_n": (4.0,)})
    assert list(histogram(metrics, "vllm:request_queue_time_seconds").buckets) == ["0.1", "3.0", "+Inf"]
    assert list(histogram(metrics, "vllm:request_params_n").buckets) == ["4.0", "+Inf"]
    with pytest.raises(ConfigError, match="no histogram is called vllm:nothing"):
        Metrics("tiny", 2048, buckets={"nothing": (1.0,)})
    with pytest.raises(ConfigError, match="growing"):
        Metrics("tiny", 2048, buckets={"request_params_n": (2.0, 1.0)})


def test_names_have_no_total_suffix_but_the_histogram_that_is_called_so() -> None:
    assert [e.name for e in TABLE if e.name.endswith("_total")] == ["vllm:iteration_tokens_total"]


def test_a_step_sets_gauges_and_adds_to_counters() -> None:
    metrics = Metrics("tiny", 2048)
    metrics.step(make_step(running=3, waiting=2, prompt_tokens=30, generated_tokens=3, preempted=1, kv_usage=0.5))
    metrics.step(make_step(running=1, waiting=0, prompt_tokens=0, generated_tokens=1, kv_usage=0.25))
    assert value(metrics, "vllm:num_requests_running") == 1
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:num_preemptions") == 1
    assert value(metrics, "vllm:generation_tokens") == 4
    steps = histogram(metrics, "vllm:iteration_tokens_total")
    assert (steps.count, steps.sum) == (2, 34)
    assert (steps.buckets["1.0"], steps.buckets["32.0"], steps.buckets["64.0"], steps.buckets["+Inf"]) == (1, 1, 2, 2)


def test_prefix_cache_counts_add_up_over_steps() -> None:
    metrics = Metrics("tiny", 2048)
    for queries, hits in ((10, 0), (20, 16), (5, 2)):
        metrics.step(make_step(cache=CacheStats(queries=queries, hits=hits)))
    assert value(metrics, "vllm:prefix_cache_queries") == 35
    assert value(metrics, "vllm:prefix_cache_hits") == 18


def test_a_paused_engine_holds_requests_back() -> None:
    metrics = Metrics("tiny", 2048)
    metrics.step(make_step(waiting=2, deferred=3))
    assert value(metrics, "vllm:num_requests_waiting") == 5
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="deferred") == 3


def test_prompt_tokens_by_source_add_up() -> None:
    metrics = Metrics("tiny", 2048)
    metrics.prompt_done(20, 16)
    metrics.prompt_done(5, 0)
    assert value(metrics, "vllm:prompt_tokens") == 25
    assert value(metrics, "vllm:prompt_tokens_cached") == 16
    assert value(metrics, "vllm:prompt_tokens_by_source", source="local_compute") == 9
    assert value(metrics, "vllm:prompt_tokens_by_source", source="local_cache_hit") == 16


def test_a_finished_request_fills_its_histograms() -> None:
    metrics = Metrics("tiny", 2048)
    finish(metrics, RequestTimes(queued=1.0, scheduled=1.5, first_token=2.0, last_token=4.0, num_preemptions=2))
    expected = {
        "e2e_request_latency_seconds": 3.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 12,
        "request_generation_tokens": 5,
        "request_prefill_kv_computed_tokens": 8,
        "request_params_max_tokens": 7,
        "request_num_preemptions": 2,
    }
    for name, total in expected.items():
        found = histogram(metrics, f"vllm:{name}")
        assert (found.count, found.sum) == (1, pytest.approx(total)), name
    assert value(metrics, "vllm:request_success", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success", finished_reason="abort") == 0


def test_a_request_that_never_ran_has_no_phases() -> None:
    metrics = Metrics("tiny", 2048)
    finish(metrics, RequestTimes(queued=1.0), finish_reason=FinishReason.ABORT, num_generation_tokens=0)
    assert value(metrics, "vllm:request_success", finished_reason="abort") == 1
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert histogram(metrics, f"vllm:request_{name}_seconds").count == 0
    assert histogram(metrics, "vllm:request_time_per_output_token_seconds").count == 0


def test_parent_and_token_times() -> None:
    metrics = Metrics("tiny", 2048)
    metrics.parent_finished(2, 9)
    metrics.token_times(first=0.3)
    metrics.token_times(gaps=[0.01, 0.02])
    assert histogram(metrics, "vllm:request_params_n").sum == 2
    assert histogram(metrics, "vllm:request_max_num_generation_tokens").sum == 9
    assert histogram(metrics, "vllm:time_to_first_token_seconds").buckets["0.5"] == 1
    gaps = histogram(metrics, "vllm:inter_token_latency_seconds")
    assert (gaps.buckets["0.01"], gaps.buckets["0.025"]) == (1, 2)  # a bound belongs to its bucket


def test_a_snapshot_is_a_copy() -> None:
    metrics = Metrics("tiny", 2048)
    before = metrics.snapshot()
    metrics.prompt_done(5, 0)
    metrics.token_times(first=1.0)
    assert before == Metrics("tiny", 2048).snapshot()


@pytest.mark.parametrize("limit, last, count", [(1, 1, 1), (10, 10, 4), (2048, 2000, 11), (8192, 5000, 12)])
def test_length_buckets_follow_the_model(limit: int, last: int, count: int) -> None:
    bounds = one_two_five(limit)
    assert (bounds[0], bounds[-1], len(bounds)) == (1, last, count)


def test_which_adapters_run_and_wait() -> None:
    metrics = Metrics("tiny", 2048)
    metrics.serve_adapters(4)
    metrics.step(
        StepStats(
            step=1, running=2, waiting=1, prompt_tokens=0, generated_tokens=1, preempted=0, kv_usage=0.0,
            running_adapters=("one", "two"), waiting_adapters=("three",),
        )
    )  # fmt: skip
    told = find(metrics, "vllm:lora_requests_info")
    names = {"running_lora_adapters": "one,two", "waiting_lora_adapters": "three", "max_lora": "4"}
    assert names.items() <= told.labels.items() and told.value > 0
