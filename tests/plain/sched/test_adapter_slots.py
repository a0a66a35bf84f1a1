"""Adapters in the scheduler: who gets a slot, what is read and dropped, and that nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from quire.sched import adapter_slots, tenants
from quire.sched.adapter import AdapterState, LoadedAdapter
from quire.sched.adapter_slots import PATIENCE, AdapterSlots
from quire.sched.gates import Hold
from quire.sched.kv_layout import place
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.kv import KVKind, KVSpec
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from quire.schema.step import StepPlan, StepResult


class Bench:
    """A scheduler over a worker that reads every adapter at once, and remembers what lies in its slots."""

    def __init__(self, slots: int = 2, copies: int = 2, **more: Any) -> None:
        settings = SchedulerSettings(max_model_len=64, max_loras=slots, max_cpu_loras=copies, **more)
        spec = KVSpec(layer="l", kind=KVKind.FULL, block_size=4, num_kv_heads=1, head_size=8)
        self.scheduler = Scheduler(settings, place([spec], 1 << 20, max_model_len=64, max_num_seqs=16))
        adapters = self.scheduler.planner.adapters
        assert adapters is not None
        self.adapters: AdapterSlots = adapters
        self.copies: set[int] = set()
        self.slots: dict[int, int] = {}  # slot -> serial
        self.row_serials: dict[str, int] = {}
        self.most_copies = 0

    def load(self, number: int) -> LoadedAdapter:
        return self.adapters.add(number, f"a{number}", f"/a{number}")

    def add(self, name: str, adapter: LoadedAdapter | None = None, tokens: int = 1, **more: Any) -> None:
        self.scheduler.add(
            EngineRequest(
                request_id=name, prompt_token_ids=(1, 2, 3), params=ResolvedParams(), seed=0, max_tokens=tokens,
                lora_name=None if adapter is None else adapter.name,
                lora_generation=0 if adapter is None else adapter.serial, **more,
            )
        )  # fmt: skip

    def read(self) -> list[int]:
        serials = [adapter.serial for adapter in self.adapters.take_reads()]
        self.copies -= set(self.adapters.take_dropped())
        for serial in serials:
            self.copies.add(serial)
            self.adapters.finish_read(serial, failed=False)
        self.most_copies = max(self.most_copies, len(self.copies))
        return serials

    def step(self) -> StepPlan:
        self.read()
        plan = self.scheduler.plan()
        for placement in plan.adapters:
            assert placement.serial in self.copies, "a plan places an adapter of which there is no copy"
            self.slots[placement.slot] = placement.serial
        for row in plan.joined:
            request = self.scheduler.requests[row.request_id]
            expected = request.source.lora_generation
            assert (row.lora_id == 0) == (expected == 0)
            if expected:
                assert self.slots[row.lora_id] == expected
                self.row_serials[row.request_id] = row.lora_id
        for grant in plan.grants:  # a slot stays as it was while a row of it lives
            request = self.scheduler.requests[grant.request_id]
            if request.source.lora_generation:
                assert self.slots[self.row_serials[grant.request_id]] == request.source.lora_generation
        if plan.grants:
            sampled = [[7] if grant.samples else [] for grant in plan.grants]
            self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled))
        return plan

    def run(self, most: int = 1000) -> list[str]:
        """Ids in the order in which they ended."""
        ended: list[str] = []
        for _ in range(most):
            before = set(self.scheduler.requests)
            if not before:
                return ended
            self.step()
            ended += sorted(before - set(self.scheduler.requests))
        raise AssertionError(f"{sorted(self.scheduler.requests)} never ended")


def ids(plan: StepPlan) -> list[str]:
    return [grant.request_id for grant in plan.grants]


def test_a_request_waits_until_its_adapter_is_read_and_others_pass() -> None:
    bench = Bench()
    bench.add("tuned", bench.load(1), tokens=3)
    bench.add("base", tokens=3)
    first = bench.scheduler.plan()
    assert ids(first) == ["base"] and bench.adapters.has_demand
    bench.scheduler.commit(first, StepResult(step=first.step, sampled=[[7]]))
    plan = bench.step()
    assert ids(plan) == ["base", "tuned"] and [row.lora_id for row in plan.joined] == [1]


def test_one_slot_is_shared_by_requests_of_one_adapter_and_then_changes_hands() -> None:
    bench = Bench(slots=1, copies=2)
    one, two = bench.load(1), bench.load(2)
    bench.add("a", one, tokens=4)
    bench.add("b", two, tokens=2)
    bench.add("c", one, tokens=2)
    bench.add("d", tokens=2)
    bench.step()  # reads
    plan = bench.step()
    assert set(ids(plan)) == {"a", "c", "d"}
    assert bench.run()[-1] == "b"


def test_an_adapter_that_is_always_wanted_does_not_keep_its_slot_for_ever() -> None:
    bench = Bench(slots=1, copies=2)
    busy, patient = bench.load(1), bench.load(2)
    bench.add("busy 0", busy, tokens=6)
    bench.step()
    bench.step()
    bench.add("patient", patient, tokens=2)
    for number in range(1, 200):
        bench.add(f"busy {number}", busy, tokens=6)
        bench.step()
        if "patient" not in bench.scheduler.requests:
            break
    assert "patient" not in bench.scheduler.requests and PATIENCE <= number < PATIENCE + 20
    bench.run()


def test_base_requests_never_wait_for_slots() -> None:
    bench = Bench(slots=1, copies=1)
    for number in range(1, 6):
        bench.add(f"a{number}", bench.load(number), tokens=20)
    for number in range(5):
        bench.add(f"base {number}", tokens=2)
    assert set(ids(bench.step())) == {f"base {number}" for number in range(5)}
    assert set(ids(bench.step())) == {f"base {number}" for number in range(5)} | {"a1"}
    bench.run()


@pytest.mark.parametrize(("slots", "copies"), [(1, 1), (2, 2), (8, 8), (8, 12)])
def test_many_adapters_through_few_slots(slots: int, copies: int) -> None:
    """None starves, and no more copies lie in host memory than allowed."""
    bench = Bench(slots, copies, max_num_seqs=16)
    adapters = [bench.load(number) for number in range(1, 101)]
    for turn in range(2):
        for adapter in adapters:
            bench.add(f"{adapter.name} {turn}", adapter, tokens=3)
    ended = bench.run(5000)
    assert len(ended) == 200 and bench.most_copies <= copies
    assert len(bench.adapters.by_serial) == 100


def test_a_removed_adapter_lives_as_long_as_its_requests() -> None:
    bench = Bench(slots=1, copies=1)
    old = bench.load(1)
    bench.add("running", old, tokens=5)
    bench.step()
    bench.step()
    bench.add("waiting", old, tokens=2)
    bench.adapters.retire(old)
    new = bench.load(1)
    bench.add("new", new, tokens=2)
    assert bench.run() == ["waiting", "running", "new"]
    assert old.serial not in bench.adapters.by_serial and new.serial != old.serial
    assert bench.slots[1] == new.serial and old.serial not in bench.copies


def test_a_preempted_request_gets_its_adapter_back() -> None:
    bench = Bench(slots=1, copies=1)
    one, two = bench.load(1), bench.load(2)
    bench.add("first", one, tokens=6)
    bench.step()
    bench.step()
    bench.scheduler.planner.preempt(bench.scheduler.requests["first"])
    assert one.num_running == 0
    bench.add("second", two, tokens=3)
    assert sorted(bench.run()) == ["first", "second"]
    assert one.num_live == two.num_live == one.num_running == two.num_running == 0


def test_a_pinned_adapter_keeps_slot_and_copy() -> None:
    bench = Bench(slots=2, copies=2)
    pinned, others = bench.load(1), [bench.load(number) for number in range(2, 6)]
    pinned.is_pinned = True
    bench.add("p", pinned)
    bench.run()
    slot = pinned.slot
    for other in others:
        bench.add(other.name, other)
    bench.run()
    assert pinned.slot == slot and bench.slots[slot] == pinned.serial and pinned.state is AdapterState.READY


def test_aborted_while_waiting_for_a_slot() -> None:
    bench = Bench(slots=1, copies=1)
    one, two = bench.load(1), bench.load(2)
    bench.add("a", one, tokens=5)
    bench.add("b", two, tokens=5)
    bench.step()
    bench.step()
    bench.scheduler.abort(["b"])
    assert two.num_live == 0 and bench.run() == ["a"]


def test_which_adapters_are_in_use() -> None:
    bench = Bench(slots=1, copies=2)
    bench.add("a", bench.load(1), tokens=5)
    bench.add("b", bench.load(2), tokens=5)
    bench.step()
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (("a1",), ("a2",))
    bench.run()
    assert bench.scheduler.stats().running_adapters == ()


@pytest.mark.parametrize("num_tenants", [1, 4])
def test_a_step_looks_at_one_of_those_that_wait_for_the_same_adapter(
    monkeypatch: pytest.MonkeyPatch, num_tenants: int
) -> None:
    bench = Bench(slots=1, copies=2)
    busy, wanted = bench.load(1), bench.load(2)
    bench.add("stream", busy, tokens=60)
    bench.step()
    bench.step()
    for number in range(1000):
        bench.add(f"waits {number}", wanted, tenant=number % num_tenants)
    bench.step()  # reads
    asked: list[str] = []
    bars = AdapterSlots.bars
    monkeypatch.setattr(AdapterSlots, "bars", lambda slots, one: asked.append(one.id) or bars(slots, one))
    for number in range(5):
        bench.add(f"base {number}", tokens=1)
        asked.clear()
        assert set(ids(bench.step())) == {"stream", f"base {number}"}, "those behind pass at once"
        assert len(asked) <= num_tenants + 1, f"{len(asked)} requests were looked at"
    bench.scheduler.abort(["stream"])
    assert "waits 0" in ids(bench.step()), "in their order, once there is a slot"


def test_requests_keep_their_order_across_lanes() -> None:
    bench = Bench(slots=2, copies=2, max_num_seqs=1)
    one, two = bench.load(1), bench.load(2)
    names = [f"r{number}" for number in range(9)]
    for number, name in enumerate(names):
        bench.add(name, (None, one, two)[number % 3])
    bench.adapters.want(one)
    bench.adapters.want(two)
    bench.read()
    assert bench.run() == names


def test_a_removed_adapter_whose_copy_is_gone_is_not_read_from_files_that_may_be_others() -> None:
    bench = Bench(slots=1, copies=1)
    old, other = bench.load(1), bench.load(2)
    bench.add("first", old, tokens=6)
    bench.step()
    bench.step()
    bench.add("second", other, tokens=3)
    bench.step()  # wants the other, whose copy takes the place of the first's
    bench.step()
    assert old.state is AdapterState.COLD and old.slot and other.state is AdapterState.READY
    bench.adapters.retire(old)
    bench.scheduler.planner.preempt(bench.scheduler.requests["first"])
    bench.scheduler.hold("first", Hold.GRAMMAR)  # the other may pass it
    read: list[int] = []
    for step in range(2 * PATIENCE):
        if step == PATIENCE + 3:
            assert not bench.scheduler.requests["second"].running, "the slot has the last copy of these weights"
            bench.scheduler.release("first", Hold.GRAMMAR)
        read += [adapter.serial for adapter in bench.adapters._demand]
        bench.step()
    assert not bench.scheduler.requests and old.serial not in read
    assert old.serial not in bench.adapters.by_serial


def test_a_step_looks_at_a_limited_number_of_adapters_and_none_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every adapter always has several requests that wait."""
    monkeypatch.setattr(tenants, "MOST_LANES", 8)
    monkeypatch.setattr(adapter_slots, "PATIENCE", 1)
    bench = Bench(slots=2, copies=4, max_num_seqs=2)
    adapters = {f"a{number}": bench.load(number) for number in range(1, 41)}
    for name, adapter in adapters.items():
        for number in range(4):
            bench.add(f"{name} {number}", adapter)
    asked: list[str] = []
    bars = AdapterSlots.bars
    monkeypatch.setattr(AdapterSlots, "bars", lambda slots, one: asked.append(one.id) or bars(slots, one))
    served: set[str] = set()
    for step in range(1000):
        asked.clear()
        for row in bench.step().joined:
            name = row.request_id.split()[0]
            served.add(name)
            bench.add(f"{row.request_id} {step}", adapters[name])
        assert len(asked) <= 8 + 2 * 4, f"{len(asked)} requests were looked at"
    assert served == adapters.keys(), f"{len(adapters) - len(served)} adapters starve"


def test_names_in_use_are_found_without_a_walk_over_all_adapters() -> None:
    bench = Bench()
    for number in range(2, 50):
        bench.load(number)
    bench.add("a", bench.load(1), tokens=2)
    bench.adapters.by_serial = Unwalked(bench.adapters.by_serial)
    assert bench.adapters.names_in_use() == ((), ("a1",))
    bench.scheduler.abort(["a"])
    assert bench.adapters.names_in_use() == ((), ())


class Unwalked(dict[int, LoadedAdapter]):
    def values(self) -> Any:
        raise AssertionError("all adapters are walked over")
