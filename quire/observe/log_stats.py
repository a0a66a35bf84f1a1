"""The periodic line: throughput, queue, KV usage and prefix hits of the last interval.

Comes in: StepStats, once per step. Goes out: at most one INFO line per interval, none while nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.base.clock import now
from quire.base.log import logger
from quire.observe.metrics import since
from quire.schema.stats import CacheStats, StepStats

log = logger(__name__)
INTERVAL_SECONDS = 10.0


class LogStats:
    """Sums steps until an interval has passed, then says them in one line."""

    def __init__(
        self, engine_index: int = 0, interval: float = INTERVAL_SECONDS, clock: Callable[[], float] = now
    ) -> None:
        self._engine = engine_index
        self._interval = interval
        self._clock = clock
        self._since = clock()
        self._prompt = self._generated = self._preempted = 0
        self._queries = self._hits = 0
        self._cache = CacheStats()
        self._last: StepStats | None = None
        self._quiet = True  # the last line already said that nothing happens

    def step(self, stats: StepStats) -> None:
        self._prompt += stats.prompt_tokens
        self._generated += stats.generated_tokens
        self._preempted += stats.preempted
        queries, hits = since(self._cache, stats.cache)
        self._queries += queries
        self._hits += hits
        self._cache = stats.cache
        self._last = stats
        if self._clock() - self._since >= self._interval:
            self.say()

    def say(self) -> str | None:
        """Log the interval up to now and start a new one. None: nothing new to say."""
        current = self._clock()
        seconds = max(current - self._since, 1e-9)
        idle = self._last is None or not (self._prompt or self._generated or self._last.running or self._last.waiting)
        line = None if self._last is None or (idle and self._quiet) else self._line(self._last, seconds)
        if line is not None:
            log.info(line)
        self._quiet = idle
        self._since = current
        self._prompt = self._generated = self._preempted = self._queries = self._hits = 0
        return line

    def _line(self, last: StepStats, seconds: float) -> str:
        parts = [
            f"Engine {self._engine:03d}: Avg prompt throughput: {self._prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._generated / seconds:.1f} tokens/s",
            f"Running: {last.running} reqs",
            f"Waiting: {last.waiting} reqs",
        ]
        if self._preempted:
            parts.append(f"Preemptions: {self._preempted}")
        parts.append(f"KV cache usage: {last.kv_usage:.1%}")
        if self._queries:
            parts.append(f"Prefix cache hit rate: {self._hits / self._queries:.1%}")
        return ", ".join(parts)
