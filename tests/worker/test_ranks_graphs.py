"""Graphs of several ranks: all of them replay the same bucket, whatever each has measured, and whatever memory it has.

Ranks are threads; a step sums as many numbers as its bucket has rows, and sums of different sizes fail at once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.layers.adapters import StepAdapters
from quire.quant.shard import ShardGroup
from quire.schema.errors import EngineDeadError
from quire.worker.graphs import LATE_AFTER, GraphTimes
from quire.worker.inputs import StepShape
from tests.thread_ranks import on_ranks
from tests.worker.test_staged import CountedCapturer, ListedGraphs

SIZES = (8, 16, 24, 32)
ONE = np.ones(1, np.int64)
ADAPTED = StepShape(0 * ONE, 0 * ONE, ONE, ONE, ONE.astype(bool), 0 * ONE, adapters=ONE.astype(np.int32))


class SummingGraphs(ListedGraphs):
    """The step that runs before a capture sums too."""

    def run_uncaptured(self, bucket: int) -> None:
        self._ranks.reduce(torch.zeros(bucket))

    def steps(self, buckets: Sequence[int]) -> list[int | None]:
        """What is replayed for steps of these buckets in which rows have adapters; None: they run without a graph."""
        used = []
        for wanted in buckets:
            bucket = None if self.bucket_of(ADAPTED) is None else self.prepare(wanted)
            self._ranks.reduce(torch.zeros(1 if bucket is None else bucket))
            used.append(bucket)
        return used


def graphs_of(group: ShardGroup, room: int = 100, **more: Any) -> SummingGraphs:
    made: SummingGraphs = SummingGraphs(SIZES, CountedCapturer(room), ranks=group, **more)
    return made


def test_ranks_count_uses_instead_of_what_each_has_measured() -> None:
    """A capture begins with a step that sums over ranks: one that decides alone would wait for the others for ever."""

    def captured_after(group: ShardGroup) -> int:
        graphs = graphs_of(group, times=GraphTimes(capture=0.5, row=(0.0, 0.01, 1.0)[group.rank]))
        graphs._capture(32)
        return [graphs.prepare(24) for _ in range(LATE_AFTER + 1)].index(24)

    assert on_ranks(3, captured_after) == [LATE_AFTER - 1] * 3


@pytest.mark.parametrize(
    ("room", "expected"), [(0, [None] * 3), (1, [24, None, None]), (2, [24, 32, 24]), (3, [24, 32, 24])]
)
def test_ranks_fall_back_together_when_one_cannot_capture(room: int, expected: list[int | None]) -> None:
    """A graph with adapters is captured when such a step comes. The memory that is left is each rank's own."""
    buckets = [24, 32, 24, *[8] * LATE_AFTER, 8, 16]

    def steps(group: ShardGroup) -> list[int | None]:
        return graphs_of(group, room if group.rank == 1 else 100, adapters=StepAdapters()).steps(buckets)

    one, other = on_ranks(2, steps)
    assert one == other and one[:3] == expected
    assert one[-2:] == {0: [None, None], 1: [None, None], 2: [24, 24], 3: [8, 24]}[room]


def test_what_only_some_could_capture_is_not_replayed_later() -> None:
    """Adapters that change more layers make all ranks capture again, what one of them did not have included."""

    def steps(group: ShardGroup) -> list[int | None]:
        adapters = StepAdapters()
        graphs = graphs_of(group, 1 if group.rank == 1 else 100, adapters=adapters)
        used = graphs.steps([32, 8, *[16] * LATE_AFTER])
        adapters.version += 1
        return used + graphs.steps([16, 8])

    one, other = on_ranks(2, steps)
    assert one == other and one[:2] == [32, 32] and one[-3:] == [32, None, None]


def test_without_adapters_ranks_fail_together() -> None:
    """A start has captured all sizes; where it has not, and there is nothing to fall back on, no rank goes on alone."""

    def failed(group: ShardGroup) -> int | None:
        graphs = graphs_of(group, 2 - group.rank)
        graphs._capture(8)
        reason = "no memory is left" if group.rank else "another rank could not capture a decode graph of 32 rows"
        with pytest.raises(RuntimeError, match=reason):
            graphs.prepare(32)
        return graphs.prepare(8)

    assert on_ranks(2, failed) == [8, 8]


def test_a_rank_that_left_others_in_a_sum_ends_the_engine() -> None:
    """It failed in the step that runs before a capture, which they have begun too."""

    class Broken(SummingGraphs):
        def run_uncaptured(self, bucket: int) -> None:
            if self._ranks.rank == 0:
                raise torch.cuda.OutOfMemoryError("no memory is left")
            super().run_uncaptured(bucket)

    def run(group: ShardGroup) -> int | None:
        graphs: Broken = Broken(SIZES, CountedCapturer(), adapters=StepAdapters(), ranks=group)
        return graphs.prepare(8)

    with pytest.raises(EngineDeadError, match=r"rank 0 of 2 could not run a step of 8 rows.*no memory is left"):
        on_ranks(2, run)


def test_a_failed_capture_keeps_nothing_of_what_it_allocated() -> None:
    """The step that goes on without a graph needs that memory. No collection of garbage comes in between."""
    graphs = SummingGraphs(SIZES, CountedCapturer(0), adapters=StepAdapters())
    left: list[weakref.ref[torch.Tensor]] = []
    plain = graphs._capture

    def capture(bucket: int) -> None:
        activations = torch.zeros(bucket)
        left.append(weakref.ref(activations))
        plain(bucket)

    graphs._capture = capture  # type: ignore[method-assign]
    gc.disable()
    try:
        assert graphs.prepare(8) is None
        assert [one() for one in left] == [None]
    finally:
        gc.enable()
