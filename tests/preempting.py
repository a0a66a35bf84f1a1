"""A scheduler that preempts, whatever room there is: in every second step the request that came last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Preemptions:
    count = 0


@contextmanager
def preempting(scheduler: Any, then: Callable[[], None] | None = None) -> Iterator[Preemptions]:
    """One request always goes on. `then`: called after each preemption."""
    planner, seen, num_steps = scheduler.planner, Preemptions(), 0
    fill = planner.fill

    def disturbed() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 2 == 0 and len(planner.running.items) > 1:
            planner.preempt(planner.running.items[-1])
            seen.count += 1
            if then is not None:
                then()
        return fill()

    planner.fill = disturbed
    try:
        yield seen
    finally:
        del planner.fill
