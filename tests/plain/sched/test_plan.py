"""plan(): order, budgets, chunks, preemption, admission, look-ahead."""

from __future__ import annotations

from types import SimpleNamespace as Names
from typing import Any

import pytest

from quire.checkpoint.facts import ModelFacts
from quire.checkpoint.media import ITEMS
from quire.sched.gates import SKIP, ChunkLimit, Gate, Hold, Holds, TokenBudget
from quire.sched.request import Request
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import ConfigError, InputError, OverloadedError
from quire.schema.kv import KVKind
from quire.schema.messages import FinishReason
from quire.schema.step import RowToken
from tests.plain.sched.kit import EOS, Bench, counts, request


@pytest.mark.parametrize(("name", "least"), [("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("max_model_len", 2)])
def test_a_limit_that_is_too_low_is_named_alone(name, least):
    with pytest.raises(ConfigError, match=f"^{name} must be at least {least}, got {least - 1}$"):
        SchedulerSettings(**{"max_model_len": 9, name: least - 1})


def test_first_come_first_served_within_the_token_budget() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.add(request("a", 6), request("b", 6), request("c", 6))
    assert counts(bench.step()) == {"a": 6, "b": 4}
    assert counts(bench.step()) == {"a": 1, "b": 2, "c": 6}
    assert counts(bench.step()) == {"a": 1, "b": 1, "c": 1}


def test_priority_is_lower_first_then_arrival() -> None:
    bench = Bench(policy="priority", max_num_seqs=2)
    bench.add(
        request("late", priority=1, arrival=9.0),
        request("low", priority=5, arrival=1.0),
        request("early", priority=1, arrival=3.0),
        request("first", priority=-4, arrival=99.0),
    )
    assert list(counts(bench.step())) == ["first", "early"]
    bench.scheduler.abort(["early"])
    assert list(counts(bench.step())) == ["first", "late"]


def test_a_request_that_joins_later_but_ranks_higher_is_served_first() -> None:
    bench = Bench(policy="priority", max_num_batched_tokens=4)
    bench.add(request("low", 2, priority=5))
    bench.step()
    bench.add(request("high", 20, priority=0))
    assert counts(bench.step()) == {"low": 1, "high": 3}
    assert counts(bench.step()) == {"high": 4}  # ranks before `low` once it runs


def test_sequence_limit() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(request("a"), request("b"), request("c"))
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)


def test_chunks_carry_on_where_they_stopped() -> None:
    bench = Bench(max_num_batched_tokens=5)
    bench.add(request("a", 12))
    grants = [bench.step().grants[0] for _ in range(4)]
    assert [(g.start, g.count, g.samples) for g in grants] == [
        (0, 5, False),
        (5, 5, False),
        (10, 2, True),
        (12, 1, True),
    ]
    assert [len(blocks) for g in grants for blocks in g.new_blocks] == [2, 1, 1]  # 12 tokens fill 3 blocks of 4


def test_a_prompt_is_not_begun_with_a_sliver_of_a_step_full_of_prompts() -> None:
    bench = Bench(max_num_batched_tokens=64, max_model_len=400)
    bench.add(request("a", 61), request("b", 40), request("c", 2))
    assert counts(bench.step()) == {"a": 61}  # 3 tokens of b would be left; nobody overtakes it
    assert counts(bench.step()) == {"a": 1, "b": 40, "c": 2}
    bench = Bench(max_num_batched_tokens=64, max_model_len=400)
    bench.add(request("a", 60), request("b", 40))
    assert counts(bench.step()) == {"a": 60, "b": 4}  # no sliver
    bench = Bench(max_num_batched_tokens=64, max_model_len=400)
    bench.add(request("a", 61), request("b", 65))
    assert counts(bench.step()) == {"a": 61, "b": 3}  # is cut anyway


def test_decodes_that_fill_a_step_do_not_keep_a_prompt_waiting() -> None:
    bench = Bench(200, max_num_batched_tokens=64, max_num_seqs=80)
    bench.add(*(request(f"d{i}", 1) for i in range(62)))
    bench.step()
    bench.add(request("late", 40))
    assert counts(bench.step())["late"] == 2


def test_without_chunking_a_prompt_waits_for_a_step_of_its_own_and_is_not_overtaken() -> None:
    bench = Bench(max_model_len=20, max_num_batched_tokens=20, chunked_prefill=False)
    bench.add(request("a", 4), request("long", 18), request("short", 2))
    assert counts(bench.step()) == {"a": 4}
    assert counts(bench.step()) == {"a": 1, "long": 18}
    assert counts(bench.step()) == {"a": 1, "long": 1, "short": 2}


def test_long_prompts_get_slices_and_short_ones_overtake() -> None:
    bench = Bench(long_prefill_threshold=4, max_partial_prefills=1, max_num_batched_tokens=40)
    bench.add(request("long", 12), request("longer", 14), request("short", 3))
    assert counts(bench.step()) == {"long": 4, "short": 3}
    assert counts(bench.step()) == {"long": 4, "short": 1}
    assert counts(bench.step()) == {"long": 4, "short": 1, "longer": 4}


def test_several_partial_prefills_of_which_one_long() -> None:
    bench = Bench(
        long_prefill_threshold=4, max_partial_prefills=3, max_long_partial_prefills=1, max_num_batched_tokens=40
    )
    bench.add(request("long", 12), request("longer", 14))
    assert counts(bench.step()) == {"long": 4}
    bench = Bench(
        long_prefill_threshold=4, max_partial_prefills=3, max_long_partial_prefills=2, max_num_batched_tokens=40
    )
    bench.add(request("long", 12), request("longer", 14), request("longest", 20))
    assert counts(bench.step()) == {"long": 4, "longer": 4}


def test_preemption_takes_from_the_last_and_starts_it_again_from_all_its_tokens() -> None:
    bench = Bench(6, max_model_len=20)
    bench.add(request("a", 7, 12), request("b", 7, 12))
    bench.step()
    while bench.scheduler.num_running == 2:
        plan = bench.plan()
        if plan.left:
            break
        bench.commit()
    assert plan.left == ("b",) and [g.request_id for g in plan.grants] == ["a"]
    assert bench.scheduler.num_waiting == 1
    bench.commit()
    known = bench.output("b")
    assert known, "it had produced something"
    while not plan.joined:  # until `a` leaves enough room
        plan = bench.step()
    (row,) = plan.joined
    assert (row.request_id, row.epoch, row.num_prompt_tokens) == ("b", 1, 7)
    assert row.token_ids == (*request("b", 7).prompt_token_ids, *known)
    bench.finish()
    assert len(bench.output("a")) == len(bench.output("b")) == 12
    assert bench.seen["b"][-1].times.num_preemptions == 1 and bench.seen["a"][-1].times.num_preemptions == 0


def test_the_last_in_order_waits_with_what_it_has() -> None:
    bench = Bench(5, max_model_len=20)
    bench.add(request("a", 8, 10), request("b", 8, 10))  # two blocks each
    bench.step()
    plan = bench.step()  # `a` takes the fifth block, `b` needs one too and is last
    assert counts(plan) == {"a": 1} and plan.left == ()
    assert bench.scheduler.num_running == 2 and bench.num_free == 0


def test_nobody_joins_in_a_step_that_lacked_blocks() -> None:
    bench = Bench(6, max_model_len=20, reserve_full_prompt=False)
    bench.add(request("a", 8, 10), request("b", 8, 10))
    bench.step()
    bench.step()
    bench.add(request("c", 1, 1))
    assert bench.num_free == 0
    assert "c" not in counts(bench.step())


def test_watermark_keeps_blocks_free_only_while_something_runs() -> None:
    bench = Bench(10, max_model_len=36, watermark=0.5)
    bench.add(request("big", 26, 4), request("small", 4, 1))
    assert counts(bench.step()) == {"big": 26}  # 7 of 10 blocks, although 5 are to be kept: nothing ran
    assert counts(bench.step()) == {"big": 1}
    bench.scheduler.abort(["big"])
    assert counts(bench.step()) == {"small": 4}


@pytest.mark.parametrize(("reserve", "joins"), [(True, False), (False, True)])
def test_reserving_the_whole_prompt(reserve: bool, joins: bool) -> None:
    bench = Bench(10, max_model_len=32, max_num_batched_tokens=8, reserve_full_prompt=reserve)
    bench.add(request("a", 22, 4))
    for _ in range(3):
        bench.step()  # 6 of 10 blocks
    bench.add(request("b", 20, 4))  # 5 blocks in the end, 2 in its first chunk
    assert ("b" in counts(bench.step())) is joins


def test_prompts_under_way_are_counted_when_another_would_join() -> None:
    bench = Bench(10, max_model_len=32, max_num_batched_tokens=8, long_prefill_threshold=4, max_partial_prefills=5,
                  max_long_partial_prefills=5)  # fmt: skip
    bench.add(request("a", 22, 4), request("b", 22, 4))  # 6 blocks each: the second must wait, though both begin small
    assert counts(bench.step()) == {"a": 4}


def test_what_can_never_be_is_refused_with_the_numbers() -> None:
    bench = Bench(4, max_model_len=40, max_num_queued=1)
    with pytest.raises(InputError, match=r"need 5 KV blocks, but there are only 4"):
        bench.add(request("big", 10, 8))
    bench.add(request("a", 4, 8))
    with pytest.raises(OverloadedError, match=r"1 requests are waiting and max_num_queued_reqs=1"):
        bench.add(request("b", 4, 8))
    bench.step()
    with pytest.raises(InputError, match=r"'a' is in use"):
        bench.add(request("a", 4, 8))
    bench.finish()
    bench.add(request("a", 4, 8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 16}, "max_num_batched_tokens=16 is less than"),
        ({"policy": "lifo"}, "scheduling_policy='lifo' is unknown"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"hash_algorithm": "crc"}, "prefix_caching_hash_algo='crc' is unknown"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bench(**settings)


def test_look_ahead_plans_on_tokens_that_are_not_known_yet() -> None:
    bench = Bench(depth=2)
    bench.add(request("a", 4, 3))
    spans = []
    for _ in range(2):
        spans += [(g.start, g.count, g.samples) for g in bench.plan().grants]
    bench.commit()
    spans += [(g.start, g.count, g.samples) for g in bench.plan().grants]
    assert spans == [(0, 4, True), (4, 1, True), (5, 1, True)]
    bench.commit()
    assert not bench.plan().grants, "its third and last token is in flight"
    (last,) = bench.commit()
    assert last.finish_reason is FinishReason.LENGTH and bench.output("a") == [7, 7, 7]


def test_depth_without_overlap_keeps_a_request_to_one_plan() -> None:
    bench = Bench(depth=3, overlap=1, max_num_seqs=2, max_num_batched_tokens=6)
    bench.add(request("a", 6, 4), request("b", 6, 4))
    assert [counts(bench.plan()) for _ in range(3)] == [{"a": 6}, {"b": 6}, {}]
    bench.commit()
    assert counts(bench.plan()) == {"a": 1}  # b is still in flight
    assert not bench.plan().grants
    bench.commit()
    assert counts(bench.plan()) == {"b": 1}
    bench.finish()
    assert bench.output("a") == bench.output("b") == [7, 7, 7, 7]


def test_plans_without_overlap_share_the_requests() -> None:
    """Or one stage of a pipeline would have all of them, and the other none."""
    bench = Bench(depth=2, overlap=1)
    bench.add(*(request(name, 6, 3) for name in "abcde"))
    assert counts(bench.plan()) == {"a": 6, "b": 6, "c": 6} and counts(bench.plan()) == {"d": 6, "e": 6}
    bench.commit()
    assert counts(bench.plan()) == {"a": 1, "b": 1, "c": 1}
    bench.commit()
    assert counts(bench.plan()) == {"d": 1, "e": 1}
    bench.commit()
    bench.finish()
    assert all(bench.output(name) == [7, 7, 7] for name in "abcde")


def test_plans_tell_what_was_sampled_where_no_request_is_in_two_of_them() -> None:
    bench = Bench(depth=2, overlap=1)
    bench.add(request("a", 6, 3), request("b", 5, 1))
    assert not bench.plan().sampled and not bench.plan().sampled
    bench.commit()  # of a
    assert bench.plan().sampled == (RowToken("a", 6, 7),)
    bench.commit()  # b has ended: nobody needs its token
    bench.commit()
    assert bench.plan().sampled == (RowToken("a", 7, 7),)
    plain = Bench(depth=2)
    plain.add(request("a", 6, 3))
    plain.plan()
    plain.plan()
    plain.commit()
    assert not plain.plan().sampled  # a row on the device has its tokens


def test_overlap_counts_the_plans_of_one_request() -> None:
    bench = Bench(depth=3, overlap=2)
    bench.add(request("a", 6, 9))
    assert [counts(bench.plan()) for _ in range(3)] == [{"a": 6}, {"a": 1}, {}]
    bench.commit()
    assert counts(bench.plan()) == {"a": 1}
    assert not bench.plan().grants
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempted: its plans out count no longer
    assert counts(bench.plan()) == {"a": 7}
    while bench.flights:
        bench.commit()
    bench.finish()
    assert bench.output("a") == [7] * 9


def test_a_prompt_in_flight_still_counts_as_half_computed() -> None:
    bench = Bench(depth=2, overlap=1, max_num_batched_tokens=4, max_partial_prefills=1)
    bench.add(request("a", 9), request("b", 9), request("c", 3))
    assert counts(bench.plan()) == {"a": 4}
    assert counts(bench.plan()) == {"c": 3}  # b would be the second; c fits whole


@pytest.mark.parametrize(("depth", "overlap"), [(0, None), (2, 0), (2, 3)])
def test_depth_and_overlap_that_cannot_be(depth: int, overlap: int | None) -> None:
    with pytest.raises(ConfigError, match=f"depth={depth} must be at least 1 and overlap={overlap}"):
        SchedulerSettings(max_model_len=9, depth=depth, overlap=overlap)


def test_no_more_plans_than_look_ahead_allows() -> None:
    bench = Bench(depth=2)
    bench.add(request("a"))
    bench.plan()
    bench.plan()
    with pytest.raises(AssertionError, match="2 plans are out"):
        bench.scheduler.plan()


def test_a_stop_seen_late_throws_the_next_token_away() -> None:
    bench = Bench(depth=2)
    bench.tokens = lambda grant: [EOS if grant.start == 4 else 7]
    bench.add(request("a", 4, 9))
    bench.plan()
    bench.plan()
    bench.commit()
    bench.plan()  # computes the position of a token that turns out to be the last
    (last,) = bench.commit()
    assert (last.finish_reason, last.stop_reason, bench.output("a")) == (FinishReason.STOP, None, [7, EOS])
    assert bench.num_free == 64
    assert bench.commit() == []
    bench.add(request("b"))
    assert bench.plan().left == ("a",)


def test_rows_are_freed_with_the_next_plan_that_is_not_empty() -> None:
    bench = Bench()
    bench.add(request("a", 4, 1))
    bench.step()
    assert bench.plan().left == ()
    bench.add(request("a", 4, 1))  # the same name again: freed, then joined
    plan = bench.step()
    assert plan.left == ("a",) and plan.joined[0].request_id == "a"


def test_an_old_result_does_not_reach_a_new_request_of_the_same_name() -> None:
    bench = Bench(depth=2)
    bench.add(request("a", 4, 5))
    bench.plan()
    bench.scheduler.abort(["a"])
    bench.add(request("a", 6, 5))
    bench.plan()
    assert bench.commit() == []
    assert [len(output.new_token_ids) for output in bench.commit()] == [1]


def test_a_gate_of_ones_own() -> None:
    class Odd(Gate):
        """Lets requests with an odd priority in every second step only."""

        step = 0

        def open(self, num_running: int) -> None:
            self.step += 1

        def singles(self) -> int:
            return 0

        def admit(self, one: Request, count: int) -> int:
            return SKIP if one.source.priority % 2 and self.step % 2 else count

    bench = Bench()
    bench.scheduler.planner.use_gates([Odd(), *bench.scheduler.planner.gates])
    bench.add(request("odd", priority=1), request("even"))
    assert [list(counts(bench.step())) for _ in range(4)] == [["even"], ["even", "odd"], ["even"], ["odd", "even"]]


def test_a_request_passed_over_does_not_loosen_the_budget() -> None:
    class NoPrompts(Gate):
        shut = False

        def admit(self, one: Request, count: int) -> int:
            return SKIP if self.shut and count > 1 else count

    bench, gate = Bench(max_num_batched_tokens=12, long_prefill_threshold=9), NoPrompts()
    gates = bench.scheduler.planner.gates
    bench.scheduler.planner.use_gates([gate, *gates])
    bench.add(request("a", 1), request("prompt", 9), request("b", 1), request("c", 1))
    next(one for one in gates if isinstance(one, ChunkLimit)).most = 5
    assert counts(bench.step()) == {"a": 1, "prompt": 5, "b": 1, "c": 1}
    next(one for one in gates if isinstance(one, TokenBudget)).most = 2
    gate.shut = True
    assert counts(bench.step()) == {"a": 1, "b": 1}


def test_a_window_gives_blocks_back_and_takes_no_more_than_it_needs() -> None:
    bench = Bench(5, (KVKind.WINDOW, 4, 6), max_model_len=64, max_num_batched_tokens=4)
    bench.add(request("a", 30, 30))
    held = []
    while bench.scheduler.has_unfinished():
        bench.step()
        held.append(5 - bench.num_free)
    assert max(held) <= 4 and len(bench.output("a")) == 30


LATENCY = {"cuda": {"latency_tokens": 512, "latency_deep": 8}, "cpu": {"latency_tokens": 64, "latency_deep": 0}}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_from_config_reads_every_option(device: str) -> None:
    config = Names(
        device_config=Names(device=device),
        scheduler_config=Names(
            max_num_batched_tokens=100, max_num_seqs=3, policy="priority", enable_chunked_prefill=True,
            long_prefill_token_threshold=9, max_num_partial_prefills=2, max_long_partial_prefills=1,
            scheduler_reserve_full_isl=False, watermark=0.25, max_num_queued_reqs=11,
            max_num_queued_tokens=12, inter_token_latency_goal_ms=25.0, encoder_cache_size=99,
            disable_chunked_mm_input=True,
        ),
        model_config=Names(takes_media=device == "cpu", is_encoder_decoder=False, facts=ModelFacts(both_ways=ITEMS)),
        cache_config=Names(enable_prefix_caching=False, prefix_caching_hash_algo="sha256_cbor"),
        kv_events_config=Names(publishes=True),
        lora_config=Names(max_loras=3, max_cpu_loras=5), num_speculative_tokens=4,
        parallel_config=Names(pipeline_parallel_size=2),
    )  # fmt: skip
    assert SchedulerSettings.from_config(config, max_model_len=50, depth=2) == SchedulerSettings(
        max_model_len=50, max_num_batched_tokens=100, max_num_seqs=3, policy="priority", depth=2, overlap=1,
        chunked_prefill=True, long_prefill_threshold=9, max_partial_prefills=2, max_long_partial_prefills=1,
        reserve_full_prompt=False, watermark=0.25, max_num_queued=11, max_num_queued_tokens=12, prefix_caching=False,
        hash_algorithm="sha256_cbor", events=True, latency_goal=0.025, max_loras=3, max_cpu_loras=5, num_drafts=4,
        encoder_tokens=99 if device == "cpu" else 0, whole_media=True, joined_media=True, **LATENCY[device],
    )  # fmt: skip


def test_a_request_held_for_two_reasons_joins_after_both_were_released() -> None:
    bench = Bench()
    bench.add(request("a"), request("b"))
    bench.scheduler.hold("a", Hold.GRAMMAR)
    bench.scheduler.hold("a", Hold.KV_TRANSFER)
    assert counts(bench.step()) == {"b": 6}
    assert bench.scheduler.has_runnable()
    bench.scheduler.release("a", Hold.GRAMMAR)
    bench.scheduler.release("a", Hold.GRAMMAR)  # a second time, and one that nobody placed
    bench.scheduler.release("a", Hold.ENCODER)
    assert counts(bench.step()) == {"b": 1}
    bench.scheduler.release("a", Hold.KV_TRANSFER)
    assert counts(bench.step()) == {"b": 1, "a": 6}


def test_holds_end_with_their_request() -> None:
    bench = Bench()
    bench.add(request("a"), request("b"))
    bench.scheduler.hold("a", Hold.GRAMMAR)
    bench.scheduler.hold("a", Hold.ENCODER)
    bench.scheduler.abort(["a"])
    with pytest.raises(KeyError, match="'a' cannot be held"):
        bench.scheduler.hold("a", Hold.GRAMMAR)
    bench.add(request("a"))  # the name again, and nothing left of the first
    assert counts(bench.step()) == {"b": 6, "a": 6}


def test_all_held_is_a_wait_and_nothing_runnable() -> None:
    bench = Bench()
    bench.add(request("a"))
    bench.scheduler.hold("a", Hold.ENCODER)
    assert not bench.plan().grants
    assert bench.scheduler.has_unfinished() and not bench.scheduler.has_runnable()


class Barring(Gate):
    def __init__(self, name: str) -> None:
        self.name = name

    def bars(self, request: Request) -> bool:
        return request.id == self.name


def test_every_gate_is_asked_whom_it_bars() -> None:
    bench = Bench()
    planner = bench.scheduler.planner
    planner.use_gates([*planner.gates, barring_a := Barring("a"), barring_c := Barring("c")])
    bench.add(*(request(name, tenant=number) for number, name in enumerate("abcd")))  # each in its lane
    bench.scheduler.hold("d", Hold.GRAMMAR)
    assert counts(bench.step()) == {"b": 6}
    barring_a.name = barring_c.name = ""
    assert counts(bench.step()) == {"b": 1, "a": 6, "c": 6}


def test_barred_requests_do_not_count_as_turned_away() -> None:
    bench = Bench(num_blocks=500, max_num_seqs=4)
    bench.add(*(request(f"held{i}", 2) for i in range(200)), request("free", 3))
    for i in range(200):
        bench.scheduler.hold(f"held{i}", Hold.KV_TRANSFER)
    assert counts(bench.step()) == {"free": 3}


def test_a_step_looks_at_one_of_those_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_blocks=500, max_num_seqs=4, depth=1)
    bench.add(*(request(f"held{i}", 2) for i in range(500)), request("free", 3))
    for i in range(500):
        bench.scheduler.hold(f"held{i}", Hold.GRAMMAR)
    asked: list[str] = []
    bars = Holds.bars
    monkeypatch.setattr(Holds, "bars", lambda holds, one: asked.append(one.id) or bars(holds, one))
    assert counts(bench.step()) == {"free": 3}
    assert len(asked) <= 2, f"{len(asked)} requests were looked at"
    bench.scheduler.release("held499", Hold.GRAMMAR)
    assert counts(bench.step()) == {"free": 1, "held499": 2}


def test_a_running_request_that_is_held_waits_on_hold_once_preempted() -> None:
    bench = Bench()
    bench.add(request("a"), request("b"))
    bench.step()
    bench.scheduler.hold("a", Hold.KV_TRANSFER)
    bench.scheduler.planner.preempt(bench.scheduler.requests["a"])
    assert counts(bench.step()) == {"b": 1}
    bench.scheduler.release("a", Hold.KV_TRANSFER)
    assert set(counts(bench.step())) == {"a", "b"}


def test_drafts_of_past_answers_stay_within_tenant_and_salt() -> None:
    """Rows whose requests may not know of each other have other scopes (drafting/suffix.py goes by them)."""
    apart: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"tenant": 1},
        {"tenant": 1, "cache_salt": "a"},
    ]

    def scopes(num_drafts: int) -> list[str]:
        bench = Bench(num_drafts=num_drafts, max_num_seqs=16)
        for i, keys in enumerate([*apart, *apart]):
            bench.scheduler.add(request(f"r{i}", 3, **keys))
        found = {row.request_id: row.scope for row in bench.scheduler.plan().joined}
        return [found[f"r{i}"] for i in range(10)]

    found = scopes(4)
    assert found[:5] == found[5:] and len(set(found)) == 5
    assert set(scopes(0)) == {""}
