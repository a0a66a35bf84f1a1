"""Proposer: what every method of drafting looks like to a worker, and the table of methods by name.

In: rows as they join, the tokens they sample, and rows as they leave. Out: for each row a Proposal of tokens that may
come next. Nothing that is proposed can change an answer: the worker verifies it. Must not know: logits, KV, plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from quire.base import registry
from quire.schema.step import NewRow


class Proposal(NamedTuple):
    """Drafts for one row. Proposals with the same `evidence` are expected to be right equally often."""

    token_ids: list[int]
    evidence: int = 0


NOTHING = Proposal([])
MODEL_EVIDENCE = -1  # of what a model drafts


class Proposer(Protocol):
    """One method of drafting, for all rows of a worker."""

    def begin(self, new: NewRow) -> None:
        """A row joins, with all of its tokens so far."""

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The row has sampled these."""

    def propose(self, request_ids: Sequence[str], count: int) -> Sequence[Proposal]:
        """At most `count` tokens for each of these rows."""

    def end(self, request_id: str) -> None:
        """The row leaves: its request has ended, or was preempted and will join again."""


@runtime_checkable
class ModelProposer(Proposer, Protocol):
    """A method that computes: whether it is worth its cost is decided before it proposes (budget.py)."""

    def behind(self, request_id: str) -> int | None:
        """Tokens of the row that it has not read; None: it cannot draft for the row."""


# method -> class, made with a SpeculativeConfig; drafters that are models are made by the worker
METHODS = registry.Registry(
    "speculative_config.method",
    {"ngram": "quire.drafting.ngram:NgramProposer", "suffix": "quire.drafting.suffix:SuffixProposer"},
)
