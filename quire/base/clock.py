"""Time: one monotonic clock for measuring, and a throttle for things that must not happen too often."""

from __future__ import annotations

from time import perf_counter as now

__all__ = ["Throttle", "now"]


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
