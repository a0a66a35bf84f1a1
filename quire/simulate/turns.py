"""A processor that works in turns, as an event loop does.

What is ready when a turn begins is done in it, one thing after another; what becomes ready meanwhile waits for the next
turn. So a request that takes several turns to be read waits for a turn's other work each time, and requests that come
together are read together. Must not know: what the work is.
"""

from __future__ import annotations

from collections.abc import Callable

Work = Callable[[float], float]  # from when it begins to when it ends
At = Callable[[float, Callable[[float], None]], None]  # call this at that time


class TurnLoop:
    def __init__(self, at: At) -> None:
        self._at = at
        self._ready: list[Work] = []
        self._free = 0.0  # when the turn under way ends
        self._is_due = False  # a turn will begin

    def add(self, now: float, work: Work) -> None:
        self._ready.append(work)
        if not self._is_due:
            self._is_due = True
            self._at(max(now, self._free), self._turn)

    def _turn(self, now: float) -> None:
        ready, self._ready = self._ready, []
        time = now
        for work in ready:
            time = work(time)
        self._free = time
        self._is_due = bool(self._ready)
        if self._is_due:
            self._at(time, self._turn)


def in_turns(loop: TurnLoop, now: float, seconds: float, turns: int, done: Callable[[float], None]) -> None:
    """Work of so many seconds in so many turns, an equal part in each; `done` is told when the last one is."""

    def work(time: float) -> float:
        nonlocal turns
        turns -= 1
        end = time + part
        if turns:
            loop.add(end, work)
        else:
            done(end)
        return end

    part = seconds / turns
    loop.add(now, work)
