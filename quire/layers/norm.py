"""Norm: one normalisation, alone or joined with the addition to the residual stream that precedes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.ops.few import NormRule
from quire.ops.norm import add_rms_norm, add_rms_norm_wide, layer_norm, rms_norm, rms_norm_wide
from quire.ops.parts import PartialSums, whole
from quire.quant.scheme import Slot, Storage
from quire.schema.errors import ConfigError


@dataclass(frozen=True)
class NormKind:
    """What a normalisation computes; see ops/norm.py."""

    kind: str = "rms"  # rms | layer
    eps: float = 1e-6
    weight: bool = True
    bias: bool = False
    plus_one: bool = False  # the stored weight is the distance from one
    wide: bool = False  # rms only: multiply the weight before rounding


RMS = NormKind()


class Norm(nn.Module):
    """`name` is the canonical name without leaf; `shape` the weight's, its last entry the normalised width."""

    def __init__(self, name: str, shape: tuple[int, ...], kind: NormKind, storage: Storage) -> None:
        super().__init__()
        self.name, self.kind = name, kind
        self.weight: Tensor | None = storage.parameter(*shape) if kind.weight else None
        if not kind.weight and kind.kind == "rms":  # no parameter: ops want a weight, checkpoints have none
            self.weight = torch.ones(shape, dtype=storage.dtype, device=storage.device)
        self.bias = storage.parameter(*shape) if kind.bias else None
        self._function = self._choose(storage)
        fused = kind.kind == "rms" and len(shape) == 1
        self._add = self._choose_add(storage) if fused else None

    def _choose(self, storage: Storage) -> Callable[[Tensor], Tensor]:
        kind, eps, offset = self.kind, self.kind.eps, 1.0 if self.kind.plus_one else 0.0
        weight, bias = self.weight, self.bias
        if kind.kind == "layer":
            layer = storage.of(layer_norm)
            return lambda x: layer(x, weight, bias, eps, offset)
        if weight is None or bias is not None:
            raise ConfigError(f"an RMS norm has no bias, but {self.name} is asked for as {kind}")
        if kind.plus_one or kind.wide:
            wide = storage.of(rms_norm_wide)
            return lambda x: wide(x, weight, eps, offset)
        rms = storage.of(rms_norm)
        return lambda x: rms(x, weight, eps)

    def _choose_add(self, storage: Storage) -> Callable[[Tensor, Tensor | PartialSums], tuple[Tensor, Tensor]]:
        kind, weight, eps, offset = self.kind, self.weight, self.kind.eps, 1.0 if self.kind.plus_one else 0.0
        assert weight is not None
        if kind.plus_one or kind.wide:
            wide = storage.of(add_rms_norm_wide)
            return lambda x, delta: wide(x, delta, weight, eps, offset)
        add = storage.of(add_rms_norm)
        return lambda x, delta: add(x, delta, weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)

    def add(self, x: Tensor, delta: Tensor | PartialSums | None) -> tuple[Tensor, Tensor]:
        """(norm(x + delta), x + delta); delta None is nothing to add."""
        if delta is None:
            return self._function(x), x
        if self._add is not None:
            return self._add(x, delta)
        total = x + whole(delta)
        return self._function(total), total

    def rule(self) -> NormRule | None:
        """This norm as data, for ops that take it in; None where it is not an RMS norm of whole rows."""
        if self._add is None:
            return None
        kind = self.kind
        return NormRule(self.weight, kind.eps, 1.0 if kind.plus_one else 0.0, kind.wide)

    def slots(self) -> Iterator[Slot]:
        for leaf, parameter in self.named_parameters(recurse=False):
            rows = []
            for head, row in enumerate(parameter.data if parameter.ndim > 1 else ()):  # a checkpoint may part the heads
                rows.append(f"{self.name}.{head}.{leaf}")
                yield Slot(rows[-1], row)
            yield Slot(f"{self.name}.{leaf}", parameter.data, tuple(rows))

    def extra_repr(self) -> str:
        return f"{self.name}, {self.kind}"


class NoNorm(nn.Module):
    """In the place of a norm an architecture does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, delta: Tensor | PartialSums | None) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + whole(delta)
        return total, total
