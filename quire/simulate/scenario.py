"""One question to the simulator: a model on a topology under a load, and what comes of it.

Owns: which part of a large fleet is simulated, and how its load is drawn. Of more than `most_replicas` replicas, so
many are simulated with their share of the load. With round robin that is exact: a replica's turns do not depend on the
others. Other routers choose among fewer replicas than there are, so queues are a little longer than they would be.
Must not know: flags, how figures are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.sched.router import ROUTERS
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import InputError
from quire.schema.kv import KVLayout
from quire.simulate.cost import CostModel
from quire.simulate.devices import ClientModel, DeviceModel, HostModel
from quire.simulate.figures import LatencyGoals, ServingFigures, figures_of, steady_from
from quire.simulate.fleet import Fleet
from quire.simulate.shape import ModelShape
from quire.simulate.topology import Topology, kv_layout
from quire.simulate.workload import FleetShare, SimulatedRequest, Workload, thin

MOST_REQUESTS = 200_000  # that one simulation draws
_TOKEN_BUDGET = 100_000  # generated tokens of a simulation whose number of requests is not given
_LEAST_SECONDS = 10.0  # in which requests come at a rate: those of a fleet that is too small wait longer and longer
_MOST_TOKENS = 600_000  # generated for that; a load that reaches this earlier is far too much, which shows earlier too
_MOST_LASTING = 20_000  # requests for that
_LEAST_REQUESTS = 64  # of each simulated replica, whatever they cost


@dataclass(frozen=True, kw_only=True)
class Scenario:
    shape: ModelShape
    device: DeviceModel
    topology: Topology = field(default_factory=Topology)
    host: HostModel = field(default_factory=HostModel)
    client: ClientModel | None = None  # a load generator that is part of what is measured
    router: str = "round-robin"
    workload: Workload = field(default_factory=Workload)
    trace: Sequence[SimulatedRequest] = ()  # instead of the workload's
    max_concurrency: int | None = None  # of the whole fleet
    num_requests: int | None = None  # to draw for the simulated replicas; None: as many as a few seconds allow
    goals: LatencyGoals = field(default_factory=LatencyGoals)
    settings: SchedulerSettings = field(default_factory=lambda: SchedulerSettings(max_model_len=4096))
    memory_utilization: float = 0.9
    block_size: int = 64
    most_replicas: int = 4
    token_budget: int = _TOKEN_BUDGET
    least_seconds: float = _LEAST_SECONDS  # of requests that come at a rate, where their number is not given

    @property
    def share(self) -> FleetShare:
        total = self.topology.data_size
        return FleetShare(min(total, self.most_replicas), total, self.router == "round-robin")

    @property
    def num_drawn(self) -> int:
        """Of a load that is no trace: requests that the simulated replicas see."""
        if self.num_requests is not None:
            return self.num_requests
        share, load = self.share, self.workload
        count = max(self.token_budget // load.output_len, _LEAST_REQUESTS * share.simulated)
        if self.at_once is not None:
            return max(count, 4 * self.at_once)  # several rounds: the first is not the steady state
        if load.rate < math.inf:
            lasting = load.rate * share.fraction * self.least_seconds
            count = max(count, int(min(lasting, _MOST_TOKENS // load.output_len, _MOST_LASTING)))
        return count

    @property
    def at_once(self) -> int | None:
        """Requests under way on the simulated replicas; None: they come when they come."""
        return None if self.max_concurrency is None else max(1, round(self.max_concurrency * self.share.fraction))

    def with_topology(self, topology: Topology) -> Scenario:
        return replace(self, topology=topology)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    scenario: Scenario
    figures: ServingFigures
    num_simulated: int  # replicas
    simulated_seconds: float
    utilization: float  # of devices: the share of the time in which they compute
    hit_rate: float  # of prompt tokens in the prefix cache
    num_preempted: int
    num_kv_tokens: int  # that the KV cache of a replica holds


def simulate(scenario: Scenario) -> Simulation:
    fleet, layout = build_fleet(scenario)
    fleet.run(draw(scenario, scenario.share), scenario.at_once)
    return _summary(scenario, fleet, layout)


def simulate_if_kept(scenario: Scenario) -> Simulation | None:
    """None: the goals are missed. That is known long before the last request has ended, and the rest is left out."""
    fleet, layout = build_fleet(scenario)
    requests, goals = draw(scenario, scenario.share), scenario.goals
    begin, allowed = math.inf, 0.0  # of a number at once it is not known yet when which request comes
    if requests and scenario.at_once is None:
        begin = steady_from([request.arrival for request in requests])
        allowed = 0.5 + (1.0 - goals.attainment) * sum(request.arrival >= begin for request in requests)

    def is_missed(now: float) -> bool:
        return sum(record.start >= begin and goals.is_missed(record, now) for record in fleet.records) > allowed

    fleet.run(requests, scenario.at_once, is_missed)
    if not fleet.is_done:
        return None
    result = _summary(scenario, fleet, layout)
    return result if result.figures.attainment >= goals.attainment else None


def build_fleet(scenario: Scenario) -> tuple[Fleet, KVLayout]:
    """ConfigError where the model cannot be divided so, or does not fit."""
    topology, settings = scenario.topology, scenario.settings
    topology.check(scenario.shape)
    stages = topology.pipeline_size
    settings = replace(settings, depth=2) if stages == 1 else replace(settings, depth=stages, overlap=1)
    layout = kv_layout(
        topology,
        scenario.shape,
        scenario.device,
        memory_utilization=scenario.memory_utilization,
        block_size=scenario.block_size,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    number = scenario.share.simulated
    router = ROUTERS[scenario.router](number)
    cost = CostModel(scenario.shape, scenario.device, topology)
    fleet = Fleet(router, number, settings, layout, cost, scenario.host, scenario.workload.seed, scenario.client)
    return fleet, layout


def draw(scenario: Scenario, share: FleetShare) -> list[SimulatedRequest]:
    """The requests that the simulated replicas see."""
    if scenario.trace:
        requests = thin(scenario.trace, share)
    else:
        count = scenario.num_drawn
        if count > MOST_REQUESTS:
            raise InputError(f"{count} requests are more than the {MOST_REQUESTS} that one simulation draws")
        requests = scenario.workload.draw(count, share)
    limit = scenario.settings.max_model_len
    for request in requests:
        if request.prompt_tokens + request.output_tokens > limit:
            raise InputError(
                f"a request of {request.prompt_tokens} prompt and {request.output_tokens} output tokens is longer than "
                f"max_model_len={limit}",
                param="max_model_len",
            )
    return requests


def _summary(scenario: Scenario, fleet: Fleet, layout: KVLayout) -> Simulation:
    share, records = scenario.share, fleet.records
    if not records:
        raise InputError(
            f"the trace has too few requests for {share.total} replicas: none falls to the {share.simulated} that are "
            "simulated",
            param="trace",
        )
    tallies = [replica.scheduler.tally for replica in fleet.replicas]
    queries = sum(tally.queries for tally in tallies)
    seconds = max(record.last for record in records) - min(record.start for record in records)
    busy = sum(replica.busy_seconds for replica in fleet.replicas) / len(fleet.replicas)
    return Simulation(
        scenario=scenario,
        figures=figures_of(records, scenario.goals, 1 / scenario.share.fraction),
        num_simulated=scenario.share.simulated,
        simulated_seconds=seconds,
        utilization=min(1.0, busy / seconds) if seconds > 0 else 0.0,
        hit_rate=sum(tally.hits for tally in tallies) / queries if queries else 0.0,
        num_preempted=sum(tally.preempted for tally in tallies),
        num_kv_tokens=layout.num_blocks * layout.groups[0].block_size // len(layout.groups),
    )
