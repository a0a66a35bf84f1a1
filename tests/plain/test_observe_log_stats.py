"""observe/log_stats.py: one line per interval, none while idle."""

from __future__ import annotations

import logging

import pytest

from quire.observe.log_stats import LogStats
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
    return StepStats(prompt_tokens=prompt, generated_tokens=generated, **(values | given))  # type: ignore[arg-type]


def test_one_line_per_interval_with_rates(lines: list[str]) -> None:
    clock = Clock()
    stats = LogStats(engine_index=1, interval=10.0, clock=clock)
    stats.step(busy(100, 0, cache=CacheStats(queries=100, hits=25)))
    clock.time += 5
    stats.step(busy(0, 50, cache=CacheStats(queries=100, hits=25)))
    assert lines == []
    clock.time += 5
    stats.step(busy(0, 50, preempted=3, cache=CacheStats(queries=100, hits=25)))
    assert lines == [
        "Engine 001: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, Preemptions: 3, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    ]
    clock.time += 10
    stats.step(busy(0, 1, cache=CacheStats(queries=100, hits=25)))
    assert "generation throughput: 0.1 tokens/s" in lines[1]
    assert "hit rate" not in lines[1]  # nothing was looked up in this interval


def test_idle_is_said_once(lines: list[str]) -> None:
    clock = Clock()
    stats = LogStats(interval=10.0, clock=clock)
    assert stats.say() is None  # nothing has ever happened
    stats.step(busy(4, 4))
    clock.time += 10
    assert stats.say() is not None
    stats.step(busy(0, 0, running=0, waiting=0))
    clock.time += 10
    assert "Running: 0 reqs" in (stats.say() or "")
    clock.time += 10
    assert stats.say() is None
    assert len(lines) == 2
