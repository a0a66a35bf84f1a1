"""The arithmetic of the benches: arrivals, percentiles, goodput, peaks, the table and the files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from statistics import mean, pvariance

import pytest

from quire.bench import report
from quire.bench.arrivals import ArrivalProcess, arrival_times
from quire.bench.datasets import Sample
from quire.bench.endpoints import MeasuredResponse
from quire.bench.serve import save
from quire.schema.errors import InputError


def outcome(
    start: float, ttft: float, itls: list[float], tokens: int | None = None, *, ok: bool = True
) -> MeasuredResponse:
    made = MeasuredResponse(Sample("x", 10, 5), start, stream=True)
    made.ttft, made.itls, made.success = ttft, itls, ok
    made.latency = ttft + sum(itls)
    made.output_len = len(itls) + 1 if tokens is None else tokens
    made.texts = ["word"]
    made.error = "" if ok else "broken"
    return made


def test_everything_at_once_without_a_rate() -> None:
    assert arrival_times(4, ArrivalProcess(), Random(0)) == [0.0] * 4


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_a_rate_is_kept_and_burstiness_is_the_spread(burstiness: float) -> None:
    times = arrival_times(4000, ArrivalProcess(20.0, burstiness), Random(1))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 20.0)
    # a gamma distribution of shape k has variance mean² / k
    assert pvariance(gaps) == pytest.approx(mean(gaps) ** 2 / burstiness, rel=0.15)


def test_infinite_burstiness_is_even() -> None:
    assert arrival_times(4, ArrivalProcess(2.0, math.inf), Random(0)) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_gets_faster(strategy: str) -> None:
    times = arrival_times(1000, ArrivalProcess(ramp=strategy, ramp_start=1.0, ramp_end=50.0), Random(0))
    first, last = times[99] - times[0], times[-1] - times[-100]
    assert first > 5 * last
    assert ArrivalProcess(ramp=strategy, ramp_start=1.0, ramp_end=50.0).rate_at(1.0) == pytest.approx(50.0)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(rate=0.0), dict(rate=-1.0), dict(rate=math.nan), dict(burstiness=0.0),
        dict(ramp="linear", ramp_start=5.0, ramp_end=5.0), dict(ramp="exponential", ramp_start=0.0, ramp_end=5.0),
        dict(ramp="linear", rate=3.0, ramp_start=1.0, ramp_end=5.0), dict(ramp="steps", ramp_start=1.0, ramp_end=2.0),
    ],
)  # fmt: skip
def test_impossible_paces_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        ArrivalProcess(**wrong)


@pytest.mark.parametrize("share", [0, 10, 25, 50, 75, 90, 99, 99.9, 100])
def test_percentiles_are_numpys(share: float) -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted(Random(3).expovariate(1.0) for _ in range(57))
    assert report.percentile(values, share) == pytest.approx(numpy.percentile(values, share))
    assert report.spread(values, (share,))["std"] == pytest.approx(numpy.std(values))


def test_figures_of_a_run() -> None:
    run = [
        outcome(0.0, 0.1, [0.02, 0.04]),
        outcome(0.05, 0.3, [0.1]),
        outcome(0.5, 0.2, [], 1),
        outcome(0.5, 0.0, [], 0, ok=False),
    ]
    wanted = report.ReportOptions(
        metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(50.0, 99.0), goodput=(("ttft", 250.0), ("tpot", 50.0))
    )
    found = report.measure(run, 2.0, wanted)
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 6)
    assert found["request_throughput"] == 1.5
    assert found["output_throughput"] == 3.0
    assert found["total_token_throughput"] == 18.0
    assert found["request_goodput"] == 1.0  # the second is too late for its first token
    assert found["mean_ttft_ms"] == pytest.approx(200.0)
    assert found["median_ttft_ms"] == pytest.approx(200.0)
    assert found["mean_tpot_ms"] == pytest.approx((30.0 + 100.0) / 2)  # one token alone has no time per output token
    assert found["mean_itl_ms"] == pytest.approx((20 + 40 + 100) / 3)
    assert found["mean_e2el_ms"] == pytest.approx((160 + 400 + 200) / 3)
    assert found["p50_itl_ms"] == pytest.approx(40.0)
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == pytest.approx(6.0)
    assert found["errors"] == ["", "", "", "broken"]
    assert found["itls"][0] == [0.02, 0.04]


def test_goodput_is_none_unless_asked_for() -> None:
    assert report.measure([outcome(0, 0.1, [])], 1.0, report.ReportOptions())["request_goodput"] is None


def test_a_run_in_which_everything_failed_still_reports() -> None:
    wanted = report.ReportOptions(metrics=("ttft", "tpot", "itl", "e2el"))
    found = report.measure([outcome(0, 0, [], 0, ok=False)] * 3, 1.0, wanted)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["max_concurrent_requests"]) == (
        0,
        3,
        0,
        0,
    )
    assert report.table(found, wanted)
    assert report.failures([outcome(0, 0, [], 0, ok=False)] * 3) == ["3 failed: broken"]
    for kinds, end in ((2, "and 1 other kind of failure"), (3, "and 2 other kinds of failure")):
        outcomes = [outcome(0, 0, [], 0, ok=False) for _ in range(kinds)]
        for number, failed in enumerate(outcomes):
            failed.fail(str(number))
        assert report.failures(outcomes, most=1)[-1] == end


def test_tokens_that_share_a_piece_are_counted_as_tokens() -> None:
    assert report.peak_tokens([outcome(0.0, 0.5, [0.1], tokens=10)]) == pytest.approx(10.0)
    assert report.peak_tokens([outcome(0.0, 0.5, [0.8], tokens=10)]) == pytest.approx(5.0)  # one piece in each second


def test_the_table_has_the_lines_other_tools_print() -> None:
    wanted = report.ReportOptions(
        metrics=("ttft", "tpot", "itl", "e2el"), goodput=(("ttft", 1e3),), max_concurrency=4, request_rate=2.0
    )
    lines = report.table(report.measure([outcome(0, 0.1, [0.1])], 1.0, wanted), wanted)
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    names = [line.split(":")[0] for line in lines if ":" in line]
    assert names == [
        "Successful requests", "Failed requests", "Maximum request concurrency", "Request rate configured (RPS)",
        "Benchmark duration (s)", "Total input tokens", "Total generated tokens", "Request throughput (req/s)",
        "Request goodput (req/s)", "Output token throughput (tok/s)", "Peak output token throughput (tok/s)",
        "Peak concurrent requests", "Total token throughput (tok/s)",
        "Mean TTFT (ms)", "Median TTFT (ms)", "P99 TTFT (ms)", "Mean TPOT (ms)", "Median TPOT (ms)", "P99 TPOT (ms)",
        "Mean ITL (ms)", "Median ITL (ms)", "P99 ITL (ms)", "Mean E2EL (ms)", "Median E2EL (ms)", "P99 E2EL (ms)",
    ]  # fmt: skip
    heads = [line for line in lines if line.startswith("-")]
    assert heads[0] == "---------------Time to First Token----------------"
    assert heads[1] == "-----Time per Output Token (excl. 1st token)------"
    assert "Mean TTFT (ms):                          100.00" in lines


@pytest.mark.parametrize(
    "parse, text",
    [
        (report.parse_metrics, "ttft,speed"),
        (report.parse_percentiles, "50,much"),
        (report.parse_percentiles, "101"),
        (lambda text: report.parse_goodput([text]), "ttft=5"),
        (lambda text: report.parse_goodput([text]), "itl:5"),
        (lambda text: report.parse_goodput([text]), "ttft:fast"),
        (lambda text: report.parse_goodput([text]), "ttft:-1"),
        (lambda text: report.parse_goodput([text]), "ttft:nan"),
    ],
)
def test_wrong_wishes_are_refused(parse: object, text: str) -> None:
    with pytest.raises(InputError, match=text.split(",")[-1].split(":")[0].split("=")[0]):
        parse(text)


def test_results_are_saved_short_long_and_one_after_another(tmp_path: Path) -> None:
    found = report.measure([outcome(0, 0.1, [0.1])], 1.0, report.ReportOptions())
    path = tmp_path / "deep" / "result.json"
    save(found, path, detailed=False, append=False)
    short = json.loads(path.read_text())
    assert not set(report.DETAILS) & set(short) and short["completed"] == 1
    save(found, path, detailed=True, append=True)
    lines = path.read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["ttfts"] == [0.1]
