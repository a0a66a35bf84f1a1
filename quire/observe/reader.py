"""What LLM.get_metrics() returns: one plain object per metric and label set, a copy at one moment.

Counters are named without the `_total` a Prometheus page adds. Histogram buckets are cumulative, keyed by their upper
bound as text, "+Inf" last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """Goes up and down."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position, such as accepted drafts at each draft position."""

    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(frozen=True)
class Summary(Metric):
    count: int
    sum: float
