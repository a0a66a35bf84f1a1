"""PackedExperts: the experts of a mixture as matrices of their own, stored as their scheme stores them.

Fills from one tensor per expert (the slots of its Linears), or from tensors that hold all experts. `mixture` is what a
product takes; it is made anew once weights were replaced. Must not know: routers, activations' arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.ops.moe import Mixture
from quire.ops.packed import Matrix, Packed, unpack
from quire.quant.scheme import Slot, Storage

Rule = tuple[str, float, float]  # name of a gated activation, alpha, limit


class ExpertLinear(Linear):
    changed: Callable[[], None]

    def finish(self) -> None:
        super().finish()
        self.changed()

    def stored(self) -> Matrix | Tensor:
        """The whole matrix: packed, or plain where some part could not be packed."""
        if self.matrix is not None:
            return self.matrix
        parts: Any = self.parts_of
        return torch.cat([unpack(part, self.dtype) if isinstance(part, Packed) else part for part in parts.values()])

    @property
    def dtype(self) -> torch.dtype:
        return cast(Any, self.scheme).dtype


class Stacked:
    """A place that all experts share: [experts, rows, width], or [experts, rows] of biases."""

    def __init__(self, shape: tuple[int, ...], targets: list[list[Any]]) -> None:
        self.shape, self._targets = shape, targets  # of each expert: places one under another

    def copy_(self, given: Tensor) -> None:
        for own, places in zip(given, self._targets, strict=True):
            for part, place in zip(own.split([place.shape[0] for place in places]), places, strict=True):
                place.copy_(part)


class PackedExperts(nn.Module):
    def __init__(
        self, prefix: str, width: int, ffn: int, experts: int, storage: Storage, *, gated: bool, bias: bool
    ) -> None:
        super().__init__()
        self.prefix, self.fused = prefix, "gate_up_proj" if gated else "up_proj"
        ups = {"gate_proj": ffn, "up_proj": ffn} if gated else {"up_proj": ffn}
        names = [f"{prefix}{expert}." for expert in range(experts)]
        self.up = nn.ModuleList(ExpertLinear(name, width, ups, storage, bias=bias) for name in names)
        self.down = nn.ModuleList(ExpertLinear(name, ffn, {"down_proj": width}, storage, bias=bias) for name in names)
        self._mixture: Mixture | None = None
        for linear in (*self.up, *self.down):
            cast(ExpertLinear, linear).changed = self._forget

    def _forget(self) -> None:
        self._mixture = None

    def slots(self) -> Iterator[Slot]:
        """Of tensors that hold all experts."""
        for name, linears in ((self.fused, self.up), ("down_proj", self.down)):
            own = [list(cast(ExpertLinear, linear).slots()) for linear in linears]
            for leaf, tail in (("weight", ""), ("bias", "_bias")):
                slots = [[slot for slot in mine if slot.name.endswith(f".{leaf}")] for mine in own]
                if not slots[0]:
                    continue
                rows = sum(slot.target.shape[0] for slot in slots[0])
                shape = (len(own), rows, *slots[0][0].target.shape[1:])
                place = Stacked(shape, [[slot.target for slot in mine] for mine in slots])
                yield Slot(
                    f"{self.prefix}{name}{tail}", cast(Tensor, place), tuple(s.name for mine in slots for s in mine)
                )

    def mixture(self, act: Callable[[Tensor], Tensor], rule: Rule | None) -> Mixture:
        if self._mixture is None:
            up, down = (tuple(cast(ExpertLinear, linear).stored() for linear in own) for own in (self.up, self.down))
            up_bias, down_bias = (
                tuple(cast(ExpertLinear, linear).bias for linear in own) for own in (self.up, self.down)
            )
            self._mixture = Mixture(up, down, up_bias, down_bias, act, rule)
        return self._mixture
