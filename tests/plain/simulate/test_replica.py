"""A replica plans as the engine's own loop does, keeps one device's time, and brings every request to its end."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.loop import EngineLoop
from quire.sched.scheduler import Scheduler
from quire.schema.messages import EngineRequest, FinishReason
from quire.schema.params import ResolvedParams
from quire.schema.step import StepPlan, StepResult
from quire.simulate.cost import load_of
from quire.simulate.devices import HostModel
from quire.simulate.replica import NEVER, Replica
from quire.simulate.scenario import Scenario, build_fleet
from quire.simulate.topology import Topology
from tests.plain.simulate.small import scenario


def request(number: int, prompt: int, output: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(number), prompt_token_ids=(number,) * prompt, params=ResolvedParams(ignore_eos=True), seed=0,
        max_tokens=output,
    )  # fmt: skip


REQUESTS = [request(i, 30 + 97 * i % 700, 1 + 13 * i % 40) for i in range(30)]


class Pending:
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def result(self) -> StepResult:
        sampled = [[7] if grant.samples else [] for grant in self.plan.grants]
        return StepResult(step=self.plan.step, sampled=sampled)


class ScriptedExecutor:
    """Only what a loop without control calls needs."""

    def forward(self, plan: StepPlan) -> None:
        self.plan = plan

    def sample(self, step: int, mask: object) -> Pending:
        return Pending(self.plan)


def watch(scheduler: Scheduler) -> list[list[tuple[str, int, int]]]:
    """Notes the grants of every plan that is not empty."""
    plans, original = [], scheduler.plan

    def plan() -> StepPlan:
        made = original()
        if made.grants:
            plans.append([(grant.request_id, grant.start, grant.count) for grant in made.grants])
        return made

    scheduler.plan = plan
    return plans


def run(replica: Replica, until: float = NEVER) -> None:
    while replica.wake_at < until:
        replica.wake(replica.wake_at)


def build(question: Scenario) -> Replica:
    return build_fleet(question)[0].replicas[0]


def test_plans_are_those_of_the_engine_loop() -> None:
    """All requests come at once and no goal depends on time, so both must plan the same steps in the same order."""
    question = scenario(settings={"latency_goal": 0.0, "max_num_seqs": 12, "max_num_batched_tokens": 300})
    fleet, layout = build_fleet(question)
    replica = fleet.replicas[0]
    replica._emit = lambda time, outputs: None
    simulated = watch(replica.scheduler)
    for one in REQUESTS:
        replica.submit(0.0, one)
    run(replica)
    scheduler = Scheduler(replica.scheduler.settings, layout)
    planned = watch(scheduler)
    loop = EngineLoop(ScriptedExecutor(), scheduler)
    for one in REQUESTS:
        loop.submit(one)
    while loop.busy:
        loop.step()
    assert simulated == planned and len(planned) > 40


@pytest.mark.parametrize("topology", [Topology(), Topology(pipeline_size=3)])
def test_every_request_gets_its_tokens_and_no_stage_works_twice_at_once(topology: Topology) -> None:
    replica = build(scenario(topology=topology))
    outputs: dict[str, int] = {}
    ended, ends = set(), list[float]()

    def emit(time: float, news: list[Any]) -> None:
        assert time >= replica.time
        for output in news:
            outputs[output.request_id] = outputs.get(output.request_id, 0) + len(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH
                ended.add(output.request_id)

    replica._emit = emit
    original = replica.cost.stage_seconds

    def stage_seconds(load: Any) -> float:
        seconds = original(load)
        ends.append(seconds)
        return seconds

    replica.cost.stage_seconds = stage_seconds
    replica.scheduler.audits = True
    for one in REQUESTS:
        replica.submit(0.0, one)
    run(replica)
    assert outputs == {one.request_id: one.max_tokens for one in REQUESTS} and ended == set(outputs)
    assert replica.time >= sum(ends) == pytest.approx(replica.busy_seconds)
    if topology.pipeline_size > 1:
        assert replica._stage_free[0] < replica._stage_free[1] < replica._stage_free[2]


def test_one_request_takes_its_prompt_and_then_a_decode_for_each_token() -> None:
    question = scenario()
    replica, times = build(question), list[float]()
    replica._emit = lambda time, outputs: times.append(time)
    replica.submit(0.0, request(1, 100, 5))
    run(replica)
    host, cost = HostModel(), replica.cost
    commit = host.commit_seconds + host.commit_row_seconds
    first = host.plan_seconds + host.plan_row_seconds
    assert len(times) == 5 and replica.num_steps == 5
    gaps = [after - before for before, after in itertools.pairwise(times)]
    steps = [cost.stage_seconds(load_of(one, (0,))) for one in decode_plans(100, 4)]
    assert gaps == pytest.approx(steps, rel=1e-6)
    prompt = cost.stage_seconds(load_of(prompt_plan(100), (0,)))
    assert times[0] == pytest.approx(first + host.add_seconds + prompt + commit, rel=1e-6)


def prompt_plan(tokens: int) -> StepPlan:
    scheduler = build(scenario()).scheduler
    scheduler.add(request(1, tokens, 1))
    return scheduler.plan()


def decode_plans(prompt: int, number: int) -> list[StepPlan]:
    scheduler = build(scenario()).scheduler
    scheduler.add(request(1, prompt, number + 1))
    plans = []
    while scheduler.has_unfinished():
        plans.append(scheduler.plan())
        scheduler.commit(plans[-1], Pending(plans[-1]).result())
    return plans[1:]


def test_the_first_step_after_a_rest_takes_longer() -> None:
    times = []
    for start in (0.001, 5.0):
        replica, news = build(scenario()), list[float]()
        replica._emit = lambda time, outputs, news=news: news.append(time)
        replica.submit(start, request(1, 100, 1))
        run(replica)
        times.append(news[0] - start)
    assert times[1] - times[0] == pytest.approx(HostModel().idle_seconds, rel=1e-6)


def test_a_full_queue_refuses() -> None:
    replica, reasons = build(scenario(settings={"max_num_queued": 3})), list[Any]()
    replica._emit = lambda time, outputs: reasons.extend(output.finish_reason for output in outputs)
    for one in REQUESTS[:10]:
        replica.submit(0.0, replace_length(one))
    run(replica)
    assert reasons.count(FinishReason.ERROR) == 7 and reasons.count(FinishReason.LENGTH) == 3


def replace_length(one: EngineRequest) -> EngineRequest:
    return request(int(one.request_id), 20, 1)


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    question = replace(scenario(), host=HostModel(plan_seconds=0.02))
    replica, times = build(question), list[float]()
    replica._emit = lambda time, outputs: times.append(time)
    replica.submit(0.0, request(1, 50, 6))
    run(replica)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps[:-1]) > 0.019  # nothing is planned beside the last step


def first_token(replica: Replica, name: str) -> list[float]:
    """When this request's tokens leave, once the replica has run."""
    times: list[float] = []

    def emit(time: float, outputs: list[Any]) -> None:
        times.extend(time for output in outputs if output.request_id == name)

    replica._emit = emit
    return times


def test_a_step_without_a_graph_takes_as_long_as_its_launches() -> None:
    ends, computed = {}, {}
    for tokens in (2048, 2049):
        for each in (0.0, 5e-3):
            question = scenario(settings={"max_model_len": 4096, "max_num_batched_tokens": 4096})
            replica = build(replace(question, memory_utilization=0.2, host=HostModel(eager_layer_seconds=each)))
            times = first_token(replica, "1")
            replica.submit(0.0, request(1, tokens, 1))
            run(replica)
            ends[tokens, each], computed[tokens, each] = times[0], replica._stage_free[0]
    assert computed[2049, 5e-3] > 28 * 5e-3 > computed[2049, 0.0]  # the last kernel comes when it is launched
    assert ends[2048, 5e-3] == ends[2048, 0.0]
    assert ends[2049, 5e-3] > 28 * 5e-3 > ends[2049, 0.0]


def test_tokens_wait_for_the_thread_that_launches_the_next_step() -> None:
    """The loop launches a step before it looks at what came of the one before (EngineLoop.step)."""
    question = scenario(settings={"max_model_len": 4096, "max_num_batched_tokens": 4096, "latency_goal": 0.0})
    gaps = {}
    for each in (0.0, 5e-3):
        replica = build(replace(question, memory_utilization=0.2, host=HostModel(eager_layer_seconds=each)))
        times = first_token(replica, "1")
        replica.submit(0.0, request(1, 100, 20))
        run(replica, until=5e-3)
        replica.submit(5e-3, request(2, 3000, 1))
        run(replica)
        gaps[each] = max(after - before for before, after in itertools.pairwise(times))
    assert gaps[5e-3] > 28 * 5e-3 > 5 * gaps[0.0]


def test_a_request_joins_the_next_step_once_the_loop_knows_how_long_steps_take() -> None:
    """As EngineLoop._linger: a step of a size that never ran is followed by one that is planned at once."""
    waits = []
    for number in (2, 9):  # steps of 20 ms: the first decode, whose size is new, and a later one
        question = scenario(settings={"latency_goal": 0.0})
        replica = build(replace(question, device=replace(question.device, step_seconds=20e-3)))
        times = first_token(replica, "2")
        replica.submit(0.0, request(1, 100, 40))
        run(replica, until=(number - 1) * 22e-3 + 10e-3)
        arrival = replica._began + 10e-3
        replica.submit(arrival, request(2, 100, 1))
        run(replica)
        waits.append(times[0] - arrival)
    assert waits == pytest.approx([10e-3 + 2 * 21e-3, 10e-3 + 21e-3], rel=0.06)
