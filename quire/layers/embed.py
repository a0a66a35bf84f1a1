"""Embeddings: token ids (and learned positions) to vectors, and the head that goes back to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.ops.linear import linear
from quire.quant.scheme import Slot, Storage


class Embedding(nn.Module):
    """A table of vectors. `offset` is added to the index: some tables keep their first rows for other uses."""

    def __init__(
        self, name: str, rows: int, width: int, storage: Storage, *, scale: float = 1.0, offset: int = 0
    ) -> None:
        super().__init__()
        self.name, self.offset = name, offset
        self.weight = storage.parameter(rows, width)
        self.scale = float(torch.tensor(scale, dtype=storage.dtype))  # rounded first, as transformers does

    def forward(self, index: Tensor) -> Tensor:
        x = F.embedding(index + self.offset if self.offset else index, self.weight)
        return x if self.scale == 1.0 else x * self.scale

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight.data)


class Head(nn.Module):
    """Hidden states to logits; shares the embedding's table when `tied` is given."""

    def __init__(
        self, name: str, vocab: int, width: int, storage: Storage, *, bias: bool = False, tied: Embedding | None = None
    ) -> None:
        super().__init__()
        self.name, self.tied = name, tied is not None
        self.weight = storage.parameter(vocab, width) if tied is None else tied.weight
        self.bias = storage.parameter(vocab) if bias else None
        self._linear = linear.on(storage.device)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden, self.weight, self.bias)

    def slots(self) -> Iterator[Slot]:
        if not self.tied:
            yield Slot(f"{self.name}.weight", self.weight.data)
        if self.bias is not None:
            yield Slot(f"{self.name}.bias", self.bias.data)
