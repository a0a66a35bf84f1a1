"""How many drafts are verified: by acceptance and cost, learned from what rows say, verified or not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.config.drafting import SpeculativeConfig
from quire.drafting.lengths import DraftLengths, Rate, StepCosts
from quire.drafting.proposer import NOTHING, Proposal

MEASURED = [13.0, 14.0, 19.5, 26.5, 47.0, 70.0, 90.0]  # ms of steps of 1, 2, 4, 8, 16, 24, 32 tokens


def lengths(most: int = 7, **more: Any) -> DraftLengths:
    made = DraftLengths(SpeculativeConfig(method="ngram", num_speculative_tokens=most, **more))
    made.costs.probed(MEASURED)
    return made


def decode(made: DraftLengths, acceptance: float, steps: int, evidence: int = 3, seed: int = 1) -> tuple[float, float]:
    """One row, each of whose drafts is right with this probability: tokens, and seconds of the steps."""
    rng, tokens, cost, verified = random.Random(seed), 0, 0.0, 0
    for _ in range(steps):
        cost += made.costs.of(1 + verified)
        right = [rng.random() < acceptance for _ in range(8)]
        new = next((i for i in range(verified) if not right[i]), verified) + 1
        said = [1 if right[i] else 2 for i in range(new)]
        made.observe("a", said)
        tokens += new
        (verified,) = made.choose(["a"], [Proposal([1] * 7, evidence)])
    return tokens, cost


def test_hopeless_drafts_cost_next_to_nothing() -> None:
    tokens, cost = decode(lengths(), 0.0, 1000)
    assert tokens == 1000 and cost <= 1.01 * 1000


def test_drafts_that_are_seldom_right_cost_at_most_three_percent() -> None:
    for acceptance in (0.05, 0.1, 0.2, 0.4):
        tokens, cost = decode(lengths(), acceptance, 3000)
        assert cost / tokens <= 1.03, f"acceptance {acceptance}"


def test_drafts_that_are_right_are_verified_up_to_the_limit() -> None:
    tokens, cost = decode(lengths(), 1.0, 200)
    assert tokens > 1400 and cost / tokens < 0.3


def test_what_is_not_verified_is_learned_from_too() -> None:
    made = lengths()
    decode(made, 0.0, 300)
    assert made.choose(["a"], [Proposal([1] * 7, 3)]) == [0]
    tokens, _ = decode(made, 1.0, 300)
    assert tokens > 1000, "the text has become predictable, and nothing was verified when it did"


def test_evidence_is_learned_apart() -> None:
    made = lengths()
    decode(made, 0.0, 100, evidence=1)
    decode(made, 1.0, 100, evidence=6)
    made.end("a")
    weak, strong = made.choose(["b", "c"], [Proposal([1] * 7, 1), Proposal([1] * 7, 6)])
    assert weak == 0 and strong >= 3


def test_of_many_rows_those_are_verified_that_are_worth_it() -> None:
    made = lengths()
    decode(made, 1.0, 100, evidence=6)
    decode(made, 0.0, 100, evidence=1)
    names = [str(i) for i in range(8)]
    chosen = made.choose(names, [Proposal([1] * 7, 6 if i == 5 else 1) if i % 2 else NOTHING for i in range(8)])
    assert chosen[5] >= 3 and sum(chosen) == chosen[5]


@pytest.mark.parametrize(("num_rows", "most"), [(1, 7), (4, 2), (8, 2), (9, 7), (16, 0), (40, 0)])
def test_limits_by_batch_size(num_rows: int, most: int) -> None:
    made = lengths(disable_by_batch_size=16, num_speculative_tokens_per_batch_size=[[2, 8, 2]])
    assert made.most(num_rows) == most


def test_costs_are_ratios_of_neighbouring_steps() -> None:
    costs = StepCosts()
    costs.probed(MEASURED)
    rng = random.Random(2)
    for _ in range(2000):  # a machine that is up to three times as slow now and then; 8 tokens cost 3 steps of one
        speed = rng.choice([1, 1, 2, 3])
        costs.learn(1, 0.013 * speed * rng.uniform(0.9, 1.1))
        costs.learn(8, 0.039 * speed * rng.uniform(0.9, 1.1))
    assert 2.7 < costs.of(8) / costs.of(1) < 3.3
    before = costs.of(4)
    costs.learn(4, -1.0)
    costs.learn(100_000, 1.0)
    assert costs.of(4) == before and costs.of(5) == costs.of(8) and costs.of(10_000) > costs.of(512)


def test_costs_that_were_not_probed_go_on_as_the_last_ones_do() -> None:
    costs = StepCosts()
    costs.probed(MEASURED[:3])
    assert costs.of(8) == pytest.approx((19.5 + 4 * 2.75) / 13)
    costs.probed([5.0])
    assert costs.of(4) == pytest.approx(1.5), "one size tells nothing"
    costs.probed([5.0, 4.0, 6.0])
    assert costs.of(2) == 1.0, "a longer step is never cheaper"


def test_rows_are_learned_from_in_the_order_of_their_proposals() -> None:
    """Rates go by what was seen last, and ranks that share a model must come to the same ones: the order must not be
    that of hashes, which each process has for itself."""
    made, names = lengths(), [f"request {number}" for number in range(40)]
    made.choose(names, [Proposal([1], 3)] * len(names))
    made.observe_all({name: [1 if i < 20 else 2] for i, name in reversed(list(enumerate(names)))})
    expected = Rate(0.99)
    for i in range(len(names)):
        expected.add(i < 20)
    assert made._first[3].value(0.5) == expected.value(0.5)
