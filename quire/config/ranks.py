"""How many workers there are and who starts them: a step of resolve.py.

In: ParallelConfig as requested. Out: the same, its backend settled where there are several ranks. What pipeline stages
cannot do in this version is refused here. Must not know: how a model is cut; whether it can be is said by its layers
when they are built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.log import logger
from quire.config.engine import EngineConfig, replace
from quire.config.option import Group
from quire.config.running import ParallelConfig
from quire.schema.errors import ConfigError, NotBuiltError

log = logger(__name__)
MOST_RANKS = 1024  # more is a typing error: a process is started for each


def check_ranks(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """One machine, one worker process per rank."""
    parallel = config.parallel_config
    size, backend = parallel.world_size, parallel.distributed_executor_backend
    if size == 1:
        return config
    sizes = _sizes(parallel)
    if size > MOST_RANKS:
        raise ConfigError(f"{sizes}: at most {MOST_RANKS} ranks are started", param="tensor_parallel_size", value=size)
    if _wants_ray(requested):
        raise NotBuiltError(
            f"distributed_executor_backend='ray' with {sizes}: this version starts its workers itself, on one machine "
            "(mp)",
            param="distributed_executor_backend",
            value="ray",
        )
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


def _wants_ray(requested: Mapping[str, Any]) -> bool:
    """The hint itself was dropped before this step, as of no effect on one worker."""
    nested = requested.get("parallel_config")
    named = requested.get("distributed_executor_backend")
    if isinstance(nested, Group):
        named = named or vars(nested).get("distributed_executor_backend")
    return named == "ray"
