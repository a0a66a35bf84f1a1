"""observe/log_stats.py: one line per interval for all processes, none while idle."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path

import pytest

from quire.observe.log_stats import LogStats
from quire.observe.metrics import Metrics
from quire.schema.stats import CacheStats, StepStats


class Clock:
    def __init__(self) -> None:
        self.time = 50.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("quire.observe.log_stats"), "info", said.append)
    return said


def busy(prompt: int, generated: int, **given: object) -> StepStats:
    values = dict(step=0, running=2, waiting=1, preempted=0, kv_usage=0.125)
    return StepStats(prompt_tokens=prompt, generated_tokens=generated, **(values | given))


def test_a_line_has_the_rates_of_its_interval(lines: list[str]) -> None:
    clock, metrics = Clock(), Metrics("tiny", 64)
    stats = LogStats(metrics.totals, 1, clock=clock)
    metrics.step(busy(100, 0, cache=CacheStats(queries=100, hits=25)))
    metrics.step(busy(0, 50))
    metrics.step(busy(0, 50, preempted=3))
    clock.time += 10
    stats.say()
    assert lines == [
        "Engine 001: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, Preemptions: 3, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    ]
    clock.time += 10
    metrics.step(busy(0, 1))
    stats.say()
    assert "generation throughput: 0.1 tokens/s" in lines[1]
    assert "hit rate" not in lines[1]  # nothing was looked up in this interval
    assert "Preemptions" not in lines[1]


def test_idle_is_said_once(lines: list[str]) -> None:
    clock, metrics = Clock(), Metrics("tiny", 64)
    stats = LogStats(metrics.totals, clock=clock)
    assert stats.say() is None  # nothing has ever happened
    metrics.step(busy(4, 4))
    clock.time += 10
    assert stats.say() is not None
    metrics.step(busy(0, 0, running=0, waiting=0))
    clock.time += 10
    assert "Running: 0 reqs" in (stats.say() or "")
    clock.time += 10
    assert stats.say() is None
    assert len(lines) == 2


def test_of_several_processes_one_speaks_for_all(lines: list[str], tmp_path: Path) -> None:
    folder, clock = str(tmp_path), Clock()
    ours, theirs = Metrics("tiny", 64, folder=folder), Metrics("tiny", 64, folder=folder)
    first = LogStats(ours.totals, folder=folder, clock=clock)
    second = LogStats(theirs.totals, folder=folder, clock=clock)
    ours.step(busy(10, 0))
    theirs.step(busy(0, 20))
    clock.time += 10
    assert "prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0" in (first.say() or "")
    assert second.say() is None
    first.stop()  # as its end would
    theirs.step(busy(0, 30))
    clock.time += 10
    assert "generation throughput: 3.0" in (second.say() or "")
    assert len(lines) == 2


def test_a_thread_says_it_and_ends(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = threading.Event()
    monkeypatch.setattr(logging.getLogger("quire.observe.log_stats"), "info", lambda line: said.set())
    metrics = Metrics("tiny", 64)
    stats = LogStats(metrics.totals)
    metrics.step(busy(4, 4))
    stats.start(interval=0.01)
    assert said.wait(30)
    stats.stop()


def test_a_thread_does_not_keep_it_alive() -> None:
    stats = LogStats(Metrics("tiny", 64).totals)
    before = set(threading.enumerate())
    stats.start(interval=0.01)
    (thread,) = set(threading.enumerate()) - before
    del stats
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
