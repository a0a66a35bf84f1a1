"""Fair scheduling between tenants: the next turn, room within a step, rows and blocks; no effect with one tenant.

The fuzzers are tests/plain/sched/fuzz.py and fair_fuzz.py, a few seeds of which run here, and known faults are put in
to see that they are caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.sched.gates import CLOSED, Hold, TenantRows, TenantTokens
from quire.sched.planner import Planner
from quire.sched.request import Request
from quire.sched.shares import Shares
from quire.sched.tenants import Tenant, Turns, Waiting
from quire.schema.step import Grant
from tests.plain.sched import fair_fuzz
from tests.plain.sched.fuzz import run_seed
from tests.plain.sched.kit import Bench, counts, request

LONG = {"max_model_len": 200, "max_num_batched_tokens": 16}


def joined(bench: Bench, steps: int) -> list[str]:
    return [new.request_id for _ in range(steps) for new in bench.step().joined]


# ---- turns ------------------------------------------------------------------------------------------------------


def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    bench = Bench(256, max_num_batched_tokens=8, max_model_len=64)
    bench.add(*(request(f"a{i}", 8, 1, tenant=1) for i in range(4)))
    bench.add(*(request(f"b{i}", 8, 1, tenant=2) for i in range(2)))
    assert joined(bench, 6) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_turns_are_weighted_by_prompt_tokens() -> None:
    bench = Bench(256, max_num_batched_tokens=12, max_model_len=64, prefix_caching=False)
    bench.add(*(request(f"a{i}", 12, 1, tenant=1) for i in range(3)))
    bench.add(*(request(f"b{i}", 4, 1, tenant=2) for i in range(6)))
    assert joined(bench, 5) == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "b5", "a2"]


def test_what_the_prefix_cache_had_is_not_charged() -> None:
    bench = Bench(256, max_num_batched_tokens=32, max_model_len=64, max_num_seqs=1)
    shared = list(range(100, 124))
    bench.add(request("first", [*shared, 1], 1, tenant=1))
    bench.finish()
    bench.add(*(request(f"a{i}", [*shared, i], 1, tenant=1) for i in range(3)))
    bench.add(*(request(f"b{i}", [200 + i], 1, tenant=2) for i in range(3)))
    assert joined(bench, 6) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_priorities_stand_above_turns() -> None:
    bench = Bench(256, max_num_batched_tokens=8, max_model_len=64, policy="priority")
    bench.add(*(request(f"a{i}", 8, 1, tenant=1, priority=0) for i in range(3)))
    bench.add(request("b0", 8, 1, tenant=2, priority=1))
    bench.add(request("b1", 8, 1, tenant=2, priority=-1))
    assert joined(bench, 5) == ["b1", "a0", "a1", "a2", "b0"]


def test_nobody_saves_up_turns_by_staying_away() -> None:
    bench = Bench(256, max_num_batched_tokens=8, max_model_len=64, prefix_caching=False)
    bench.add(*(request(f"a{i}", 8, 1, tenant=1) for i in range(10)))
    joined(bench, 6)
    bench.add(*(request(f"b{i}", 8, 1, tenant=2) for i in range(4)))
    assert joined(bench, 6) == ["a6", "b0", "a7", "b1", "a8", "b2"]


def test_siblings_share_a_tenant() -> None:
    bench = Bench(256, max_num_batched_tokens=8, max_model_len=64, prefix_caching=False)
    bench.add(*(request(f"a.{i}", 8, 1, tenant=1, parent_id="a") for i in range(8)), request("b", 8, 1, tenant=2))
    assert joined(bench, 2) == ["a.0", "b"]


def test_tenants_that_are_gone_are_forgotten() -> None:
    bench = Bench(256, max_num_batched_tokens=8, max_model_len=64)
    for name in range(1000):
        bench.add(request(f"r{name}", 8, 1, tenant=name))
        bench.step()
    bench.finish()
    assert len(bench.scheduler.planner.waiting.tenants) <= 130


# ---- within a step ----------------------------------------------------------------------------------------------


def test_a_long_prompt_shares_its_steps_with_another_tenants() -> None:
    bench = Bench(256, **LONG)
    bench.add(request("long", 160, 1, tenant=1))
    assert counts(bench.step()) == {"long": 16}
    bench.add(request("short", 8, 1, tenant=2))
    assert counts(bench.step()) == {"long": 8, "short": 8}
    assert counts(bench.step()) == {"long": 16}


def test_a_long_prompt_leaves_more_while_its_tenant_is_ahead() -> None:
    bench = Bench(256, **LONG)
    bench.add(request("long", 160, 1, tenant=1))
    bench.step()
    bench.add(request("other", 160, 1, tenant=2))  # begins where the first is
    assert counts(bench.step()) == {"long": 8, "other": 8}
    bench.scheduler.planner.waiting.charge(1, 8)
    assert counts(bench.step()) == {"long": 4, "other": 12}


def test_a_tenant_that_is_due_leaves_nothing() -> None:
    bench = Bench(256, **LONG)
    bench.add(request("long", 160, 1, tenant=1), request("other", 160, 1, tenant=2))
    bench.step()
    bench.scheduler.planner.waiting.charge(2, 100)
    assert counts(bench.step()) == {"long": 16}


def test_two_long_prompts_of_two_tenants_are_computed_side_by_side() -> None:
    bench = Bench(256, **LONG)
    bench.add(request("a", 160, 1, tenant=1))
    bench.step()
    bench.add(request("b", 160, 1, tenant=2))
    assert set(counts(bench.step())) == {"a", "b"}
    bench.add(request("c", 160, 1, tenant=2))
    assert set(counts(bench.step())) == {"a", "b"}, "max_num_partial_prefills holds within a tenant"


def test_room_is_not_left_to_those_who_cannot_use_it() -> None:
    bench = Bench(256, **LONG)
    bench.add(request("long", 160, 1, tenant=1))
    bench.step()
    bench.add(request("held", 10, 1, tenant=2))
    bench.scheduler.hold("held", Hold.GRAMMAR)
    assert counts(bench.step()) == {"long": 16}
    bench.scheduler.release("held", Hold.GRAMMAR)
    assert counts(bench.step()) == {"long": 6, "held": 10}


def test_room_that_was_left_in_vain_is_not_left_again() -> None:
    bench = Bench(48, **LONG)
    bench.add(request("long", 160, 1, tenant=1))
    bench.step()
    bench.add(request("large", 60, 1, tenant=2))  # whose blocks are not there
    assert counts(bench.step()) == {"long": 8}
    assert counts(bench.step()) == {"long": 16}


# ---- rows and blocks --------------------------------------------------------------------------------------------


def test_rows_over_a_share_are_given_up_to_one_that_waits() -> None:
    bench = Bench(256, max_num_seqs=4)
    bench.add(*(request(f"a{i}", 4, 40, tenant=1) for i in range(5)))
    bench.step()
    assert bench.scheduler.num_running == 4
    bench.add(*(request(f"b{i}", 4, 40, tenant=2) for i in range(3)))
    plan = bench.step()
    assert [new.request_id for new in plan.joined] == ["b0", "b1"]
    assert set(plan.left) == {"a2", "a3"}
    for _ in range(10):
        assert set(counts(bench.step())) == {"a0", "a1", "b0", "b1"}, "nobody gives up more than its share"
    bench.finish()
    assert all(len(bench.output(f"{name}{i}")) == 40 for name, number in (("a", 5), ("b", 3)) for i in range(number))


def test_a_flood_of_one_tenant_does_not_use_up_the_step() -> None:
    bench = Bench(1024, max_num_seqs=16)
    bench.add(*(request(f"a{i}", 4, 40, tenant=1) for i in range(150)))
    for _ in range(5):
        bench.step()
    bench.add(*(request(f"b{i}", 4, 8, tenant=2) for i in range(3)))
    assert joined(bench, 2) == ["b0", "b1", "b2"]


def test_blocks_that_requests_share_count_once() -> None:
    """Six requests with one prefix hold little more than one: another tenant holds most, and gives some up."""
    bench = Bench(96, max_model_len=128, max_num_batched_tokens=512)
    prompt = list(range(80))
    bench.add(request("a0", prompt, 24, tenant=1), *(request(f"c{i}", 80, 24, tenant=3) for i in range(3)))
    bench.step()
    bench.add(*(request(f"a{i}", prompt, 24, tenant=1) for i in range(1, 6)))
    bench.step()
    assert bench.scheduler.num_running == 9
    bench.add(request("b0", 92, 4, tenant=2))
    plans = [bench.step() for _ in range(3)]
    assert {name for plan in plans for name in plan.left} == {"c2"}
    assert "b0" in {new.request_id for plan in plans for new in plan.joined}


def test_the_last_rows_stay_free_for_those_below_their_share() -> None:
    bench = Bench(256, max_num_seqs=8)
    bench.add(request("b0", 4, 40, tenant=2), *(request(f"a{i}", 4, 40, tenant=1) for i in range(20)))
    bench.step()
    assert bench.scheduler.num_running == 7
    bench.add(request("b1", 4, 40, tenant=2))
    assert [new.request_id for new in bench.step().joined] == ["b1"]
    assert bench.scheduler.tally.preempted == 0 and bench.scheduler.num_running == 8


def test_blocks_over_a_share_are_given_up_to_one_that_waits() -> None:
    bench = Bench(32, max_model_len=128, max_num_batched_tokens=64)
    bench.add(*(request(f"a{i}", 28, 40, tenant=1) for i in range(4)))
    for _ in range(3):
        bench.step()
    bench.add(request("b", 40, 8, tenant=2))
    names = joined(bench, 3)
    assert "b" in names
    bench.finish()
    assert len(bench.output("b")) == 8 and all(len(bench.output(f"a{i}")) == 40 for i in range(4))


def test_one_that_is_gone_claims_no_blocks() -> None:
    bench = Bench(32, max_model_len=128, max_num_batched_tokens=64)
    bench.add(*(request(f"a{i}", 28, 40, tenant=1) for i in range(4)))
    for _ in range(3):
        bench.step()
    bench.add(request("b", 40, 8, tenant=2))
    bench.step()
    bench.scheduler.abort(["b"])
    bench.add(request("c", 1, 1, tenant=3))
    before = bench.scheduler.planner.tally.preempted
    running = set(counts(bench.step()))
    assert {"a0", "a1", "a2"} <= running and bench.scheduler.planner.tally.preempted == before == 0


def test_where_nothing_runs_nothing_is_given_up() -> None:
    """Blocks that wait to be copied belong to nobody."""
    bench = Bench(32, max_model_len=128, max_num_batched_tokens=64)
    taken = bench.scheduler.kv.pool.take(30)
    bench.add(request("a", 40, 8, tenant=1), request("b", 40, 8, tenant=2))
    assert not bench.plan().grants and not bench.plan().grants
    bench.scheduler.kv.pool.drop(taken)
    bench.finish()
    assert len(bench.output("a")) == len(bench.output("b")) == 8


def test_rows_are_not_given_up_for_lower_priority() -> None:
    bench = Bench(256, max_num_seqs=4, policy="priority")
    bench.add(*(request(f"a{i}", 4, 40, tenant=1, priority=0) for i in range(4)))
    bench.step()
    bench.add(request("b", 4, 40, tenant=2, priority=1))
    for _ in range(5):
        assert set(counts(bench.step())) == {"a0", "a1", "a2", "a3"}


# ---- one tenant: as if there were no tenants --------------------------------------------------------------------


class PlainTurns:
    """In the policy's order, whose ever they are; written without Turns."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting, self.left = waiting, sorted(waiting, key=lambda request: request.order)

    @property
    def request(self) -> Request | None:
        return self.left[0] if self.left else None

    def pass_by(self) -> None:
        del self.left[0]

    pass_lane = pass_by

    def join(self) -> None:
        self.waiting.remove(self.left[0])

    def go_on(self) -> None:
        del self.left[0]


def plain(patch: pytest.MonkeyPatch) -> None:
    """No gate, share or turn that knows tenants."""
    patch.setattr(Waiting, "turns", lambda waiting: PlainTurns(waiting))
    patch.setattr(TenantRows, "admit", lambda gate, request, count: count)
    patch.setattr(TenantTokens, "admit", lambda gate, request, count: count)
    patch.setattr(Shares, "row_to_give_up", lambda shares, barred: None)
    patch.setattr(Shares, "blocks_to_give_up", lambda shares, claimant: None)


def plans_of(seed: int, tenants: tuple[int, ...]) -> list[tuple[Grant, ...]]:
    plans: list[tuple[Grant, ...]] = []
    run_seed(seed, 200, tenants, plans)
    return plans


def assert_one_tenant_changes_nothing(seeds: int) -> None:
    for seed in range(seeds):
        found = plans_of(seed, (7,))
        with pytest.MonkeyPatch.context() as patch:
            plain(patch)
            assert found == plans_of(seed, (7,)), f"seed {seed}: another plan than without tenants"


def test_one_tenant_changes_nothing() -> None:
    assert_one_tenant_changes_nothing(20)


def test_several_tenants_do() -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain(patch)
        without = [plans_of(seed, (1, 2)) for seed in range(3)]
    assert without != [plans_of(seed, (1, 2)) for seed in range(3)]


def newest_first(turns: Turns, name: int, lane: int, index: int) -> Any:
    queue = turns._waiting.tenants[name].lanes.get(lane)
    if queue is None or index >= len(queue.items):
        return None
    return (-queue.items[index].order[-1],), lane, len(queue.items) - 1 - index


def leaves_to_its_own(gate: TenantTokens, mine: int, most: int) -> tuple[int, bool]:
    """Counts its own tenant's prompts among those of others."""
    return min(most, gate.waiting.num_tokens), True


def gives_up_to_its_own(shares: Shares, barred: Callable[[Request], bool]) -> Request | None:
    return shares.running.items[-1] if len(shares.running) > 1 else None


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (Turns, "_place", newest_first),
        (TenantTokens, "_needed", leaves_to_its_own),
        (TenantRows, "admit", lambda gate, request, count: CLOSED if len(gate.shares.running) > 4 else count),
    ],
    ids=["newest_first", "leaves_to_its_own", "no_last_rows"],
)
def test_changes_for_one_tenant_are_found(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError):
        assert_one_tenant_changes_nothing(30)


# ---- work per step ----------------------------------------------------------------------------------------------


class CountedNames(set[int]):
    """The tenants that wait; counts how many names were walked over."""

    num_walked = 0

    def __iter__(self) -> Iterator[int]:
        for name in super().__iter__():
            self.num_walked += 1
            yield name


def test_work_of_a_step_does_not_grow_with_tenants_times_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is taken by one tenant, and 200 others wait; then rows are free and the first tenant wants more."""
    num_tenants = 200
    bench = Bench(4000, max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=64)
    bench.add(*(request(f"a{i}", 2, 30, tenant=0) for i in range(64)))
    bench.step()
    bench.add(*(request(f"b{i}", 2, 30, tenant=i) for i in range(1, num_tenants)))
    bench.add(*(request(f"c{i}", 2, 30, tenant=0) for i in range(100)))
    waiting, planner = bench.scheduler.planner.waiting, bench.scheduler.planner
    barred: list[str] = []
    is_barred = Planner._barred
    monkeypatch.setattr(Planner, "_barred", lambda planner, one: barred.append(one.id) or is_barred(planner, one))
    waiting.active = names = CountedNames(waiting.active)
    preempted = planner.tally.preempted
    bench.plan()
    assert planner.tally.preempted - preempted == 4, "rows are given up"
    assert names.num_walked <= 8 * num_tenants, f"{names.num_walked} tenants were looked at in a step"
    assert len(barred) <= num_tenants + 64, f"{len(barred)} requests were looked at in a step"
    bench.commit()
    bench.scheduler.abort([f"a{i}" for i in range(60)])
    waiting.active = names = CountedNames(waiting.active)
    asked: list[int] = []
    may_take = Shares.may_take_row
    monkeypatch.setattr(Shares, "may_take_row", lambda shares, name: asked.append(name) or may_take(shares, name))
    bench.plan()
    assert len(asked) > 16, "who may join is asked often"
    assert names.num_walked <= 8 * num_tenants, f"{names.num_walked} tenants were looked at in a step"


# ---- fuzzers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 9), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("check", fair_fuzz.CHECKS.values(), ids=fair_fuzz.CHECKS)
def test_nobody_is_left_behind(check: Callable[[int, int], Any], seeds: range) -> None:
    for seed in seeds:
        check(seed, 100)


def test_rows_were_given_up() -> None:
    assert sum(fair_fuzz.check_rows(seed, 30) for seed in range(6)) > 5


def free_of_charge(waiting: Waiting, name: int, tokens: int) -> None:
    """Nobody is charged: first come, first served."""


def charged_by_request(waiting: Waiting, name: int, tokens: int) -> None:
    CHARGE(waiting, name, 1)


def newcomers_first(waiting: Waiting, name: int) -> Tenant:
    """Whoever comes has all the turns it might have had before."""
    tenant = waiting.tenants.get(name)
    if tenant is None:
        tenant = waiting.tenants[name] = Tenant(float("-inf"))
    return tenant


def served_without_credit(waiting: Waiting, name: int) -> float:
    tenant = waiting.tenants.get(name)
    return waiting.now if tenant is None else tenant.served


def added_as_it_was(waiting: Waiting, request: Request) -> None:
    served = waiting.tenants[request.tenant].served if request.tenant in waiting.tenants else float("-inf")
    ADD(waiting, request)
    waiting.tenants[request.tenant].served = served


def takes_all(gate: TenantTokens, request: Request, count: int) -> int:
    return count


def keeps_all_rows(shares: Shares, barred: Callable[[Request], bool]) -> None:
    return None


CHARGE, ADD = Waiting.charge, Waiting.add
FAULTS: list[tuple[str, tuple[tuple[object, str, Callable[..., Any]], ...]]] = [
    ("shares", ((Waiting, "charge", free_of_charge),)),
    ("shares", ((Waiting, "charge", charged_by_request),)),
    ("starvation", ((Waiting, "charge", free_of_charge),)),
    ("regulars", ((Waiting, "_tenant", newcomers_first), (Waiting, "add", added_as_it_was),
                  (Waiting, "level", served_without_credit))),
    ("rows", ((Shares, "row_to_give_up", keeps_all_rows),)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "faults"), FAULTS, ids=[f"{check}-{faults[0][2].__name__}" for check, faults in FAULTS]
)
def test_unfair_schedulers_are_caught(monkeypatch: pytest.MonkeyPatch, check: str, faults: Any) -> None:
    for place, name, fault in faults:
        monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError):
        for seed in range(12):
            fair_fuzz.CHECKS[check](seed, 200)
