"""The backend `mp`: a worker process for each rank, on this host or shared out among several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.executor.remote import RemoteExecutor

if TYPE_CHECKING:
    from quire.config import EngineConfig


def one_per_rank(config: EngineConfig) -> RemoteExecutor:
    parallel = config.parallel_config
    if parallel.nnodes > 1:
        from quire.executor.nodes import across_nodes  # lazy

        executor: RemoteExecutor = across_nodes(config)
        return executor
    return RemoteExecutor(config, num_workers=parallel.world_size, stages=parallel.pipeline_parallel_size)
