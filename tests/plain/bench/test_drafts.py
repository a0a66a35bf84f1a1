"""Speculative decoding in metrics: counted by Metrics, shown on the page and in the log line, read by the benchmark."""

from __future__ import annotations

from quire.bench import drafts, report
from quire.observe.log_stats import LogStats
from quire.observe.metrics import Metrics
from quire.observe.prometheus import Page
from quire.observe.reader import Counter, Vector
from quire.sched.tally import DraftCounts
from quire.schema.stats import DraftStats, StepStats

NAME = "vllm:spec_decode_num_accepted_tokens_per_pos"


def step(stats: DraftStats) -> StepStats:
    return StepStats(
        step=1, running=1, waiting=0, prompt_tokens=0, generated_tokens=3, preempted=0, kv_usage=0.0, drafts=stats
    )


def test_drafts_are_counted_by_position() -> None:
    counts = DraftCounts()
    for num_verified, num_right in ((3, 3), (3, 1), (2, 0)):
        counts.add(num_verified, num_right)
    taken = counts.take()
    assert taken == DraftStats(num_drafts=3, num_tokens=8, accepted=(2, 1, 1)) and counts.take() == DraftStats()
    assert taken + DraftStats(num_drafts=1, num_tokens=4, accepted=(1, 1, 1, 1)) == DraftStats(
        num_drafts=4, num_tokens=12, accepted=(3, 2, 2, 1)
    )


def test_metrics_page_log_line_and_benchmark_agree() -> None:
    metrics = Metrics("tiny", 64, num_drafts=4)
    page = Page([metrics], alone=False)
    before = drafts.parse(page.render()[0].decode())
    log = LogStats(metrics.totals)
    metrics.step(step(DraftStats(num_drafts=3, num_tokens=8, accepted=(2, 1, 1))))
    metrics.step(step(DraftStats()))
    labels = {"model_name": "tiny", "engine": "0"}
    read = {metric.name: metric for metric in metrics.read() if "spec_decode" in metric.name}
    assert read == {
        "vllm:spec_decode_num_drafts": Counter("vllm:spec_decode_num_drafts", labels, 3),
        "vllm:spec_decode_num_draft_tokens": Counter("vllm:spec_decode_num_draft_tokens", labels, 8),
        "vllm:spec_decode_num_accepted_tokens": Counter("vllm:spec_decode_num_accepted_tokens", labels, 4),
        NAME: Vector(NAME, labels, [2, 1, 1, 0]),
    }
    text = page.render()[0].decode()
    assert f'{NAME}_total{{engine="0",model_name="tiny",position="1"}} 1.0' in text
    assert "Mean acceptance length: 2.33, Draft acceptance rate: 50.0%, Per-position acceptance: 0.67 0.33 0.33" in (
        log.say() or ""
    )
    assert "acceptance" not in (log.say() or ""), "nothing new"
    result = drafts.measure(before, drafts.parse(text))
    assert (result["spec_decode_num_drafts"], result["spec_decode_acceptance_rate"]) == (3, 50.0)
    assert [round(share, 2) for share in result["spec_decode_per_position_acceptance_rates"]] == [0.67, 0.33, 0.33]
    lines = report._drafts(result)
    assert any(line.split() == ["Acceptance", "length:", "2.33"] for line in lines) and len(lines) == 9


def test_without_drafts_nothing_is_shown() -> None:
    metrics = Metrics("tiny", 64)
    metrics.step(step(DraftStats()))
    text = Page([metrics], alone=False).render()[0].decode()
    assert "spec_decode" not in text and drafts.parse(text) is None and drafts.measure(None, None) == {}
    assert all("spec_decode" not in metric.name for metric in metrics.read())
