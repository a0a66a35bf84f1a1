"""The rejection rule: whatever drafts are drawn from, tokens are distributed as without drafts.

Counts of many draws are compared with exact probabilities by Pearson's statistic, and known faults exceed its bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import sample
from quire.sampling import rejection
from quire.sampling.rejection import DrawnDrafts, decide, draw_drafts

DRAWS, VOCAB = 20_000, 9
LOGITS = torch.tensor([1.5, 0.0, -1.0, 2.0, float("-inf"), 0.3, 0.3, -3.0, 1.0])
WRONG = {
    "flat": torch.full((VOCAB,), 1 / VOCAB),
    "sharp": torch.softmax(torch.tensor([0.0, 4.0, 0.0, 1.0, 3.0, 0.0, -2.0, 0.0, 0.0]), 0),
    "forbidden": torch.eye(VOCAB)[4],
    "certain": torch.eye(VOCAB)[3],
    "the same": torch.softmax(LOGITS, 0),
}


def pearson(counts: Tensor, shares: Tensor) -> tuple[float, float]:
    """The statistic, and a bound that one of a hundred thousand right samples exceeds (Wilson and Hilferty)."""
    assert not counts[shares <= 0].any(), "a token that cannot be"
    expected = shares.double() * counts.sum()
    often = expected >= 5  # the others count as one
    observed, expected = (torch.cat((x[often], x[~often].sum()[None])) for x in (counts.double(), expected))
    possible = expected > 0
    statistic = ((observed - expected) ** 2 / expected)[possible].sum()
    free = int(possible.sum()) - 1
    part = 2 / (9 * free)
    return float(statistic), free * (1 - part + 4.265 * part**0.5) ** 3


def counts_of(q: Tensor, *, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How often each token came, and how often the draft was kept, by token."""
    seeds = torch.arange(DRAWS) * 7919 - 50_000_000
    places = torch.full((DRAWS,), 11) if positions is None else positions
    shares = q.expand(DRAWS, VOCAB)
    drafts = draw_drafts(shares, seeds, places)
    said = decide(LOGITS.expand(DRAWS, VOCAB), DrawnDrafts(torch.arange(DRAWS), drafts, shares), seeds, places)
    return torch.bincount(said, minlength=VOCAB), torch.bincount(said[said == drafts], minlength=VOCAB)


@pytest.mark.parametrize("name", WRONG)
def test_tokens_are_distributed_as_without_drafts(name: str) -> None:
    p, q = torch.softmax(LOGITS, 0), WRONG[name]
    counts, kept = counts_of(q)
    statistic, bound = pearson(counts, p)
    assert statistic < bound
    together = float(torch.minimum(p, q).sum())
    assert abs(int(kept.sum()) - together * DRAWS) < 5 * DRAWS**0.5, "as many are kept as can be"


def test_each_position_has_numbers_of_its_own() -> None:
    """One seed, many positions."""
    seeds, places = torch.full((DRAWS,), 12345), torch.arange(DRAWS)
    for numbers in (sample.uniform(seeds, places), sample.uniform(places, seeds)):
        assert numbers.min() > 0 and numbers.max() < 1
        statistic, bound = pearson(torch.histc(numbers, 16, 0, 1), torch.full((16,), 1 / 16))
        assert statistic < bound
    counts, _ = counts_of(WRONG["sharp"], positions=torch.arange(DRAWS))
    statistic, bound = pearson(counts, torch.softmax(LOGITS, 0))
    assert statistic < bound


def always(logits: Tensor, drafts: DrawnDrafts, seeds: Tensor, positions: Tensor) -> Tensor:
    return drafts.token_ids


def by_p_alone(logits: Tensor, drafts: DrawnDrafts, seeds: Tensor, positions: Tensor) -> Tensor:
    """Kept with p(x), whatever it was drawn from."""
    p = torch.softmax(logits, -1)
    keeps = sample.uniform(seeds + rejection._DECIDED, positions) < p.gather(1, drafts.token_ids.unsqueeze(1)).squeeze(
        1
    )
    rest = sample.sample_((p - drafts.probabilities).clamp(min=0).log(), seeds, positions)
    return torch.where(keeps, drafts.token_ids, rest)


def from_p(logits: Tensor, drafts: DrawnDrafts, seeds: Tensor, positions: Tensor) -> Tensor:
    """What is refused is drawn from all of p."""
    said = DECIDE(logits, drafts, seeds, positions)
    return torch.where(said == drafts.token_ids, said, sample.sample_(logits.clone(), seeds, positions))


def of_another(logits: Tensor, drafts: DrawnDrafts, seeds: Tensor, positions: Tensor) -> Tensor:
    """Judged by another distribution than it was drawn from."""
    return DECIDE(logits, drafts._replace(probabilities=drafts.probabilities.roll(1, -1)), seeds, positions)


def with_the_noise_of_drafts(logits: Tensor, drafts: DrawnDrafts, seeds: Tensor, positions: Tensor) -> Tensor:
    return DECIDE(logits, drafts, seeds + rejection._DRAFTED, positions)


DECIDE = rejection.decide
FAULTS: list[Callable[..., Any]] = [always, by_p_alone, from_p, of_another, with_the_noise_of_drafts]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_faults_exceed_the_bound(fault: Any) -> None:
    p, q = torch.softmax(LOGITS, 0), torch.softmax(torch.tensor([0.0, 2.0, 0.0, 1.0, -9.0, 0.0, -2.0, 0.0, 0.0]), 0)
    seeds, places = torch.arange(DRAWS) * 7919, torch.full((DRAWS,), 11)
    shares = q.expand(DRAWS, VOCAB)
    drafts = DrawnDrafts(torch.arange(DRAWS), draw_drafts(shares, seeds, places), shares)
    counts = torch.bincount(fault(LOGITS.expand(DRAWS, VOCAB), drafts, seeds, places), minlength=VOCAB)
    counts, possible = counts[p > 0], p[p > 0]
    statistic, bound = pearson(counts, possible)
    assert statistic > bound
    right = torch.bincount(decide(LOGITS.expand(DRAWS, VOCAB), drafts, seeds, places), minlength=VOCAB)
    statistic, bound = pearson(right, p)
    assert statistic < bound


def test_a_broken_drafter_changes_nothing() -> None:
    """Its distributions are no numbers."""
    seeds, places = torch.arange(DRAWS) * 7919, torch.full((DRAWS,), 11)
    shares, drafts = torch.full((DRAWS, VOCAB), float("nan")), torch.zeros(DRAWS, dtype=torch.int64)
    tokens = decide(LOGITS.expand(DRAWS, VOCAB), DrawnDrafts(torch.arange(DRAWS), drafts, shares), seeds, places)
    counts = torch.bincount(tokens, minlength=VOCAB)
    statistic, bound = pearson(counts, torch.softmax(LOGITS, 0))
    assert statistic < bound
