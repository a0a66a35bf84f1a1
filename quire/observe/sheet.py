"""Sheet: the numbers behind a table of declarations, one place in a row of cells for each.

In: add, set, observe, by name and label values. Out: read(), the reader's types, over every process that shares the
sheet: counters, histograms and summaries are summed, gauges are those of the process that set them last.
A name or a label value that was not declared is a KeyError: label sets cannot grow.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quire.base.clock import now
from quire.observe.cells import Cells, Row
from quire.observe.declared import MetricDeclaration, Values
from quire.observe.reader import Counter, Gauge, Histogram, Metric, Summary

_STAMP, _CREATED, _FIRST = 0, 1, 2  # when a gauge was last set; when the row was made; the first number


class _Spread(NamedTuple):
    """A histogram's cells: one per bucket (not cumulative, the last is +Inf), then the sum."""

    first: int
    bounds: tuple[float, ...]


class Sheet:
    def __init__(
        self,
        table: Sequence[MetricDeclaration],
        *,
        kind: str,
        lengths: tuple[float, ...] = (),
        folder: str | None = None,
    ) -> None:
        self.table = table
        self._cells: dict[tuple[str, Values], int] = {}
        self._spreads: dict[tuple[str, Values], _Spread] = {}
        end = _FIRST
        for entry, values in _entries(table):
            key = (entry.name, values)
            if entry.kind in ("histogram", "summary"):
                bounds = (entry.buckets or lengths) if entry.kind == "histogram" else ()
                self._spreads[key] = _Spread(end, bounds)
                end += len(bounds) + 2
            else:
                self._cells[key] = end
                end += 1
        self.cells = Cells(end, kind=kind, meaning=repr((self._cells, self._spreads)), folder=folder)
        self._mine = self.cells.mine
        self._mine[_CREATED] = time.time()

    def add(self, name: str, amount: float = 1.0, *values: str) -> None:
        self._mine[self._cells[name, values]] += amount

    def set(self, name: str, value: float, *values: str) -> None:
        self._mine[self._cells[name, values]] = value
        self._mine[_STAMP] = now()

    def preset(self, name: str, value: float, *values: str) -> None:
        """What a gauge is before anybody sets it: a process that only begins knows less than one that was told."""
        self._mine[self._cells[name, values]] = value

    def observe(self, name: str, value: float, *values: str) -> None:
        first, bounds = self._spreads[name, values]
        mine = self._mine
        mine[first + bisect_left(bounds, value)] += 1.0
        mine[first + len(bounds) + 1] += value

    def created(self) -> float:
        """Wall-clock seconds since when everything is counted."""
        return min(row[_CREATED] for row in self.cells.rows())

    def number(self, name: str, *values: str) -> float:
        """A counter's total, or a gauge's value."""
        kind = next(entry.kind for entry in self.table if entry.name == name)
        rows = self.cells.rows()
        cell = self._cells[name, values]
        return _newest(rows)[cell] if kind == "gauge" else sum(row[cell] for row in rows)

    def sum_of(self, name: str, *values: str) -> float:
        """Of everything a histogram or a summary has seen."""
        first, bounds = self._spreads[name, values]
        return sum(row[first + len(bounds) + 1] for row in self.cells.rows())

    def read(self, labels: Mapping[str, str], *, seen_only: bool = False) -> list[Metric]:
        """Every metric as it is now, in the order of the table. `seen_only` leaves out what never happened."""
        metrics: list[Metric] = []
        rows = self.cells.rows()
        newest = _newest(rows)
        for entry, values in _entries(self.table):
            mine = {k: v for k, v in labels.items() if k != "engine" or entry.per_engine}
            mine |= dict(zip(entry.labels, values, strict=True))
            if entry.kind in ("histogram", "summary"):
                metric = _whole(entry.name, mine, self._spreads[entry.name, values], rows)
                if metric.count or not (seen_only and entry.labels):
                    metrics.append(metric if entry.kind == "histogram" else Summary(*_summary(metric)))
                continue
            cell = self._cells[entry.name, values]
            if entry.kind == "gauge":
                metrics.append(Gauge(entry.name, mine, newest[cell]))
            elif (total := sum(row[cell] for row in rows)) or not (seen_only and entry.labels):
                metrics.append(Counter(entry.name, mine, int(total)))
        return metrics


def _entries(table: Sequence[MetricDeclaration]) -> Iterator[tuple[MetricDeclaration, Values]]:
    return itertools.chain.from_iterable(((entry, values) for values in entry.values) for entry in table)


def _newest(rows: list[Row[float]]) -> Row[float]:
    return max(rows, key=lambda row: row[_STAMP])


def _whole(name: str, labels: dict[str, str], spread: _Spread, rows: list[Row[float]]) -> Histogram:
    first, bounds = spread
    buckets, total = {}, 0
    for index, bound in enumerate((*map(str, bounds), "+Inf")):
        total += int(sum(row[first + index] for row in rows))
        buckets[bound] = total
    return Histogram(name, labels, total, sum(row[first + len(bounds) + 1] for row in rows), buckets)


def _summary(metric: Histogram) -> tuple[str, dict[str, str], int, float]:
    return metric.name, metric.labels, metric.count, metric.sum
