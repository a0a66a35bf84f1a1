"""Whether a draft model drafts at all: by acceptance, by its own cost, and by what it would have to read first."""

from __future__ import annotations

import random

import pytest

from quire.config.drafting import SpeculativeConfig
from quire.drafting.budget import DraftBudget
from quire.drafting.lengths import DraftLengths
from quire.drafting.proposer import MODEL_EVIDENCE, Proposal

MEASURED = [13.0, 14.0, 19.5, 26.5, 47.0, 70.0, 90.0]  # ms of steps of 1, 2, 4, 8, 16, 24, 32 tokens


class Simulated:
    """One row after another; a draft is right with a given probability, and everything costs what the table says."""

    def __init__(self, pass_cost: float, most: int = 4) -> None:
        self.lengths = DraftLengths(SpeculativeConfig(method="draft_model", model="x", num_speculative_tokens=most))
        self.lengths.costs.probed(MEASURED)
        self.budget, self.pass_cost = DraftBudget(self.lengths, pass_cost), pass_cost
        self.rng = random.Random(1)
        self.num_rows = 0

    def answer(self, acceptance: float, num_tokens: int, prompt: int = 1) -> tuple[float, float]:
        """Tokens said, and their cost in steps of one token."""
        self.num_rows += 1
        name, unread, cost, said, verified = f"r{self.num_rows}", prompt, 0.0, 0, 0
        costs = self.lengths.costs
        while said < num_tokens:
            cost += costs.of(1 + verified)
            right = [self.rng.random() < acceptance for _ in range(8)]
            new = next((i for i in range(verified) if not right[i]), verified) + 1
            tokens = [1 if right[i] else 2 for i in range(new)]
            said, unread, verified = said + new, unread + new, 0
            self.lengths.observe(name, tokens)
            self.budget.observe(name, new)
            names, count = self.budget.plan([name], {name: unread}.get)
            if names:
                cost += self.pass_cost * (costs.of(unread) + count - 1)
                unread = 0
                (verified,) = self.lengths.choose([name], [Proposal([1] * count, MODEL_EVIDENCE)], 1)
        self.lengths.end(name)
        self.budget.end(name)
        return said, cost


@pytest.mark.parametrize("pass_cost", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.3])
def test_where_it_does_not_help_it_costs_at_most_three_percent(pass_cost: float, acceptance: float) -> None:
    row = Simulated(pass_cost)
    row.answer(acceptance, 300)  # until it is known
    tokens, cost = row.answer(acceptance, 3000)
    assert cost / tokens <= 1.03


def test_where_it_helps_it_drafts() -> None:
    row = Simulated(0.1)
    row.answer(0.9, 100)
    tokens, cost = row.answer(0.9, 1000)
    assert cost / tokens < 0.75


def test_a_drafter_as_slow_as_the_model_is_not_used_however_good() -> None:
    row = Simulated(1.0)
    row.answer(1.0, 100)
    tokens, cost = row.answer(1.0, 1000)
    assert cost / tokens <= 1.03


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    row = Simulated(0.1)
    row.answer(0.0, 1000)
    row.answer(0.95, 1500)
    tokens, cost = row.answer(0.95, 1000)
    assert cost / tokens < 0.8


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    row = Simulated(0.5, most=3)
    for _ in range(100):
        row.answer(0.95, 8, prompt=500)
    cost = sum(row.answer(0.95, 8, prompt=500)[1] for _ in range(50))
    assert cost <= 1.03 * 50 * 8


def test_costs_follow_what_is_measured() -> None:
    budget = Simulated(0.5).budget
    for _ in range(100):
        budget.learn_step(1, 0.010)
        budget.learn_drafting(1, 4, 0.008)
    assert budget.pass_cost == pytest.approx(0.2, rel=0.01)


def test_rows_that_cannot_be_drafted_for_are_left_alone() -> None:
    budget = Simulated(0.1).budget
    assert budget.plan(["a", "b"], lambda name: None) == ([], 0)
    names, count = budget.plan(["a", "b"], {"b": 1}.get)
    assert names == ["b"] and count > 0
