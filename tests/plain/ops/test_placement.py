"""quant/placement.py: every expert is somewhere, copies are on different ranks, and loads become even."""

from __future__ import annotations

import random

import pytest

from quire.quant.placement import Placement, balanced, balancedness, first_placement
from quire.schema.errors import ConfigError


def check(placed: Placement, count: int) -> None:
    assert {expert for own in placed for expert in own} == set(range(count))
    assert all(len(set(own)) == len(own) for own in placed)


def test_at_first() -> None:
    assert first_placement(5, 2, "linear") == ((0, 1), (2, 3, 4))
    assert first_placement(5, 2, "round_robin") == ((0, 2, 4), (1, 3))
    assert first_placement(4, 2, "linear", 2) == ((0, 1, 3), (0, 1, 2))
    with pytest.raises(ConfigError, match="4 experts cannot be shared out among 8 ranks"):
        first_placement(4, 8, "linear")
    with pytest.raises(ConfigError, match="num_redundant_experts is 5: each of 4 experts can have 1 copies on 2 ranks"):
        first_placement(4, 2, "linear", 5)


@pytest.mark.parametrize("seed", range(200))
def test_any_loads(seed: int) -> None:
    rng = random.Random(seed)
    count, ranks = rng.randrange(1, 40), rng.randrange(1, 9)
    if count < ranks:
        return
    redundant = rng.choice((0, rng.randrange(0, count * (ranks - 1) + 1)))
    placed = first_placement(count, ranks, rng.choice(("linear", "round_robin")), redundant)
    check(placed, count)
    assert sum(map(len, placed)) == count + redundant
    for _ in range(4):
        loads = [rng.choice((0, 1, rng.randrange(1000))) for _ in range(count)]
        moved = balanced(loads, placed)
        check(moved, count)
        assert [len(own) for own in moved] == [len(own) for own in placed]
        assert balanced(loads, placed) == moved
        for was, new in zip(placed, moved, strict=True):  # who stays keeps its place
            assert all(new.index(expert) == place for place, expert in enumerate(was) if expert in new)
        placed = moved


def test_busy_experts_get_the_copies_and_ranks_the_same_load() -> None:
    loads, placed = [90, 1, 1, 1, 1, 1, 1, 90], first_placement(8, 4, "linear", 4)
    assert balancedness(loads, placed) < 0.6
    placed = balanced(loads, placed)
    assert [sum(expert in own for own in placed) for expert in (0, 7)] == [3, 3]
    assert balancedness(loads, placed) > 0.7 and balancedness([0] * 8, placed) == 1.0
