"""Step times: what is learned of them, the gate that goes by them, and the loop that plans no earlier than needed."""

from __future__ import annotations

import queue

import pytest

from quire.engine import loop as loop_module
from quire.engine.loop import StepTimes
from quire.sched.gates import Hold, TokenPace
from quire.schema.messages import Stop
from tests.plain.engine.test_loop import make_loop, request
from tests.plain.sched.kit import Bench, counts
from tests.plain.sched.kit import request as engine_request


def test_a_step_is_expected_to_take_what_the_fastest_of_its_size_took_lately() -> None:
    times = StepTimes()
    assert times.expect(3) == 0.0
    for seconds in (5.0, 2.0, 3.0):
        times.learn(3, seconds)
    assert times.expect(3) == 2.0 and times.expect(4) == 0.0
    for _ in range(StepTimes.KEPT):
        times.learn(3, 4.0)
    assert times.expect(3) == 4.0
    times.learn(70, 7.0)
    assert times.expect(128) == 7.0 and times.expect(64) == 0.0  # numbers of one size are alike


def test_tokens_within_a_time_follow_the_steps() -> None:
    pace = TokenPace()
    pace.learn(TokenPace.LEAST - 1, 9.0)
    assert pace.tokens_within(1.0) is None  # none was long enough
    pace.learn(TokenPace.LEAST, TokenPace.LEAST * 1e-3)
    assert pace.tokens_within(0.5) == 500
    for _ in range(100):
        pace.learn(1000, 2.0)
    assert pace.tokens_within(0.5) == pytest.approx(250, abs=1)


def latency_bench(**settings: object) -> Bench:
    bench = Bench(4096, max_model_len=8192, max_num_batched_tokens=4096, latency_goal=0.01, **settings)
    bench.scheduler.pace.learn(512, 0.01)
    return bench


def test_prompts_beside_decodes_are_cut_to_the_goal() -> None:
    bench = latency_bench()
    bench.add(engine_request("a", 900))
    assert counts(bench.step()) == {"a": 900}  # nobody waits for it
    bench.add(engine_request("b", 600), engine_request("c", 600))
    assert counts(bench.step()) == {"a": 1, "b": 511}
    assert counts(bench.step()) == {"a": 1, "b": 89, "c": 422}
    assert counts(bench.step()) == {"a": 1, "b": 1, "c": 178}


def test_a_budget_between_two_sizes_of_steps_is_the_smaller_one() -> None:
    bench = latency_bench()
    for _ in range(100):
        bench.scheduler.pace.learn(1000, 1000 * 0.01 / 700)  # 700 tokens within the goal
    bench.add(engine_request("a", 8))
    bench.step()
    bench.add(engine_request("b", 2000))
    assert counts(bench.step()) == {"a": 1, "b": 639}


def test_a_prompt_is_not_begun_with_a_sliver() -> None:
    bench = latency_bench()
    bench.add(engine_request("a", 8))
    bench.step()
    bench.add(engine_request("b", 450), engine_request("c", 300))
    assert counts(bench.step()) == {"a": 1, "b": 450}  # 61 of 512 tokens are left over
    assert counts(bench.step()) == {"a": 1, "b": 1, "c": 300}


def test_a_deep_queue_comes_first() -> None:
    bench = latency_bench()
    bench.add(engine_request("a", 8))
    bench.step()
    bench.add(*(engine_request(f"p{i}", 600) for i in range(7)))
    assert counts(bench.step()) == {"a": 1, **{f"p{i}": 600 for i in range(6)}, "p6": 495}


def cpu_bench() -> Bench:
    """Ten milliseconds for each token, and a goal of two seconds."""
    bench = Bench(4096, max_model_len=8192, max_num_batched_tokens=4096, latency_goal=2.0, latency_tokens=64,
                  latency_deep=0)  # fmt: skip
    bench.scheduler.pace.learn(64, 0.64)
    return bench


def test_on_a_cpu_no_queue_of_prompts_is_reason_enough_for_a_long_step() -> None:
    """Whoever fills the queue would else make every stream wait for a step of max_num_batched_tokens."""
    bench = cpu_bench()
    bench.add(engine_request("a", 8, 60))
    bench.step()
    bench.add(*(engine_request(f"p{i}", 4000) for i in range(20)))
    sizes = [sum(counts(bench.step()).values()) for _ in range(30)]
    assert max(sizes) <= 192 and sum(sizes) > 30 * 180


def test_a_prompt_that_is_older_than_the_decodes_is_cut_too() -> None:
    """It comes before them in the order of arrival: one that waited for its grammar, or was preempted."""
    bench = cpu_bench()
    bench.add(engine_request("old", 4000))
    bench.scheduler.hold("old", Hold.GRAMMAR)
    bench.add(engine_request("a", 8, 60), engine_request("b", 8, 60))
    bench.step()
    bench.scheduler.release("old", Hold.GRAMMAR)
    for _ in range(10):
        assert counts(bench.step()) == {"old": 190, "a": 1, "b": 1}


def test_on_a_cpu_short_prompts_do_not_wait_for_the_end_of_a_long_one() -> None:
    bench = cpu_bench()
    bench.add(engine_request("a", 8, 60))
    bench.step()
    bench.add(engine_request("long", 4000))
    assert counts(bench.step()) == {"a": 1, "long": 191}
    bench.add(engine_request("short", 60))
    assert counts(bench.step()) == {"a": 1, "long": 96, "short": 60}
    assert counts(bench.step()) == {"a": 1, "long": 190, "short": 1}
    bench.add(engine_request("second", 4000))  # cannot join: only one prompt may be partial
    assert counts(bench.step()) == {"a": 1, "long": 95, "short": 1}
    assert counts(bench.step()) == {"a": 1, "long": 190, "short": 1}  # room that nobody takes is not left again


def test_prompts_alone_are_not_cut() -> None:
    bench = cpu_bench()
    bench.add(engine_request("p", 8000))
    assert counts(bench.step()) == {"p": 4096}
    assert counts(bench.step()) == {"p": 3904}


def test_on_a_cpu_the_first_prompt_is_no_exception() -> None:
    bench = Bench(4096, max_model_len=8192, max_num_batched_tokens=4096, latency_goal=2.0, latency_tokens=64,
                  latency_deep=0)  # fmt: skip
    bench.add(engine_request("a", 8, 60))
    bench.step()
    bench.add(engine_request("p", 4000))
    assert sum(counts(bench.step()).values()) == 256


def test_on_a_cpu_short_steps_teach_too() -> None:
    """Else the budget would never follow a machine that became slower."""
    bench = cpu_bench()
    bench.add(engine_request("a", 8))
    bench.step()
    for _ in range(60):
        bench.scheduler.pace.learn(100, 2.0)
    bench.add(engine_request("p", 4000))
    assert sum(counts(bench.step()).values()) == 64


def test_many_decodes_leave_half_a_step_to_prompts() -> None:
    bench = latency_bench(max_num_seqs=1000)
    bench.add(*(engine_request(f"d{i}", [i, i + 1, i + 2], max_tokens=50) for i in range(500)))
    bench.step()
    bench.add(engine_request("p", 600))
    assert counts(bench.step())["p"] == 256


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Inbox:
    """Messages that come at given times; waiting for them moves the clock."""

    def __init__(self, clock: Clock, *due: tuple[float, object]) -> None:
        self.clock, self.due = clock, list(due)

    def empty(self) -> bool:
        return not self.due or self.due[0][0] > self.clock.time

    def get(self, timeout: float | None = None) -> object:
        until = self.clock.time + (1e9 if timeout is None else timeout)
        if not self.due or self.due[0][0] > until:
            self.clock.time = until
            raise queue.Empty
        time, message = self.due.pop(0)
        self.clock.time = max(self.clock.time, time)
        return message


def test_a_request_that_comes_while_the_device_works_is_in_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second: one that comes in the middle of the third joins the fourth, though that is planned ahead."""
    clock = Clock()
    monkeypatch.setattr(loop_module, "now", clock)
    loop = make_loop(ahead=1)
    plans: list[tuple[float, set[str]]] = []
    plain_forward, plain_sample = loop.executor.forward, loop.executor.sample
    ends = [0.0]  # of the steps, as a device that works by itself would end them

    def forward(plan: object) -> None:
        plans.append((clock.time, {grant.request_id for grant in plan.grants}))
        ends.append(max(ends[-1], clock.time) + 1.0)
        plain_forward(plan)

    def sample(step: int, mask: object) -> object:
        pending, end = plain_sample(step, mask), ends[-1]

        class Late:
            def result(self) -> object:
                clock.time = max(clock.time, end)
                return pending.result()

        return Late()

    monkeypatch.setattr(loop.executor, "forward", forward)
    monkeypatch.setattr(loop.executor, "sample", sample)
    inbox = Inbox(clock, (0.0, request("a", max_tokens=30)), (6.5, request("b", max_tokens=4)), (40.0, Stop()))
    loop.run(inbox, lambda message: None)
    joined = next(i for i, (_, names) in enumerate(plans) if "b" in names)
    time, _ = plans[joined]
    assert 6.5 < time < 7.0  # in the step that begins when the one under way ends, not the one after
    steady = [time for time, names in plans[4:joined] if names == {"a"}]
    assert all(time % 1.0 > 0.9 for time in steady)  # planned just before they are wanted


def test_a_step_that_is_computed_in_forward_is_learned_with_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, in the engine's own process. Else every step would seem to take no time, and no goal would bind."""
    clock = Clock()
    monkeypatch.setattr(loop_module, "now", clock)
    loop = make_loop(latency_goal=1.0, latency_tokens=4, latency_deep=0)
    plain_forward = loop.executor.forward

    def forward(plan: object) -> None:
        plain_forward(plan)
        clock.time += 0.5 * plan.total_tokens

    monkeypatch.setattr(loop.executor, "forward", forward)
    loop.submit(request("a", max_tokens=30))
    for _ in range(3):
        loop.step()
    assert loop.scheduler.pace.tokens_within(10.0) == 20
