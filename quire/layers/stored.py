"""MatrixLayer: a module that has one stored matrix; and the stored matrices of a whole model, by name.

Parameters stand on the module under the names that its scheme gives them, so that they are found, moved and saved as
those of any module are. Must not know: how matrices are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from quire.ops.packed import Packed
from quire.quant.experts import StoredExperts
from quire.quant.packed import PackedMatrix
from quire.quant.scheme import StoredMatrix


class MatrixLayer(nn.Module):
    stored: StoredMatrix
    weight: nn.Parameter  # of plain numbers and panels only
    bias: nn.Parameter | None

    def hold(self, stored: StoredMatrix) -> None:
        self.stored = stored
        self.register_parameter("bias", None)
        register(self, stored.parameters())

    def finish(self) -> None:
        """All slots are filled, or parameters were replaced by others."""
        known = dict(self.stored.parameters())
        for name, parameter in self.named_parameters(recurse=False):
            if known.get(name) is not parameter:
                self.stored.adopt(name, parameter)
        self.stored.finish()
        register(self, self.stored.parameters())


class ExpertLayer(nn.Module):
    stored: StoredExperts

    def hold(self, stored: StoredExperts) -> None:
        self.stored = stored
        register(self, stored.parameters())

    def finish(self) -> None:
        self.stored.finish()
        register(self, self.stored.parameters())


def register(module: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """These and no others are the module's own parameters."""
    expected, present = dict(parameters), dict(module.named_parameters(recurse=False))
    for name in present.keys() - expected.keys():
        delattr(module, name)
    for name, parameter in expected.items():
        if present.get(name) is not parameter:
            module.register_parameter(name, parameter)


def finish_matrices(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, MatrixLayer | ExpertLayer):
            module.finish()


def fill_dummy_experts(model: object, normal: Tensor) -> None:
    """Codes of experts from a sequence of normal numbers."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, ExpertLayer):
            module.stored.fill_dummy(normal)


def matrices_of(model: object) -> Iterator[tuple[str, StoredMatrix]]:
    """Every stored matrix once, under the name of its module."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, MatrixLayer):
            yield name, module.stored
        elif isinstance(module, ExpertLayer):
            yield from ((f"{name}.{inner}", matrix) for inner, matrix in module.stored.matrices())


def packed_matrices(model: object) -> dict[str, PackedMatrix]:
    return {name: matrix for name, matrix in matrices_of(model) if isinstance(matrix, PackedMatrix)}


@runtime_checkable
class HoldsAddresses(Protocol):
    """A module that keeps where weights lie."""

    def forget_addresses(self) -> None: ...


def reopen_matrices(model: object) -> bool:
    """All matrices lie as a checkpoint stores them, until weights are finished; whether any did not."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, HoldsAddresses):
            module.forget_addresses()
    return sum([matrix.reopen() for _, matrix in matrices_of(model)]) > 0


def num_numbers(model: object, parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers a model's parameters stand for: a packed matrix counts those it holds; tied ones count once."""
    parts = [part for matrix in packed_matrices(model).values() for part in matrix.parts.values()]
    packed = {part.data.data_ptr(): part.rows * part.width for part in parts if isinstance(part, Packed)}
    for part in (part for _, matrix in matrices_of(model) for part in matrix.coded()):
        packed |= {tensor.data_ptr(): 0 for tensor in part.tensors().values()}
        packed[part.codes.data_ptr()] = part.rows * part.width
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, ExpertLayer):
            counts, weights = module.stored.num_numbers(), dict(module.stored.parameters())
            packed |= {weights[name].data_ptr(): count for name, count in counts.items()}
    own = {id(parameter): parameter for parameter in parameters}.values()
    return sum(packed.get(p.data_ptr(), p.numel()) for p in own)
