"""Norm: one normalisation, alone or joined with the addition to the residual stream that precedes it.

`joined` is the kernel itself where the device has one for both, with the norm's weight bound to it. Where ranks share
the entries of a vector, RankNorm normalises it by a sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quire.ops.few import NormRule
from quire.ops.norm import add_layer_norm, add_rms_norm, add_rms_norm_wide, layer_norm, rms_norm, rms_norm_wide
from quire.ops.parts import PartialSums, whole
from quire.quant.scheme import Slot, Storage
from quire.quant.shard import Span, cut_to
from quire.schema.errors import ConfigError

# (x, delta) -> (norm(x + delta), x + delta)
Joined = Callable[[Tensor, Tensor | PartialSums], tuple[Tensor, Tensor]]


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
    """`name` is the canonical name without leaf; `shape` the weight's on this rank, its last entry the normalised
    width. `own`: which entries of its first axis these are; None: all of them."""

    def __init__(
        self, name: str, shape: tuple[int, ...], kind: NormKind, storage: Storage, own: Span | None = None
    ) -> None:
        super().__init__()
        self.name, self.kind, self._own = name, kind, own or Span.all(shape[0])
        self.weight: Tensor | None = storage.parameter(*shape) if kind.weight else None
        if not kind.weight and kind.kind == "rms":  # no parameter: ops want a weight, checkpoints have none
            self.weight = torch.ones(shape, dtype=storage.dtype, device=storage.device)
        self.bias = storage.parameter(*shape) if kind.bias else None
        self._function = self._choose(storage)
        self.is_fused = kind.kind == "rms" and len(shape) == 1
        is_joined = self.is_fused or (kind.kind == "layer" and len(shape) == 1)
        self.joined = self._choose_joined(storage) if is_joined else partial(_add_first, self._function)

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

    def _choose_joined(self, storage: Storage) -> Joined:
        kind, weight, eps, offset = self.kind, self.weight, self.kind.eps, 1.0 if self.kind.plus_one else 0.0
        if kind.kind == "layer":
            return partial(storage.of(add_layer_norm), weight=weight, bias=self.bias, eps=eps, offset=offset)
        assert weight is not None
        if kind.plus_one or kind.wide:
            return partial(storage.of(add_rms_norm_wide), weight=weight, eps=eps, offset=offset)
        return partial(storage.of(add_rms_norm), weight=weight, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)

    def add(self, x: Tensor, delta: Tensor | PartialSums | None) -> tuple[Tensor, Tensor]:
        """(norm(x + delta), x + delta); delta None is nothing to add."""
        return (self._function(x), x) if delta is None else self.joined(x, delta)

    def rule(self) -> NormRule | None:
        """This norm as data, for ops that take it in; None where it is not an RMS norm of whole rows."""
        if not self.is_fused:
            return None
        kind = self.kind
        return NormRule(self.weight, kind.eps, 1.0 if kind.plus_one else 0.0, kind.wide)

    def slots(self) -> Iterator[Slot]:
        own = self._own
        for leaf, parameter in self.named_parameters(recurse=False):
            rows = []
            for head in range(own.whole if parameter.ndim > 1 else 0):  # a checkpoint may part the heads
                rows.append(f"{self.name}.{head}.{leaf}")
                is_here = own.start <= head < own.start + own.count
                yield Slot(rows[-1], parameter.data[head - own.start] if is_here else None)
            yield Slot(f"{self.name}.{leaf}", parameter.data, tuple(rows), cut_to(0, [own]))

    def extra_repr(self) -> str:
        return f"{self.name}, {self.kind}"


class RankNorm(Norm):
    """A norm over entries of which each rank has some. `copies`: how many ranks have the same ones. `groups`: how many
    parts of the vector are normalised each by itself; a rank's entries are of one of them."""

    def __init__(
        self, name: str, own: Span, kind: NormKind, storage: Storage, *, copies: int = 1, groups: int = 1
    ) -> None:
        super().__init__(name, (own.count,), kind, storage, own)
        self._groups, self._size = groups, own.whole // groups
        self._group = own.start // self._size
        if own.whole % groups or own.start + own.count > (self._group + 1) * self._size:
            raise ConfigError(
                f"{groups} norms of {name} cannot be shared out among {storage.group.size} ranks",
                param="tensor_parallel_size",
                value=storage.group.size,
            )
        self.is_fused = False
        self._reduce, self._copies = storage.group.reduce, copies
        self._function = self._normalise
        self.joined = partial(_add_first, self._function)

    def _normalise(self, x: Tensor) -> Tensor:
        kind, wide = self.kind, x.float()
        if kind.kind == "layer":
            wide = wide - self._mean(wide)
        normed = wide * torch.rsqrt(self._mean(wide * wide) + kind.eps)
        if self.weight is None:
            return normed.to(x.dtype)
        weight = self.weight.float() + 1.0 if kind.plus_one else self.weight
        if kind.kind == "layer" or kind.wide or kind.plus_one:
            normed = normed * weight.float()
            return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)
        return normed.to(x.dtype) * weight

    def _mean(self, x: Tensor) -> Tensor:
        """Over all ranks of the group: [..., 1]."""
        totals = x.new_zeros((*x.shape[:-1], self._groups))
        totals[..., self._group] = x.sum(-1) / self._copies
        return self._reduce(totals)[..., self._group : self._group + 1] / self._size


def norm_of(name: str, own: Span, kind: NormKind, storage: Storage, *, copies: int = 1) -> Norm:
    """Over the entries `own` of this rank, and those of the others where there are some."""
    if own.is_whole:
        return Norm(name, (own.whole,), kind, storage)
    return RankNorm(name, own, kind, storage, copies=copies)


def _add_first(norm: Callable[[Tensor], Tensor], x: Tensor, delta: Tensor | PartialSums) -> tuple[Tensor, Tensor]:
    total = x + whole(delta)
    return norm(total), total


class NoNorm(nn.Module):
    """In the place of a norm an architecture does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def joined(self, x: Tensor, delta: Tensor | PartialSums) -> tuple[Tensor, Tensor]:
        total = x + whole(delta)
        return total, total

    def add(self, x: Tensor, delta: Tensor | PartialSums | None) -> tuple[Tensor, Tensor]:
        return (x, x) if delta is None else self.joined(x, delta)
