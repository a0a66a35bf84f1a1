"""Media in the scheduler: what is encoded when, where prompts are cut, what is kept and freed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from quire.sched.encoder_cache import CrossItems, EncoderCache
from quire.sched.gates import SchedulerLoad
from quire.schema.errors import ConfigError, InputError
from quire.schema.kv import KVKind
from quire.schema.stats import CacheStats
from quire.schema.step import StepPlan
from tests.plain.sched.kit import Bench, counts, item, request


def bench(capacity: int, **settings: object) -> tuple[Bench, EncoderCache]:
    made = Bench(encoder_tokens=capacity, prefix_caching=False, **settings)
    encoder = made.scheduler.planner.encoder
    assert encoder is not None
    return made, encoder


def encoded(plan: StepPlan) -> list[str]:
    return [one.item.key for one in plan.encode]


def test_an_item_is_encoded_once_and_shared() -> None:
    made, encoder = bench(20)
    made.add(request("a", 12, media_keys=((2, 6, "x"),)), request("b", 9, media_keys=((0, 6, "x"),)))
    plan = made.step()
    assert encoded(plan) == ["x"] and counts(plan) == {"a": 12, "b": 9}
    made.add(request("c", 9, media_keys=((0, 6, "x"), (6, 2, "y"))))
    assert encoded(made.step()) == ["y"]
    assert (encoder.num_queries, encoder.num_hits) == (4, 2)
    assert encoder.take_counts().hits == 2 and encoder.take_counts().queries == 0


def test_rows_know_places_and_only_the_encoder_gets_arrays() -> None:
    made, _ = bench(20)
    given = request("a", 12, media_keys=((2, 6, "x"),))
    big, small = replace(given.media[0].arrays["pixels"], data=bytes(1000)), given.media[0].arrays["pixels"]
    made.add(replace(given, media=(replace(given.media[0], arrays={"pixels": big, "grid": small}),)))
    plan = made.step()
    assert set(plan.encode[0].item.arrays) == {"pixels", "grid"}
    (placed,) = plan.joined[0].media
    assert set(placed.arrays) == {"grid"} and (placed.offset, placed.length, placed.key) == (2, 6, "x")


def test_a_prompt_is_cut_before_an_item_that_must_wait() -> None:
    made, _ = bench(8)
    made.add(request("a", 20, media_keys=((2, 6, "x"), (9, 6, "y"))))
    plan = made.step()
    assert counts(plan) == {"a": 9} and encoded(plan) == ["x"]
    plan = made.step()
    assert counts(plan) == {"a": 11} and encoded(plan) == ["y"] and plan.free_encoded == ("x",)


def test_an_item_larger_than_the_budget_goes_alone() -> None:
    made, _ = bench(4)
    made.add(request("a", 20, media_keys=((0, 9, "x"), (10, 2, "y"))))
    assert encoded(made.step()) == ["x"]
    plan = made.step()
    assert encoded(plan) == ["y"] and plan.free_encoded == ("x",)


def test_chunks_of_one_item_encode_it_once() -> None:
    made, encoder = bench(20, max_num_batched_tokens=4)
    made.add(request("a", 11, media_keys=((1, 9, "x"),)))
    plans = [made.step() for _ in range(3)]
    assert [encoded(plan) for plan in plans] == [["x"], [], []] and [counts(plan)["a"] for plan in plans] == [4, 4, 3]
    made.step()
    assert list(encoder.idle) == ["x"] and not encoder.uses


def test_whole_items_are_not_split() -> None:
    made, _ = bench(20, max_num_batched_tokens=8, whole_media=True)
    made.add(request("a", 20, media_keys=((5, 6, "x"),)))
    assert [counts(made.step())["a"] for _ in range(3)] == [5, 8, 7]
    with pytest.raises(InputError, match="9 tokens, and a step takes 8"):
        made.add(request("b", 20, media_keys=((5, 9, "x"),)))


def test_joined_items_are_in_one_step() -> None:
    made, _ = bench(20, max_num_batched_tokens=12, whole_media=True, joined_media=True)
    made.add(request("a", 30, media_keys=((5, 4, "x"), (11, 5, "y"))))
    plans = [made.step() for _ in range(3)]
    assert [counts(plan)["a"] for plan in plans] == [5, 12, 12] and [encoded(plan) for plan in plans] == [
        [], ["x", "y"], [],
    ]  # fmt: skip
    made.scheduler.abort(["a"])
    made.add(request("b", 12), request("c", 9, media_keys=((0, 4, "x"), (4, 4, "z"))))
    assert counts(made.step()) == {"b": 12} and counts(made.step()) == {"b": 1, "c": 9}
    with pytest.raises(InputError, match=r"13 tokens from its first media item to the end of its last, .* takes 12"):
        made.add(request("d", 30, media_keys=((5, 4, "x"), (11, 7, "y"))))


def test_joined_items_do_not_exceed_what_a_step_encodes() -> None:
    made, _ = bench(8, max_num_batched_tokens=20, joined_media=True)
    with pytest.raises(InputError, match=r"10 tokens from its first media item to the end of its last, .* takes 8"):
        made.add(request("a", 30, media_keys=((5, 4, "x"), (11, 4, "y"))))
    made.add(request("b", 30, media_keys=((5, 10, "y"),)))  # alone
    assert encoded(made.step()) == ["y"]


def test_what_failed_is_encoded_again() -> None:
    made, encoder = bench(20, depth=2)
    made.add(request("a", 8, media_keys=((1, 4, "x"),)))
    made.plan()
    made.plan()
    made.commit(failed={"a": "broken"})
    assert "x" not in encoder.entries
    made.commit()
    made.add(request("b", 8, media_keys=((1, 4, "x"),)))
    plan = made.step()
    assert plan.free_encoded == ("x",) and encoded(plan) == ["x"]


def test_what_may_fail_after_an_abort_is_encoded_again() -> None:
    """The result of the step that encodes it is not in: whether it failed, nobody will be told."""
    made, encoder = bench(20, depth=2)
    made.add(request("a", 8, media_keys=((1, 4, "x"),)))
    assert encoded(made.plan()) == ["x"]
    made.scheduler.abort(["a"])
    assert "x" not in encoder.entries and not encoder.uses
    made.add(request("b", 8, media_keys=((1, 4, "x"),)))
    plan = made.plan()
    assert plan.free_encoded == ("x",) and encoded(plan) == ["x"] and counts(plan) == {"b": 8}
    made.commit(failed={"a": "broken"})
    made.commit()
    assert "x" in encoder.entries and "b" in made.scheduler.requests


def test_nothing_computed_by_a_step_that_may_fail_is_found_after_an_abort() -> None:
    made = Bench(encoder_tokens=20, depth=2)
    ids = list(range(100, 113))
    made.add(request("a", ids, media_keys=((1, 4, "x"),)))
    made.plan()
    made.scheduler.abort(["a"])
    made.add(request("b", ids, media_keys=((1, 4, "x"),)))
    assert counts(made.plan()) == {"b": 13}
    made.commit()
    made.commit()
    made.add(request("c", ids, media_keys=((1, 4, "x"),)))
    assert counts(made.plan())["c"] == 1


def test_after_an_abort_of_a_decode_items_and_prefix_are_found() -> None:
    made, encoder = bench(20, depth=2)
    made.add(request("a", 8, media_keys=((1, 4, "x"),)))
    made.plan()
    made.plan()
    made.commit()
    made.scheduler.abort(["a"])
    made.add(request("b", 8, media_keys=((1, 4, "x"),)))
    assert not encoded(made.plan()) and "x" in encoder.entries


def test_clearing_forgets_what_nobody_uses() -> None:
    made, encoder = bench(20, max_num_batched_tokens=6)
    made.add(request("a", 4, media_keys=((0, 3, "x"),)), request("b", 12, media_keys=((0, 8, "y"),)))
    made.step()
    made.step()
    encoder.clear()
    assert set(encoder.entries) == {"y"}


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ((item(5, 9, "x"),), "5 to 13: items lie one after another in a prompt of 12"),
        ((item(0, 4, "x"), item(3, 2, "y")), "3 to 4"),
        ((item(0, 0, "x"),), "0 to -1"),
        ((replace(item(0, 4, "x"), takes_vector=b"\1\1"),), "4 positions says of 2"),
        ((replace(item(0, 2, "x"), takes_vector=b"\0\0"),), "at least one must"),
        ((replace(item(0, 2, "x"), arrays={}),), "was not sent"),
    ],
)
def test_impossible_media_are_refused(media: tuple, message: str) -> None:
    made, _ = bench(20)
    with pytest.raises(InputError, match=message):
        made.add(replace(request("a", 12), media=media))


def test_a_model_without_media_refuses_them() -> None:
    with pytest.raises(InputError, match="takes no media"):
        Bench().add(request("a", 12, media_keys=((0, 3, "x"),)))
    with pytest.raises(ConfigError, match="must encode all media of a prompt"):
        Bench(encoder_tokens=8, chunked_prefill=False, max_num_batched_tokens=64)


# ---- encoder-decoder models


def cross_bench(capacity: int = 40, num_blocks: int = 64, **settings: object) -> tuple[Bench, EncoderCache]:
    groups = (KVKind.FULL, 4, 0), (KVKind.CROSS, 4, 20)
    made = Bench(num_blocks, *groups, encoder_tokens=capacity, **settings)
    encoder = made.scheduler.planner.encoder
    assert isinstance(encoder, CrossItems)
    return made, encoder


def test_the_first_step_of_a_row_reads_its_encoder_s_input() -> None:
    """Whatever positions it computes; later steps and chunks read none."""
    made, encoder = cross_bench(max_num_batched_tokens=4)
    made.add(request("a", 10, max_tokens=3, media_keys=((0, 9, "x"),)))
    plan = made.step()
    assert encoded(plan) == ["x"] and counts(plan) == {"a": 4}
    assert plan.joined[0].num_encoder_tokens == 9
    assert [len(blocks) for blocks in plan.grants[0].new_blocks] == [1, 3]
    plan = made.step()
    assert encoded(plan) == [] and list(encoder.idle) == ["x"] and [len(b) for b in plan.grants[0].new_blocks] == [1, 0]
    made.finish()
    assert made.num_free == 64


def test_an_encoder_s_input_is_encoded_once_and_prefixes_are_shared_by_equal_ones_only() -> None:
    made, encoder = cross_bench()
    prompt = [9, 8, 7, 6, 5, 4, 3, 9, 8]
    made.add(request("a", prompt, max_tokens=2, media_keys=((0, 9, "x"),)))
    made.finish()
    made.add(request("b", prompt, max_tokens=2, media_keys=((0, 9, "x"),)))
    plan = made.step()
    assert plan.grants[0].start == 8 and encoded(plan) == [] and plan.joined[0].num_encoder_tokens == 9
    assert len(plan.grants[0].new_blocks[1]) == 3, "its own blocks, filled anew"
    made.finish()
    made.add(request("c", prompt, max_tokens=2, media_keys=((0, 9, "y"),)))
    plan = made.step()
    assert plan.grants[0].start == 0 and encoded(plan) == ["y"], "another input, another prefix"
    made.finish()
    assert encoder.take_counts() == CacheStats(queries=3, hits=1)


def test_a_preempted_row_reads_its_encoder_s_input_again() -> None:
    made, encoder = cross_bench(prefix_caching=False)
    made.add(request("a", 6, media_keys=((0, 9, "x"),)))
    assert encoded(made.step()) == ["x"]
    for is_there in (True, False):
        planner = made.scheduler.planner
        planner.preempt(planner.running.items[-1])
        assert made.num_free == 64, "its cross-attention blocks are free too"
        if not is_there:
            encoder.open(SchedulerLoad(0, 0, 0))
            encoder.clear()
        plan = made.step()
        assert plan.joined[0].request_id == "a" and plan.joined[0].num_encoder_tokens == 9
        assert encoded(plan) == ([] if is_there else ["x"])
    made.finish()
    assert made.num_free == 64


def test_inputs_of_encoders_wait_for_room_and_aborts_free_blocks() -> None:
    made, encoder = cross_bench(capacity=20)
    for name in "abc":
        made.add(request(name, 3, max_tokens=9, media_keys=((0, 12, name),)))
    assert encoded(made.step()) == ["a"]
    plan = made.step()
    assert encoded(plan) == ["b"] and plan.free_encoded == ("a",), "as soon as the first one has read its own"
    made.scheduler.abort(["a", "b"])
    assert made.num_free == 64 and not encoder.uses
    assert encoded(made.step()) == ["c"]
    made.finish()


@pytest.mark.parametrize("ends", ["abort", "preempt"])
def test_an_encoder_s_input_is_kept_once_the_first_step_is_in(ends: str) -> None:
    """Its length says nothing of positions: a decode in flight reads no vectors, however long the input is."""
    made, encoder = cross_bench(depth=2)
    prompt = list(range(100, 109))
    made.add(request("a", prompt, media_keys=((0, 19, "x"),)))
    made.plan()
    made.plan()
    made.commit()
    if ends == "abort":
        made.scheduler.abort(["a"])
        made.add(request("b", prompt, media_keys=((0, 19, "x"),)))
    else:
        made.scheduler.planner.preempt(made.scheduler.requests["a"])
    plan = made.plan()
    assert not encoded(plan) and not plan.free_encoded and plan.grants[0].start == 8
    made.commit()
    made.finish()
    assert not encoder.uses and made.num_free == 64


def test_an_encoder_s_input_is_not_kept_while_the_first_step_is_out() -> None:
    """Also where that step begins past the input's length, behind a prefix that was found."""
    made, encoder = cross_bench(depth=2)
    prompt = list(range(100, 109))
    made.add(request("a", prompt, max_tokens=1, media_keys=((0, 3, "x"),)))
    made.finish()
    encoder.open(SchedulerLoad(0, 0, 0))
    encoder.clear()
    made.add(request("b", prompt, media_keys=((0, 3, "x"),)))
    plan = made.plan()
    assert encoded(plan) == ["x"] and plan.grants[0].start == 8
    made.scheduler.abort(["b"])
    assert "x" not in encoder.entries


@pytest.mark.parametrize(
    ("media", "words"),
    [((), "one input of its encoder, not 0"), (((0, 2, "x"), (0, 3, "y")), "not 2"), (((1, 2, "x"),), "position 1")],
)
def test_wrong_inputs_of_encoders(media: tuple[tuple[int, int, str], ...], words: str) -> None:
    made, _ = cross_bench()
    with pytest.raises(InputError, match=words):
        made.add(request("a", 6, media_keys=media))
    with pytest.raises(InputError, match=r"may need .* KV blocks"):
        made.add(request("b", 6, media_keys=((0, 999, "x"),)))
