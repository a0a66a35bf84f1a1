"""Routers: turns, loads and prefixes decide as they say, whatever comes in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.sched import router as module
from quire.sched.router import PIECE, ROUTERS, LeastLoaded, PrefixAware, Router
from quire.schema.errors import ConfigError
from tests.plain.sched.kit import request

TEMPLATE = tuple(range(3 * PIECE + 2))  # three pieces, and the two tokens of a question


def assign(router: Router, name: str, prompt: Sequence[int] = (), **more: Any) -> int:
    return router.assign(request(name, list(prompt), **more))


def pieces(router: PrefixAware, prompt: Sequence[int], **more: Any) -> list[bytes]:
    return router._hashes(request("a", list(prompt), **more))


def test_round_robin_takes_turns_whatever_ends() -> None:
    router = Router(3)
    assert [assign(router, str(i), (1, 2)) for i in range(4)] == [0, 1, 2, 0]
    router.finish("1")
    assert assign(router, "4") == 1 and router.unfinished == [2, 1, 1]


def test_the_least_loaded_is_chosen_and_equals_take_turns() -> None:
    router = LeastLoaded(3)
    assert sorted(assign(router, str(i)) for i in range(3)) == [0, 1, 2]
    router.finish("1")
    assert assign(router, "3") == 1
    router.finish("never assigned")
    assert router.unfinished == [1, 1, 1]


def test_a_known_prefix_leads_to_the_engine_that_has_it() -> None:
    router = PrefixAware(4)
    shared = tuple(range(3 * PIECE))
    first = assign(router, "first", (*shared, 7, 8))
    assign(router, "other", tuple(range(1000, 1000 + 3 * PIECE)))
    assert assign(router, "second", (*shared, 9, 10)) == first
    assert assign(router, "part", (*shared[: 2 * PIECE], 5, *range(500, 700))) == first
    assert assign(router, "salted", (*shared, 9, 10), cache_salt="someone else's") != first


def test_the_last_token_is_no_part_of_a_prefix() -> None:
    """An engine computes at least one token, so a prompt of exactly one piece has nothing to reuse."""
    router = PrefixAware(2)
    assert pieces(router, range(PIECE)) == pieces(router, ()) == []
    assert len(pieces(router, range(PIECE + 1))) == 1


def test_no_more_of_a_prompt_is_looked_at_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LOOKED_AT", 2)
    assert len(pieces(PrefixAware(2), TEMPLATE)) == 2


def test_different_images_at_equal_tokens_spread() -> None:
    router = PrefixAware(4)
    images = [((3, 2 * PIECE, f"image {number}"),) for number in range(8)]
    chosen = [assign(router, str(number), TEMPLATE, media_keys=image) for number, image in enumerate(images)]
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]
    again = [assign(router, f"again {number}", TEMPLATE, media_keys=image) for number, image in enumerate(images)]
    assert again == chosen


def test_an_image_counts_in_each_piece_it_overlaps_and_those_behind() -> None:
    router = PrefixAware(2)
    plain = pieces(router, TEMPLATE)
    for at, length, common in ((PIECE, 5, 1), (PIECE - 1, 2, 0), (2 * PIECE + 3, 4, 2), (3 * PIECE, 2, 3)):
        one, other = (pieces(router, TEMPLATE, media_keys=((at, length, key),)) for key in "xy")
        assert one[:common] == other[:common] == plain[:common]
        assert not {*one[common:]} & {*other[common:]} and not {*one[common:]} & {*plain}
    later = pieces(router, TEMPLATE, media_keys=((3, 4, "x"), (2 * PIECE, 9, "y")))
    assert later[:2] == pieces(router, TEMPLATE, media_keys=((3, 4, "x"), (2 * PIECE, 9, "z")))[:2]


def test_items_that_attend_to_each_other_count_together() -> None:
    first, one, other = (3, 4, "x"), (2 * PIECE, 9, "y"), (2 * PIECE, 9, "z")
    for joins, common in ((False, 2), (True, 0)):
        router = PrefixAware(2, joins_media=joins)
        found = [pieces(router, TEMPLATE, media_keys=(first, second)) for second in (one, other)]
        assert [a == b for a, b in zip(*found, strict=True)] == [True] * common + [False] * (3 - common)


def test_adapters_do_not_attract_each_other() -> None:
    router = PrefixAware(3)
    adapters = ({}, {"lora_id": 1, "lora_name": "one"}, {"lora_id": 2, "lora_name": "two"})
    chosen = [assign(router, f"first {i}", TEMPLATE, **adapter) for i, adapter in enumerate(adapters)]
    assert sorted(chosen) == [0, 1, 2]
    assert [assign(router, f"second {i}", TEMPLATE, **adapter) for i, adapter in enumerate(adapters)] == chosen


def test_a_popular_prefix_spreads_once_its_engine_is_full() -> None:
    router = PrefixAware(4)
    shared = tuple(range(2 * PIECE))
    for number in range(200):
        assign(router, str(number), (*shared, number))
    mean = 200 / 4
    assert max(router.unfinished) <= PrefixAware.MOST_LOAD * mean + PrefixAware.SLACK + 1 and min(router.unfinished) > 0


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 10)
    router = PrefixAware(2)
    for number in range(50):
        assign(router, str(number), (number,) * (3 * PIECE))
    assert len(router._engine_of_piece) == 10


@pytest.mark.parametrize("name", ROUTERS)
def test_counts_are_those_of_unfinished_requests(name: str) -> None:
    rng, router = random.Random(1), ROUTERS[name](5)
    alive: dict[str, int] = {}
    for number in range(2000):
        if alive and rng.random() < 0.5:
            ended = rng.choice(sorted(alive))
            router.finish(ended)
            del alive[ended]
        else:
            prompt = (rng.randrange(4),) * rng.randrange(1, 300)
            alive[str(number)] = assign(router, str(number), prompt)
        assert router.unfinished == [list(alive.values()).count(engine) for engine in range(5)]


def test_no_engine_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one engine, got 0"):
        Router(0)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_lost_engine_gives_up_its_requests_and_is_never_chosen_again(name: str) -> None:
    router = ROUTERS[name](3)
    shared = tuple(range(3 * PIECE))
    ids = {str(i): assign(router, str(i), (*shared, i)) for i in range(9)}
    gone = ids["0"]
    assert sorted(router.lose(gone)) == sorted(one for one, engine in ids.items() if engine == gone)
    assert router.unfinished[gone] == 0 and router.lose(gone) == [] and gone not in router.living
    later = [assign(router, f"later {i}", (*shared, i)) for i in range(30)]
    assert gone not in later and set(later) <= set(router.living) and len(set(later)) == 2
    router.finish("0")  # it went with its engine
    assert sum(router.unfinished) == sum(engine != gone for engine in ids.values()) + 30


class Board:
    """Counts that two routers share."""

    def __init__(self) -> None:
        self.counts = [0, 0]

    def add(self, engine: int, amount: int) -> None:
        self.counts[engine] += amount

    def read(self) -> list[int]:
        return self.counts


def test_routers_that_share_their_counts_fill_engines_evenly() -> None:
    """Each by itself would send its first request to engine 0."""
    board = Board()
    routers = [LeastLoaded(2, board), LeastLoaded(2, board)]
    assert [assign(router, f"{name}") for name, router in enumerate(routers)] == [0, 1]
    routers[0].place("forced", 1)
    assert board.counts == [1, 2] and assign(routers[1], "next") == 0
    for router in routers:
        for name in ("0", "1", "forced", "next"):
            router.finish(name)
    assert board.counts == [0, 0]
