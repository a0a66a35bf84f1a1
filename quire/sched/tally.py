"""What the scheduler counted since its last report, which `stats` reports next."""

from __future__ import annotations


class SchedulerCounts:
    def __init__(self) -> None:
        self.step = 0  # the last one committed
        self.queries = 0  # prompt tokens looked up in the prefix cache
        self.hits = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preempted = 0

    def begin(self) -> None:
        """Reported; count anew."""
        self.queries = self.hits = 0
        self.prompt_tokens = self.generated_tokens = self.preempted = 0
