"""How many workers there are and who starts them: a step of resolve.py.

In: ParallelConfig as requested. Out: the same, its backend settled where there are several ranks. What pipeline stages
cannot do in this version is refused here. Must not know: how a model is cut; whether it can be is said by its layers
when they are built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from quire.base import env
from quire.base.log import logger
from quire.config.engine import EngineConfig, replace
from quire.config.running import ParallelConfig
from quire.schema.errors import ConfigError, MissingExtraError, NotBuiltError

log = logger(__name__)
MOST_RANKS = 1024  # more is a typing error: a process is started for each


def check_ranks(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """A worker process per rank, on one machine or several."""
    parallel = config.parallel_config
    _check_nodes(parallel)
    if parallel.distributed_executor_backend == "external_launcher":
        _check_launched(config)
    size, backend = parallel.world_size, parallel.distributed_executor_backend
    _check_balance(config)
    _check_context(parallel)
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        if size > 1:
            raise MissingExtraError("distributed_executor_backend='ray'", "ray", "ray")
        log.info("distributed_executor_backend='ray' has no effect: Ray is not installed, and there is one worker")
        return replace(config, **{"parallel_config.distributed_executor_backend": None})
    if size == 1:
        return config
    sizes = _sizes(parallel)
    if size > MOST_RANKS:
        raise ConfigError(f"{sizes}: at most {MOST_RANKS} ranks are started", param="tensor_parallel_size", value=size)
    if backend == "uni":
        raise ConfigError(
            f"distributed_executor_backend='uni' is one worker, and there are {size} ({sizes}): choose mp, or leave it "
            "unset",
            param="distributed_executor_backend",
            value=backend,
        )
    if parallel.pipeline_parallel_size > 1:
        _check_stages(config)
    if backend is None:
        log.info("distributed_executor_backend: mp (%d ranks)", size)
    return replace(config, **{"parallel_config.distributed_executor_backend": backend or "mp"})


def _sizes(parallel: ParallelConfig) -> str:
    """As a user wrote them, those that are not 1."""
    sizes = {name: getattr(parallel, f"{name}_parallel_size") for name in ("tensor", "pipeline")}
    return " and ".join(f"{name}_parallel_size {size}" for name, size in sizes.items() if size > 1)


def _check_nodes(parallel: ParallelConfig) -> None:
    nodes, size = parallel.nnodes, parallel.world_size
    if parallel.node_rank >= nodes:
        raise ConfigError(
            f"node_rank is {parallel.node_rank}; it must be below nnodes={nodes}",
            param="node_rank",
            value=parallel.node_rank,
        )
    if nodes == 1:
        return
    if parallel.distributed_executor_backend == "ray":
        raise _wrong_backend_of_nodes(parallel)
    if parallel.nodes_have_engines:
        _check_engines_of_nodes(parallel)
        return
    if size % nodes:
        raise ConfigError(
            f"{size} rank{'s' * (size > 1)} ({_sizes(parallel) or 'tensor_parallel_size 1'}) cannot be shared out "
            f"among nnodes={nodes}",
            param="nnodes",
            value=nodes,
        )
    if parallel.distributed_executor_backend not in (None, "mp", "external_launcher"):
        raise _wrong_backend_of_nodes(parallel)


def _wrong_backend_of_nodes(parallel: ParallelConfig) -> ConfigError:
    backend = parallel.distributed_executor_backend
    return ConfigError(
        f"nnodes={parallel.nnodes} needs distributed_executor_backend='mp', not {backend!r}",
        param="distributed_executor_backend",
        value=backend,
    )


def _check_engines_of_nodes(parallel: ParallelConfig) -> None:
    """Each machine has as many whole engines as any other."""
    nodes, engines = parallel.nnodes, parallel.data_parallel_size
    if engines % nodes == 0:
        return
    if nodes % engines == 0:
        raise NotBuiltError(
            f"nnodes={nodes} with data_parallel_size={engines}: each engine of a data-parallel deployment is on one "
            "machine, unless Ray places its workers (data_parallel_backend and distributed_executor_backend 'ray')",
            param="nnodes",
            value=nodes,
        )
    raise ConfigError(
        f"data_parallel_size={engines} engines cannot be shared out among nnodes={nodes}; data_parallel_size_local and "
        "data_parallel_start_rank may say which of them a machine has, without nnodes",
        param="nnodes",
        value=nodes,
    )


def _check_balance(config: EngineConfig) -> None:
    parallel = config.parallel_config
    copies = parallel.eplb_config.num_redundant_experts
    if not parallel.enable_eplb:
        if copies:
            raise ConfigError(
                f"num_redundant_experts is {copies}, which needs enable_eplb", param="eplb_config", value=copies
            )
        return
    reason = ""
    if not parallel.enable_expert_parallel:
        reason = "it needs enable_expert_parallel, with which ranks have whole experts"
    elif parallel.tensor_parallel_size * parallel.data_parallel_size == 1:
        reason = "there is one rank, and nothing to balance; set tensor_parallel_size or data_parallel_size"
    if reason:
        raise ConfigError(f"enable_eplb: {reason}", param="enable_eplb", value=True)
    others = {
        "an external launcher": parallel.distributed_executor_backend == "external_launcher",
        "pipeline stages": parallel.pipeline_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "a pooling model": config.model_config.is_pooling,
    }
    for other in (name for name, is_so in others.items() if is_so):
        raise NotBuiltError(f"enable_eplb: experts do not move together with {other}", param="enable_eplb", value=True)


def _check_context(parallel: ParallelConfig) -> None:
    size, tensor = parallel.decode_context_parallel_size, parallel.tensor_parallel_size
    if tensor % size:
        raise ConfigError(
            f"decode_context_parallel_size={size} must divide tensor_parallel_size={tensor}: it divides contexts among "
            "the same ranks",
            param="decode_context_parallel_size",
            value=size,
        )
    if parallel.dcp_comm_backend == "a2a" and size == 1:
        raise ConfigError(
            "dcp_comm_backend='a2a' needs decode_context_parallel_size above 1", param="dcp_comm_backend", value="a2a"
        )


def divide_contexts(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """Of context parallelism: what it is not built for is refused, the two names of an option become one."""
    parallel, block_size = config.parallel_config, config.cache_config.block_size
    size, old = parallel.decode_context_parallel_size, parallel.dcp_kv_cache_interleave_size
    if size == 1:
        return config
    others = {
        "an encoder-decoder model": config.model_config.is_encoder_decoder,
        "a pooling model": config.model_config.is_pooling,
        "a KV cache in int8 on CPUs: choose another kv_cache_dtype": (
            config.device_config.device == "cpu" and config.cache_config.cache_dtype.startswith("int8")
        ),
        "batch-invariant mode: how a context is divided changes bits": env.BATCH_INVARIANT.get(),
    }
    for other in (name for name, is_so in others.items() if is_so):
        raise NotBuiltError(
            f"decode_context_parallel_size={size} is not built for {other}",
            param="decode_context_parallel_size",
            value=size,
        )
    _check_copies(config)
    interleave = parallel.cp_kv_cache_interleave_size
    if old > 1 and old != interleave:
        log.warning("cp_kv_cache_interleave_size: %d, as its old name dcp_kv_cache_interleave_size says", old)
        interleave = old
    if block_size % interleave:
        raise ConfigError(
            f"cp_kv_cache_interleave_size={interleave} must divide block_size={block_size}",
            param="cp_kv_cache_interleave_size",
            value=interleave,
        )
    return replace(config, **{"parallel_config.cp_kv_cache_interleave_size": interleave})


def _check_copies(config: EngineConfig) -> None:
    """As far as the configuration tells; a layer with other heads than most says so when it is built."""
    facts, parallel = config.model_config.facts, config.parallel_config
    size, tensor, heads = parallel.decode_context_parallel_size, parallel.tensor_parallel_size, facts.num_kv_heads
    if facts.uses_mla or not heads or (tensor % heads == 0 and tensor // heads % size == 0):
        return
    raise ConfigError(
        f"decode_context_parallel_size={size} divides a context among ranks that have the same heads of keys: it must "
        f"divide tensor_parallel_size={tensor} / {heads} heads of keys",
        param="decode_context_parallel_size",
        value=size,
    )


def check_shares(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """As far as the configuration tells, before a process is started for each rank; layers say it exactly when they are
    built."""
    facts, parallel = config.model_config.facts, config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if facts.num_heads and facts.num_heads % ranks:
        possible = ", ".join(str(size) for size in range(1, facts.num_heads + 1) if facts.num_heads % size == 0)
        raise ConfigError(
            f"tensor_parallel_size={ranks}: {facts.num_heads} heads cannot be shared out among {ranks} ranks; sizes "
            f"that divide them are {possible}",
            param="tensor_parallel_size",
            value=ranks,
        )
    if facts.num_layers and stages > facts.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is more than the model's {facts.num_layers} layers",
            param="pipeline_parallel_size",
            value=stages,
        )
    return config


def spread_experts(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """Whether the ranks of all engines divide a mixture's experts among themselves, and run every step together."""
    parallel = config.parallel_config
    if not parallel.enable_expert_parallel:
        return config
    if config.model_config.facts.num_experts == 0:
        return _without_experts(config)
    if parallel.data_parallel_size == 1:
        if parallel.tensor_parallel_size == 1:
            log.info("enable_expert_parallel has no effect: with tensor_parallel_size 1 every engine has all experts")
        return config
    if why := _why_apart(config):
        if parallel.enable_eplb and parallel.tensor_parallel_size == 1:
            raise NotBuiltError(
                f"enable_eplb: each engine has one rank with all experts, and none can move between engines: {why}; "
                "set tensor_parallel_size above 1",
                param="enable_eplb",
                value=True,
            )
        log.warning(
            "enable_expert_parallel divides experts among the %d ranks of each engine, not among engines: %s",
            parallel.world_size,
            why,
        )
        return config
    ranks = parallel.world_size_across_dp
    log.info("Experts are divided among the %d ranks of all engines, which run every step together", ranks)
    return replace(config, **{"parallel_config.experts_span_engines": True})


def _without_experts(config: EngineConfig) -> EngineConfig:
    """Of a dense model: its experts can be neither divided nor moved."""
    kind = config.model_config.facts.model_type
    if config.parallel_config.enable_eplb:
        raise ConfigError(
            f"enable_eplb: a model of type {kind!r} has no experts to balance; it is for mixtures of experts",
            param="enable_eplb",
            value=True,
        )
    log.info("enable_expert_parallel has no effect: a model of type %r has no experts to divide", kind)
    return config


def _why_apart(config: EngineConfig) -> str:
    parallel = config.parallel_config
    if parallel.distributed_executor_backend not in (None, "uni", "mp"):
        return f"distributed_executor_backend is {parallel.distributed_executor_backend!r}"
    if parallel.data_parallel_size_local < parallel.data_parallel_size or parallel.is_headless:
        return "several programs start them, or Ray does, and they do not know of each other"
    if config.speculative_config is not None:
        return "they draft"
    if config.load_config.load_format == "sharded_state":
        return "files of load_format 'sharded_state' have all experts of the ranks of one engine"
    if config.model_config.is_pooling:
        return "the model is pooled"
    return ""


def _check_launched(config: EngineConfig) -> None:
    """The ranks' own engines must plan the same steps, whatever their clocks say."""
    reason = ""
    if config.enable_lora:
        reason = "adapters are read in the background, and the ranks would not agree when one is there"
    elif config.scheduler_config.inter_token_latency_goal_ms:
        reason = "inter_token_latency_goal_ms goes by a clock, and each rank has its own"
    if reason:
        raise NotBuiltError(
            f"distributed_executor_backend='external_launcher': {reason}",
            param="distributed_executor_backend",
            value="external_launcher",
        )


def _check_stages(config: EngineConfig) -> None:
    """Of models, load_model refuses more: encoder-decoders, and transformers' own code."""
    stages = config.parallel_config.pipeline_parallel_size
    reason = ""
    if config.speculative_config is not None:
        reason = "speculative decoding does not work across pipeline stages"
    elif config.model_config.is_pooling:
        reason = "pooling models are not cut into pipeline stages; tensor_parallel_size is there for them"
    if reason:
        raise NotBuiltError(f"pipeline_parallel_size={stages}: {reason}", param="pipeline_parallel_size", value=stages)
