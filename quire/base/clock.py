"""Time: one monotonic clock for measuring, a throttle for things that must not happen too often, and a list of laps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter as now

__all__ = ["Laps", "Throttle", "now"]


class Throttle:
    """True at most once per `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = -float("inf")

    def ready(self) -> bool:
        current = now()
        if current - self._last < self.seconds:
            return False
        self._last = current
        return True


class Laps:
    """Stretches of time by name, in order of their ends."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, float, str]] = []  # name, seconds, the stretch around it
        self._around = ""
        self._last = now()

    def mark(self, name: str) -> None:
        """What passed since the last mark, or since this began."""
        current = now()
        self.taken.append((name, current - self._last, self._around))
        self._last = current

    @contextmanager
    def inside(self, around: str) -> Iterator[None]:
        """Marks made here are parts of the stretch `around`, which somebody else measures."""
        outer, self._around = self._around, around
        self._last = now()
        try:
            yield
        finally:
            self._around = outer
            self._last = now()
