"""Which engines of a data-parallel deployment this program starts: a step of resolve.py.

In: ParallelConfig as requested, and the variables DP_SIZE, DP_RANK and DP_RANK_LOCAL. Out: the same with the ranks of
the engines that start here settled: all of them (internal balancing), one (external), none, if Ray starts them, or
some: with a server of their own (hybrid), with the server that has the others too, or without any (headless), for that
server. Engines are replicas
that do not know of each other. Must not know: how an engine is started, or which one a request goes to.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from quire.base import env
from quire.base.log import logger, once
from quire.config.engine import EngineConfig, replace
from quire.config.ranks import MOST_RANKS
from quire.config.running import ParallelConfig
from quire.schema.errors import ConfigError, MissingExtraError, NotBuiltError

log = logger(__name__)
_SIZE, _LOCAL, _RANK, _START = (
    "data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank",
)  # fmt: skip
_ROUTING, _BY_LOAD = "data_parallel_routing", "least-loaded"
_NOTHING_TO_ROUTE = "data_parallel_routing=%r has no effect: requests to this program all go to one engine"


def check_engines(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """How many engines there are, and which of them start here."""
    config = _divided(requested, config)
    parallel = config.parallel_config
    routing = requested.get(_ROUTING)
    if routing not in (None, _BY_LOAD) and len(parallel.engine_ranks) == 1 and not parallel.is_headless:
        once(log, logging.INFO, _NOTHING_TO_ROUTE, routing)
    return config


def _divided(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    parallel = config.parallel_config
    rank, local = requested.get(_RANK), requested.get(_LOCAL)
    _check_sizes(parallel, rank, local)
    if parallel.data_parallel_backend == "ray":
        if parallel.data_parallel_size > 1:
            return _engines_on_ray(config, rank, local)
        log.info("data_parallel_backend='ray' has no effect: there is one engine")
    if parallel.nodes_have_engines:
        return _engines_of_a_node(_with_address(requested, config), rank, local)
    if parallel.is_headless and parallel.nnodes == 1:
        return _engines_for_a_server(_with_address(requested, config), rank, local)
    if parallel.data_parallel_size == 1 and local != 0 and env.DP_SIZE.get() > 1:
        return _one_of_several_programs(config)
    if parallel.data_parallel_size == 1 and local != 0:
        return _only_engine(config)
    if parallel.distributed_executor_backend == "external_launcher":
        return _one_of_those_launched(config)
    if rank is not None or parallel.data_parallel_external_lb:
        return _one_engine(config, rank, local)
    if parallel.data_parallel_hybrid_lb or parallel.data_parallel_start_rank is not None:
        return _some_engines(config, local)
    if local is not None and local < parallel.data_parallel_size:
        return _engines_of_several_machines(_with_address(requested, config), local)
    return _settled(config, rank=0, local=parallel.data_parallel_size)


def _only_engine(config: EngineConfig) -> EngineConfig:
    """There is nothing to divide among servers."""
    parallel = config.parallel_config
    start = parallel.data_parallel_start_rank
    if start:
        raise ConfigError(
            f"{_START} is {start}; it must be below {_SIZE}={parallel.data_parallel_size}", param=_START, value=start
        )
    if not parallel.data_parallel_hybrid_lb:
        return config
    log.info("data_parallel_hybrid_lb has no effect: with %s 1 there is one engine, on one server", _SIZE)
    return replace(config, **{"parallel_config.data_parallel_hybrid_lb": False})


def _with_address(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """data_parallel_address, or where else the machines of a deployment find the first one."""
    if requested.get("data_parallel_address") is not None:
        return config
    return replace(config, **{"parallel_config.data_parallel_master_ip": config.parallel_config.master_addr})


def _check_sizes(parallel: ParallelConfig, rank: int | None, local: int | None) -> None:
    size = parallel.data_parallel_size
    if size * parallel.world_size > MOST_RANKS:
        raise ConfigError(
            f"{_SIZE} is {size}, of {parallel.world_size} ranks each; at most {MOST_RANKS} ranks are started",
            param=_SIZE,
            value=size,
        )
    if parallel.data_parallel_external_lb and parallel.data_parallel_hybrid_lb:
        raise ConfigError("data_parallel_external_lb and data_parallel_hybrid_lb exclude each other")
    if parallel.data_parallel_external_lb and size == 1:
        raise ConfigError(f"data_parallel_external_lb needs {_SIZE} above 1", param="data_parallel_external_lb")
    if local is not None and local > size:
        raise ConfigError(f"{_LOCAL}={local} is more than {_SIZE}={size}", param=_LOCAL, value=local)
    if rank is not None and rank >= size:
        raise ConfigError(f"{_RANK} is {rank}; it must be below {_SIZE}={size}", param=_RANK, value=rank)


def _engines_on_ray(config: EngineConfig, rank: int | None, local: int | None) -> EngineConfig:
    """Ray starts all of them, `local` at least on this program's node."""
    parallel = config.parallel_config
    others = {
        "headless": parallel.is_headless,
        "nnodes": parallel.nnodes > 1,
        _RANK: rank is not None,
        _START: parallel.data_parallel_start_rank is not None,
        "data_parallel_hybrid_lb": parallel.data_parallel_hybrid_lb,
        "data_parallel_external_lb": parallel.data_parallel_external_lb,
        "external_launcher": parallel.distributed_executor_backend == "external_launcher",
    }
    for other in (name for name, is_set in others.items() if is_set):
        raise ConfigError(
            f"data_parallel_backend='ray' and {other} exclude each other: one program has the server, and Ray starts "
            "all engines, on whichever nodes have room",
            param="data_parallel_backend",
            value="ray",
        )
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("data_parallel_backend='ray'", "ray", "ray")
    size = parallel.data_parallel_size
    return _settled(config, rank=0, local=0, num_engines_elsewhere=size, num_engines_near=local or 0)


def _engines_of_a_node(config: EngineConfig, rank: int | None, local: int | None) -> EngineConfig:
    """node_rank says which ones, as data_parallel_size_local and data_parallel_start_rank do."""
    parallel = config.parallel_config
    node, number = parallel.node_rank, parallel.data_parallel_size // parallel.nnodes
    first = node * number
    for name, value, meant in ((_LOCAL, local, number), (_START, parallel.data_parallel_start_rank, first)):
        if value not in (None, meant):
            raise ConfigError(
                f"{name}={value}, but nnodes={parallel.nnodes} and node_rank={node} mean {meant}: leave it out",
                param=name,
                value=value,
            )
    config = replace(config, **{"parallel_config.nnodes": 1, "parallel_config.node_rank": 0})
    if rank is not None or parallel.data_parallel_external_lb:
        of_node = range(first, first + number)
        if rank is None and number > 1:
            raise ConfigError(f"data_parallel_external_lb needs {_RANK}: node_rank={node} has {number}", param=_RANK)
        if rank not in (None, *of_node):
            raise ConfigError(
                f"{_RANK}={rank}, but node_rank={node} of nnodes={parallel.nnodes} has {first} to {of_node[-1]}",
                param=_RANK,
                value=rank,
            )
        return _one_engine(config, first if rank is None else rank, None)
    if parallel.data_parallel_hybrid_lb and not parallel.is_headless:
        return _some_engines(replace(config, **{f"parallel_config.{_START}": first}), number)
    if parallel.is_headless != (node > 0):
        raise ConfigError(
            f"node_rank is {node}: the first of nnodes={parallel.nnodes} machines has the server, unless there is one "
            "on each (data_parallel_hybrid_lb, data_parallel_external_lb); the others are headless",
            param="node_rank",
            value=node,
        )
    if not parallel.is_headless:
        return _engines_of_several_machines(config, number)
    return _engines_for_a_server(replace(config, **{f"parallel_config.{_START}": first}), rank, number)


def _engines_of_several_machines(config: EngineConfig, local: int) -> EngineConfig:
    """The first ones are here, with the server; others are where `quire serve --headless` runs."""
    parallel = config.parallel_config
    if parallel.nnodes > 1:
        raise NotBuiltError(
            f"nnodes={parallel.nnodes} with {_LOCAL}={local}: the ranks of an engine are on one machine if engines are "
            "on several",
            param="nnodes",
            value=parallel.nnodes,
        )
    elsewhere = parallel.data_parallel_size - local
    here = f"engines 0 to {local - 1}" if local else "no engine"
    log.info("Here: %s; %d of %d are on other machines", here, elsewhere, parallel.data_parallel_size)
    return _settled(config, rank=0, local=local, num_engines_elsewhere=elsewhere)


def _engines_for_a_server(config: EngineConfig, rank: int | None, local: int | None) -> EngineConfig:
    """`--headless`: engines whose server is on another machine."""
    parallel = config.parallel_config
    size, start = parallel.data_parallel_size, parallel.data_parallel_start_rank or 0
    local = size if local is None else local
    others = {
        _RANK: rank is not None,
        "data_parallel_hybrid_lb": parallel.data_parallel_hybrid_lb,
        "data_parallel_external_lb": parallel.data_parallel_external_lb,
    }
    for other in (name for name, is_set in others.items() if is_set):
        raise ConfigError(
            f"{other} and headless exclude each other: {other} is for a machine with a server of its own; on one "
            f"without, {_START} says which engines it starts",
            param=other,
        )
    if local == 0:
        raise ConfigError(f"{_LOCAL}=0 and headless: there would be nothing to start", param=_LOCAL, value=local)
    _check_range(start, local, size)
    return _settled(config, rank=start, local=local)


def _check_range(start: int, local: int, size: int) -> None:
    if start + local > size:
        raise ConfigError(
            f"{_START}={start} and {_LOCAL}={local} name engines beyond {_SIZE}={size}", param=_START, value=start
        )


def _one_engine(config: EngineConfig, rank: int | None, local: int | None) -> EngineConfig:
    """External balancing: servers of one engine each. On which machine the others are, nobody says."""
    if rank is None:
        raise ConfigError(f"data_parallel_external_lb needs {_RANK}", param=_RANK)
    if local not in (None, 1):
        raise ConfigError(
            f"{_LOCAL}={local}, but a server with external load balancing has one engine", param=_LOCAL, value=local
        )
    if config.parallel_config.data_parallel_hybrid_lb:
        raise ConfigError(f"data_parallel_hybrid_lb takes {_START}, not {_RANK}", param=_RANK, value=rank)
    log.info("Engine %d of %d, balanced outside", rank, config.parallel_config.data_parallel_size)
    return _settled(config, rank=rank, local=1, data_parallel_external_lb=True)


def _some_engines(config: EngineConfig, local: int | None) -> EngineConfig:
    """Hybrid balancing: servers of some engines each."""
    parallel = config.parallel_config
    size, start = parallel.data_parallel_size, parallel.data_parallel_start_rank or 0
    if local is None:
        raise ConfigError(f"data_parallel_hybrid_lb needs {_LOCAL}", param=_LOCAL)
    if local == 0:
        raise ConfigError(f"data_parallel_hybrid_lb with {_LOCAL}=0 is a server without engines", param=_LOCAL)
    _check_range(start, local, size)
    if local == size:
        return _settled(config, rank=0, local=size, data_parallel_hybrid_lb=False)
    if local == 1:
        log.warning("data_parallel_hybrid_lb with %s=1 is external load balancing", _LOCAL)
        changes = {"data_parallel_hybrid_lb": False, "data_parallel_external_lb": True}
        return _settled(config, rank=start, local=1, **changes)
    log.info("Engines %d to %d of %d, balanced outside and here", start, start + local - 1, size)
    return _settled(config, rank=start, local=local, data_parallel_hybrid_lb=True)


def _one_of_several_programs(config: EngineConfig) -> EngineConfig:
    """A program that is run once per engine, each with its own requests: the variables say which one this is."""
    size, rank = env.DP_SIZE.get(), env.DP_RANK.get()
    if size * config.parallel_config.world_size > MOST_RANKS:
        raise ConfigError(f"VLLM_DP_SIZE is {size}; at most {MOST_RANKS} ranks are started")
    if not 0 <= rank < size:
        raise ConfigError(f"VLLM_DP_RANK is {rank}; it must be from 0 to {size - 1}, because VLLM_DP_SIZE is {size}")
    place = env.DP_RANK_LOCAL.get()
    place = rank if place is None else place
    if not 0 <= place < size:
        raise ConfigError(f"VLLM_DP_RANK_LOCAL is {place}; it must be from 0 to {size - 1}")
    log.info("Engine %d of %d (VLLM_DP_RANK, VLLM_DP_SIZE)", rank, size)
    changes = {_SIZE: size, "data_parallel_rank_local": place, "num_engines_here": size}
    return _settled(config, rank=rank, local=1, **changes)


def _one_of_those_launched(config: EngineConfig) -> EngineConfig:
    """Ranks of an engine follow each other; how many were launched is checked when they meet."""
    size = config.parallel_config.data_parallel_size
    return _settled(config, rank=(env.RANK.get() or 0) // config.parallel_config.world_size % size, local=1)


def _settled(config: EngineConfig, *, rank: int, local: int, **changes: Any) -> EngineConfig:
    changes = {_RANK: rank, _LOCAL: local, "num_engines_here": local} | changes
    return replace(config, **{f"parallel_config.{name}": value for name, value in changes.items()})


def config_of_engine(config: EngineConfig, place: int) -> EngineConfig:
    """For one of the engines that this program starts, by its place among them."""
    parallel = config.parallel_config
    rank, here = parallel.data_parallel_rank + place, parallel.place_here + place
    return replace(config, **{f"parallel_config.{_RANK}": rank, "parallel_config.data_parallel_rank_local": here})
