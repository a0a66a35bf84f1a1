"""Mlp: up, activation, down; with or without a gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.norm import NormKind, norm_of
from quire.ops.act import gated_on, plain_on, xielu
from quire.ops.coded import CodedWeight
from quire.ops.few import NormRule, linear_act, linear_add, linear_parts, norm_linear
from quire.ops.parts import PartialSums
from quire.ops.rounded import RoundedRows, RowCode, rounded_act, rounded_parts
from quire.quant.scheme import Slot, Storage


class Mlp(nn.Module):
    def __init__(
        self, prefix: str, width: int, ffn: int, storage: Storage, *, act: str, gated: bool = True, bias: bool = False,
        down_bias: bool | None = None,  # None: as bias
    ) -> None:  # fmt: skip
        super().__init__()
        self.own = own = storage.group.span("entries of an mlp", ffn)  # those between up and down on this rank
        parts = {"gate_proj": own, "up_proj": own} if gated else {"up_proj": own}
        self.up = Linear(prefix, width, parts, storage, bias=bias, fused="gate_up_proj" if gated else "")
        self.down = Linear(prefix, own, {"down_proj": width}, storage, bias=bias if down_bias is None else down_bias)
        self._act = (gated_on if gated else plain_on)(act, storage.kernels)
        self._norm_linear, self._linear_add = storage.of(norm_linear), storage.of(linear_add)
        self._linear_act, self._linear_parts = storage.of(linear_act), storage.of(linear_parts)
        self._rounded_act, self._rounded_parts = storage.of(rounded_act), storage.of(rounded_parts)
        self.is_gated = gated
        self.joins = self.up.may_be_few and self.down.may_be_few  # whether `join` and `in_parts` may be called

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._act(self.up(x)))

    def join(self, x: Tensor, norm: NormRule) -> Tensor:
        """x + mlp(norm(x)), for a few rows: see ops/few.py."""
        up, down = self.up.read_few(), self.down.read_few()
        assert up is not None and down is not None
        between = self._norm_linear(x, norm, *up, self._act)
        return self.down.summed(self._linear_add(between, *down, self.down.own_stream(x)))

    def few_matrices(self) -> list[Tensor | CodedWeight] | None:
        """What `join` and `in_parts` read, as loaded; None: there is something that they cannot."""
        up, down = self.up.read_few(), self.down.read_few()
        return None if up is None or down is None else [up[0], down[0]]

    def few_linears(self) -> list[Linear]:
        """Whose matrices those are."""
        return [self.up, self.down]

    def in_parts(self, x: Tensor) -> Tensor | PartialSums:
        """mlp(x), to be added up by the next norm, unless it is over ranks: see ops/few.py."""
        up, down, rows = self.up.read_few(), self.down.read_few(), len(x)
        assert up is not None and down is not None
        between = self._linear_act(x, *up, self._act, self.up.added(rows))
        return self.down.sum_parts(self._linear_parts(between, *down, self.down.added(rows)))

    def of_rounded(self, x: RoundedRows) -> Tensor | PartialSums:
        """mlp(x) of inputs that are codes, and codes between its matmuls: see ops/rounded.py. As `in_parts`."""
        up, down = self.up.read_few(), self.down.read_few()
        assert (
            up is not None and down is not None and isinstance(up[0], CodedWeight) and isinstance(down[0], CodedWeight)
        )
        between = self._rounded_act(x, up[0], up[1], self._act, RowCode.of(down[0]))
        return self.down.sum_parts(self._rounded_parts(between, down[0], down[1]))


class NormedMlp(Mlp):
    """A norm of all entries between the activation and the matmul down."""

    def __init__(self, prefix: str, width: int, ffn: int, storage: Storage, *, act: str, norm: str, kind: NormKind,
                 gated: bool = True, bias: bool = False) -> None:  # fmt: skip
        super().__init__(prefix, width, ffn, storage, act=act, gated=gated, bias=bias)
        self.norm = norm_of(prefix + norm, self.own, kind, storage)
        self.joins = False

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self._act(self.up(x))))


class SparseMlp(Mlp):
    """Gates below a quantile, as that of a normal distribution with their mean and deviation, are cut to zero."""

    def __init__(self, prefix: str, width: int, ffn: int, storage: Storage, *, act: str, sparsity: float,
                 bias: bool = False) -> None:  # fmt: skip
        from quire.ops.streams import root, row_mean  # lazy

        super().__init__(prefix, width, ffn, storage, act=act, bias=bias)
        self.joins = False
        self._deviations = float(torch.special.ndtri(torch.tensor(sparsity, dtype=torch.float64, device="cpu")))
        self._row_mean, self._root = storage.of(row_mean), storage.of(root)
        self._reduce = storage.group.sum_over(self.own)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        wide = gate.float()
        apart = wide - self._mean(wide)
        cut = (apart - self._root(self._mean(apart.square())) * self._deviations).clamp(min=0.0)
        return self.down(self._act(torch.cat((cut.to(x.dtype), up), -1)))

    def _mean(self, x: Tensor) -> Tensor:
        """Over the entries of all ranks: [T, 1]."""
        mean = self._row_mean(x)
        return mean if self._reduce is None else self._reduce(mean * (self.own.count / self.own.whole))


class XieluMlp(Mlp):
    """No gate; an activation whose two slopes are learned, layer by layer: see ops/act.py."""

    def __init__(self, prefix: str, width: int, ffn: int, storage: Storage, *, bias: bool = False) -> None:
        super().__init__(prefix, width, ffn, storage, act="relu2", gated=False, bias=bias)
        self.prefix = prefix
        self.alphas = storage.parameter(2, dtype=torch.float32)
        self._xielu = storage.of(xielu)
        self.joins = False

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._xielu(self.up(x), self.alphas))

    def slots(self) -> Iterator[Slot]:
        for row, name in enumerate(("alpha_p", "alpha_n")):
            yield Slot(f"{self.prefix}act_fn.{name}", self.alphas.data[row : row + 1])
