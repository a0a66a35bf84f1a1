"""CodedMatrix: a matrix of a checkpoint whose numbers are codes of a few bits, between its files and a weight scheme.

Loaders make them, the weight table passes them on, and a scheme keeps the codes in a form that its kernels multiply or
asks for `numbers()`. Forms: blocks of a GGUF file, affine codes (scale * (code - zero)), small floats, and codes that
index a table. Must not know: files, names of tensors, which kernels there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from quire.quant.shard import Cut

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # code 0..7; 8..15 are the same below zero
FLOAT_BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}


class InputCoding(NamedTuple):
    """How a checkpoint wants a matrix's inputs rounded before a matmul. Kernels may multiply them unrounded instead."""

    form: str = "none"  # none | fp8 | fp4 | int8
    scaled_by: str = "none"  # static (one scale from the file) | token | tensor | group: measured in each step
    scale: Tensor | None = None  # of a static coding
    zero: Tensor | None = None

    def to(self, device: torch.device) -> InputCoding:
        moved = [None if t is None else t.to(device) for t in (self.scale, self.zero)]
        return self._replace(scale=moved[0], zero=moved[1])


PLAIN_INPUT = InputCoding()


class Grid(NamedTuple):
    """One value for every block of rows and columns of a matrix; blocks at the far edges may be cut short."""

    values: Tensor  # [blocks of rows, blocks of columns]
    rows: int  # of a block
    columns: int

    def fits(self, shape: tuple[int, int]) -> bool:
        expected = -(-shape[0] // self.rows), -(-shape[1] // self.columns)
        return tuple(self.values.shape) == expected

    def spread(self, shape: tuple[int, int]) -> Tensor:
        """The value of every row and block of columns: [rows, blocks of columns]."""
        values = self.values
        if self.rows == 1:
            return values
        if values.shape[0] == 1:
            return values.expand(shape[0], -1)
        return values.repeat_interleave(self.rows, 0)[: shape[0]]

    def is_fractional(self) -> bool:
        """Whether some values are not whole numbers, or need more than 15 bits."""
        values = self.values
        return values.is_floating_point() and not torch.equal(values.round().clamp(-(1 << 14), 1 << 14), values)

    def scaled(self, numbers: Tensor) -> Tensor:
        """numbers [rows, width] times their values."""
        rows, width = numbers.shape
        values = self.spread((rows, width))
        if width % self.columns == 0:
            return (numbers.view(rows, -1, self.columns) * values[:, :, None]).view(rows, width)
        return numbers * values.repeat_interleave(self.columns, 1)[:, :width]

    def cut(self, cut: Cut) -> Grid | None:
        """None: the cut goes through a block."""
        size = self.rows if cut.axis == 0 else self.columns
        if self.values.shape[cut.axis] == 1 and size >= cut.whole:
            length = sum(stop - start for start, stop in cut.ranges)
            return self._replace(rows=length) if cut.axis == 0 else self._replace(columns=length)
        if any(start % size or (stop % size and stop != cut.whole) for start, stop in cut.ranges):
            return None
        if len(cut.ranges) > 1 and any((stop - start) % size for start, stop in cut.ranges[:-1]):
            return None
        ranges = tuple((start // size, -(-stop // size)) for start, stop in cut.ranges)
        return self._replace(values=Cut(cut.axis, self.values.shape[cut.axis], ranges).of(self.values))


class Integers(NamedTuple):
    """A matrix as whole numbers times scales: number = scale * (q - zero)."""

    q: Tensor  # int16 [rows, width]
    zero: Tensor | None  # [rows, groups], int16, or float32 where some lie between two codes; None: 0
    scale: Tensor  # float32 [rows, groups]
    group: int  # columns that share a scale


class CodedMatrix(ABC):
    """[rows, width]."""

    inputs: InputCoding

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @abstractmethod
    def numbers(self) -> Tensor:
        """What the codes stand for."""
        ...

    @abstractmethod
    def cut(self, cut: Cut) -> Self | None:
        """None: it cannot be cut there as codes."""
        ...

    @abstractmethod
    def to(self, device: torch.device) -> Self: ...

    def integers(self) -> Integers | None:
        """None: its numbers are not whole numbers times a scale for neighbouring columns."""
        return None


class OpenBlocks(NamedTuple):
    """Blocks of a GGUF file, opened: number = scale * (code - middle) - least, or scale * number of the code."""

    codes: Tensor  # uint8 [rows, width]; 8 bits: int8
    kind: str  # as codes of ops/coded.py
    group: int  # columns that share a scale
    scale: Tensor  # [rows, groups]: floats, or with `coarse` uint8 or int8
    middle: int = 0
    least: Tensor | None = None  # as `scale`
    coarse: Tensor | None = None  # float16 [1, or 2 with `least`, rows, width / 256]: of `scale`, of `least`


@dataclass(frozen=True)
class GGUFBlocks(CodedMatrix):
    """The bytes of a GGUF tensor's blocks, not decoded yet."""

    raw: Tensor  # uint8 [rows, bytes of a row]
    type_id: int  # of GGUF files
    width: int
    decode: Callable[[Tensor], Tensor]  # raw -> numbers
    block: int  # numbers that are stored together
    inputs: InputCoding = PLAIN_INPUT
    opens: Callable[[Tensor], OpenBlocks] | None = None  # raw -> codes

    @property
    def shape(self) -> tuple[int, int]:
        return self.raw.shape[0], self.width

    def numbers(self) -> Tensor:
        return self.decode(self.raw)

    def cut(self, cut: Cut) -> GGUFBlocks | None:
        if cut.axis == 0:
            return replace(self, raw=cut.of(self.raw))
        if any(border % self.block for ends in cut.ranges for border in ends):
            return None
        size = self.raw.shape[1] * self.block // self.width  # bytes of a block
        ends = tuple((start // self.block * size, stop // self.block * size) for start, stop in cut.ranges)
        width = sum(stop - start for start, stop in cut.ranges)
        return replace(self, raw=Cut(1, self.raw.shape[1], ends).of(self.raw), width=width)

    def to(self, device: torch.device) -> GGUFBlocks:
        return replace(self, raw=self.raw.to(device))


class _Tensors(CodedMatrix):
    """A frozen dataclass of tensors and grids."""

    def to(self, device: torch.device) -> Self:
        moved: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = self.__dict__[each.name]
            if isinstance(value, Tensor | InputCoding):
                moved[each.name] = value.to(device)
            elif isinstance(value, Grid):
                moved[each.name] = value._replace(values=value.values.to(device))
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class AffineCodes(_Tensors):
    """number = scale * (code - zero). Codes are unsigned; signed ones are stored with half their range added."""

    codes: Tensor  # uint8 [rows, width]
    bits: int
    scale: Grid
    zero: Grid | int  # in codes; where it is a grid of floats, it may lie between two of them
    groups: Tensor | None = None  # int64 [width]: the group of each column, where that does not follow from its place
    inputs: InputCoding = PLAIN_INPUT

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def numbers(self) -> Tensor:
        if self.groups is not None:
            scale = self.scale.spread(self.shape).float()[:, self.groups]
            zero = self.zero.spread(self.shape).float()[:, self.groups] if isinstance(self.zero, Grid) else self.zero
            return (self.codes.float() - zero) * scale
        if not isinstance(self.zero, Grid):
            return self._scale.scaled(self.codes.float() - self.zero)
        ones = torch.ones((), device=self.codes.device).expand(self.shape)
        zero = self.zero._replace(values=self.zero.values.float()).scaled(ones)
        return self._scale.scaled(self.codes.float() - zero)

    @property
    def _scale(self) -> Grid:
        return self.scale._replace(values=self.scale.values.float())

    def cut(self, cut: Cut) -> AffineCodes | None:
        if cut.axis == 1 and self.groups is not None:
            at = Cut(0, cut.whole, cut.ranges)
            return replace(self, codes=cut.of(self.codes), groups=at.of(self.groups))
        scale = self.scale.cut(cut)
        zero = self.zero.cut(cut) if isinstance(self.zero, Grid) else self.zero
        if scale is None or zero is None:
            return None
        return replace(self, codes=cut.of(self.codes), scale=scale, zero=zero)

    def integers(self) -> Integers | None:
        zero = self.zero
        if self.groups is not None or (isinstance(zero, Grid) and zero.columns != self.scale.columns):
            return None
        shape, q = self.shape, self.codes.to(torch.int16)
        scale = self.scale.spread(shape).float()
        if isinstance(zero, Grid):
            zeros = zero.spread(shape)
            return Integers(q, zeros.float() if zero.is_fractional() else zeros.to(torch.int16), scale, zero.columns)
        return Integers(q - zero, None, scale, self.scale.columns)


@dataclass(frozen=True)
class FloatCodes(_Tensors):
    """number = small float * scale of its block * scale of the whole."""

    codes: Tensor  # float8 [rows, width]; e2m1: uint8 [rows, width / 2], the first of two in the low half of a byte
    kind: str  # one of FLOAT_BITS
    scale: Grid  # values: floats, or uint8 that are powers of two (e8m0)
    whole: Tensor | None = None  # one number
    inputs: InputCoding = PLAIN_INPUT

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.codes.shape
        return rows, width * 2 if self.kind == "e2m1" else width

    def numbers(self) -> Tensor:
        values = self._halves().float() / 2 if self.kind == "e2m1" else self.codes.float()
        return self.scales().scaled(values)

    def cut(self, cut: Cut) -> FloatCodes | None:
        scale, at = self.scale.cut(cut), cut
        if scale is not None and cut.axis == 1 and self.kind == "e2m1":
            if any(border % 2 for ends in cut.ranges for border in ends):
                return None
            at = Cut(1, cut.whole // 2, tuple((start // 2, stop // 2) for start, stop in cut.ranges))
        return None if scale is None else replace(self, codes=at.of(self.codes), scale=scale)

    def integers(self) -> Integers | None:
        if self.kind != "e2m1":
            return None
        return Integers(self._halves(), None, self.scales().spread(self.shape) / 2, self.scale.columns)

    def scales(self) -> Grid:
        """Of blocks, times that of the whole, as numbers."""
        values = self.scale.values
        scale = power_of_two(values) if values.dtype == torch.uint8 else values.float()
        return self.scale._replace(values=scale if self.whole is None else scale * self.whole.float())

    def _halves(self) -> Tensor:
        """Codes of e2m1 as twice their numbers, which are whole: int16."""
        twice = torch.tensor([2 * n for n in E2M1] + [-2 * n for n in E2M1], device=self.codes.device).to(torch.int16)
        return twice[open_halves(self.codes).long()]


@dataclass(frozen=True)
class TableCodes(_Tensors):
    """number = table[code] * scale of its run; runs of `run` numbers go on from one row to the next."""

    codes: Tensor  # uint8 [rows, width]
    table: Tensor  # float32, one number for each code
    scale: Tensor  # float32, one for each run
    run: int
    inputs: InputCoding = PLAIN_INPUT

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def numbers(self) -> Tensor:
        values = self.table[self.codes.long()]
        count = values.numel()
        if count % self.run == 0:
            return (values.view(-1, self.run) * self.scale[:, None]).view(self.shape)
        return (values.view(-1) * self.scale.repeat_interleave(self.run)[:count]).view(self.shape)

    def cut(self, cut: Cut) -> TableCodes | None:
        width = self.shape[1]
        if width % self.run:
            return None
        scale = Grid(self.scale.view(-1, width // self.run), 1, self.run).cut(cut)
        if scale is None:
            return None
        # a cut through the only run of a row leaves a shorter one
        return replace(self, codes=cut.of(self.codes), scale=scale.values.reshape(-1), run=scale.columns)


def power_of_two(exponents: Tensor) -> Tensor:
    """e8m0: 2^(n - 127); 255 is not a number."""
    bits = exponents.int() << 23  # as float32 has them; its 0 would be 0, and 2^-127 is half of its smallest power
    powers = bits.masked_fill(exponents == 0, 1 << 22).view(torch.float32)
    return powers.masked_fill(exponents == 255, float("nan"))


def open_halves(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """Two codes of 4 bits in each byte of the last axis -> one byte for each."""
    low, high = packed & 15, packed >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, -1).flatten(-2)


def open_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] whose bits follow each other, codes at the low end first -> uint8 [..., n * 32 / bits]."""
    if bits in (2, 4, 8):
        raw = words.contiguous().view(torch.uint8)
        if bits == 8:
            return raw
        if bits == 4:
            return open_halves(raw)
        return torch.stack([raw >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    wide = words.long() & 0xFFFFFFFF
    *rest, count = wide.shape
    codes = count * 32 // bits
    at = torch.arange(codes, device=words.device) * bits
    first, shift = at // 32, at % 32
    both = wide[..., first] | torch.where(first + 1 < count, wide[..., (first + 1).clamp(max=count - 1)] << 32, 0)
    return (both >> shift & (1 << bits) - 1).to(torch.uint8).view(*rest, codes)
