"""Records of requests to figures: latencies, throughput and goodput of a whole fleet in its steady state.

Requests that came while the fleet filled are left out of latencies, and rates are counted from then until the last
request came, so that neither the empty beginning nor the emptying end counts. Must not know: how records were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.report import percentile
from quire.simulate.fleet import RequestRecord

WARM_UP = 0.25  # of the time over which requests come


@dataclass(frozen=True, kw_only=True)
class LatencyGoals:
    """What a request must keep to count as good; None: any. Seconds."""

    ttft: float | None = None
    itl: float | None = None  # mean over the request
    attainment: float = 0.99  # the share of requests that must be good

    def is_met(self, record: RequestRecord) -> bool:
        if not record.is_complete or (self.ttft is not None and record.ttft > self.ttft):
            return False
        return self.itl is None or record.tpot <= self.itl


@dataclass(frozen=True, kw_only=True)
class ServingFigures:
    """Latencies in milliseconds; rates per second of the whole fleet."""

    num_requests: int  # that latencies are of
    num_refused: int
    request_rate: float  # as requests came
    output_rate: float  # tokens
    goodput: float  # requests that kept every goal
    attainment: float  # their share
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    e2el_p50: float
    e2el_p99: float


def figures_of(records: Sequence[RequestRecord], goals: LatencyGoals, scale: float) -> ServingFigures:
    """`scale`: replicas of the fleet for each that was simulated."""
    starts = [record.start for record in records]
    begin, end = min(starts), max(starts)
    begin += WARM_UP * (end - begin)
    steady = [record for record in records if record.start >= begin]
    if end - begin <= 0:  # all at once: until the last token instead
        end = max(record.last for record in records)
    seconds = max(end - begin, 1e-9)
    complete = [record for record in steady if record.is_complete]
    ttft = sorted(record.ttft for record in complete)
    gaps = sorted(gap for record in complete for gap in record.gaps)
    whole = sorted(record.last - record.start for record in complete)
    good = sum(goals.is_met(record) for record in steady)
    return ServingFigures(
        num_requests=len(steady),
        num_refused=len(steady) - len(complete),
        request_rate=len(steady) / seconds * scale,
        output_rate=sum(_tokens_within(record, begin, end) for record in records) / seconds * scale,
        goodput=good / seconds * scale,
        attainment=good / len(steady),
        ttft_p50=1e3 * percentile(ttft, 50),
        ttft_p99=1e3 * percentile(ttft, 99),
        itl_p50=1e3 * percentile(gaps, 50),
        itl_p99=1e3 * percentile(gaps, 99),
        e2el_p50=1e3 * percentile(whole, 50),
        e2el_p99=1e3 * percentile(whole, 99),
    )


def _tokens_within(record: RequestRecord, begin: float, end: float) -> float:
    """Those that came in this time, as if evenly between the first and the last."""
    if record.first < 0 or record.first > end or record.last < begin:
        return 0.0
    if record.last <= record.first:
        return float(record.num_tokens)
    inside = min(record.last, end) - max(record.first, begin)
    return record.num_tokens * inside / (record.last - record.first)
