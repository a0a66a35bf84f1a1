"""ProcessContext: what ranks that divide contexts among themselves exchange, through torch.distributed.

As a ContextRanks. Must not know: attention, models, which tokens a rank keeps.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from quire.base import env


class ProcessContext:
    """`group`: the process group of the ranks that have the same heads of keys."""

    def __init__(self, rank: int, size: int, group: Any, *, interleave: int, by_exchange: bool) -> None:
        self.rank, self.size, self.interleave, self.by_exchange = rank, size, interleave, by_exchange
        self._group, self._in_one_piece = group, distributed.get_backend(group) == "nccl"

    def gather(self, x: Tensor) -> Tensor:
        if self._through_host(x):
            return self.gather(x.cpu()).to(x.device)
        every = x.new_empty((self.size, *x.shape))
        if self._in_one_piece:
            distributed.all_gather_into_tensor(every, x, group=self._group)
        else:
            distributed.all_gather(list(every.unbind()), x, group=self._group)
        return every

    def scatter(self, parts: Tensor) -> Tensor:
        if self._through_host(parts):
            return self.scatter(parts.cpu()).to(parts.device)
        parts = parts.contiguous()
        own = torch.empty_like(parts[0])
        if self._in_one_piece:
            distributed.reduce_scatter_tensor(own, parts, group=self._group)
        else:
            distributed.reduce_scatter(own, list(parts.unbind()), group=self._group)
        return own

    def exchange(self, parts: Tensor) -> Tensor:
        if self._through_host(parts):
            return self.exchange(parts.cpu()).to(parts.device)
        parts = parts.contiguous()
        own = torch.empty_like(parts)
        distributed.all_to_all_single(own, parts, group=self._group)
        return own

    def _through_host(self, x: Tensor) -> bool:
        """Ranks that share a GPU talk over gloo, which has these for the host's memory only."""
        return x.is_cuda and not self._in_one_piece


def join_context(size: int, *, interleave: int, by_exchange: bool) -> ProcessContext:
    """Among the ranks of all stages and engines that have joined, of which `size` neighbours each divide contexts. Each
    makes the groups of all."""
    limit, world = timedelta(seconds=env.ENGINE_START_TIMEOUT_S.get()), distributed.get_world_size()
    groups = [distributed.new_group(range(first, first + size), timeout=limit) for first in range(0, world, size)]
    place, rank = divmod(distributed.get_rank(), size)
    return ProcessContext(rank, size, groups[place], interleave=interleave, by_exchange=by_exchange)
