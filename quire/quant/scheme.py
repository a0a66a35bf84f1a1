"""WeightScheme: how the numbers of a matrix are stored, filled from a checkpoint, and multiplied.

A Linear asks its scheme to create parameters, names the places a checkpoint fills (`slots`), lets the scheme finish
them once all are there, and multiplies through `apply`. `Storage` is what every module needs to make parameters.
Must not know: which model a matrix belongs to, or where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.ops.linear import linear
from quire.quant.arena import Arena


class StoredRows(NamedTuple):
    """A checkpoint matrix [rows, width] as the bytes of its blocks, not decoded yet."""

    raw: Tensor  # uint8 [rows, bytes of a row]
    type_id: int  # of GGUF files
    width: int
    decode: Callable[[Tensor], Tensor]  # raw -> numbers

    @property
    def shape(self) -> tuple[int, int]:
        return self.raw.shape[0], self.width

    def numbers(self) -> Tensor:
        return self.decode(self.raw)


class TakesBlocks:
    """A place that is no tensor: it has a shape and `copy_`, which takes numbers or StoredRows."""

    shape: tuple[int, ...]

    def copy_(self, given: Tensor | StoredRows) -> None:
        raise NotImplementedError


class Slot(NamedTuple):
    """One place a checkpoint tensor goes. With `fills`, a place that holds all of those slots at once."""

    name: str
    target: Tensor
    fills: tuple[str, ...] = ()


class WeightScheme(Protocol):
    name: str

    def create(self, layer: nn.Module, in_size: int, out_size: int, *, bias: bool) -> None:
        """Give the layer its parameters."""
        ...

    def slots(self, layer: nn.Module, parts: Mapping[str, int]) -> Iterator[tuple[str, str, Tensor]]:
        """(part, leaf name, target) of everything a checkpoint stores; part '' is the whole of a fused matrix."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """All slots are filled: repack, transpose, fold, as the kernel wants it."""
        ...

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]; the layer is the one given to create."""
        ...

    def rows(self, layer: Any, index: Tensor) -> Tensor:
        """Rows of the matrix, as an embedding reads them: [*index, in]."""
        ...


class Plain:
    """Numbers as they are: weight [out, in] and bias [out] in the model's dtype."""

    name = "plain"

    def __init__(self, dtype: torch.dtype, arena: Arena) -> None:
        self.dtype, self.arena = dtype, arena
        self._linear = linear.on(arena.device)

    def create(self, layer: nn.Module, in_size: int, out_size: int, *, bias: bool) -> None:
        layer.register_parameter("weight", new_parameter((out_size, in_size), self.dtype, self.arena))
        layer.register_parameter("bias", new_parameter((out_size,), self.dtype, self.arena) if bias else None)

    def slots(self, layer: nn.Module, parts: Mapping[str, int]) -> Iterator[tuple[str, str, Tensor]]:
        for leaf, parameter in layer.named_parameters(recurse=False):
            for (part, rows), end in zip(parts.items(), accumulate(parts.values()), strict=True):
                yield part, leaf, parameter.data[end - rows : end]
            if len(parts) > 1:
                yield "", leaf, parameter.data

    def finish(self, layer: nn.Module) -> None:
        return None

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        return self._linear(x, layer.weight, layer.bias)

    def rows(self, layer: Any, index: Tensor) -> Tensor:
        return F.embedding(index, layer.weight)


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, arena: Arena) -> nn.Parameter:
    """Not filled, and never trained."""
    return nn.Parameter(arena.empty(shape, dtype), requires_grad=False)


@dataclass(frozen=True)
class Storage:
    """Where parameters live and in which form; passed to every module that makes some."""

    dtype: torch.dtype
    arena: Arena
    scheme_of: Callable[[str], WeightScheme]  # a matrix's canonical name -> its scheme

    @classmethod
    def plain(cls, dtype: torch.dtype, device: torch.device | str) -> Storage:
        arena = Arena(torch.device(device))
        scheme = Plain(dtype, arena)
        return cls(dtype, arena, lambda name: scheme)

    @property
    def device(self) -> torch.device:
        return self.arena.device

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return new_parameter(shape, dtype or self.dtype, self.arena)
