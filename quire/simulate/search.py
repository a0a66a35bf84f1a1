"""The smallest fleet that keeps the goals: for each size of a replica, the fewest replicas, found by bisection.

More replicas see less load each, so that whether goals are kept is taken to rise with their number. Fleets of more than
`COARSE` replicas are told apart to within a fiftieth: the load's own randomness says no more.
Must not know: flags, how figures are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from quire.schema.errors import ConfigError
from quire.simulate.scenario import Scenario, Simulation, build_fleet, simulate_if_kept
from quire.simulate.topology import MOST_DEVICES, Topology

COARSE = 50
SEARCH_BUDGET = 40_000  # generated tokens of one simulation of many
_LARGEST_REPLICAS = ((8, 2), (8, 4), (8, 8))  # tensor and pipeline sizes, tried where one machine is too small


def find_smallest(
    scenario: Scenario, tensor_sizes: tuple[int, ...], tell: Callable[[], object] = lambda: None
) -> list[Simulation]:
    """One result per size of a replica that can hold the model and keeps the goals, fewest devices first. `tell` is
    called after each simulation."""
    results = (_smallest(scenario, topology, tell) for topology in _candidates(scenario, tensor_sizes))
    return sorted(filter(None, results), key=lambda result: result.scenario.topology.num_devices)


def _candidates(scenario: Scenario, tensor_sizes: tuple[int, ...]) -> Iterator[Topology]:
    """Replicas that can hold the model; several machines for one only if no single machine can."""
    is_found, error = False, None
    pipeline = scenario.topology.pipeline_size
    sizes = [(size, pipeline) for size in tensor_sizes]
    for tensor, stages in [*sizes, *_LARGEST_REPLICAS]:
        if is_found and (tensor, stages) in _LARGEST_REPLICAS:
            return
        topology = replace(scenario.topology, tensor_size=tensor, pipeline_size=stages, data_size=1)
        topology = replace(topology, has_expert_parallel=topology.has_expert_parallel and tensor > 1)
        try:
            build_fleet(scenario.with_topology(topology))
        except ConfigError as refused:
            error = refused
            continue
        is_found = True
        yield topology
    if not is_found and error is not None:
        raise error


def _smallest(scenario: Scenario, topology: Topology, tell: Callable[[], object]) -> Simulation | None:
    """None: not even as many replicas as there may be keep the goals."""
    most = MOST_DEVICES // topology.replica_size
    scenario = replace(scenario, token_budget=SEARCH_BUDGET)

    def tried(number: int) -> Simulation | None:
        result = simulate_if_kept(scenario.with_topology(replace(topology, data_size=number)))
        tell()
        return result

    low, high = 0, 1  # low does not hold (or is none)
    while (best := tried(high)) is None:
        low, high = high, min(2 * high, most)
        if low == most:
            return None
    while high - low > max(1, high // COARSE):
        middle = (low + high) // 2
        if (result := tried(middle)) is None:
            low = middle
        else:
            high, best = middle, result
    return best
