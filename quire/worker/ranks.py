"""The ranks of an engine: this worker joins the process group of all of them, and gets its share of the model.

In: which rank of how many, and the URL at which they meet. Out: a ShardGroup whose sums go through torch.distributed:
NCCL between GPUs, gloo between CPU processes. World size 1 joins nothing. Must not know: models, or how processes were
started.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor, distributed

from quire.base import env
from quire.base.log import logger
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import ConfigError

_log = logger(__name__)


def join(rank: int, size: int, meeting: str, device: torch.device) -> ShardGroup:
    """Returns once all ranks are there."""
    if size == 1:
        return ALONE
    backend = "nccl" if device.type == "cuda" else "gloo"
    env.keep_on_this_host()
    limit = timedelta(seconds=env.ENGINE_START_TIMEOUT_S.get())
    distributed.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=size, timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    _log.info("Rank %d of %d (%s)", rank, size, backend)
    return ShardGroup(rank, size, _sum)


def leave() -> None:
    """Connections are closed; the peers may be gone already."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _sum(x: Tensor) -> Tensor:
    """In place. The result has the same bits on every rank: each entry is added up once, and then sent to all."""
    distributed.all_reduce(x)
    return x


def gpu_of(rank: int, size: int) -> int:
    """The index of a rank's GPU among those that are visible. ConfigError: there are fewer than ranks."""
    count = torch.cuda.device_count()
    if rank < count:
        return rank
    raise ConfigError(
        f"worker {rank} of {size} has no GPU: {count} are visible (CUDA_VISIBLE_DEVICES, nvidia-smi), and "
        "tensor_parallel_size times data_parallel_size are needed",
        param="tensor_parallel_size",
        value=size,
    )
