"""WeightScheme: how the numbers of a matrix are stored, filled from a checkpoint, and multiplied.

A layer asks its scheme for a `StoredMatrix` of some shape, names the places that a checkpoint fills (`slots`), lets it
`finish` once all are there, and multiplies through it. Experts of a mixture have schemes of their own (experts.py).
`Storage` is what every module needs to make parameters. Must not know: which model a matrix belongs to, or where its
numbers come from.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.ops.coded import CodedWeight
from quire.ops.linear import linear
from quire.ops.op import Kernels, Op, P, R
from quire.ops.packed import Matrix
from quire.quant.arena import Arena
from quire.quant.coded import CodedMatrix
from quire.quant.shard import ALONE, Cut, ShardGroup, Span, cut_to
from quire.schema.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quire.quant.experts import ExpertScheme

PIECE = 8 << 20  # bytes of numbers that are on their way to a device at once, in each thread that loads
Send = Callable[[Tensor | CodedMatrix], Tensor | CodedMatrix]


def by_rows(numbers: Tensor, most: int = PIECE) -> Iterator[tuple[int, Tensor]]:
    """Some rows at a time, and where they begin: no more than `most` bytes of them, if one row is no more."""
    if numbers.nbytes <= most:
        yield 0, numbers
        return
    count = max(1, most // numbers[0].nbytes)
    for start in range(0, len(numbers), count):
        yield start, numbers[start : start + count]


class WeightTarget(ABC):
    """A destination for numbers that is not a tensor."""

    shape: tuple[int, ...]
    takes_codes = False  # whether `copy_` takes a CodedMatrix as well

    def expected(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What a tensor must have, if this is its shape."""
        return self.shape

    @abstractmethod
    def copy_(self, source: Tensor | CodedMatrix) -> None: ...

    def copy_sent(self, source: Tensor | CodedMatrix, send: Send) -> None:
        """As `copy_`, of what `send` has yet to bring to the device."""
        self.copy_(send(source))


class RunTarget(WeightTarget):
    """Some parts of a matrix that a checkpoint stores as one tensor: each gets its rows."""

    takes_codes = True

    def __init__(self, parts: Sequence[WeightTarget]) -> None:
        self._parts = parts
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])

    def copy_(self, source: Tensor | CodedMatrix) -> None:
        for part, own in self._shares(source):
            part.copy_(own)

    def copy_sent(self, source: Tensor | CodedMatrix, send: Send) -> None:
        for part, own in self._shares(source):
            part.copy_sent(own, send)

    def _shares(self, source: Tensor | CodedMatrix) -> Iterator[tuple[WeightTarget, Tensor | CodedMatrix]]:
        at = 0
        for part in self._parts:
            rows = Cut(0, self.shape[0], ((at, at + part.shape[0]),))
            codes = None if isinstance(source, Tensor) else source.cut(rows)
            yield part, codes or rows.of(source if isinstance(source, Tensor) else source.numbers())
            at += part.shape[0]


class TwoPieces:
    """A matrix that a checkpoint stores as two tensors, its first rows and the others; how many are in which is not
    known before. It is filled once both are there."""

    def __init__(self, target: Tensor | WeightTarget, cut: Cut | None) -> None:
        self._target, self._cut = target, cut
        self._pieces: list[Tensor | None] = [None, None]
        self._lock = threading.Lock()
        self.shape = tuple(target.shape) if cut is None else cut.uncut(target.shape)

    def put(self, index: int, piece: Tensor) -> None:
        with self._lock:  # the other may come from another thread
            self._pieces[index] = piece
            first, last = self._pieces
            if first is None or last is None:
                return
            if len(first) + len(last) != self.shape[0]:
                raise CheckpointError(
                    f"a table of {self.shape[0]} rows is stored as two of {len(first)} and {len(last)} rows"
                )
            whole = torch.cat((first, last))
            self._target.copy_(whole if self._cut is None else self._cut.of(whole))
            self._pieces = [None, None]


class PieceTarget(WeightTarget):
    """One of the TwoPieces."""

    def __init__(self, pieces: TwoPieces, index: int) -> None:
        self._pieces, self._index = pieces, index
        self.shape = pieces.shape

    def expected(self, shape: Sequence[int]) -> tuple[int, ...]:
        rows = shape[0] if len(shape) == 2 and shape[0] < self.shape[0] else self.shape[0]
        return rows, *self.shape[1:]

    def copy_(self, source: Tensor | CodedMatrix) -> None:
        self._pieces.put(self._index, source if isinstance(source, Tensor) else source.numbers())


class Slot(NamedTuple):
    """One place a checkpoint tensor goes. With `fills`, a place that holds all of those slots at once."""

    name: str
    target: Tensor | WeightTarget | None  # None: it lies on another rank
    fills: tuple[str, ...] = ()
    cut: Cut | None = None  # what is kept of the tensor, once it is arranged; None: all of it


class PartSlot(NamedTuple):
    """A Slot of a matrix, by the last part of its name."""

    leaf: str
    target: Tensor | WeightTarget | None
    cut: Cut | None


@dataclass(frozen=True)
class MatrixShape:
    """A matrix [rows, width] whose rows are named parts, and what of it this rank holds."""

    parts: Mapping[str, Span]  # rows of each
    width: Span
    bias: bool = False

    @property
    def rows(self) -> int:
        return sum(span.count for span in self.parts.values())

    @property
    def has_bias(self) -> bool:
        """Results of a cut width are added up over ranks, so one of them has the bias."""
        return self.bias and self.width.start == 0

    def rows_of(self, run: tuple[str, ...]) -> tuple[int, int]:
        """Where parts that follow each other begin and end."""
        names = list(self.parts)
        first = names.index(run[0])
        start = sum(self.parts[name].count for name in names[:first])
        return start, start + sum(self.parts[name].count for name in run)

    def cut_of(self, run: tuple[str, ...]) -> Cut | None:
        """Of a weight stored [rows, width]."""
        return cut_to(0, [self.parts[name] for name in run]) or cut_to(1, [self.width])


class StoredMatrix(ABC):
    """One matrix as its scheme stores it. The layer that has it registers its parameters, and multiplies through it."""

    name: str  # of the scheme
    is_plain = False  # whether `numbers` are always there, for ops that read them
    may_be_few = False  # whether `few_form` may be something that is not plain, once the matrix is loaded
    shape: MatrixShape
    bias: nn.Parameter | None  # [rows]
    numbers: nn.Parameter | None = None  # [rows, width], one row after another; None: they lie in another form
    packed: Matrix | None = None  # what packed kernels multiply; None: they cannot

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As they are registered; after `finish` there may be others."""
        ...

    @abstractmethod
    def slots(self, run: tuple[str, ...]) -> Iterator[PartSlot]:
        """Of a checkpoint that stores these parts, which follow each other, as one. None: it cannot be filled so."""
        ...

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        """Somebody put another parameter in the place of one that was registered under this name."""
        return None

    def finish(self) -> None:
        """All slots are filled: repack, transpose, fold, as the kernel wants it."""
        return None

    def reopen(self) -> bool:
        """Numbers lie as a checkpoint stores them again, until the next `finish`; whether they did not."""
        return False

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """x [T, width] -> [T, rows], the bias added."""
        ...

    def multiply_with(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """With another bias than its own, which it must not have."""
        y = self.multiply(x)
        return y if bias is None else y + bias

    def multiply_wide(self, x: Tensor) -> Tensor:
        """In float32, as far as its form allows."""
        return self.multiply(x).float()

    @abstractmethod
    def take(self, index: Tensor) -> Tensor:
        """Rows of the matrix, as an embedding reads them: [*index, width]."""
        ...

    def few_form(self) -> Tensor | CodedWeight | None:
        """The one matrix that ops of ops/few.py read, some of which take some codes; None: it is not one."""
        return self.numbers if self.is_plain else None

    def few_parts(self) -> Sequence[Tensor | CodedWeight]:
        """The same of matrices one below another, which are coded differently; nothing: there are none."""
        one = self.few_form()
        return () if one is None else (one,)

    def coded(self) -> Sequence[CodedWeight]:
        """Parts that a device keeps as codes."""
        return ()

    def whole(self) -> Matrix | Tensor:
        """All parts as kernels of experts and of blocks take them: packed, or plain rows."""
        whole = self.packed if self.packed is not None else self.numbers
        if whole is None:
            raise ConfigError(f"a matrix stored as {self.name} has no form that compiled kernels take")
        return whole

    def _bias_slots(self, run: tuple[str, ...]) -> Iterator[PartSlot]:
        shape = self.shape
        if not shape.bias:
            return
        start, stop = shape.rows_of(run)
        target = None if self.bias is None else self.bias.data[start:stop]
        yield PartSlot("bias", target, cut_to(0, [shape.parts[name] for name in run]))


class WeightScheme(Protocol):
    name: str

    def create(self, shape: MatrixShape) -> StoredMatrix:
        """A matrix of this shape, not filled."""
        ...


class PlainMatrix(StoredMatrix):
    """Numbers as they are: weight [rows, width] and bias [rows] in the model's dtype."""

    name = "plain"
    is_plain = True

    def __init__(self, shape: MatrixShape, scheme: PlainScheme) -> None:
        self.shape, self._linear = shape, scheme.linear
        rows = shape.rows
        self.weight = new_parameter((rows, shape.width.count), scheme.dtype, scheme.arena)
        self.bias = new_parameter((rows,), scheme.dtype, scheme.arena) if shape.has_bias else None
        self.numbers = self.weight

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    def slots(self, run: tuple[str, ...]) -> Iterator[PartSlot]:
        start, stop = self.shape.rows_of(run)
        yield PartSlot("weight", self.weight.data[start:stop], self.shape.cut_of(run))
        yield from self._bias_slots(run)

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        if name == "weight":
            self.weight = self.numbers = parameter
            self.packed = None
        elif name == "bias":
            self.bias = parameter

    def multiply(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)

    def multiply_with(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(x, self.weight, bias)

    def multiply_wide(self, x: Tensor) -> Tensor:
        return self._linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    def take(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


class PlainScheme:
    name = "plain"

    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        self.dtype, self.arena, self.linear = dtype, arena, kernels.of(linear)

    def create(self, shape: MatrixShape) -> StoredMatrix:
        return PlainMatrix(shape, self)


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, arena: Arena) -> nn.Parameter:
    """Not filled, and never trained."""
    return nn.Parameter(arena.empty(shape, dtype), requires_grad=False)


class SchemeChoice(Protocol):
    """Which scheme the matrices of a model get, by their canonical names."""

    def of_matrix(self, name: str) -> WeightScheme: ...

    def of_experts(self, name: str) -> ExpertScheme:
        """`name`: up to the experts' numbers, with its final dot."""
        ...

    def keeps_blocks(self, type_id: int) -> bool:
        """Whether blocks of this type of GGUF files are wanted as they are stored."""
        ...


@dataclass(frozen=True)
class Storage:
    """Where parameters live, in which form, and with which kernels they are multiplied; passed to every module that
    makes some. `group`: the ranks that share the matrices."""

    dtype: torch.dtype
    arena: Arena
    kernels: Kernels
    schemes: SchemeChoice
    group: ShardGroup = ALONE

    @property
    def device(self) -> torch.device:
        return self.arena.device

    def of(self, op: Op[P, R]) -> Callable[P, R]:
        """The function that computes this op for the model."""
        return self.kernels.of(op)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return new_parameter(shape, dtype or self.dtype, self.arena)
