"""Embeddings: token ids (and learned positions) to vectors, and the head that goes back to logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.quant.scheme import Slot, Storage


class Embedding(nn.Module):
    """A table of vectors. `offset` is added to the index: some tables keep their first rows for other uses."""

    weight: nn.Parameter  # plain schemes and panels only

    def __init__(
        self, name: str, rows: int, width: int, storage: Storage, *, scale: float = 1.0, offset: int = 0
    ) -> None:
        super().__init__()
        self.name, self.offset, self.num_rows = name, offset, rows
        self.scheme = storage.scheme_of(name)
        self.scheme.create(self, width, rows, bias=False)
        self.scale = float(torch.tensor(scale, dtype=storage.dtype))  # rounded first, as transformers does

    def forward(self, index: Tensor) -> Tensor:
        x = self.scheme.rows(self, index + self.offset if self.offset else index)
        return x if self.scale == 1.0 else x * self.scale

    def slots(self) -> Iterator[Slot]:
        for _, leaf, target in self.scheme.slots(self, {"": self.num_rows}):
            yield Slot(f"{self.name}.{leaf}", target)

    def finish(self) -> None:
        self.scheme.finish(self)


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


class Head(nn.Module):
    """Hidden states to logits; shares the embedding's table when `tied` is given."""

    weight: nn.Parameter  # plain schemes and panels only
    bias: nn.Parameter | None

    def __init__(
        self, name: str, vocab: int, width: int, storage: Storage, *, bias: bool = False, tied: Embedding | None = None
    ) -> None:
        super().__init__()
        self.name, self.num_rows = name, vocab
        self.scheme = storage.scheme_of(name) if tied is None else tied.scheme
        self._owner = () if tied is None else (tied,)  # in a tuple: it is no part of this module
        if tied is None:
            self.scheme.create(self, width, vocab, bias=bias)
            return
        self.bias = storage.parameter(vocab) if bias else None
        if self.scheme.name == "plain":
            self.weight = tied.weight

    @property
    def tied(self) -> bool:
        return bool(self._owner)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self._owner or self.scheme.name == "plain":
            return self.scheme.apply(self, hidden)
        logits = self.scheme.apply(self._owner[0], hidden)
        return logits if self.bias is None else logits + self.bias

    def slots(self) -> Iterator[Slot]:
        if not self._owner:
            for _, leaf, target in self.scheme.slots(self, {"": self.num_rows}):
                yield Slot(f"{self.name}.{leaf}", target)
        elif self.bias is not None:
            yield Slot(f"{self.name}.bias", self.bias.data)

    def finish(self) -> None:
        if not self._owner:
            self.scheme.finish(self)
