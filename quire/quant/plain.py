"""Plain storage: every matrix as it is, and experts in two tensors. Must not know: which model they belong to."""

from __future__ import annotations

import torch

from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.experts import ExpertScheme, Stacked
from quire.quant.scheme import PlainScheme, Storage, WeightScheme
from quire.quant.shard import ALONE, ShardGroup


class PlainChoice:
    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        self._plain, self._experts = PlainScheme(dtype, arena, kernels), Stacked(dtype, arena, kernels)

    def of_matrix(self, name: str) -> WeightScheme:
        return self._plain

    def of_experts(self, name: str) -> ExpertScheme:
        return self._experts

    def keeps_blocks(self, type_id: int) -> bool:
        return False


def plain_storage(dtype: torch.dtype, kernels: Kernels, group: ShardGroup = ALONE) -> Storage:
    arena = Arena(kernels.device)
    return Storage(dtype, arena, kernels, PlainChoice(dtype, arena, kernels), group)
