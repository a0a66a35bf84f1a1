"""Linear: one matmul whose rows are named parts; the names are how a checkpoint fills it.

A fused matmul (q, k and v; gate and up) is one Linear with several parts, and also answers to a fused spelling. How its
numbers are stored is its scheme's business. Where it is cut among ranks, its sizes are Spans: of rows, each rank has
some of the results; of the width, each has a part of every result, and they are added up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from quire.layers.stored import MatrixLayer
from quire.ops.coded import CodedWeight
from quire.ops.few import sum_parts
from quire.ops.lora import AddedLowRank, LowRank
from quire.ops.parts import PartialSums
from quire.quant.scheme import MatrixShape, Slot, Storage
from quire.quant.shard import Span

if TYPE_CHECKING:
    from quire.layers.adapters import LinearAdapters


class Linear(MatrixLayer):
    def __init__(
        self,
        prefix: str,  # canonical name of the module around it, with its final dot
        in_size: int | Span,
        parts: Mapping[str, int | Span],  # name -> rows
        storage: Storage,
        *,
        bias: bool = False,
        fused: str = "",  # name of a checkpoint tensor that holds all parts
        runs: Mapping[str, tuple[str, ...]]
        | None = None,  # names of tensors that hold some parts, which follow each other
        wide: bool = False,  # compute in float32, and give that
        absorbed: bool = False,  # what adapters add is for others to merge (layers/mla.py), not for `forward` to add
    ) -> None:
        super().__init__()
        self.prefix, self.fused, self._runs = prefix, fused, dict(runs or {})
        spans = {name: rows if isinstance(rows, Span) else Span.all(rows) for name, rows in parts.items()}
        width = in_size if isinstance(in_size, Span) else Span.all(in_size)
        scheme = storage.schemes.of_matrix(prefix + (fused or next(iter(parts))))
        self.hold(scheme.create(MatrixShape(spans, width, bias)))
        self.parts = {name: span.count for name, span in spans.items()}  # rows on this rank
        self.in_size, self.out_size = width.count, self.stored.shape.rows
        self._multiply = self.stored.multiply_wide if wide else self.stored.multiply
        self._reduce = storage.group.sum_over(in_size) if isinstance(in_size, Span) else None
        self._sum_parts = storage.of(sum_parts)
        self._adds_stream = width.start == 0  # of ranks whose results are added up, one adds what comes to them
        self.absorbed = absorbed
        self.adapters: LinearAdapters | None = None  # unless the engine serves adapters

    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        if self.adapters is not None and not self.absorbed:
            y = self.adapters.add(x, y)
        return y if self._reduce is None else self._reduce(y)

    @property
    def is_plain(self) -> bool:
        """Whether ops may read `weight` and `bias` as they are, and what they compute is the whole result."""
        return self.stored.is_plain and self._reduce is None

    @property
    def may_be_few(self) -> bool:
        """Whether `read_few` may give something, as far as is known before weights are loaded."""
        return self.stored.is_plain or self.stored.may_be_few

    def read_few(self) -> tuple[Tensor | CodedWeight, Tensor | None] | None:
        """As `read_plain`, for ops of ops/few.py, some of which take some codes; None: it is not one matrix. What they
        compute is this rank's part: `summed`, `sum_parts` and `own_stream` are for who reads a matrix whose results are
        added up."""
        matrix = self.stored.few_form()
        return None if matrix is None else (matrix, self.stored.bias)

    def read_few_parts(self) -> tuple[Sequence[Tensor | CodedWeight], Tensor | None] | None:
        """As `read_few` of matrices one below another, which are coded differently; None: there are none."""
        parts = self.stored.few_parts()
        return (parts, self.stored.bias) if parts else None

    def summed(self, own: Tensor) -> Tensor:
        """What ops have computed of this rank's part, added up over ranks if this matmul is cut so."""
        return own if self._reduce is None else self._reduce(own)

    def sum_parts(self, own: Tensor | PartialSums) -> Tensor | PartialSums:
        """As `summed`; where nothing is added up over ranks, parts are left to their consumer."""
        if self._reduce is None:
            return own
        return self._reduce(self._sum_parts(own) if isinstance(own, PartialSums) else own)

    def own_stream(self, stream: Tensor) -> Tensor | None:
        """What this rank adds to its part before parts are added up, so that the sum is the stream plus the result."""
        return stream if self._adds_stream else None

    def added(self, num_rows: int) -> AddedLowRank | None:
        """What adapters add to these rows, for ops that add it themselves; None: nothing."""
        return None if self.adapters is None else self.adapters.added(num_rows)

    @property
    def low(self) -> LowRank | None:
        """The adapters' part of this matrix, for ops that add it themselves; None: there are no adapters, they are for
        others to merge, or ranks have to talk between A and B."""
        return None if self.adapters is None or self.adds_alone else self.adapters.low

    @property
    def adds_alone(self) -> bool:
        """Whether nothing but this layer, or the one that it is a part of, can add its adapters."""
        return self.absorbed or (self.adapters is not None and self.adapters.shards is not None)

    def read_plain(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for an op that computes more than the matmul: only where it `is_plain`, and only in steps
        without a veto (layers/veto.py)."""
        numbers = self.stored.numbers
        assert numbers is not None
        return numbers, self.stored.bias

    @property
    def is_summed(self) -> bool:
        """Whether a result is added up over ranks."""
        return self._reduce is not None

    @property
    def reduce(self) -> Callable[[Tensor], Tensor] | None:
        """What adds results up over ranks; None: they are whole."""
        return self._reduce

    def slots(self) -> Iterator[Slot]:
        for name, run in self.named_runs():
            yield from self._slots(name, run)

    def named_runs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every name that a checkpoint may use, and the parts that it stands for, which follow each other."""
        for part in self.parts:
            yield part, (part,)
        if self.fused and len(self.parts) > 1:
            yield self.fused, tuple(self.parts)
        yield from self._runs.items()

    def _slots(self, name: str, run: tuple[str, ...]) -> Iterator[Slot]:
        for slot in self.stored.slots(run):
            fills = tuple(f"{self.prefix}{part}.{slot.leaf}" for part in run) if len(run) > 1 else ()
            yield Slot(f"{self.prefix}{name}.{slot.leaf}", slot.target, fills, slot.cut)

    def extra_repr(self) -> str:
        parts = ", ".join(f"{name} {rows}" for name, rows in self.parts.items())
        return f"{self.in_size} -> {parts}, {self.stored.name}"
