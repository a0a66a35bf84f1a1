"""N-grams and suffixes against a plain reading of the whole text; what past answers are kept, and for whom."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from quire.config.drafting import SpeculativeConfig
from quire.drafting.index import TokenIndex, follow
from quire.drafting.ngram import NgramProposer
from quire.drafting.suffix import PastAnswers, SuffixProposer
from quire.schema.params import ResolvedParams
from quire.schema.step import NewRow


def row(name: str, tokens: Iterable[int], num_prompt: int | None = None, scope: str = "") -> NewRow:
    ids = tuple(tokens)
    return NewRow(
        request_id=name, epoch=0, token_ids=ids, num_prompt_tokens=len(ids) if num_prompt is None else num_prompt,
        params=ResolvedParams(), seed=0, scope=scope,
    )  # fmt: skip


def common_ending(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[-count - 1] == b[-count - 1]:
        count += 1
    return count


@pytest.mark.parametrize("width", [1, 2, 3])
def test_an_index_finds_every_occurrence(width: int) -> None:
    rng = random.Random(width)
    index, text = TokenIndex(width), list[int]()
    for _ in range(300):
        new = [rng.randrange(3) for _ in range(rng.randint(0, 3))]
        index.extend(new)
        text += new
        ends = [at for at in range(len(text) - 1, width - 1, -1) if text[at - width : at] == text[-width:]]
        assert list(index.occurrences(10_000)) == (ends if len(text) >= width else [])
        assert list(index.occurrences(2)) == ends[:2]
        other = [rng.randrange(3) for _ in range(8)]
        ends = [at for at in range(len(text), width - 1, -1) if text[at - width : at] == other[-width:]]
        assert list(index.occurrences_of(other, 10_000)) == ends
        for at in ends[:3]:
            assert index.agreement(at, other, 5) == min(5, common_ending(text[:at], other))


def test_an_index_forgets_its_beginning() -> None:
    rng, index, text = random.Random(4), TokenIndex(2), list[int]()
    for _ in range(60):
        new = [rng.randrange(4) for _ in range(20)]
        index.extend(new)
        text += new
        if rng.random() < 0.5:
            index.drop(rng.randrange(len(index.text)))
        left = text[index.dropped :]
        assert index.text == left and index.length == len(text)
        ends = [at for at in range(len(left) - 1, 1, -1) if left[at - 2 : at] == left[-2:]]
        assert list(index.occurrences(10_000)) == [at + index.dropped for at in ends]


def test_what_follows_a_loop_goes_on_with_it() -> None:
    index = TokenIndex(1)
    index.extend([9, 1, 2, 3])
    assert follow(index, 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2] and follow(index, 2, 1) == [2]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (2, 4), (3, 3), (5, 6)])
def test_ngrams_are_the_longest_and_latest_of_the_row(low: int, high: int) -> None:
    rng = random.Random(high)
    proposer = NgramProposer(SpeculativeConfig(prompt_lookup_min=low, prompt_lookup_max=high))
    text = [rng.randrange(4) for _ in range(30)]
    proposer.begin(row("a", text))
    num_drafted = 0
    for _ in range(120):
        (proposal,) = proposer.propose(["a"], 4)
        lengths = {at: min(16, common_ending(text[:at], text)) for at in range(1, len(text))}
        longest = max(lengths.values())
        if longest < low:
            assert not proposal.token_ids
        elif proposal.token_ids:  # a bounded number of occurrences is compared
            num_drafted += 1
            best = [at for at, length in lengths.items() if length == longest]
            drafts = [(text[at:] * 4)[:4] for at in best]
            agreed = [length for at, length in lengths.items() if (text[at:] * 4)[:4] == proposal.token_ids]
            assert proposal.token_ids in drafts or max(agreed) >= low
        new = [rng.randrange(4) if rng.random() < 0.3 else (proposal.token_ids or [0])[0]]
        proposer.extend("a", new)
        text += new
    assert num_drafted > 20
    proposer.end("a")
    proposer.end("never began")


def test_a_row_is_searched_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = NgramProposer(SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=3))
    compared: list[int] = []
    agreement = TokenIndex.agreement
    monkeypatch.setattr(TokenIndex, "agreement", lambda *given: compared.append(1) or agreement(*given))
    proposer.begin(row("a", [tokens % 5000 if tokens % 2 else 7 for tokens in range(20_001)]))  # 7 everywhere
    proposer.propose(["a"], 4)
    assert 0 < len(compared) <= 17


def suffix(**options: Any) -> SuffixProposer:
    return SuffixProposer(SpeculativeConfig(**{f"suffix_decoding_{name}": value for name, value in options.items()}))


def propose(proposer: SuffixProposer, name: str, count: int = 8) -> list[int]:
    (proposal,) = proposer.propose([name], count)
    return proposal.token_ids


def test_suffixes_follow_the_most_frequent_path() -> None:
    proposer = suffix()
    proposer.begin(row("a", [1, 2, 5, 9, 1, 2, 6, 9, 1, 2, 5, 8, 0, 1, 2]))
    assert propose(proposer, "a") == [5, 8][:2], "5 twice, 6 once; two tokens agree, so two are drafted"
    assert propose(proposer, "a", 1) == [5]
    rare = suffix(min_token_prob=0.5)
    rare.begin(row("a", [1, 2, 5, 9, 1, 2, 6, 9, 1, 2, 7, 8, 0, 1, 2]))
    assert propose(rare, "a") == [], "each is as rare as a third"
    short = suffix(max_spec_factor=0.5)
    short.begin(row("a", [1, 2, 5, 9, 1, 2]))
    assert propose(short, "a") == [5]


def test_suffixes_know_past_answers_of_the_same_scope_only() -> None:
    proposer = suffix()
    proposer.begin(row("a", [40, 41], scope="x"))
    proposer.extend("a", [1, 2, 3, 4, 5])
    proposer.begin(row("b", [7, 2, 3], scope="x"))
    assert propose(proposer, "b") == [], "it has not ended"
    proposer.end("a")
    assert propose(proposer, "b") == [4, 5]
    proposer.begin(row("c", [7, 2, 3], scope="y"))
    assert propose(proposer, "c") == []
    proposer.begin(row("d", [40, 41], scope="x"))
    assert propose(proposer, "d") == [1, 2], "an answer is found by the end of its prompt"


def test_an_answer_is_told_once_though_its_row_left_twice() -> None:
    proposer = suffix()
    proposer.begin(row("a", range(20)))
    proposer.extend("a", [50, 51, 52])
    proposer.end("a")  # preempted
    size = proposer.past.num_tokens
    assert size == 8 + 3 + 1 and len(proposer.past) == 1
    proposer.begin(row("a", [*range(20), 50, 51, 52], num_prompt=20))
    proposer.extend("a", [53, 54, 55])
    proposer.end("a")
    assert proposer.past.num_tokens == size + 3 + 1


def test_past_answers_are_dropped_oldest_first() -> None:
    past = PastAnswers(3, most_tokens=100)
    for i in range(200):
        past.add(f"scope {i % 2}", [i, i + 1, i + 2])
    assert len(past) == 3 and past.num_tokens == 12
    kept = {scope: index.text for scope in ("scope 0", "scope 1") if (index := past.of(scope)) is not None}
    assert kept["scope 1"][-4:] == [199, 200, 201, -1] and kept["scope 0"][-4:] == [198, 199, 200, -1]
    assert sum(map(len, kept.values())) <= 4 * 3 * 4 // 3 + 4, "tokens that are due go when they are a quarter"
    past.add("scope 0", list(range(90)))
    assert past.num_tokens <= 100
    past.add("scope 0", list(range(200)))
    assert past.num_tokens <= 100, "one that is too long is not kept at all"
    nothing = PastAnswers(0)
    nothing.add("", [1, 2, 3, 4])
    assert len(nothing) == 0 and nothing.of("") is None


def test_past_answers_of_many_scopes_are_bounded_together() -> None:
    past = PastAnswers(50)
    for i in range(1000):
        past.add(str(i), [1, 2, 3])
    assert len(past) == 50 and past.of("3") is None and past.of("999") is not None


def test_a_replaced_token_does_not_end_what_is_followed() -> None:
    proposer = suffix()
    turn = [30, 31, 32, 33, 34, 35, 50, 36, 37, 38, 39, 40, 41]
    proposer.begin(row("a", [1, *turn, 2, *turn[:6]]))
    assert propose(proposer, "a")[:2] == [50, 36]
    proposer.extend("a", [51])  # and not 50
    assert propose(proposer, "a") == [36, 37, 38], "half as far as six tokens reach"
    proposer.extend("a", [36, 37, 38])
    assert propose(proposer, "a")[:3] == [39, 40, 41]
    proposer.extend("a", [7])
    proposer.extend("a", [8])
    proposer.extend("a", [9])
    assert propose(proposer, "a") == [], "it is lost"
