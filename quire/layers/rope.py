"""Rope: one kind of rotary position of a model. Tables are made once per step and shared by its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.ops.rope import frequencies, rope_tables, rotate
from quire.quant.scheme import Storage


@dataclass(frozen=True)
class RopeKind:
    """What a rotary position computes; see ops/rope.py."""

    theta: float = 10000.0
    dim: int = 0  # entries of a head that are rotated
    pairs: bool = False  # rotate neighbours instead of halves
    wide: bool = False  # rotate in float32 whatever the model's dtype
    back: bool = False  # turns the other way round
    scaling: Mapping[str, Any] | None = None  # rope_type and its numbers, as configs write them


class Turn(NamedTuple):
    """A step's rotation: what layers hand to `turn`."""

    cos: Tensor  # [T, 1, dim]
    sin: Tensor


class Rope(nn.Module):
    def __init__(self, kind: RopeKind, length: int, storage: Storage) -> None:
        super().__init__()
        self.kind = kind
        self.dtype = torch.float32 if kind.wide else storage.dtype
        inv_freq, self.gain = frequencies(kind.theta, kind.dim, kind.scaling, length)
        self.inv_freq = (-inv_freq if kind.back else inv_freq).to(
            storage.device
        )  # no buffer: it is no part of a checkpoint
        self._tables, self._rotate = storage.of(rope_tables), storage.of(rotate)

    def forward(self, positions: Tensor) -> Turn:
        return Turn(*self._tables(positions, self.inv_freq, self.gain, self.kind.pairs, self.dtype))

    def turn(self, x: Tensor, turn: Turn) -> Tensor:
        """x [T, H, D] rotated."""
        return self._rotate(x, turn.cos, turn.sin, self.kind.pairs)
