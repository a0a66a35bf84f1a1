"""The scheduler fuzzer with a few fixed seeds, and proof that it can fail: known faults are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.sched import kv_policy, prefix_hash
from quire.sched.blocks import BlockPool
from quire.sched.encoder_cache import EncoderCache
from quire.sched.gates import NO_LIMIT, Hold, Holds, Overlap
from quire.sched.kv_cache import KVCache
from quire.sched.moves import BlockMoves
from quire.sched.planner import Planner
from quire.sched.request import Queue, Request, Running
from quire.sched.shares import Shares
from quire.schema.step import Direction, Move
from tests.plain.sched.fuzz import run_seed

SEEDS, MORE_SEEDS = 30, 80  # of `make test`, and of `make long`
RARE = (
    "hits",
    "resumed",
    "aborted",
    "resets",
    "drafts",
    "accepted",
    "held",
    "saved",
    "brought",
    "relocated",
    "given up",
    "encoded",
    "joined media",
    "freed",
    "with media",
)


@pytest.mark.parametrize("seeds", [range(SEEDS), pytest.param(range(SEEDS, MORE_SEEDS), marks=pytest.mark.long)])
def test_no_invariant_breaks(seeds: range) -> None:
    seen = Counter[str]()
    for seed in seeds:
        seen += run_seed(seed, 400)
    rare = {name: seen[name] for name in RARE if seen[name] < len(seeds) // 3}
    assert not rare, f"hardly exercised: {rare} in {dict(seen)}"


def early_window(policy: kv_policy.Window, computed: int) -> int:
    return max(0, computed - policy.window + 2) // policy.block_size


def early_state(policy: kv_policy.State, computed: int) -> int:
    return computed // policy.block_size


def keyless(given: Any, start: int, size: int) -> list[Any]:
    return []


def no_take_back(request: Request, num_wrong: int) -> None:
    """Wrong drafts stay counted as computed."""


def taken_back_once(request: Request, num_wrong: int) -> None:
    """Forgets that later plans had counted them too."""
    request.computed -= num_wrong
    request.end -= num_wrong
    request.target = min(request.end + request.num_drafts, request.last)


def room_for_the_nearest(kv: KVCache, request: Request, upto: int) -> Any:
    """Takes no blocks for drafts."""
    return GROW(kv, request, max(request.planned + 1, upto - request.num_drafts))


def one_loads_keys(given: Any, start: int, size: int) -> list[Any]:
    """Forgets how often an adapter was loaded."""
    return [(letter, text, 0 if letter == "l" else number) for letter, text, number in KEYS(given, start, size)]


def release_all(holds: Holds, request_id: str, reason: Hold) -> None:
    """The first holder to let go frees it for all."""
    holds.by_request.pop(request_id, None)


def holds_nobody(holds: Holds, request: Request) -> bool:
    return False


def one_plan_more(gate: Overlap, request: Request, count: int) -> int:
    return count if request.num_flights <= gate.most else 0


def flights_outlive_preemption(request: Request) -> None:
    flights = request.num_flights if hasattr(request, "num_flights") else 0
    RESTART(request)
    request.num_flights = flights


def moves_nothing(moves: BlockMoves) -> tuple[()]:
    TAKE(moves)
    return ()


def moves_backwards(moves: BlockMoves) -> Any:
    return TAKE(moves)[::-1]


def saves_without_holding(moves: BlockMoves, group: int, name: bytes, slot: int, *, after: bool = False) -> bool:
    block = moves._kv.pool.named[group][name]
    moves.waiting.append(Move(block, slot, Direction.OUT, after))
    return True


def brings_another(moves: BlockMoves, request: Request, group: int, index: int, slot: int) -> bool:
    """From the slot before."""
    return BRING(moves, request, group, index, max(1, slot - 1))


def relocates_in_name_only(moves: BlockMoves, group: int, name: bytes) -> bool:
    before = len(moves.waiting)
    done = RELOCATE(moves, group, name)
    del moves.waiting[before:]
    return done


def share_nothing(pool: BlockPool, blocks: Any) -> None:
    pass


def named_to_the_end(kv: KVCache, request: Request) -> None:
    """Names blocks by what is planned, drafts and unknown tokens included."""
    if kv.caching:
        table = request.holding.tables[kv.growing[0][0]]
        for index in range(min(request.planned // kv.growing[0][1], len(request.holding.hashes))):
            kv.pool.name(kv.growing[0][0], table[index], request.holding.hashes[-1 - index])


def quiet_preempt(planner: Planner, request: Request) -> None:
    """Forgets to count the epoch up, so an old result is taken for a new one."""
    PREEMPT(planner, request)
    request.epoch -= 1


def gives_up_the_oldest(shares: Shares, in_use: dict[int, int], share: int, rank: float) -> Request | None:
    last = NEWEST(shares, in_use, share, rank)
    return last and next(request for request in shares.running.items if request.tenant == last.tenant)


def gives_up_the_last_of_all(shares: Shares, in_use: dict[int, int], share: int, rank: float) -> Request | None:
    return NEWEST(shares, in_use, share, rank) and shares.running.items[-1]


def gives_up_to_anybody(shares: Shares, in_use: dict[int, int], share: int, rank: float) -> Request | None:
    return NEWEST(shares, in_use, share, float("-inf"))


def rows_forgotten(running: Running, request: Request) -> None:
    """Counts those that come, and not those that go."""
    Queue.remove(running, request)


def frees_at_once(cache: EncoderCache, request: Request, count: int) -> None:
    """What a step still reads may be evicted by another grant of the same step."""
    ENCODE(cache, request, count)
    for use in cache._passed:
        cache._release(*use)
    cache._passed.clear()


def keeps_vectors_of_the_preempted(cache: EncoderCache, request: Request) -> None:
    cache.unfinished.discard(request.id)


def encodes_anything(cache: EncoderCache, request: Request, count: int) -> int:
    return count


def asks_for_no_single(cache: EncoderCache) -> int:
    return NO_LIMIT


def frees_without_saying(cache: EncoderCache, key: str) -> None:
    DROP(cache, key)
    cache._freed.clear()


ENCODE, DROP = EncoderCache.take, EncoderCache._drop
NEWEST = Shares._newest
PREEMPT, RESTART, GROW = Planner.preempt, Request.restart, KVCache.grow
TAKE, BRING, RELOCATE, KEYS = BlockMoves.take, BlockMoves.bring, BlockMoves.relocate, prefix_hash.extra_keys
FAULTS: list[tuple[object, str, Callable[..., Any]]] = [
    (kv_policy.Window, "first_needed", early_window),
    (kv_policy.State, "first_needed", early_state),
    (prefix_hash, "extra_keys", keyless),
    (Request, "take_back", no_take_back),
    (Request, "take_back", taken_back_once),
    (KVCache, "grow", room_for_the_nearest),
    (prefix_hash, "extra_keys", one_loads_keys),
    (Holds, "remove", release_all),
    (Holds, "bars", holds_nobody),
    (Overlap, "admit", one_plan_more),
    (Request, "restart", flights_outlive_preemption),
    (BlockMoves, "take", moves_nothing),
    (BlockMoves, "take", moves_backwards),
    (BlockMoves, "save", saves_without_holding),
    (BlockMoves, "bring", brings_another),
    (BlockMoves, "relocate", relocates_in_name_only),
    (BlockPool, "share", share_nothing),
    (KVCache, "name", named_to_the_end),
    (Planner, "preempt", quiet_preempt),
    (Shares, "_newest", gives_up_the_oldest),
    (Shares, "_newest", gives_up_the_last_of_all),
    (Shares, "_newest", gives_up_to_anybody),
    (Running, "remove", rows_forgotten),
    (EncoderCache, "take", frees_at_once),
    (EncoderCache, "_leave", keeps_vectors_of_the_preempted),
    (EncoderCache, "admit", encodes_anything),
    (EncoderCache, "singles", asks_for_no_single),
    (EncoderCache, "_drop", frees_without_saying),
]

# Seeds to begin with, where the first ones notice nothing.
CAUGHT_LATE = {moves_backwards: 26, gives_up_to_anybody: 49, frees_at_once: 52, asks_for_no_single: 18}


@pytest.mark.parametrize(("place", "name", "fault"), FAULTS, ids=[fault.__name__ for _, _, fault in FAULTS])
def test_faults_are_caught(monkeypatch: pytest.MonkeyPatch, place: object, name: str, fault: Any) -> None:
    monkeypatch.setattr(place, name, fault)
    first = CAUGHT_LATE.get(fault, 0)
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(60):
            run_seed((first + seed) % 60, 300)
