"""Records of requests to figures: latencies, throughput and goodput of a whole fleet in its steady state.

Requests that came while the fleet filled are left out of latencies; tokens a second are those of the middle half of
all tokens, so that neither the filling beginning nor the emptying end counts. Must not know: how records were made.
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

    def is_missed(self, record: RequestRecord, now: float) -> bool:
        """For certain, of a request that may not have ended yet."""
        if record.is_complete:
            return not self.is_met(record)
        if self.ttft is None:
            return False
        return (record.ttft if record.first >= 0 else now - record.start) > self.ttft


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


def steady_from(starts: Sequence[float]) -> float:
    """Requests that came earlier are not counted: the fleet was filling."""
    begin, end = min(starts), max(starts)
    return begin + WARM_UP * (end - begin)


def figures_of(records: Sequence[RequestRecord], goals: LatencyGoals, scale: float) -> ServingFigures:
    """`scale`: replicas of the fleet for each that was simulated."""
    starts = [record.start for record in records]
    begin, end = steady_from(starts), max(starts)
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
        output_rate=_token_rate(records) * scale,
        goodput=good / seconds * scale,
        attainment=good / len(steady),
        ttft_p50=1e3 * percentile(ttft, 50),
        ttft_p99=1e3 * percentile(ttft, 99),
        itl_p50=1e3 * percentile(gaps, 50),
        itl_p99=1e3 * percentile(gaps, 99),
        e2el_p50=1e3 * percentile(whole, 50),
        e2el_p99=1e3 * percentile(whole, 99),
    )


def _token_rate(records: Sequence[RequestRecord]) -> float:
    """Tokens a second of the middle half, as if those of a request came evenly."""
    times: list[float] = []
    for record in records:
        gap = record.tpot
        times += [record.first + number * gap for number in range(record.num_tokens)]
    times.sort()
    low, high = len(times) // 4, 3 * len(times) // 4
    seconds = times[high] - times[low] if times else 0.0
    return (high - low) / seconds if seconds > 0 else 0.0
