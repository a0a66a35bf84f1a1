"""What the scheduler counted: totals of the prefix cache, and the numbers of the step that `stats` reports next."""

from __future__ import annotations


class Tally:
    def __init__(self) -> None:
        self.queries = 0  # prompt tokens looked up in the prefix cache, since start or reset
        self.hits = 0
        self.step = 0  # the last one committed
        self.prompt_tokens = 0  # since the last report, as the rest
        self.generated_tokens = 0
        self.preempted = 0

    def begin(self) -> None:
        """Reported; count anew."""
        self.prompt_tokens = self.generated_tokens = self.preempted = 0
