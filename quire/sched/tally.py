"""What the scheduler counted since its last report: data, which planner and scheduler add to and `stats` reports."""

from __future__ import annotations

import msgspec


class SchedulerCounts(msgspec.Struct):
    step: int = 0  # the last one committed
    queries: int = 0  # prompt tokens looked up in the prefix cache
    hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preempted: int = 0
