"""A grammar whose masks take long is ended, and only it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.grammar import masks as masks_module
from quire.grammar.backend import GrammarVocabulary, Rows
from quire.grammar.masks import MOST_SECONDS, Masks, _GrammarState
from quire.schema.messages import EngineOutput, EngineRequest
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, StepPlan


class Matcher:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, count: int) -> None: ...

    def can_end(self) -> bool:
        return False

    def fault(self) -> str | None:
        return None


class Backend:
    """Its matchers say how long they take."""

    def __init__(self) -> None:
        self.now = 0.0

    def fill(self, matchers: Sequence[Matcher], rows: Rows, places: Sequence[int]) -> None:
        for matcher, place in zip(matchers, places, strict=True):
            self.now += matcher.seconds
            rows[place] = -1


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("seconds", [0.3, 5.0])
def test_only_the_slow_one_ends(monkeypatch: pytest.MonkeyPatch, count: int, seconds: float) -> None:
    backend: Any = Backend()
    monkeypatch.setattr(masks_module, "now", lambda: backend.now)
    masks = Masks(lambda: GrammarVocabulary(tokens=[b"a"] * 64, size=64, ends=(3,)), vocab_size=64)
    for number in range(count):
        given = EngineRequest(
            request_id=str(number), prompt_token_ids=[1], params=ResolvedParams(), seed=0, max_tokens=999
        )
        matcher: Any = Matcher(seconds if number == 0 else 0.001)
        masks._states[str(number)] = _GrammarState(given, matcher, backend)
    plan = StepPlan(step=0, grants=tuple(Grant(str(number), 0, 1, True, 0) for number in range(count)))
    for turn in range(400):
        mask, lost = masks.mask(plan)
        if lost:
            assert [one.request_id for one in lost] == ["0"] and "too complex" in str(lost[0].error)
            assert turn <= 12 and backend.now < 2 * seconds + MOST_SECONDS + 1.5
            masks.drop("0")
            plan = StepPlan(step=0, grants=plan.grants[1:])
        masks.advance([EngineOutput(request_id=grant.request_id, new_token_ids=[5]) for grant in plan.grants])
        assert mask is not None or count == 1
    assert len(masks._states) == count - 1


@pytest.mark.parametrize(("seconds", "ends_at"), [(0.045, None), (0.06, 195), (0.1, 39)])
def test_each_token_said_buys_more_time(monkeypatch: pytest.MonkeyPatch, seconds: float, ends_at: int | None) -> None:
    """A long answer under a steady grammar goes on; one that outspends two seconds and 0.05 a token is ended then."""
    backend: Any = Backend()
    monkeypatch.setattr(masks_module, "now", lambda: backend.now)
    masks = Masks(lambda: GrammarVocabulary(tokens=[b"a"] * 64, size=64, ends=(3,)), vocab_size=64)
    given = EngineRequest(request_id="0", prompt_token_ids=[1], params=ResolvedParams(), seed=0, max_tokens=999)
    matcher: Any = Matcher(seconds)
    masks._states["0"] = _GrammarState(given, matcher, backend)
    plan = StepPlan(step=0, grants=(Grant("0", 0, 1, True, 0),))
    for turn in range(400):
        if masks.mask(plan)[1]:
            assert ends_at is not None and abs(turn - ends_at) <= 1
            return
        masks.advance([EngineOutput(request_id="0", new_token_ids=[5])])
    assert ends_at is None and backend.now > 5 * MOST_SECONDS


def test_where_ranks_must_agree_no_clock_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = Backend()
    monkeypatch.setattr(masks_module, "now", lambda: backend.now)
    masks = Masks(
        lambda: GrammarVocabulary(tokens=[b"a"] * 64, size=64, ends=(3,)), vocab_size=64, ends_slow=False
    )  # fmt: skip
    given = EngineRequest(request_id="0", prompt_token_ids=[1], params=ResolvedParams(), seed=0, max_tokens=999)
    matcher: Any = Matcher(50.0)
    masks._states["0"] = _GrammarState(given, matcher, backend)
    plan = StepPlan(step=0, grants=(Grant("0", 0, 1, True, 0),))
    assert not any(masks.mask(plan)[1] for _ in range(20))


def test_the_whole_budget_may_be_spent() -> None:
    given = EngineRequest(request_id="0", prompt_token_ids=[1], params=ResolvedParams(), seed=0, max_tokens=999)
    for num_outputs, budget in ((0, 2.0), (10, 2.5)):
        assert not _GrammarState(given, num_outputs=num_outputs, seconds=budget).is_slow()
        assert _GrammarState(given, num_outputs=num_outputs, seconds=budget + 0.001).is_slow()
