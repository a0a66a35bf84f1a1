"""Moves: what is queued between plans travels with the next one, and the prefix cache knows of it at once."""

from __future__ import annotations

import pytest

from quire.sched.events import BlockStored
from quire.schema.kv import KVKind
from quire.schema.step import Direction, Move
from tests.plain.sched.kit import Bench, counts, request

PROMPT = list(range(100, 117))  # four blocks of 4, and one token


def cached(bench: Bench) -> list[bytes]:
    """Names of the prompt's blocks, after a request that has left."""
    bench.add(request("first", PROMPT, 1))
    bench.step()
    return list(bench.scheduler.kv.pool.named[0])


def test_a_block_that_was_brought_is_found_in_the_plan_that_brings_it() -> None:
    bench = Bench(events=True)
    bench.add(request("a", PROMPT, 2))
    one = bench.scheduler.requests["a"]
    moves = bench.scheduler.kv.moves
    assert [moves.bring(one, 0, index, slot=50 + index) for index in (0, 1)] == [True, True]
    assert not moves.bring(one, 0, 0, slot=9), "it can be found already"
    (plan,) = [bench.step()]
    blocks = plan.joined[0].blocks[0]
    assert plan.moves == (Move(50, blocks[0], Direction.IN), Move(51, blocks[1], Direction.IN))
    assert counts(plan) == {"a": 9} and bench.step().moves == ()
    stored = [event for event in bench.scheduler.take_events() if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored[:2]] == [PROMPT[:4], PROMPT[4:8]]
    assert stored[1].parent_block_hash == stored[0].block_hashes[0]


def test_what_has_no_name_cannot_be_brought() -> None:
    bench = Bench(64, (KVKind.FULL, 4, 0), (KVKind.CROSS, 4, 0))
    bench.add(request("a", PROMPT))
    one, moves = bench.scheduler.requests["a"], bench.scheduler.kv.moves
    for group, index in ((0, 4), (0, -1), (1, 0)):
        with pytest.raises(ValueError, match=f"block {index} of a, group {group}"):
            moves.bring(one, group, index, slot=1)
    plain = Bench(prefix_caching=False)
    plain.add(request("a", PROMPT))
    with pytest.raises(ValueError, match="no name"):
        plain.scheduler.kv.moves.bring(plain.scheduler.requests["a"], 0, 0, slot=1)


def test_nothing_is_brought_where_no_block_is_free() -> None:
    bench = Bench(5)
    bench.add(request("a", PROMPT, 2), request("b", list(range(17)), 2))
    assert counts(bench.plan()) == {"a": 17} and bench.num_free == 0
    other, moves = bench.scheduler.requests["b"], bench.scheduler.kv.moves
    assert [moves.bring(other, 0, index, slot=index) for index in range(4)] == [False] * 4
    assert not moves.waiting and len(bench.scheduler.kv.pool.named[0]) == 4  # a's own
    bench.commit()
    bench.finish()
    bench.add(request("c", list(range(50, 67)), 1))
    assert moves.bring(bench.scheduler.requests["c"], 0, 0, slot=1), "there are free ones now"


def test_a_save_after_the_forward_pass_holds_its_block_until_the_plan_is_made() -> None:
    bench = Bench(5)
    names = cached(bench)
    moves = bench.scheduler.kv.moves
    blocks = [bench.scheduler.kv.pool.named[0][name] for name in names]
    assert moves.save(0, names[0], slot=7) and moves.save(0, names[1], slot=8, after=True)
    assert not moves.save(0, b"unknown", slot=9)
    assert bench.num_free == 4
    bench.scheduler.audit()
    bench.add(request("b", list(range(14)), 1))
    plan = bench.plan()
    assert plan.moves == (Move(blocks[0], 7, Direction.OUT), Move(blocks[1], 8, Direction.OUT, after=True))
    assert blocks[1] not in plan.grants[0].new_blocks[0], "it was taken while it had to be read"
    assert names[1] in bench.scheduler.kv.pool.named[0]
    bench.commit()
    assert bench.num_free == 5


def test_a_request_that_needs_every_block_is_not_kept_waiting_by_a_save() -> None:
    bench = Bench(5)
    names = cached(bench)
    block = bench.scheduler.kv.pool.named[0][names[1]]
    assert bench.scheduler.kv.moves.save(0, names[1], slot=8, after=True)
    bench.add(request("b", list(range(19)), 1))  # five blocks
    plan = bench.plan()
    assert counts(plan) == {"b": 19} and plan.moves == (
        Move(block, 8, Direction.OUT),
    )  # before the block is written over


def test_a_relocated_block_is_found_at_its_new_place() -> None:
    bench = Bench(8)
    names = cached(bench)
    pool, moves = bench.scheduler.kv.pool, bench.scheduler.kv.moves
    before = pool.named[0][names[0]]
    assert moves.relocate(0, names[0]) and not moves.relocate(0, b"unknown")
    bench.scheduler.audit()
    bench.add(request("b", PROMPT, 3))
    plan = bench.step()
    after = plan.joined[0].blocks[0][0]
    assert plan.moves == (Move(before, after),) and before != after == pool.named[0][names[0]]
    assert not moves.relocate(0, names[0]), "somebody holds it"


def test_a_reset_forgets_what_was_queued() -> None:
    bench = Bench()
    names = cached(bench)
    assert bench.scheduler.kv.moves.save(0, names[0], slot=7, after=True)
    assert bench.scheduler.reset_prefix_cache()
    bench.add(request("b", 3, 1))
    assert bench.step().moves == () and bench.num_free == 64


def test_nobody_is_preempted_for_a_block_that_only_a_save_holds() -> None:
    bench = Bench(6)
    names = cached(bench)  # four of six blocks
    bench.add(request("a", list(range(4)), 8), request("b", list(range(50, 54)), 8))
    assert counts(bench.step()) == {"a": 4, "b": 4}
    for slot, name in enumerate(names):
        assert bench.scheduler.kv.moves.save(0, name, slot, after=True)
    assert bench.num_free == 0
    plan = bench.step()
    assert counts(plan) == {"a": 1, "b": 1} and bench.scheduler.stats().preempted == 0
    assert [move.after for move in plan.moves] == [False] * 4, "saved before the blocks are written over"
    bench.finish()
    assert bench.output("a") == bench.output("b") == [7] * 8


def test_a_hit_that_only_a_save_held_still_takes_its_blocks() -> None:
    bench = Bench(6)
    names = cached(bench)
    bench.add(request("r", list(range(5)), 3))
    bench.step()  # holds the two blocks that have no name
    for slot, name in enumerate(names[:3]):
        assert bench.scheduler.kv.moves.save(0, name, slot, after=True)
    assert bench.num_free == 1
    bench.add(request("b", [*PROMPT[:8], *range(300, 309)], 1))  # five blocks, two of them found; four can be had
    assert counts(bench.step()) == {"r": 1}
    bench.finish()
    assert len(bench.output("b")) == 1
