"""Where an adapter can add something: the layers of a model by the names that checkpoints have for them.

In: a model with a weight table. Out: for a module's name in an adapter file, its place: a run of rows of a Linear or of
the head, the table of the embedding, one matrix of one expert, or that matrix of all experts at once. B of a fused
matrix is brought into the layout that the table gives the weight itself. Must not know: files, slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from quire.layers.adapters import ExpertAdapters, HeadAdapters, LinearAdapters, StepAdapters, TableAdapters
from quire.layers.embed import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.table import WeightTable
from quire.ops.op import Kernels
from quire.quant.scheme import PlainMatrix

AdaptedLayer: TypeAlias = Linear | Experts | Embedding | Head
_CHUNK = 1 << 14  # rows of a table that are compared at once


@dataclass(frozen=True)
class AdapterPlace:
    """Rows [start, stop) of a matrix that is `width` wide."""

    name: str  # canonical
    layer: AdaptedLayer
    start: int
    stop: int
    width: int
    expert: int = -1  # of a mixture's experts; -1: not one of them
    is_down: bool = False  # the experts' second matrix
    experts: int = 1  # more: the matrices of all experts, one behind another

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def is_stack(self) -> bool:
        return isinstance(self.layer, Experts) and self.expert < 0


class AdapterPlaces:
    def __init__(self, model: nn.Module, table: WeightTable) -> None:
        self._table = table
        self.by_name: dict[str, AdapterPlace] = {}
        for module in model.modules():
            if isinstance(module, Linear):
                self._add_linear(module)
            elif isinstance(module, Experts):
                self._add_experts(module)
            elif isinstance(module, Embedding | Head):
                self._add(AdapterPlace(module.name, module, 0, module.rows.count, module.width))

    def find(self, module: str) -> AdapterPlace | None:
        """By a module's name as a checkpoint of the model spells it."""
        return self.by_name.get(self.canonical(module))

    def find_parameter(self, name: str) -> AdapterPlace | None:
        """By the name of a parameter that is not called `weight`."""
        return self.by_name.get(self._table.canonical(name))

    def canonical(self, module: str) -> str:
        return self._table.canonical(f"{module}.weight").removesuffix(".weight")

    def arrange(self, place: AdapterPlace, b: Tensor) -> Tensor:
        """B [rows, rank], whose rows lie as the checkpoint's weight has them, in the layout of the layer's rows."""
        name = f"{place.name}.weight"
        if place.expert >= 0:
            return b
        probe = self._table.arranged(name, torch.empty((place.rows, place.rows + 1), device="meta"))
        is_transposed = probe.shape[0] != place.rows
        return self._table.arranged(name, b.t() if is_transposed else b).contiguous()

    def is_transposed(self, place: AdapterPlace) -> bool:
        """Whether a checkpoint has the matrices of all experts as [experts, width, rows]."""
        probe = torch.empty((1, place.rows, place.rows + 2), device="meta")
        return self._table.arranged(place.name, probe).shape[1] != place.rows

    def arrange_stack(self, place: AdapterPlace, b: Tensor) -> Tensor:
        """The same as `arrange`, for B [experts, rows, rank] of all experts."""
        b = b.transpose(1, 2) if self.is_transposed(place) else b
        return self._table.arranged(place.name, b).contiguous()

    def is_weight_of(self, place: AdapterPlace, weight: Tensor) -> bool:
        """Whether these numbers, as a checkpoint has them, are those of an embedding or a head; of a matrix that was
        rounded when it was stored: nearly."""
        layer = place.layer
        assert isinstance(layer, Embedding | Head)
        stored, weight = layer.stored, self._table.arranged(f"{place.name}.weight", weight)
        is_exact = isinstance(stored, PlainMatrix)
        device = next(parameter.device for _, parameter in stored.parameters())
        for start in range(0, place.rows, _CHUNK):
            stop = min(start + _CHUNK, place.rows)
            ours = stored.take(torch.arange(start, stop, device=device)).cpu()
            theirs = weight[start:stop].to(ours.dtype)
            if not torch.equal(ours, theirs) and (is_exact or not _is_near(ours.float(), theirs.float())):
                return False
        return True

    def _add(self, place: AdapterPlace) -> None:
        self.by_name[place.name] = place

    def _add_linear(self, layer: Linear) -> None:
        bounds, at = {}, 0
        for part, rows in layer.parts.items():
            bounds[part] = (at, at + rows)
            at += rows
        for name, run in layer.named_runs():
            full = layer.prefix + name
            self._add(AdapterPlace(full, layer, bounds[run[0]][0], bounds[run[-1]][1], layer.in_size))

    def _add_experts(self, layer: Experts) -> None:
        shape = layer.stored.shape
        for name, matrix, is_down in zip((shape.fused, "down_proj"), shape.matrices(), (False, True), strict=True):
            width, count = matrix.width.count, shape.experts
            self._add(
                AdapterPlace(
                    layer.prefix + name, layer, 0, matrix.rows, width, is_down=is_down, experts=count
                )
            )  # fmt: skip
            for expert in range(count):
                for part in matrix.parts:
                    start, stop = matrix.rows_of((part,))
                    self._add(
                        AdapterPlace(f"{layer.prefix}{expert}.{part}", layer, start, stop, width, expert, is_down)
                    )


def _is_near(ours: Tensor, theirs: Tensor) -> bool:
    """Four bits per number leave less than a fifth of difference."""
    return bool((ours - theirs).norm() <= 0.2 * theirs.norm())


def attach(
    model: nn.Module, step: StepAdapters, num_slots: int, rank: int, like: Tensor, kernels: Kernels
) -> list[AdaptedLayer]:
    """Give every layer its slots; all layers that have some. `like`: a tensor of the adapters' dtype, on the model's
    device."""
    layers: list[AdaptedLayer] = []
    for module in model.modules():
        if isinstance(module, Linear):
            module.adapters = LinearAdapters(module, step, num_slots, rank, like, kernels)
        elif isinstance(module, Experts):
            module.adapters = ExpertAdapters(module.stored, step, num_slots, kernels)
        elif isinstance(module, Embedding):
            module.adapters = TableAdapters(step, num_slots, kernels)
        elif isinstance(module, Head):
            module.adapters = HeadAdapters(num_slots, kernels)
        else:
            continue
        layers.append(module)
    return layers
