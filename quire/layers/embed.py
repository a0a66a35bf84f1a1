"""Embeddings: token ids (and learned positions) to vectors, and the head that goes back to logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.layers.stored import MatrixLayer
from quire.quant.scheme import MatrixShape, PieceTarget, Slot, Storage, StoredMatrix, TwoPieces
from quire.quant.shard import Span, cut_to

if TYPE_CHECKING:
    from quire.layers.adapters import HeadAdapters, TableAdapters


class Embedding(MatrixLayer):
    """A table of vectors. `offset` is added to the index: some tables keep their first rows for other uses."""

    def __init__(
        self, name: str, rows: int, width: int, storage: Storage, *, scale: float = 1.0, offset: int = 0,
        is_cut: bool = False,  # whether ranks share the rows
        in_two: bool = False,  # whether a checkpoint may have the first rows and the others as two tensors
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.offset, self._in_two = name, offset, in_two
        self.rows = storage.group.uneven_span(rows) if is_cut else Span.all(rows)
        self.hold(storage.schemes.of_matrix(name).create(MatrixShape({"": self.rows}, Span.all(width))))
        self._factor = float(torch.tensor(scale, dtype=storage.dtype))  # rounded first, as transformers does
        self._reduce = storage.group.sum_over(self.rows) if is_cut else None
        self.width = width
        self.adapters: TableAdapters | None = None  # unless the engine serves adapters

    def forward(self, index: Tensor) -> Tensor:
        return self._vectors(index, self.adapters)

    def take(self, index: Tensor) -> Tensor:
        """As forward, without adapters."""
        return self._vectors(index, None)

    def _vectors(self, index: Tensor, adapters: TableAdapters | None) -> Tensor:
        index = index + self.offset if self.offset else index
        x = self.stored.take(index) if self._reduce is None else _own_rows(self.stored, self.rows, index)
        if adapters is not None and adapters.is_sharded:
            x = adapters.add(index, x)
        if self._reduce is not None:
            x = self._reduce(x)
        if adapters is not None and not adapters.is_sharded:
            x = adapters.add(index, x)
        return x if self._factor == 1.0 else x * self._factor

    def slots(self) -> Iterator[Slot]:
        for slot in self.stored.slots(("",)):
            name = f"{self.name}.{slot.leaf}"
            if not self._in_two or slot.target is None or slot.leaf != "weight":
                yield Slot(name, slot.target, cut=slot.cut)
                continue
            parts, pieces = (f"{self.name}.first", f"{self.name}.others"), TwoPieces(slot.target, slot.cut)
            yield from (Slot(part, PieceTarget(pieces, index)) for index, part in enumerate(parts))
            yield Slot(name, slot.target, parts, slot.cut)


def _own_rows(stored: StoredMatrix, rows: Span, index: Tensor) -> Tensor:
    """Zeros where the vector lies on another rank."""
    if rows.count == rows.whole:
        return stored.take(index)
    at = index - rows.start
    is_elsewhere = (at < 0) | (at >= rows.count)
    return stored.take(at.masked_fill(is_elsewhere, 0)).masked_fill(is_elsewhere[..., None], 0)


class SinePositions(nn.Module):
    """Positions as sines and cosines of falling frequencies; nothing of it lies in a checkpoint."""

    def __init__(self, rows: int, width: int, storage: Storage, *, offset: int = 0, apart: bool = True) -> None:
        super().__init__()
        self.offset = offset
        half = width // 2
        steps = torch.arange(half, dtype=torch.float32)
        rates = torch.exp(steps * -(math.log(10000) / (half - 1))) if apart else 10000 ** (-2 * steps / width)
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * rates
        self.table = torch.cat((angles.sin(), angles.cos()), 1).to(device=storage.device, dtype=storage.dtype)

    def forward(self, index: Tensor) -> Tensor:
        return self.table[index + self.offset]


class Head(MatrixLayer):
    """Hidden states to logits; shares the embedding's table when `tied` is given. Where ranks share the rows, each
    computes some of the logits and all get all of them."""

    def __init__(
        self, name: str, vocab: int, width: int, storage: Storage, *, bias: bool = False, tied: Embedding | None = None
    ) -> None:
        super().__init__()
        self.name, self.tied, self.width = name, tied is not None, width
        self.adapters: HeadAdapters | None = None  # unless the engine serves adapters
        self.rows = storage.group.uneven_span(vocab) if tied is None else tied.rows
        self._reduce = storage.group.sum_over(self.rows)
        if tied is None:
            shape = MatrixShape({"": self.rows}, Span.all(width), bias)
            self.hold(storage.schemes.of_matrix(name).create(shape))
            return
        self.stored = tied.stored
        self.bias = storage.parameter(self.rows.count) if bias else None
        if self.stored.is_plain:
            self.weight = tied.weight

    def forward(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """`slots` [S]: of the rows' adapters; None: no row has one."""
        if self.tied and self.bias is not None:  # the embedding's matrix has none
            logits = self.stored.multiply_with(hidden, self.bias)
        else:
            logits = self.stored.multiply(hidden)
        if slots is not None and self.adapters is not None:
            logits = self.adapters.add(hidden, logits, slots)
        return logits if self._reduce is None else self._reduce(self._placed(logits))

    def take(self, index: Tensor) -> Tensor:
        """Rows of the matrix [*index, width], whichever rank has them."""
        if self._reduce is None:
            return self.stored.take(index)
        return self._reduce(_own_rows(self.stored, self.rows, index))

    def _placed(self, logits: Tensor) -> Tensor:
        """Zeros where another rank computes."""
        rows = self.rows
        if rows.count == rows.whole:
            return logits
        return nn.functional.pad(logits, (rows.start, rows.whole - rows.start - rows.count))

    def slots(self) -> Iterator[Slot]:
        if not self.tied:
            for slot in self.stored.slots(("",)):
                yield Slot(f"{self.name}.{slot.leaf}", slot.target, cut=slot.cut)
        elif self.bias is not None:
            yield Slot(f"{self.name}.bias", self.bias.data, cut=cut_to(0, [self.rows]))

    def finish(self) -> None:
        if not self.tied:
            super().finish()
        elif self.stored.numbers is not None and self.stored.is_plain:
            self.weight = self.stored.numbers
