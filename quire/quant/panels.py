"""PanelScheme: plain numbers that lie in panels once all of them are there, because a kernel multiplies them faster so.

Parameters keep their names, shapes and bytes; only the order of numbers inside 16 rows changes, at `finish`, and
changes back before a checkpoint fills them again. A matrix whose shape panels do not fit is plain. Must not know: which
model a matrix belongs to, or which kernels there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.ops.packed import BLOCK, PANEL, Matrix, Packed, lay_panels, packed_linear, packed_rows
from quire.quant.arena import Arena
from quire.quant.packed import PLAIN_NAMES
from quire.quant.scheme import Plain


class PanelScheme(Plain):
    """`layer.matrix` is what is multiplied; None as long as the rows lie one after another."""

    name = "panels"

    def __init__(self, dtype: torch.dtype, arena: Arena) -> None:
        super().__init__(dtype, arena)
        self._plain = Plain(dtype, arena)
        self._lay, self._packed = lay_panels.on(arena.device), packed_linear.on(arena.device)
        self._packed_rows = packed_rows.on(arena.device)

    def create(self, layer: nn.Module, in_size: int, out_size: int, *, bias: bool) -> None:
        super().create(layer, in_size, out_size, bias=bias)
        holder: Any = layer
        if out_size % PANEL or in_size % BLOCK:
            holder.scheme = self._plain
        else:
            holder.matrix = None

    def slots(self, layer: nn.Module, parts: Mapping[str, int]) -> Iterator[tuple[str, str, Tensor]]:
        self.lay_back(layer)
        yield from super().slots(layer, parts)

    def finish(self, layer: nn.Module) -> None:
        holder: Any = layer
        if holder.matrix is None:
            weight = holder.weight.data
            self._lay(weight)
            holder.matrix = Matrix((Packed(weight.view(-1).view(torch.uint8), "B16", *weight.shape),))

    def lay_back(self, layer: nn.Module) -> bool:
        holder: Any = layer
        if holder.matrix is None:
            return False
        self._lay(holder.weight.data, True)
        holder.matrix = None
        return True

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        if layer.matrix is None:
            return super().apply(layer, x)
        return self._packed(x, layer.matrix, layer.bias)

    def rows(self, layer: Any, index: Tensor) -> Tensor:
        if layer.matrix is None:
            return super().rows(layer, index)
        return self._packed_rows(index, layer.matrix.parts[0], self.dtype)


class PanelSchemes:
    """Which scheme a matrix gets: panels, but plain where layers or kernels of experts read its numbers."""

    def __init__(self, dtype: torch.dtype, arena: Arena) -> None:
        self._plain, self._panels = Plain(dtype, arena), PanelScheme(dtype, arena)

    def __call__(self, name: str) -> Plain:
        is_read = ".experts." in name or name.rpartition(".")[2] in PLAIN_NAMES
        return self._plain if is_read else self._panels


@runtime_checkable
class HoldsAddresses(Protocol):
    """A module that keeps where weights lie."""

    def forget_addresses(self) -> None: ...


def lay_back(model: Any) -> bool:
    """All matrices of a model become plain rows again, until its weights are finished; whether any lay in panels."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    found = [(vars(module).get("scheme"), module) for module in modules if "matrix" in vars(module)]
    for module in modules:
        if isinstance(module, HoldsAddresses):
            module.forget_addresses()
    return sum(scheme.lay_back(module) for scheme, module in found if isinstance(scheme, PanelScheme)) > 0
