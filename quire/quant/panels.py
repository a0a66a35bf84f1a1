"""PanelScheme: plain numbers that lie in panels once all of them are there, because a kernel multiplies them faster so.

Parameters keep their names, shapes and bytes; only the order of numbers inside 16 rows changes, at `finish`, and
changes back before a checkpoint fills them again. A matrix whose shape panels do not fit is plain. Must not know: which
model a matrix belongs to, or which kernels there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.ops.op import Kernels
from quire.ops.packed import BLOCK, PANEL, Matrix, Packed, lay_panels, packed_linear, packed_rows, panel_kind
from quire.quant.arena import Arena
from quire.quant.experts import ExpertScheme, Stacked
from quire.quant.packed import PLAIN_NAMES
from quire.quant.scheme import MatrixShape, PartSlot, PlainMatrix, PlainScheme, StoredMatrix, WeightScheme


class PanelScheme(PlainScheme):
    name = "panels"

    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        super().__init__(dtype, arena, kernels)
        self.lay, self.packed_linear = kernels.of(lay_panels), kernels.of(packed_linear)
        self.packed_rows = kernels.of(packed_rows)

    def create(self, shape: MatrixShape) -> StoredMatrix:
        if shape.rows % PANEL or shape.width.count % BLOCK:
            return super().create(shape)
        return PanelMatrix(shape, self)


class PanelMatrix(PlainMatrix):
    """`packed` is what is multiplied; None as long as the rows lie one after another."""

    name = "panels"
    is_plain = False

    def __init__(self, shape: MatrixShape, scheme: PanelScheme) -> None:
        super().__init__(shape, scheme)
        self._scheme = scheme

    def slots(self, run: tuple[str, ...]) -> Iterator[PartSlot]:
        self.reopen()
        yield from super().slots(run)

    def finish(self) -> None:
        if self.packed is None:
            weight = self.weight.data
            self._scheme.lay(weight)
            self.packed = Matrix((Packed(weight.view(-1).view(torch.uint8), panel_kind(weight.dtype), *weight.shape),))
            self.numbers = None

    def reopen(self) -> bool:
        if self.packed is None:
            return False
        self._scheme.lay(self.weight.data, True)
        self.packed, self.numbers = None, self.weight
        return True

    def multiply(self, x: Tensor) -> Tensor:
        return self.multiply_with(x, self.bias)

    def multiply_with(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return super().multiply_with(x, bias)
        return self._scheme.packed_linear(x, self.packed, bias)

    def multiply_wide(self, x: Tensor) -> Tensor:
        return super().multiply_wide(x) if self.packed is None else self.multiply(x).float()

    def take(self, index: Tensor) -> Tensor:
        if self.packed is None:
            return super().take(index)
        return self._scheme.packed_rows(index, self.packed.parts[0], self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


class PanelChoice:
    """Panels, but plain where layers or kernels of experts read the numbers."""

    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        self._plain, self._panels = PlainScheme(dtype, arena, kernels), PanelScheme(dtype, arena, kernels)
        self._experts = Stacked(dtype, arena, kernels)

    def of_matrix(self, name: str) -> WeightScheme:
        return self._plain if name.rpartition(".")[2] in PLAIN_NAMES else self._panels

    def of_experts(self, name: str) -> ExpertScheme:
        return self._experts

    def keeps_blocks(self, type_id: int) -> bool:
        return False
