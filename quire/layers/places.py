"""Where an adapter can add something: the layers of a model by the names that checkpoints have for them.

In: a model with a weight table. Out: for a module's name in an adapter file, its place: a run of rows of a Linear, or
one matrix of one expert. B of a fused matrix is brought into the layout that the table gives the weight itself.
Must not know: files, slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.layers.adapters import ExpertAdapters, LinearAdapters, StepAdapters
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.table import WeightTable
from quire.ops.op import Kernels

_NO_HEAD = "adapters of the head (lm_head) are not in this version"
_NO_EMBEDDING = "adapters of the embedding are not in this version"


@dataclass(frozen=True)
class AdapterPlace:
    """Rows [start, stop) of a matrix that is `width` wide."""

    name: str  # canonical
    layer: Linear | Experts
    start: int
    stop: int
    width: int
    expert: int = -1  # of a mixture's experts; -1: the layer is a Linear
    is_down: bool = False  # the expert's second matrix

    @property
    def rows(self) -> int:
        return self.stop - self.start


class AdapterPlaces:
    def __init__(self, model: nn.Module, table: WeightTable) -> None:
        self._table = table
        self.by_name: dict[str, AdapterPlace] = {}
        self.refused: dict[str, str] = {"lm_head": _NO_HEAD, "model.embed_tokens": _NO_EMBEDDING}  # by canonical name
        for module in model.modules():
            if isinstance(module, Linear):
                self._add_linear(module)
            elif isinstance(module, Experts):
                self._add_experts(module)

    def find(self, module: str) -> AdapterPlace | None:
        """By a module's name as a checkpoint of the model spells it."""
        return self.by_name.get(self.canonical(module))

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

    def _add_linear(self, layer: Linear) -> None:
        bounds, at = {}, 0
        for part, rows in layer.parts.items():
            bounds[part] = (at, at + rows)
            at += rows
        for name, run in layer.named_runs():
            full = layer.prefix + name
            self.by_name[full] = AdapterPlace(full, layer, bounds[run[0]][0], bounds[run[-1]][1], layer.in_size)

    def _add_experts(self, layer: Experts) -> None:
        up, down = layer.stored.shape.matrices()
        for expert in range(layer.stored.shape.experts):
            for shape, is_down in ((up, False), (down, True)):
                for part in shape.parts:
                    start, stop = shape.rows_of((part,))
                    name = f"{layer.prefix}{expert}.{part}"
                    if not layer.takes_adapters:
                        self.refused[name] = "adapters of experts whose inputs are weighted are not in this version"
                        continue
                    self.by_name[name] = AdapterPlace(
                        name, layer, start, stop, shape.width.count, expert, is_down
                    )  # fmt: skip


def attach(model: nn.Module, step: StepAdapters, num_slots: int, rank: int, like: Tensor, kernels: Kernels) -> None:
    """Give every layer its slots. `like`: a tensor of the adapters' dtype, on the model's device."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.adapters = LinearAdapters(module, step, num_slots, rank, like, kernels)
        elif isinstance(module, Experts) and module.takes_adapters:
            module.adapters = ExpertAdapters(module.stored, step, num_slots, kernels)
