"""The periodic line: throughput, queue, KV usage and prefix hits of the last interval.

Comes in: totals, read from the metrics when an interval has passed. Goes out: one INFO line, and none while nothing
happens. Of several processes that share an engine one speaks, for all of them; when it dies, another goes on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import zip_longest

from quire.base import env
from quire.base.clock import now
from quire.base.log import logger
from quire.observe.cells import LeaderLock
from quire.observe.metrics import Totals

log = logger(__name__)


class LogStats:
    """Remembers the totals of the last line, and says what has been added."""

    def __init__(
        self,
        read: Callable[[], Totals],
        engine_index: int | None = 0,
        *,
        folder: str | None = None,
        clock: Callable[[], float] = now,
    ) -> None:
        """`engine_index` None: of all engines together."""
        self._read = read
        self._name = "All engines" if engine_index is None else f"Engine {engine_index:03d}"
        self._clock = clock
        self._lock = LeaderLock(folder, f"log-{'all' if engine_index is None else engine_index}")
        self._since = clock()
        self._last = read()
        self._quiet = True  # the last line already said that nothing happens
        self._ended = threading.Event()

    def start(self, interval: float | None = None) -> None:
        """Say a line every `interval` seconds, from a thread, until stop() or until this is collected."""
        seconds = env.LOG_STATS_INTERVAL.get() if interval is None else interval
        thread = threading.Thread(
            target=_speak, args=(weakref.ref(self), self._ended, seconds), name="log stats", daemon=True
        )
        thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._lock.release()

    def say(self) -> str | None:
        """Log the interval up to now and start a new one. None: nothing new to say, or another process says it."""
        current = self._clock()
        seconds = max(current - self._since, 1e-9)
        totals, before = self._read(), self._last
        self._since, self._last = current, totals
        if not self._lock.mine():
            return None
        added = totals.prompt_tokens - before.prompt_tokens + totals.generated_tokens - before.generated_tokens
        idle = not (added or totals.running or totals.waiting)
        line = None if idle and self._quiet else self._line(before, totals, seconds)
        if line is not None:
            log.info(line)
        self._quiet = idle
        return line

    def _line(self, before: Totals, totals: Totals, seconds: float) -> str:
        prompt = (totals.prompt_tokens - before.prompt_tokens) / seconds
        generated = (totals.generated_tokens - before.generated_tokens) / seconds
        parts = [
            f"{self._name}: Avg prompt throughput: {prompt:.1f} tokens/s",
            f"Avg generation throughput: {generated:.1f} tokens/s",
            f"Running: {totals.running} reqs",
            f"Waiting: {totals.waiting} reqs",
        ]
        if preempted := totals.preempted - before.preempted:
            parts.append(f"Preemptions: {preempted}")
        parts.append(f"KV cache usage: {totals.kv_usage:.1%}")
        if queries := totals.queries - before.queries:
            parts.append(f"Prefix cache hit rate: {(totals.hits - before.hits) / queries:.1%}")
        if totals.num_drafts > before.num_drafts:
            parts.extend(_drafts(before, totals))
        return ", ".join(parts)


def _drafts(before: Totals, totals: Totals) -> list[str]:
    """How often drafts were right: in all, and at each position up to the last that ever was."""
    num_drafts = totals.num_drafts - before.num_drafts
    accepted = totals.accepted_tokens - before.accepted_tokens
    by_position = [
        (count - earlier) / num_drafts
        for count, earlier in zip_longest(totals.accepted_by_position, before.accepted_by_position, fillvalue=0)
    ]
    while by_position and not by_position[-1]:
        by_position.pop()
    rate = accepted / max(1, totals.draft_tokens - before.draft_tokens)
    return [
        f"Mean acceptance length: {1 + accepted / num_drafts:.2f}",
        f"Draft acceptance rate: {rate:.1%}",
        f"Per-position acceptance: {' '.join(f'{share:.2f}' for share in by_position) or 'none'}",
    ]


def _speak(speaker: weakref.ref[LogStats], ended: threading.Event, interval: float) -> None:
    while not ended.wait(interval):
        stats = speaker()
        if stats is None:
            return
        stats.say()
        del stats
