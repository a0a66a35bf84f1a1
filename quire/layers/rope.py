"""Rope: one kind of rotary position of a model. Tables are made once per step and shared by its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.ops.rope import frequencies, rope_tables, rotate
from quire.quant.scheme import Storage
from quire.schema.errors import ConfigError


@dataclass(frozen=True)
class RopeKind:
    """What a rotary position computes; see ops/rope.py."""

    theta: float = 10000.0
    dim: int = 0  # entries of a head that are rotated
    pairs: bool = False  # rotate neighbours instead of halves
    wide: bool = False  # rotate in float32 whatever the model's dtype
    back: bool = False  # turns the other way round
    scaling: Mapping[str, Any] | None = None  # rope_type and its numbers, as configs write them
    sections: tuple[int, ...] = ()  # M-RoPE: how many frequencies, in order, turn by each channel of positions
    interleaved: bool = False  # M-RoPE: frequencies take turns among the channels, as far as each has some left


class RotaryTables(NamedTuple):
    """A step's rotation: what layers hand to `turn`."""

    cos: Tensor  # [T, 1, dim]
    sin: Tensor


class Rope(nn.Module):
    def __init__(self, kind: RopeKind, length: int, storage: Storage) -> None:
        super().__init__()
        self.kind = kind
        self.dtype = torch.float32 if kind.wide else storage.dtype
        inv_freq, self.gain = frequencies(kind.theta, kind.dim, kind.scaling, length)
        inv_freq = -inv_freq if kind.back else inv_freq
        self.inv_freq = inv_freq.to(storage.device)  # not a buffer: checkpoints do not have it
        self.tables = partial(  # positions [T] -> cos, sin
            storage.of(rope_tables), inv_freq=self.inv_freq, gain=self.gain, pairs=kind.pairs, dtype=self.dtype
        )
        self._rotate = storage.of(rotate)
        self._channel_of = _channel_of(kind).to(storage.device) if kind.sections else None

    def forward(self, positions: Tensor, channels: Tensor | None = None) -> RotaryTables:
        """Positions [T]; channels [C, T] where they are not all the same."""
        if channels is not None:
            return self._by_channel(channels)
        return RotaryTables(*self.tables(positions))

    def _by_channel(self, channels: Tensor) -> RotaryTables:
        if self._channel_of is None or len(channels) != len(self.kind.sections):
            raise ConfigError(
                f"positions have {len(channels)} channels, this rotary embedding {len(self.kind.sections) or 'one'}"
            )
        cos, sin = self(channels[0])
        for at in range(1, len(channels)):
            turn, is_own = self(channels[at]), self._channel_of == at
            cos, sin = torch.where(is_own, turn.cos, cos), torch.where(is_own, turn.sin, sin)
        return RotaryTables(cos, sin)

    def turn(self, x: Tensor, turn: RotaryTables) -> Tensor:
        """x [T, H, D] rotated."""
        return self._rotate(x, turn.cos, turn.sin, self.kind.pairs)


def _channel_of(kind: RopeKind) -> Tensor:
    """[dim]: the channel of each entry that is rotated, laid out as `rope_tables` lays out cosines."""
    if 2 * sum(kind.sections) != kind.dim:
        raise ConfigError(
            f"sections {list(kind.sections)} name {sum(kind.sections)} frequencies, the rotary embedding has "
            f"{kind.dim // 2}",
            param="mrope_section",
        )
    number = len(kind.sections)
    if kind.interleaved:
        own = torch.zeros(kind.dim // 2, dtype=torch.long)
        for channel in range(1, number):
            own[channel : number * kind.sections[channel] : number] = channel
    else:
        own = torch.repeat_interleave(torch.arange(number), torch.tensor(kind.sections))
    return own.repeat_interleave(2) if kind.pairs else torch.cat((own, own))
