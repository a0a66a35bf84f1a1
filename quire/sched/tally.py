"""What the scheduler counted since its last report: data, which planner and scheduler add to and `stats` reports."""

from __future__ import annotations

import msgspec

from quire.schema.stats import NO_DRAFTS, DraftStats


class DraftCounts:
    """Drafts that were verified since the last report."""

    def __init__(self) -> None:
        self.num_drafts = self.num_tokens = 0
        self.accepted: list[int] = []  # by position

    def add(self, num_verified: int, num_right: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_verified
        accepted = self.accepted
        accepted.extend([0] * (num_right - len(accepted)))
        for position in range(num_right):
            accepted[position] += 1

    def take(self) -> DraftStats:
        if not self.num_drafts:
            return NO_DRAFTS
        taken = DraftStats(num_drafts=self.num_drafts, num_tokens=self.num_tokens, accepted=tuple(self.accepted))
        self.num_drafts = self.num_tokens = 0
        self.accepted = []
        return taken


class SchedulerCounts(msgspec.Struct):
    step: int = 0  # the last one committed
    queries: int = 0  # prompt tokens looked up in the prefix cache
    hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preempted: int = 0
    drafts: DraftCounts = msgspec.field(default_factory=DraftCounts)
