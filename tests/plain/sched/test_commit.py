"""commit(), abort(), reset_prefix_cache(): how requests end, and what is said of them."""

from __future__ import annotations

import pytest

from quire.schema.kv import KVKind
from quire.schema.messages import FinishReason
from quire.schema.params import PoolingParams, RepetitionDetectionParams, ResolvedParams
from quire.schema.step import FORBIDS_ALL, Grant, LogprobRows, Pooled, StepResult
from tests.plain.sched.kit import EOS, Bench, counts, request

SCRIPT = [7, 8, EOS, 9, 5, 5, 6, 4, 6, 4, 3]  # what the model says after a prompt of 4


class Device:
    """A row on a device that drafts for itself: `drafts` are its proposals for each step, as far as they go."""

    def __init__(self, *drafts: list[int]) -> None:
        self.at, self.drafts = 0, list(drafts)

    def ahead(self, name: str) -> list[int]:
        """What its next step verifies."""
        return self.drafts[0] if self.drafts else []

    def __call__(self, grant: Grant) -> list[int]:
        assert grant.start + grant.count - grant.num_drafts - 4 >= self.at, "the device is further than the plan"
        drafts = self.drafts.pop(0) if self.at and self.drafts else []
        new = []
        for draft in (*drafts[: grant.num_drafts], None):
            new.append(SCRIPT[self.at])
            self.at += 1
            if new[-1] != draft:
                break
        return new


def drafting(bench: Bench, device: Device) -> Device:
    bench.tokens, bench.drafts = device, device.ahead
    return device


def scripted(grant: Grant) -> list[int]:
    return [SCRIPT[grant.start + grant.count - 4]]


STOPS = [
    ({}, 9, [7, 8, EOS], FinishReason.STOP, None),
    ({"params": ResolvedParams(stop_token_ids=(8,))}, 9, [7, 8], FinishReason.STOP, 8),
    ({"params": ResolvedParams(stop_token_ids=(EOS,))}, 9, [7, 8, EOS], FinishReason.STOP, None),
    ({"params": ResolvedParams(ignore_eos=True, stop_token_ids=(5,))}, 9, [7, 8, EOS, 9, 5], FinishReason.STOP, 5),
    ({"params": ResolvedParams(min_tokens=4, max_tokens=9, stop_token_ids=(7, 5))}, 9, SCRIPT[:5], "stop", 5),
    ({}, 2, [7, 8], FinishReason.LENGTH, None),
    ({}, 3, [7, 8, EOS], FinishReason.STOP, None),
    ({"params": ResolvedParams(ignore_eos=True)}, 99, SCRIPT[:11], FinishReason.LENGTH, None),  # max_model_len 15
]
REPETITIONS = [
    (RepetitionDetectionParams(max_pattern_size=2, min_count=2), SCRIPT[:6]),
    (RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=2, min_count=2), SCRIPT[:10]),
    (RepetitionDetectionParams(max_pattern_size=3, min_count=3), SCRIPT[:11]),
]


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
@pytest.mark.parametrize(("more", "max_tokens", "tokens", "reason", "stop_id"), STOPS)
def test_stop_rules(
    look_ahead: int, more: dict[str, object], max_tokens: int, tokens: list[int], reason: str, stop_id: int | None
) -> None:
    bench = Bench(max_model_len=15, depth=look_ahead + 1)
    bench.tokens = scripted
    bench.add(request("a", 4, max_tokens, **more))
    while bench.scheduler.has_unfinished() or bench.flights:
        plan = bench.plan()
        while len(bench.flights) > (look_ahead if plan.grants else 0):
            bench.commit()
    last = bench.seen["a"][-1]
    assert (bench.output("a"), last.finish_reason, last.stop_reason) == (tokens, reason, stop_id)
    assert bench.num_free == 64


@pytest.mark.parametrize(("rule", "tokens"), REPETITIONS)
def test_repetition_ends_a_request(rule: RepetitionDetectionParams, tokens: list[int]) -> None:
    bench = Bench(max_model_len=15)
    bench.tokens = scripted
    bench.add(request("a", 4, 99, params=ResolvedParams(ignore_eos=True, repetition_detection=rule)))
    bench.finish()
    reason = FinishReason.REPETITION if len(tokens) < 11 else FinishReason.LENGTH
    assert (bench.output("a"), bench.seen["a"][-1].finish_reason) == (tokens, reason)


def test_drafts_are_checked_in_one_step_and_the_wrong_ones_forgotten() -> None:
    bench = Bench(num_drafts=4)
    drafting(bench, Device([8, EOS, 1, 1], [1, 1, 1, 1]))
    bench.add(request("a", 4, 8, params=ResolvedParams(ignore_eos=True)))
    (grant,) = bench.step().grants
    assert (grant.start, grant.count, grant.num_drafts) == (0, 4, 0), "there is nothing to draft from yet"
    (grant,) = bench.step().grants
    assert (grant.start, grant.count, grant.num_drafts, grant.samples) == (4, 5, 4, True)
    assert bench.output("a") == [7, 8, EOS, 9]  # two right, and the model's own instead of the third
    (grant,) = bench.step().grants
    assert (grant.start, grant.count, grant.num_drafts) == (7, 4, 3), "four tokens are left to generate"
    (grant,) = bench.step().grants
    assert (grant.start, grant.count, grant.num_drafts) == (8, 1, 0), "nothing was drafted, so nothing is set aside"
    bench.finish()
    assert bench.output("a") == SCRIPT[:8]


def test_the_last_token_is_not_drafted_for() -> None:
    bench = Bench(num_drafts=4)
    drafting(bench, Device([8, EOS]))
    bench.add(request("a", 4, 2, params=ResolvedParams(ignore_eos=True)))
    bench.step()
    assert bench.plan().grants[0].num_drafts == 0, "one token is left to generate: a draft would be for nothing"


def test_drafts_accepted_past_a_stop_are_cut() -> None:
    bench = Bench(num_drafts=4)
    drafting(bench, Device([8, EOS, 9, 5]))
    bench.add(request("a", 4, 9))
    bench.step()
    bench.step()
    assert bench.output("a") == [7, 8, EOS] and bench.seen["a"][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_grant_after_the_first_checks_drafts_whatever_the_depth(depth: int) -> None:
    bench = Bench(num_drafts=2, depth=depth, max_model_len=99)
    device = drafting(bench, Device(*([token, 1] for token in SCRIPT[1::2])))  # the first of two is right
    bench.add(request("a", 4, 11, params=ResolvedParams(ignore_eos=True)))
    grants = []
    while bench.scheduler.has_unfinished() or bench.flights:
        plan = bench.plan()
        grants += plan.grants
        while len(bench.flights) > (depth - 1 if plan.grants else 0):
            bench.commit()
    assert bench.output("a") == SCRIPT and device.at == 11
    assert [bool(grant.num_drafts) for grant in grants[:4]] == [False, True, True, True]
    assert len(grants) <= 7, "a step brings two tokens"


def test_plans_ahead_count_drafts_as_right_until_they_are_known_to_be_wrong() -> None:
    bench = Bench(num_drafts=2, depth=2)
    drafting(bench, Device([8, 1], [9, 5]))
    bench.add(request("a", 4, 11, params=ResolvedParams(ignore_eos=True)))
    bench.step()
    assert [(g.start, g.count) for g in bench.plan().grants] == [(4, 3)]
    assert [(g.start, g.count) for g in bench.plan().grants] == [(7, 3)], "the furthest it can be"
    bench.commit()  # one of two was right: the row is at 6
    assert [(g.start, g.count) for g in bench.plan().grants] == [(9, 3)]
    bench.commit()
    assert bench.output("a") == [7, 8, EOS, 9, 5, 5]
    assert bench.scheduler.requests["a"].computed == 4 + 6 - 1
    assert bench.scheduler.requests["a"].planned == 4 + 6 - 1 + 3


def test_blocks_are_there_for_the_furthest_case() -> None:
    bench = Bench(num_drafts=3, depth=2)
    drafting(bench, Device([1, 1, 1], [1, 1, 1]))
    bench.add(request("a", 4, 30, params=ResolvedParams(ignore_eos=True)))
    bench.step()
    ahead = [bench.plan() for _ in range(2)]
    assert [sum(map(len, plan.grants[0].new_blocks)) for plan in ahead] == [1, 1]  # positions up to 12, blocks of 4
    bench.commit()
    bench.commit()
    assert bench.output("a") == [7, 8, EOS] and bench.scheduler.requests["a"].room == 12


def test_more_tokens_than_drafts_allow_are_a_fault() -> None:
    bench = Bench(num_drafts=1)
    bench.drafts = lambda name: [7]
    bench.add(request("a", 4, 30))
    bench.step()
    bench.tokens = lambda grant: [7, 7, 7]
    with pytest.raises(AssertionError, match="a got 1 tokens more than its drafts allow"):
        bench.step()


def test_the_state_before_wrong_drafts_keeps_its_block() -> None:
    bench = Bench(64, (KVKind.STATE, 2, 0), num_drafts=4)
    drafting(bench, Device([8, 1, 1, 1]))
    bench.add(request("a", 4, 8, params=ResolvedParams(ignore_eos=True)))
    bench.step()
    bench.step()
    (table,) = bench.scheduler.requests["a"].holding.tables
    assert bench.output("a") == [7, 8, EOS], (
        "of positions 4 to 8, whose blocks are 2, 3 and 4, the first two were right"
    )
    assert [block >= 0 for block in table] == [False, False, True, True, True]
    bench.finish()
    assert bench.output("a") == SCRIPT[:8] and bench.num_free == 64


def test_a_pooled_request_ends_with_its_prompt() -> None:
    bench = Bench(max_num_batched_tokens=4, num_drafts=2)
    bench.tokens = lambda grant: []
    bench.add(request("a", 6, 9, params=PoolingParams(task="embed")))
    assert counts(bench.step()) == {"a": 4}
    vector = Pooled((2,), "float32", bytes(8))
    assert counts(bench.step(pooled={"a": vector})) == {"a": 2}
    (last,) = bench.seen["a"]
    assert (last.finish_reason, last.pooled, last.new_token_ids) == (FinishReason.STOP, vector, [])
    assert bench.num_free == 64 and not bench.scheduler.has_unfinished()
    bench.add(request("b", 3, params=PoolingParams()))
    with pytest.raises(AssertionError, match="no token came back for b"):
        bench.step()


def test_abort_running_waiting_in_flight_and_unknown() -> None:
    bench = Bench(max_num_seqs=1, depth=2)
    bench.add(request("a"), request("b"))
    bench.plan()
    outputs = bench.scheduler.abort(["a", "b", "a", "nobody"])
    assert [(o.request_id, o.finish_reason, o.new_token_ids) for o in outputs] == [
        ("a", FinishReason.ABORT, []),
        ("b", FinishReason.ABORT, []),
    ]
    assert all(o.times is not None for o in outputs)
    assert not bench.scheduler.has_unfinished() and bench.num_free == 64
    assert bench.commit() == []
    bench.add(request("c"))
    assert bench.plan().left == ("a",), "`b` never had a row"


def test_a_failure_ends_one_request_and_its_blocks_are_not_offered_again() -> None:
    bench = Bench()
    prompt = list(range(9))
    bench.add(request("a", prompt), request("b", 5))
    bench.step()
    bench.step(failed={"a": "no token could be chosen"})
    last = bench.seen["a"][-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "no token could be chosen")
    assert bench.scheduler.num_running == 1
    bench.add(request("c", prompt))
    assert bench.plan().joined[0].blocks == ((),)


def test_what_forbids_every_token_is_the_requests_own_fault() -> None:
    bench = Bench()
    bench.add(request("a", 5), request("b", 5))
    bench.step()
    bench.step(failed={"a": "the logits are not numbers", "b": FORBIDS_ALL})
    assert [bench.seen[name][-1].error_kind for name in "ab"] == ["", "InputError"]


def test_reset_prefix_cache() -> None:
    bench = Bench()
    prompt = list(range(9))
    bench.add(request("a", prompt, 5))
    bench.step()
    assert bench.scheduler.reset_prefix_cache() is False
    bench.finish()
    assert bench.scheduler.reset_prefix_cache() is True
    bench.add(request("b", prompt, 5))
    assert bench.step().joined[0].blocks == ((),)
    bench.step()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert (bench.scheduler.num_running, bench.num_free) == (0, 64)
    plan = bench.step()
    assert plan.left == ("b",) and plan.joined[0].epoch == 1 and len(plan.joined[0].token_ids) == 11
    bench.finish()
    assert len(bench.output("b")) == 5


def test_reset_with_a_step_in_flight() -> None:
    bench = Bench(depth=2)
    bench.add(request("a", 4, 5))
    bench.plan()
    bench.plan()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert bench.commit() == [] and bench.commit() == []
    bench.finish()
    assert len(bench.output("a")) == 5


def rows(tokens: list[int]) -> LogprobRows:
    return LogprobRows([[t] for t in tokens], [[-1.0] for _ in tokens], tokens)


def test_prompt_log_probabilities_arrive_once_though_the_prompt_is_computed_twice() -> None:
    bench = Bench(max_num_batched_tokens=3)
    bench.add(request("a", 7, 2, params=ResolvedParams(prompt_logprobs=1)))
    pieces = [[1, 2, 3], [4, 5, 6], None]  # positions that the chunks [0, 3), [3, 6), [6, 7) tell of
    for piece in pieces[:2]:
        bench.step(prompt_logprobs={"a": rows(piece)})
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    for piece in pieces:
        bench.step(**({"prompt_logprobs": {"a": rows(piece)}} if piece else {}))
    bench.finish()
    got = [rank for output in bench.seen["a"] if output.prompt_logprobs for rank in output.prompt_logprobs.ranks]
    assert got == [1, 2, 3, 4, 5, 6] and len(bench.output("a")) == 2


def test_log_probabilities_are_cut_with_the_tokens() -> None:
    bench = Bench(num_drafts=3)
    drafting(bench, Device([8, EOS, 9]))
    bench.add(request("a", 4, 9))
    bench.step(logprobs=[rows([7])])
    bench.step(logprobs=[rows(SCRIPT[1:5])])
    assert [o.logprobs.ranks for o in bench.seen["a"]] == [[7], [8, EOS]]


def test_times_and_stats() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add(request("a", 6, 2))
    bench.step()
    stats = bench.scheduler.stats(forward_seconds=0.5)
    assert (stats.step, stats.running, stats.waiting, stats.prompt_tokens, stats.generated_tokens) == (1, 1, 0, 4, 0)
    assert (stats.kv_usage, stats.cache.queries, stats.cache.hits) == (1 / 64, 6, 0)
    assert stats.forward_seconds == 0.5
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (2, 1)
    bench.finish()
    first, last = bench.seen["a"]
    assert first.times.last_token == 0.0, "a copy: later stamps do not reach it"
    assert 0 < last.times.queued < last.times.scheduled < last.times.first_token < last.times.last_token
    assert first.times.first_token == last.times.first_token


def test_results_come_in_order_and_bring_what_was_granted() -> None:
    bench = Bench(depth=2)
    bench.add(request("a"))
    first, second = bench.plan(), bench.plan()
    with pytest.raises(AssertionError, match="step 1 is due"):
        bench.scheduler.commit(second, StepResult(step=2, sampled=[[7]]))
    bench = Bench()
    bench.add(request("a"))
    plan = bench.plan()
    with pytest.raises(AssertionError, match="no token came back for a"):
        bench.scheduler.commit(plan, StepResult(step=1, sampled=[[]]))
    assert first.step == 1


def test_the_audit_sees_a_lost_block() -> None:
    bench = Bench()
    bench.add(request("a"))
    bench.step()
    bench.scheduler.kv.pool.refs[bench.scheduler.requests["a"].holding.tables[0][0]] += 1
    with pytest.raises(AssertionError, match="counted wrongly"):
        bench.scheduler.audit()


def test_a_block_held_by_nobody_is_noticed_when_the_engine_falls_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.sched.scheduler.env.AUDIT.get", lambda: False)
    bench = Bench()
    bench.add(request("a", 4, 1))
    plan = bench.plan()
    bench.scheduler.kv.pool.take(1)
    with pytest.raises(AssertionError, match="1 blocks are held by no request"):
        bench.scheduler.commit(plan, StepResult(step=1, sampled=[[7]]))


def test_an_empty_plan_commits_to_nothing() -> None:
    bench = Bench()
    plan = bench.scheduler.plan()
    assert not plan.grants and bench.scheduler.commit(plan, StepResult(step=1, sampled=[])) == []
    assert counts(plan) == {}
