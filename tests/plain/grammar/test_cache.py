"""grammar/cache.py: what is kept, and who has to make way."""

from __future__ import annotations

from quire.grammar.cache import MOST_ENTRIES, GrammarCache
from quire.schema.grammar import GrammarKind, GrammarSpec

MOST = 8000  # bytes; an eighth of them for new ones


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.REGEX, text=text)


def made(*texts: str, cost: int = 100) -> GrammarCache[str]:
    cache: GrammarCache[str] = GrammarCache(MOST)
    for text in texts:
        cache.put(spec(text), text, cost)
    return cache


def test_new_ones_have_an_eighth_of_the_room() -> None:
    cache = made(*(f"n{i}" for i in range(50)))
    assert len(cache) == 10 and cache.num_bytes == 1000
    assert [spec(f"n{i}") in cache for i in (0, 39, 40, 49)] == [False, False, True, True]


def test_what_came_again_is_not_pushed_out_by_what_came_once() -> None:
    cache = made("ours")
    assert cache.use(spec("ours")) == "ours"  # who had it compiled
    assert cache.use(spec("ours")) == "ours"  # another request
    for i in range(500):
        cache.put(spec(f"n{i}"), "", 100)
        assert cache.use(spec(f"n{i}")) == ""
    assert cache.use(spec("ours")) == "ours" and cache.num_bytes <= 1000 + 100


def test_the_one_who_had_it_compiled_does_not_count_as_two() -> None:
    cache = made("once")
    cache.use(spec("once"))
    for i in range(10):
        cache.put(spec(f"n{i}"), "", 100)
    assert cache.use(spec("once")) is None


def test_all_together_are_bounded_and_the_oldest_goes() -> None:
    cache = made()
    for i in range(200):
        cache.put(spec(f"n{i}"), "", 100)
        for _ in range(2):
            cache.use(spec(f"n{i}"))
    assert cache.num_bytes == MOST - MOST // 8
    assert spec("n129") not in cache and spec("n130") in cache
    cache.use(spec("n130"))
    for i in range(200, 210):
        cache.put(spec(f"n{i}"), "", 100)
        for _ in range(2):
            cache.use(spec(f"n{i}"))
    assert spec("n131") not in cache and spec("n130") in cache


def test_one_larger_than_all_room_is_there_until_the_next() -> None:
    cache = made("large", cost=10 * MOST)
    assert cache.use(spec("large")) == "large"
    cache.put(spec("small"), "small", 1)
    assert cache.use(spec("large")) is None and cache.num_bytes == 1


def test_the_same_again_is_counted_once() -> None:
    cache = made("a", "a", "a")
    assert len(cache) == 1 and cache.num_bytes == 100
    cache.use(spec("a"))
    cache.use(spec("a"))
    cache.put(spec("a"), "b", 30)
    assert len(cache) == 1 and cache.num_bytes == 30 and cache.use(spec("a")) == "b"


def test_entries_without_bytes_are_bounded_too() -> None:
    cache = made(*map(str, range(MOST_ENTRIES + 10)), cost=0)
    assert len(cache) == MOST_ENTRIES
