"""Who goes first. A policy gives each request one sortable key for life; a Queue keeps requests in that order.

The last of the running is the first to be preempted, so nothing granted earlier in a plan is ever withdrawn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from quire.sched.request import Request

Key = tuple[float, ...]
_key = attrgetter("order")


def fcfs(request: Request, number: int) -> Key:
    return (number,)


def priority(request: Request, number: int) -> Key:
    """Lower value first, then arrival."""
    return (request.given.priority, request.given.arrival, number)


POLICIES: dict[str, Callable[[Request, int], Key]] = {"fcfs": fcfs, "priority": priority}


class Queue:
    """Requests sorted by their key. `items` is public: the planner walks it, and drops from its end."""

    def __init__(self) -> None:
        self.items: list[Request] = []
        self.num_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return len(self.items)

    def add(self, request: Request) -> None:
        self.num_tokens += request.num_prompt
        if not self.items or self.items[-1].order < request.order:
            self.items.append(request)
        else:
            insort(self.items, request, key=_key)

    def remove(self, request: Request) -> None:
        index = bisect_left(self.items, request.order, key=_key)
        assert self.items[index] is request, f"{request.id} is not where its order says"
        self.drop(index)

    def drop(self, index: int) -> None:
        self.num_tokens -= self.items.pop(index).num_prompt
