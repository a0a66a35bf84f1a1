"""vllm.distributed.parallel_state, as far as a process can tell by itself: its place among all ranks of an engine.

In: torch's process group, where this process has joined one (a worker of several, a program under torchrun). Without
one nothing is divided, and every group has one rank. Which of them share layers only the engine's configuration says.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from quire.base.registry import load
from quire.schema.errors import NotBuiltError


class Group(NamedTuple):
    """Ranks that work together, as one of them sees them."""

    rank: int
    world_size: int
    local_rank: int
    device_group: Any  # torch's; None: this process alone

    @property
    def rank_in_group(self) -> int:
        return self.rank

    @property
    def ranks(self) -> list[int]:
        return list(range(self.world_size))

    @property
    def first_rank(self) -> int:
        return 0

    @property
    def last_rank(self) -> int:
        return self.world_size - 1

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.last_rank

    def barrier(self) -> None:
        if self.device_group is not None:
            load("torch:distributed").barrier(self.device_group)


_ALONE = Group(0, 1, 0, None)


def _joined() -> Any:
    """torch.distributed, if this process is one of several ranks."""
    if "torch" not in sys.modules or not (found := load("torch:distributed")).is_available():
        return None
    return found if found.is_initialized() else None


def get_world_group() -> Group:
    """All ranks of the engine that this process belongs to."""
    distributed = _joined()
    if distributed is None:
        return _ALONE
    cuda = load("torch:cuda")
    rank = distributed.get_rank()
    local = cuda.current_device() if distributed.get_backend() == "nccl" else rank
    return Group(rank, distributed.get_world_size(), local, distributed.group.WORLD)


def _part(name: str) -> Group:
    distributed = _joined()
    if distributed is not None and distributed.get_world_size() > 1:
        raise NotBuiltError(
            f"{name}: among several ranks, parallel_config says which of them share layers or have experts together; "
            "get_world_group() tells the place among all"
        )
    return get_world_group()


def get_tp_group() -> Group:
    return _part("get_tp_group")


def get_pp_group() -> Group:
    return _part("get_pp_group")


def get_dp_group() -> Group:
    return _part("get_dp_group")


def get_ep_group() -> Group:
    return _part("get_ep_group")


def get_tensor_model_parallel_rank() -> int:
    return _part("get_tensor_model_parallel_rank").rank


def get_tensor_model_parallel_world_size() -> int:
    return _part("get_tensor_model_parallel_world_size").world_size


def is_global_first_rank() -> bool:
    return get_world_group().is_first_rank


def model_parallel_is_initialized() -> bool:
    """Whether this process is one of the ranks of a model."""
    return _joined() is not None
