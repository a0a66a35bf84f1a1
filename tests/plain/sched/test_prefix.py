"""The prefix cache: hashes, what a hit is for each kind of layer, sharing, eviction, events."""

from __future__ import annotations

import hashlib
import struct

import pytest

from quire.base import registry
from quire.sched.blocks import BlockPool
from quire.sched.events import AllBlocksCleared, BlockRemoved, BlockStored
from quire.sched.kv_policy import ChunkedLocal, Cross, Full, State, Window
from quire.sched.prefix_hash import ALGORITHMS, BlockHasher
from quire.schema.errors import MissingExtraError
from quire.schema.kv import KVKind
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from tests.plain.sched.kit import Bench, counts, request

PROMPT = list(range(10, 27))  # 17 tokens: four full blocks of 4 and one token


def hashes(algorithm: str = "sha256", size: int = 4, tokens: list[int] = PROMPT, **more: object) -> list[bytes]:
    found: list[bytes] = []
    BlockHasher(algorithm, size).extend(found, tokens, len(tokens), request("a", tokens, **more))
    return found


def hit_of(bench: Bench, given: EngineRequest) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Tokens and blocks that a request joins with; it is ended again."""
    bench.add(given)
    plan = bench.step()
    row = next(new for new in plan.joined if new.request_id == given.request_id)
    start = next(grant.start for grant in plan.grants if grant.request_id == given.request_id)
    bench.scheduler.abort([given.request_id])
    return start, row.blocks


# ---------------------------------------------------------------- hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hash_covers_everything_before_it(algorithm: str) -> None:
    whole = hashes(algorithm)
    assert len(whole) == 4 and len(set(whole)) == 4
    assert whole == hashes(algorithm), "the same in every process: no seed"
    changed = hashes(algorithm, tokens=[*PROMPT[:5], 99, *PROMPT[6:]])
    assert changed[0] == whole[0] and not set(changed[1:]) & set(whole)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hashes_grow_without_being_computed_again(algorithm: str) -> None:
    given, grown, hasher = (
        request("a", PROMPT, cache_salt="s", media_keys=((2, 9, "m"),)),
        [],
        BlockHasher(algorithm, 4),
    )
    for upto in range(len(PROMPT) + 1):
        before = list(grown)
        hasher.extend(grown, PROMPT[:upto], upto, given)
        assert grown[: len(before)] == before
    assert grown == hashes(algorithm, cache_salt="s", media_keys=((2, 9, "m"),))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extra_keys_tell_prefixes_apart(algorithm: str) -> None:
    salted = [
        hashes(algorithm, **more)
        for more in (
            {},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"lora_id": 1, "lora_name": "a"},
            {"lora_id": 1, "lora_name": "a", "lora_generation": 1},
            {"lora_id": 1, "lora_name": "a", "lora_generation": 2},
            {"lora_id": 2},
            {"media_keys": ((0, 3, "a"),)},
            {"media_keys": ((1, 3, "a"),)},
            {"media_keys": ((0, 3, "b"),)},
        )
    ]
    assert len({one[0] for one in salted}) == len(salted)
    late = hashes(algorithm, media_keys=((9, 3, "a"),))
    assert late[:2] == salted[0][:2] and late[2] != salted[0][2] and late[3] != salted[0][3]


def test_the_documented_encodings() -> None:
    """By hand, so that a router in another language can follow them."""
    parent, packed = bytes(32), struct.pack("<4I", *PROMPT[:4])
    assert hashes()[0] == hashlib.sha256(parent + packed).digest()
    salt = b"s" + struct.pack("<I", 1) + b"x"
    media = b"m" + struct.pack("<I", 2) + b"ab" + struct.pack("<q", 3)
    keyed = hashes(cache_salt="x", media_keys=((3, 2, "ab"),))
    assert keyed[0] == hashlib.sha256(parent + packed + salt + media).digest()
    tail = struct.pack("<4I", *PROMPT[4:8]) + media[:-8] + struct.pack("<q", -1)
    assert keyed[1] == hashlib.sha256(keyed[0] + tail).digest()
    tokens = [5, 23, 24, 70000]
    cbor = bytes.fromhex("83 5820") + bytes(32) + bytes.fromhex("84 05 17 1818 1a00011170 f6")
    assert hashes("sha256_cbor", tokens=tokens)[0] == hashlib.sha256(cbor).digest()
    keyed_cbor = cbor[:-1] + bytes.fromhex("82 82 6173 6178 83 616d 626162 03")
    given = {"cache_salt": "x", "media_keys": ((3, 2, "ab"),)}
    assert hashes("sha256_cbor", tokens=tokens, **given)[0] == hashlib.sha256(keyed_cbor).digest()


def test_xxhash_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise ImportError(path)

    monkeypatch.setattr("quire.sched.prefix_hash.load", missing)
    with pytest.raises(MissingExtraError, match=r"prefix_caching_hash_algo='xxhash' needs the package 'xxhash'"):
        BlockHasher("xxhash", 16)
    Bench(prefix_caching=False, hash_algorithm="xxhash")  # nothing will be hashed
    assert registry.load is not missing


# ---------------------------------------------------------------- policies


def test_what_is_still_needed() -> None:
    full, window, chunk, state = Full(4), Window(4, 6), ChunkedLocal(4, 8), State(4)
    at = (0, 1, 5, 6, 8, 9, 13, 16, 17)
    assert [full.first_needed(n) for n in at] == [0] * 9
    assert [window.first_needed(n) for n in at] == [0, 0, 0, 0, 0, 1, 2, 2, 3]
    assert [chunk.first_needed(n) for n in at] == [0, 0, 0, 0, 2, 2, 2, 4, 4]
    assert [state.first_needed(n) for n in at] == [0, 0, 1, 1, 1, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("policy", "present", "longest"),
    [
        (Full(4), "", 0),
        (Full(4), "01245", 3),
        (Full(4), "012345", 6),
        (Window(4, 6), "012345", 6),
        (Window(4, 6), "45", 6),  # a query at 24 reads 19..24
        (Window(4, 6), "2345"[:3], 5),
        (Window(4, 6), "235", 4),
        (Window(4, 6), "0", 1),
        (Window(4, 6), "5", 0),
        (ChunkedLocal(4, 8), "", 4),  # at 16 a new chunk begins: nothing before it is read
        (ChunkedLocal(4, 8), "4", 5),
        (State(4), "0", 1),
        (State(4), "035", 6),
        (State(4), "02", 3),
        (State(4), "", 0),
        (Cross(4, 9), "", 6),
    ],
)
def test_longest_prefix(policy: Full, present: str, longest: int) -> None:
    names = [bytes([i]) for i in range(6)]
    most = 5 if isinstance(policy, ChunkedLocal) else 6
    assert policy.longest(names, {names[int(i)]: 0 for i in present}, most) == longest


def test_peak_bounds_what_a_request_holds() -> None:
    assert Full(4).peak(17, 8) == 5
    assert Window(4, 6).peak(1000, 8) == 5  # 8 + 6 + 2 tokens may straddle five blocks
    assert Window(4, 6).peak(9, 8) == 3
    assert State(4).peak(1000, 1) == 3
    assert Cross(4, 9).peak(1000, 8) == 3


# ---------------------------------------------------------------- sharing


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    bench = Bench()
    bench.add(request("a", PROMPT[:16], 1))
    bench.step()
    assert hit_of(bench, request("b", PROMPT[:16]))[0] == 12
    assert hit_of(bench, request("c", PROMPT))[0] == 16


def test_siblings_share_the_prompt_in_the_very_step_that_computes_it() -> None:
    bench = Bench()
    bench.add(*(request(f"s{i}", PROMPT, parent_id="s") for i in range(3)))
    plan = bench.step()
    assert counts(plan) == {"s0": 17, "s1": 1, "s2": 1}
    first = plan.grants[0].new_blocks[0]
    assert [row.blocks for row in plan.joined] == [((),), (first[:4],), (first[:4],)]
    assert 64 - bench.num_free == 5 + 1 + 1
    bench.step()
    assert bench.scheduler.stats().cache.hits == 32 and bench.seen["s1"][0].num_cached_tokens == 16


def test_a_state_is_shared_from_the_next_step_on() -> None:
    bench = Bench(64, (KVKind.FULL, 4, 0), (KVKind.STATE, 4, 0))
    bench.add(*(request(f"s{i}", PROMPT) for i in range(2)))
    assert counts(bench.step()) == {"s0": 17, "s1": 17}
    start, rows = hit_of(bench, request("s2", PROMPT))
    assert start == 16 and rows[1][:3] == (-1, -1, -1) and rows[1][3] >= 0


def test_every_group_must_serve_the_prefix() -> None:
    bench = Bench(64, (KVKind.FULL, 4, 0), (KVKind.WINDOW, 8, 3))
    bench.add(request("a", PROMPT, 1))
    bench.step()
    start, rows = hit_of(bench, request("b", PROMPT))
    assert start == 16 and [len(row) for row in rows] == [4, 2] and rows[1][0] == -1
    assert hit_of(bench, request("c", [*PROMPT[:12], 1, 2, 3, 4, 5]))[0] == 8  # a block end in both groups


def test_who_does_not_read_may_still_write() -> None:
    bench = Bench()
    bench.add(request("a", PROMPT, 1))
    bench.step()
    for params in (ResolvedParams(prompt_logprobs=1), ResolvedParams(skip_reading_prefix_cache=True)):
        assert hit_of(bench, request("b", PROMPT, params=params))[0] == 0
    assert bench.scheduler.stats().cache.queries == 17, "only who looks is counted"
    fresh = Bench()
    fresh.add(request("a", PROMPT, 1, params=ResolvedParams(prompt_logprobs=1)))
    fresh.step()
    assert hit_of(fresh, request("b", PROMPT))[0] == 16


@pytest.mark.parametrize(
    "more", [{"cache_salt": "s"}, {"lora_id": 1, "lora_name": "l"}, {"media_keys": ((0, 2, "m"),)}]
)
def test_other_keys_other_prefixes(more: dict[str, object]) -> None:
    bench = Bench(encoder_tokens=64)
    bench.add(request("a", PROMPT, 1))
    bench.step()
    assert hit_of(bench, request("b", PROMPT, **more))[0] == 0
    assert hit_of(bench, request("c", PROMPT, **more))[0] == 16


def test_no_sharing_without_caching() -> None:
    bench = Bench(prefix_caching=False)
    bench.add(request("a", PROMPT), request("b", PROMPT))
    assert counts(bench.step()) == {"a": 17, "b": 17}


def test_outputs_are_cached_too() -> None:
    bench = Bench()
    bench.add(request("a", PROMPT, 9))
    bench.finish()
    start, _ = hit_of(bench, request("b", [*PROMPT, *[7] * 8, 1]))
    assert start == 24  # the ninth output was never computed


def test_a_request_resumed_finds_its_own_blocks() -> None:
    bench = Bench()
    bench.add(request("a", PROMPT, 9))
    bench.step()
    bench.step()
    bench.scheduler.planner.preempt(bench.scheduler.requests["a"])
    plan = bench.step()
    assert (plan.grants[0].start, plan.grants[0].count) == (16, 3)
    bench.finish()
    assert len(bench.output("a")) == 9 and bench.seen["a"][-1].num_cached_tokens == 0


def test_cross_attention_blocks_come_once_and_go_together() -> None:
    bench = Bench(64, (KVKind.FULL, 4, 0), (KVKind.CROSS, 4, 0))
    bench.add(request("a", PROMPT, 4, media_keys=((0, 10, "sound"),)))
    plan = bench.step()
    assert [len(blocks) for blocks in plan.grants[0].new_blocks] == [5, 3]
    assert all(grant.new_blocks in ((), ((), ())) or not grant.new_blocks[1] for grant in bench.step().grants)
    bench.finish()
    start, rows = hit_of(bench, request("b", PROMPT, 4, media_keys=((0, 10, "sound"),)))
    assert start == 16 and rows[1] == ()
    assert bench.num_free == 64


# ---------------------------------------------------------------- the pool


def test_blank_blocks_go_first_then_the_oldest_cached() -> None:
    pool = BlockPool(4, 1)
    a, b, c = pool.take(3)
    for block in (a, b, c):
        pool.name(0, block, bytes([block]))
    pool.drop([c, a])
    assert pool.take(1) == (3,), "never used"
    pool.share([c])
    pool.drop([c])  # used again: now younger than a
    assert pool.take(1) == (a,)
    assert pool.named[0] == {bytes([b]): b, bytes([c]): c}
    assert pool.num_free == 1


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    bench = Bench(8)
    bench.add(request("a", PROMPT[:16], 1))
    bench.step()
    bench.add(request("b", 21, 4))  # six of eight blocks
    bench.step()
    bench.scheduler.abort(["b"])
    assert hit_of(bench, request("c", PROMPT))[0] == 8


def test_events_tell_what_can_be_found() -> None:
    bench = Bench(6, events=True)
    bench.add(request("a", PROMPT, 1, lora_id=3, lora_name="l"))
    bench.step()
    (stored,) = bench.scheduler.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == hashes(lora_id=3, lora_name="l") and stored.parent_block_hash is None
    assert (stored.token_ids, stored.block_size, stored.lora_id, stored.medium) == (PROMPT[:16], 4, 3, "GPU")
    bench.add(request("b", 20, 1))
    bench.step()
    removed = [event for event in bench.scheduler.take_events() if isinstance(event, BlockRemoved)]
    assert [event.block_hashes[0] for event in removed] == stored.block_hashes[:0:-1]
    bench.scheduler.reset_prefix_cache()
    assert isinstance(bench.scheduler.take_events()[-1], AllBlocksCleared)
    assert bench.scheduler.take_events() == []


def test_no_events_unless_asked() -> None:
    bench = Bench()
    bench.add(request("a", PROMPT, 1))
    bench.step()
    assert bench.scheduler.take_events() == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_joined_items_and_what_is_between_them_count_from_the_first_on(algorithm: str) -> None:
    """Blocks of 4: the first item begins in the second, the second item in the fourth."""

    def hashed(ids: list[int], *media: tuple[int, int, str], joins: bool = True) -> list[bytes]:
        out: list[bytes] = []
        BlockHasher(algorithm, 4, joins_media=joins).extend(out, ids, 16, request("a", ids, media_keys=media))
        return out

    ids, first, second = list(range(50, 68)), (5, 4, "x"), (12, 3, "y")
    whole = hashed(ids, first, second)
    assert whole == hashed([*ids[:17], 7], first, second), "what follows the last item does not count"
    between = [*ids[:10], 7, *ids[11:]]
    for other in (hashed(ids, first), hashed(ids, first, (12, 3, "z")), hashed(ids, first, (13, 2, "y")),
                  hashed(between, first, second)):  # fmt: skip
        assert other[0] == whole[0] and not set(other[1:]) & set(whole)
    apart = hashed(ids, first, second, joins=False)
    assert apart[:2] == hashed(ids, first, joins=False)[:2] and apart[1] != whole[1]
    assert hashed(ids) == hashed(ids, joins=False)
