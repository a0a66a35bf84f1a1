"""SeveralMetrics: the metrics of several engines that one program serves, shown together.

Each engine has a Metrics of its own, which differ in the label `engine`. What has no such label is counted in the
first one.
Must not know: where the numbers come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice, zip_longest

from quire.observe.metrics import MOST_ENDED, Ended, Metrics, Totals
from quire.observe.reader import Metric
from quire.observe.sheet import Sheet


class SeveralMetrics:
    """As a MetricSource, and for whoever wants one number for all engines."""

    def __init__(self, engines: Sequence[Metrics]) -> None:
        self.engines = tuple(engines)
        self._shared = {entry.name for entry in self.sheet.table if not entry.per_engine}

    @property
    def sheet(self) -> Sheet:
        """For what all engines have in common: the table, and when counting began."""
        return self.engines[0].sheet

    @property
    def ended(self) -> list[Ended]:
        """The last requests of this process, of any engine, the newest last."""
        rows = heapq.merge(*(reversed(list(one.ended)) for one in self.engines), key=lambda ended: -ended.at)
        return list(islice(rows, MOST_ENDED))[::-1]

    def snapshot(self) -> list[Metric]:
        return self._shown([one.snapshot() for one in self.engines])

    def read(self) -> list[Metric]:
        return self._shown([one.read() for one in self.engines])

    def totals(self) -> Totals:
        """Sums; of the share of KV blocks the mean."""
        each = [one.totals() for one in self.engines]
        sums = {name: sum(getattr(one, name) for one in each) for name in Totals._fields if name not in _APART}
        accepted = zip_longest(*(one.accepted_by_position for one in each), fillvalue=0)
        usage = sum(one.kv_usage for one in each) / len(each)
        return Totals(**sums, kv_usage=usage, accepted_by_position=tuple(map(sum, accepted)))

    def _shown(self, each: list[list[Metric]]) -> list[Metric]:
        first, *others = each
        return first + [metric for metrics in others for metric in metrics if metric.name not in self._shared]


_APART = ("kv_usage", "accepted_by_position")
