"""Linear: one matrix product whose rows are named parts; the names are how a checkpoint fills it.

A fused product (q, k and v; gate and up) is one Linear with several parts, and also answers to a fused spelling.
How its numbers are stored is its scheme's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from quire.ops.packed import Matrix
from quire.quant.scheme import Plain, Slot, Storage


class Linear(nn.Module):
    weight: nn.Parameter  # plain schemes and panels only
    bias: nn.Parameter | None
    matrix: Matrix | None  # packed schemes and panels only; None while some part is plain

    def __init__(
        self,
        prefix: str,  # canonical name of the module around it, with its final dot
        in_size: int,
        parts: Mapping[str, int],  # name -> rows
        storage: Storage,
        *,
        bias: bool = False,
        fused: str = "",  # name of a checkpoint tensor that holds all parts
    ) -> None:
        super().__init__()
        self.prefix, self.parts, self.fused = prefix, dict(parts), fused
        self.in_size, self.out_size = in_size, sum(parts.values())
        self.scheme = storage.scheme_of(prefix + (fused or next(iter(parts))))
        self.scheme.create(self, in_size, self.out_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.scheme.apply(self, x)

    @property
    def is_plain(self) -> bool:
        """Whether ops may read `weight` and `bias` as they are."""
        return self.scheme.name == "plain"

    @property
    def has_rows(self) -> bool:
        """Whether a checkpoint fills rows of `weight`, however they lie later."""
        return isinstance(self.scheme, Plain)

    def slots(self) -> Iterator[Slot]:
        for part, leaf, target in self.scheme.slots(self, self.parts):
            if part:
                yield Slot(f"{self.prefix}{part}.{leaf}", target)
            elif self.fused:
                yield Slot(
                    f"{self.prefix}{self.fused}.{leaf}", target, tuple(f"{self.prefix}{p}.{leaf}" for p in self.parts)
                )

    def finish(self) -> None:
        self.scheme.finish(self)

    def extra_repr(self) -> str:
        parts = ", ".join(f"{name} {rows}" for name, rows in self.parts.items())
        return f"{self.in_size} -> {parts}, {self.scheme.name}"
