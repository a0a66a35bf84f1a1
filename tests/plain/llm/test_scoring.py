"""llm/scoring.py: pairs of texts before and after the model."""

from __future__ import annotations

import random
from array import array
from typing import Any
from unittest.mock import Mock

import pytest

from quire.llm import scoring
from quire.schema.errors import InputError
from quire.schema.step import Pooled


@pytest.mark.parametrize("tile", [1, 5, 1 << 20])
def test_max_sim_in_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a tile, each row of the first is compared with every row of the second."""
    monkeypatch.setattr(scoring, "_TILE", tile)
    rng = random.Random(1)
    one, other = ([[rng.gauss(0, 1) for _ in range(4)] for _ in range(count)] for count in (7, 3))
    expected = sum(max(sum(a * b for a, b in zip(row, col, strict=True)) for col in other) for row in one)
    first, second = (
        Pooled((len(r), 4), "float32", array("f", [x for row in r for x in row]).tobytes()) for r in (one, other)
    )
    assert scoring.max_sim(first, second) == pytest.approx(expected, abs=1e-4)
    assert scoring.max_sim(first, Pooled((0, 4), "float32", b"")) == 0.0


def test_no_pair_is_put_together_before_all_are_checked() -> None:
    pooling = Mock(takes_pairs=True)

    def check_pair(first: str, second: str, *, is_cut: bool) -> None:
        if len(first) + len(second) > 5:
            raise InputError("too long")

    pooling.check_pair = check_pair
    pairs: list[Any] = [("a", "b"), ("a", "bcdefg")]
    with pytest.raises(InputError, match="too long"):
        scoring.cross_prompts(pooling, pairs, None, None)
    pooling.pair.assert_not_called()
    assert len(scoring.cross_prompts(pooling, pairs[:1], None, None)) == 1
