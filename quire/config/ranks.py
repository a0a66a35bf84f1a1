"""How many workers there are and who starts them: a step of resolve.py.

In: ParallelConfig as requested. Out: the same, its backend settled where there are several ranks. Must not know: how a
model is cut; whether it can be is said by its layers when they are built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.log import logger
from quire.config.engine import EngineConfig, replace
from quire.config.option import Group
from quire.schema.errors import ConfigError, NotBuiltError

log = logger(__name__)
MOST_RANKS = 1024  # more is a typing error: a process is started for each


def check_ranks(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """One machine, one worker process per rank."""
    parallel = config.parallel_config
    size, backend = parallel.world_size, parallel.distributed_executor_backend
    if size == 1:
        return config
    if size > MOST_RANKS:
        raise ConfigError(
            f"tensor_parallel_size is {size}; at most {MOST_RANKS} ranks are started", param="tensor_parallel_size"
        )
    if _wants_ray(requested):
        raise NotBuiltError(
            f"distributed_executor_backend='ray' with tensor_parallel_size {size}: this version starts its workers "
            "itself, on one machine (mp)",
            param="distributed_executor_backend",
            value="ray",
        )
    if backend == "uni":
        raise ConfigError(
            f"distributed_executor_backend='uni' is one worker, and tensor_parallel_size is {size}: choose mp, or "
            "leave it unset",
            param="distributed_executor_backend",
            value=backend,
        )
    if backend is None:
        log.info("distributed_executor_backend: mp (%d ranks)", size)
    return replace(config, **{"parallel_config.distributed_executor_backend": backend or "mp"})


def _wants_ray(requested: Mapping[str, Any]) -> bool:
    """The hint itself was dropped before this step, as of no effect on one worker."""
    nested = requested.get("parallel_config")
    named = requested.get("distributed_executor_backend")
    if isinstance(nested, Group):
        named = named or vars(nested).get("distributed_executor_backend")
    return named == "ray"
