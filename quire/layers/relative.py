"""Learned scores by distance: a table of a few buckets per head, exact for near tokens and coarser for far ones.

Out: what attention adds to its scores, by distance (see ops/attention.by_distance and ragged_attention). Distances
beyond the last bucket all mean the same, so a short row of numbers says everything whatever a text's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.quant.scheme import Slot, Storage


@dataclass(frozen=True)
class RelativeKind:
    buckets: int = 32
    farthest: int = 128  # distances from here on share the last bucket
    each: bool = False  # every layer has a table of its own; else all share one


class RelativeScores(nn.Module):
    """`name` is the canonical name of the table without leaf. both_ways: keys may lie after their query."""

    def __init__(self, name: str, heads: int, kind: RelativeKind, storage: Storage, *, both_ways: bool) -> None:
        super().__init__()
        self.name, self.kind, self.both_ways = name, kind, both_ways
        self.weight = storage.parameter(kind.buckets, heads)

    def forward(self) -> Tensor:
        """[H, G + 1] by distance back, or both ways [H, 2 G + 1] by key minus query from -G to G."""
        reach = self.kind.farthest
        gap = torch.arange(-reach, reach + 1) if self.both_ways else -torch.arange(reach + 1)
        return self.weight[self._bucket(gap).to(self.weight.device)].t().float().contiguous()

    def _bucket(self, gap: Tensor) -> Tensor:
        """Key minus query -> row of the table. Half the rows are single distances, half grow by a constant factor."""
        buckets, first = self.kind.buckets, torch.zeros_like(gap)
        if self.both_ways:
            buckets //= 2
            first = (gap > 0) * buckets
        away, near = gap.abs(), buckets // 2
        grown = torch.log(away.clamp(min=1).float() / near) / math.log(self.kind.farthest / near)
        far = near + (grown * (buckets - near)).long()
        return first + torch.where(away < near, away, far.clamp(max=buckets - 1))

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight.data)


class LayerScores(nn.ModuleList):
    """The tables of all layers, named `name`, or `name`.0 and on where each has its own."""

    def __init__(
        self, name: str, heads: int, kind: RelativeKind, storage: Storage, *, layers: int, both_ways: bool
    ) -> None:
        names = [f"{name}.{i}" for i in range(layers)] if kind.each else [name]
        super().__init__([RelativeScores(one, heads, kind, storage, both_ways=both_ways) for one in names])
        self._layers = layers

    def scores(self) -> list[Tensor]:
        """Of each layer, as RelativeScores gives them."""
        found = [table() for table in self]
        return found if len(found) == self._layers else found * self._layers
