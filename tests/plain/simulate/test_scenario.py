"""Fleets: a simulated part of a fleet against the whole of it, prefixes, goals, and the search for the smallest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.sched.router import ROUTERS
from quire.schema.errors import ConfigError, InputError
from quire.simulate.devices import HostModel
from quire.simulate.figures import LatencyGoals, ServingFigures
from quire.simulate.fleet import Fleet
from quire.simulate.scenario import Scenario, build_fleet, simulate, simulate_if_kept
from quire.simulate.search import find_smallest
from quire.simulate.topology import Topology
from quire.simulate.workload import FleetShare, thin
from tests.plain.simulate.small import scenario

EIGHT = Topology(data_size=8)
LOAD = {"rate": 3000.0}
ALL = 100  # replicas: no fleet here is larger


def test_with_round_robin_a_part_of_a_fleet_is_exact() -> None:
    """Each replica sees the same requests at the same times, so every one of them is served alike."""
    question = scenario(topology=EIGHT, most_replicas=ALL, load={"rate": 400.0, "range_ratio": 0.5})
    whole = build_fleet(question)[0]
    requests = question.workload.draw(160, question.share)
    whole.run(requests)
    part = build_fleet(replace(question, most_replicas=2))[0]
    part.run(thin(requests, FleetShare(2, 8, True)))
    seen = {record.request: (record.ttft, record.last, record.gaps) for record in part.records}
    expected = {r.request: (r.ttft, r.last, r.gaps) for i, r in enumerate(whole.records) if i % 8 < 2}
    assert len(seen) == 40 and seen == expected


def figures(question: Scenario) -> ServingFigures:
    return simulate(question).figures


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_a_part_of_a_fleet_tells_the_figures_of_the_whole(router: str) -> None:
    """What is lost by simulating 2 of 8 replicas, at most of their load: the bounds of the documentation."""
    question = scenario(topology=EIGHT, router=router, load={"rate": 800.0, "range_ratio": 0.3}, most_replicas=ALL)
    whole = figures(replace(question, num_requests=640))
    part = figures(replace(question, num_requests=320, most_replicas=2))
    assert part.request_rate == pytest.approx(whole.request_rate, rel=0.10)
    assert part.output_rate == pytest.approx(whole.output_rate, rel=0.10)
    for name in ("ttft_p50", "itl_p50", "e2el_p50", "ttft_p99", "e2el_p99"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.15), name


def test_ten_thousand_devices_are_a_few_replicas() -> None:
    question = scenario(topology=Topology(tensor_size=2, data_size=5000), load={"rate": 100_000.0})
    result = simulate(replace(question, num_requests=200))
    assert result.num_simulated == 4 and result.figures.request_rate == pytest.approx(100_000, rel=0.2)
    with pytest.raises(ConfigError, match="10002 devices; at most 10000"):
        simulate(question.with_topology(Topology(tensor_size=2, data_size=5001)))


def test_a_router_that_knows_prefixes_finds_more_of_them() -> None:
    load = {"rate": 200.0, "prefix_len": 640, "num_prefixes": 16, "input_len": 64}
    question = scenario(topology=Topology(data_size=4), load=load, num_requests=160)
    rates = {name: simulate(replace(question, router=name)).hit_rate for name in ROUTERS}
    assert rates["prefix-aware"] > rates["round-robin"] + 0.1 and rates["prefix-aware"] > rates["least-loaded"] + 0.1
    off = replace(question.settings, prefix_caching=False)
    assert simulate(replace(question, settings=off)).hit_rate == 0


def test_goals_count_the_requests_that_keep_them() -> None:
    question = scenario(load={"rate": 100.0})
    loose, tight = LatencyGoals(ttft=10, itl=10), LatencyGoals(ttft=1e-6)
    assert figures(replace(question, goals=loose)).attainment == 1
    assert figures(replace(question, goals=tight)).goodput == 0
    middle = figures(question).ttft_p50 / 1e3
    assert 0.3 < figures(replace(question, goals=LatencyGoals(ttft=middle))).attainment < 0.7


def test_more_load_is_slower_and_a_server_can_be_the_limit() -> None:
    slow, fast = (figures(scenario(load={"rate": rate}, num_requests=120)) for rate in (20.0, 2000.0))
    assert fast.ttft_p99 > slow.ttft_p99 and fast.itl_p50 > slow.itl_p50
    assert slow.output_rate == pytest.approx(20 * 20, rel=0.15) and fast.output_rate > 10 * slow.output_rate
    busy = scenario(load={"rate": 2000.0}, num_requests=120, host=HostModel(chunk_seconds=1e-3))
    assert figures(busy).e2el_p50 > 1.5 * fast.e2el_p50


def test_so_many_at_once_stay_at_once() -> None:
    question = scenario(max_concurrency=8, num_requests=64)
    fleet = build_fleet(question)[0]
    records = fleet.run(question.workload.draw(64, question.share), 8)
    moments = sorted([(r.start, 1) for r in records] + [(r.last, -1) for r in records])
    level, most = 0, 0
    for _, change in moments:
        level += change
        most = max(most, level)
    assert most == 8 and len(records) == 64 and all(record.is_complete for record in records)


def test_the_smallest_fleet_keeps_the_goals_and_one_less_does_not() -> None:
    goals = LatencyGoals(ttft=0.05, itl=0.004, attainment=0.95)
    question = scenario(goals=goals, load={"rate": 3000.0}, num_requests=80)
    best = find_smallest(question, (1, 2))
    assert [r.scenario.topology.num_devices for r in best] == sorted(r.scenario.topology.num_devices for r in best)
    one = next(r for r in best if r.scenario.topology.tensor_size == 1)
    number = one.scenario.topology.data_size
    assert number > 1 and one.figures.attainment >= 0.95
    assert figures(question.with_topology(Topology(data_size=number - 1))).attainment < 0.95
    assert find_smallest(replace(question, goals=LatencyGoals(ttft=1e-9)), (1,)) == []


def test_a_search_stops_where_the_goals_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes to the same as a simulation to the end, under each goal alone and both."""
    run, fleets = Fleet.run, list[Fleet]()
    monkeypatch.setattr(Fleet, "run", lambda fleet, *given: fleets.append(fleet) or run(fleet, *given))
    for ttft, itl in ((0.05, None), (None, 0.00125), (0.1, 0.0016)):
        goals = LatencyGoals(ttft=ttft, itl=itl, attainment=0.9)
        kept = []
        for number in (1, 2, 3, 4, 8, 16):
            question = scenario(goals=goals, load=LOAD, num_requests=300, topology=Topology(data_size=number))
            whole, found = simulate(question), simulate_if_kept(question)
            kept.append(found is not None)
            assert kept[-1] == (whole.figures.attainment >= 0.9)
            assert found is None or found.figures == whole.figures
        assert 0 < sum(kept) < len(kept), (ttft, itl)
    tokens = [sum(record.num_tokens for record in fleet.records) for fleet in fleets]
    assert tokens[1] < tokens[0] / 2  # of one replica, where 0.05 s to the first token are asked


def test_a_fleet_that_falls_behind_slowly_is_too_small() -> None:
    """The goals are kept by the first requests of a fleet that has a little less than it needs."""
    question = scenario(
        most_replicas=1, num_requests=None, memory_utilization=0.9, goals=LatencyGoals(ttft=0.5), least_seconds=3.0,
        load={"rate": 1500.0, "output_len": 100},
    )  # fmt: skip
    (best,) = find_smallest(question, (1,))
    number = best.scenario.topology.data_size
    smaller = best.scenario.with_topology(Topology(data_size=number - 1))
    assert figures(replace(smaller, least_seconds=0.0)).attainment == 1 > 0.5 > figures(smaller).attainment
    assert figures(replace(best.scenario, num_requests=2 * best.scenario.num_drawn)).attainment == 1


def test_how_many_requests_are_drawn() -> None:
    question = scenario(num_requests=None, load={"rate": 800.0}, topology=EIGHT, least_seconds=20.0)
    assert question.num_drawn == 800 / 8 * 4 * 20  # which lasts longer than the budget of tokens
    assert replace(question, least_seconds=0.0).num_drawn == question.token_budget // 20
    assert replace(question, least_seconds=1e6).num_drawn == 20_000
    slow = scenario(num_requests=None, load={"rate": 1e6, "output_len": 1000})
    assert slow.num_drawn == 600 and replace(slow, least_seconds=0.0).num_drawn == 100
    assert replace(question, num_requests=7).num_drawn == 7
    assert replace(question, max_concurrency=5000).num_drawn == 4 * 2500
    assert scenario(num_requests=None).num_drawn == question.token_budget // 20  # all at once


@pytest.mark.parametrize(
    "topology, words",
    [
        (Topology(tensor_size=3), "tensor_parallel_size=3 does not divide the 16 attention heads"),
        (Topology(pipeline_size=29), "pipeline_parallel_size=29 is more than the 28 layers"),
        (Topology(has_expert_parallel=True), "tiny has no experts"),
        (Topology(data_size=0), "data_parallel_size must be at least 1, got 0"),
    ],
)
def test_impossible_topologies_are_refused(topology: Topology, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(scenario(topology=topology))


def test_a_model_that_does_not_fit_is_refused() -> None:
    small = replace(scenario().device, memory_bytes=40 << 30)
    with pytest.raises(ConfigError, match=r"tiny does not fit TP 1 x DP 1: a rank has 1\.1 GiB of weights"):
        simulate(replace(scenario(), device=small))
    tight = replace(scenario().device, memory_bytes=54 << 30)
    with pytest.raises(ConfigError, match="one request of max_model_len=2048 needs 32 KV blocks"):
        simulate(replace(scenario(), device=tight))


def test_requests_beyond_the_limits_are_refused() -> None:
    with pytest.raises(InputError, match="3000 prompt and 20 output tokens is longer than max_model_len=2048"):
        simulate(scenario(load={"input_len": 3000}))
    with pytest.raises(InputError, match="more than the 200000"):
        simulate(scenario(num_requests=300_000))
