"""CodedExperts: experts of a mixture kept as codes of 8 or 4 bits, in the form that grouped kernels read.

What a checkpoint stores is not known before its first matrix comes: that decides the layout of its side (up or down),
and memory for all experts is taken then; with a layout known beforehand (dummy weights, rounding to fp8 while loading)
it is taken at once. A side whose matrices have no layout, or not all the same, holds numbers of the model's dtype.
Where a kernel reads MXFP4 in a form of its own (MxCodes), every matrix is packed as it comes, so that there are never
two forms of it; only what that kernel cannot read after all is unpacked at the end, one side at a time.
Must not know: files, names of tensors, routers, which model they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.ops.coded_experts import CHUNK, ExpertCodes, close_chunks, coded_forms, padded, run_coded_experts
from quire.ops.linear import linear
from quire.ops.mx_experts import MxCodes, multiplies_mx, shapes_of
from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.coded import AffineCodes, CodedMatrix, FloatCodes, GGUFBlocks, Grid, open_halves
from quire.quant.device_codes import four_bits
from quire.quant.experts import ExpertShape, StackTarget, StoredExperts
from quire.quant.scheme import MatrixShape, Slot, WeightTarget, new_parameter
from quire.quant.shard import cut_to
from quire.schema.errors import ConfigError

_GROUPS = (16, 32, 64)  # columns that share a scale, where they are fewer than a chunk
_MIDDLE = 8  # zero point of symmetric codes
_DECODED = 1 << 22  # numbers that are decoded at once
_LARGEST = 448.0  # of e4m3
_DUMMY_EXPONENT = 120  # 2^-7, of scales that are powers of two
_DUMMY_SCALE = {"e4m3": 0.02, "e2m1": 2.0**-7, "int4": 2.0**-8}  # random codes then have a deviation of about 0.02


class CodeLayout(NamedTuple):
    """How the matrices of one side lie: see ExpertCodes."""

    form: str
    by_row: bool = False  # whether rows have a scale
    block: tuple[int, int] = (1, 0)  # rows and columns that share another one; no columns: there is none
    scale: torch.dtype | None = None
    zeros: torch.dtype | None = None  # of zero points: uint8, or float32 where they may lie between two codes


class CodedPart(NamedTuple):
    """Some rows of one expert's matrix."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    row_scale: Tensor | None


FP8_ROWS = CodeLayout("e4m3", by_row=True)
MXFP4 = CodeLayout("e2m1", block=(1, 32), scale=torch.uint8)


def layout_of(coded: CodedMatrix) -> CodeLayout | None:
    """None: kernels have no layout for such codes."""
    rows, width = coded.shape
    if isinstance(coded, FloatCodes):
        return _float_layout(coded, rows, width)
    if isinstance(coded, AffineCodes) and coded.bits <= 4 and coded.groups is None:
        columns = _columns(coded.scale.columns, width)
        same = not isinstance(coded.zero, Grid) or coded.zero.columns == coded.scale.columns
        if columns and same:
            return CodeLayout("int4", block=(1, columns), scale=coded.scale.values.dtype, zeros=_zeros_of(coded.zero))
    return None


def _zeros_of(zero: Grid | int) -> torch.dtype | None:
    if isinstance(zero, Grid):
        return torch.float32 if zero.values.is_floating_point() else torch.uint8
    return None if zero == _MIDDLE else torch.uint8


def _float_layout(coded: FloatCodes, rows: int, width: int) -> CodeLayout | None:
    grid = coded.scale
    kind = grid.values.dtype
    if coded.kind == "e4m3" and kind != torch.uint8:
        if grid.columns >= width:
            return FP8_ROWS
        if grid.columns % CHUNK == 0:
            block = grid.rows if rows % grid.rows == 0 else 1
            return CodeLayout("e4m3", block=(block, grid.columns), scale=torch.float32)
        return None
    if coded.kind == "e2m1" and (columns := _columns(grid.columns, width)):
        return CodeLayout("e2m1", by_row=coded.whole is not None, block=(1, columns), scale=kind)
    return None


def _columns(columns: int, width: int) -> int:
    """Of a block of 4-bit codes, as it lies; 0: kernels cannot read it."""
    if columns >= width:
        return padded(width)
    return columns if columns in _GROUPS or columns % CHUNK == 0 else 0


def part_of(coded: CodedMatrix, layout: CodeLayout) -> CodedPart:
    """`coded` in its own layout, or in that with zero points or wider ones."""
    if isinstance(coded, AffineCodes):
        scale = coded.scale.spread(coded.shape)
        zero = None
        if layout.zeros is not None:
            grid = coded.zero
            zero = grid.spread(coded.shape) if isinstance(grid, Grid) else torch.full_like(scale, grid)
            zero = zero.to(layout.zeros)
        return CodedPart(close_chunks(coded.codes), scale, zero, None)
    assert isinstance(coded, FloatCodes)  # nothing else has a layout
    rows = coded.shape[0]
    whole = None if coded.whole is None else coded.whole.float().expand(rows)
    if coded.kind == "e2m1":
        return CodedPart(close_chunks(open_halves(coded.codes)), coded.scale.spread(coded.shape), None, whole)
    values = coded.scale.values.float()
    if coded.whole is not None:
        values = values * coded.whole.float()
    if layout.by_row:
        return CodedPart(coded.codes, None, None, coded.scale._replace(values=values).spread(coded.shape)[:, 0])
    spread = coded.scale._replace(values=values).spread(coded.shape) if layout.block[0] == 1 else values
    return CodedPart(coded.codes, spread, None, None)


def round_to_fp8(numbers: Tensor) -> CodedPart:
    """One scale for each row."""
    wide = numbers.float()
    scale = wide.abs().amax(1).clamp(min=1e-12) / _LARGEST
    codes = (wide / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return CodedPart(codes, None, None, scale)


class CodedSide:
    """The first or the second matrices of all experts."""

    def __init__(
        self, name: str, experts: int, shape: MatrixShape, dtype: torch.dtype, arena: Arena, layout: CodeLayout | None,
        rounds: bool, packs: bool = False,
    ) -> None:  # fmt: skip
        """`rounds`: plain numbers become fp8. `packs`: MXFP4 becomes MxCodes."""
        self.name, self.experts, self.shape = name, experts, shape
        self._dtype, self._arena, self._rounds, self._packs = dtype, arena, rounds, packs
        self._misfits: Tensor | None = None  # of MxCodes: whether its kernel cannot decode some exactly
        self.plain: nn.Parameter | None = None
        self.codes: ExpertCodes | MxCodes | None = None
        self._layout: CodeLayout | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._is_final = False
        self._lock = Lock()
        if layout is not None:
            self._allocate(layout)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parameters.items()

    @property
    def is_packed(self) -> bool:
        return isinstance(self.codes, MxCodes)

    @property
    def fits_packed(self) -> bool:
        """Reads the answer back from the device, so for the end of loading only."""
        return self.is_packed and (self._misfits is None or not bool(self._misfits))

    def weight(self) -> ExpertCodes | MxCodes | Tensor:
        weight = self.codes if self.codes is not None else self.plain
        assert weight is not None  # a checkpoint that lacks them is refused
        return weight

    def finish(self) -> None:
        """From now on the form stays: graphs that were captured read this memory."""
        self._is_final = self.codes is not None or self.plain is not None

    def _check_open(self) -> None:
        if self._is_final:
            raise ConfigError("experts that replace others must be coded as those were", param="quantization")

    def put(self, expert: int, start: int, source: Tensor | CodedMatrix) -> None:
        """Rows from `start` on, perhaps while another thread brings others."""
        if isinstance(source, GGUFBlocks):
            source = four_bits(source) or source
        with self._lock:
            if isinstance(source, CodedMatrix):
                layout = layout_of(source)
                if self._takes(layout):
                    self._put_codes(expert, start, source)
                    return
                source = source.numbers()
            if self._rounds:
                self._copy(expert, start, round_to_fp8(source))
                return
            if self.plain is None:
                self._decode()
            assert self.plain is not None
            self.plain.data[expert, start : start + source.shape[0]].copy_(source)

    def _put_codes(self, expert: int, start: int, source: CodedMatrix) -> None:
        if isinstance(self.codes, MxCodes):
            assert isinstance(source, FloatCodes) and self._misfits is not None
            scale = source.scale.spread(source.shape)
            self._misfits |= ~self.codes.put(expert, start, open_halves(source.codes), scale)
            return
        assert self._layout is not None
        self._copy(expert, start, part_of(source, self._layout))

    def _takes(self, layout: CodeLayout | None) -> bool:
        """Whether codes of this layout can be added to those that are there."""
        if layout is None or self.plain is not None:
            return False
        if self._layout is None:
            self._allocate(layout)
        have = self._layout
        assert have is not None
        if layout._replace(zeros=have.zeros) != have:
            return False
        if layout.zeros is not None and have.zeros not in (layout.zeros, torch.float32):
            self._widen_zeros(layout.zeros)
        return True

    def _allocate(self, layout: CodeLayout) -> None:
        rows, width, count = self.shape.rows, self.shape.width.count, self.experts
        self._layout = layout
        if self._packs and layout == MXFP4:
            words, bytes_ = (
                self._new(leaf, shape, torch.int32)
                for leaf, shape in zip(("codes", "scale"), shapes_of(count, rows, width), strict=True)
            )
            self.codes = MxCodes(words, bytes_, rows, width, len(self.shape.parts) > 1)
            self._misfits = torch.zeros((), dtype=torch.bool, device=words.device)
            return
        small = layout.form != "e4m3"
        codes = self._new("codes", (count, rows, padded(width) // 2 if small else width),
                          torch.uint8 if small else torch.float8_e4m3fn)  # fmt: skip
        scale = zero = row_scale = None
        if layout.block[1]:
            assert layout.scale is not None
            grid = count, -(-rows // layout.block[0]), -(-(padded(width) if small else width) // layout.block[1])
            scale = self._new("scale", grid, layout.scale)
            zero = None if layout.zeros is None else self._new("zero", grid, layout.zeros)
        if layout.by_row:
            row_scale = self._new("row_scale", (count, rows), torch.float32)
        self.codes = ExpertCodes(layout.form, codes, width, scale, layout.block, zero, row_scale)

    def _new(self, leaf: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros: what pads a row is never written."""
        parameter = new_parameter(shape, dtype, self._arena)
        parameter.data.view(torch.uint8).zero_()
        self._parameters[f"{self.name}_{leaf}"] = parameter
        return parameter.data

    def unpack(self) -> None:
        """From now on, codes as other kernels read them."""
        have, layout = self.codes, self._layout
        if not isinstance(have, MxCodes):
            return
        self._check_open()
        assert layout is not None
        self._packs, self._misfits = False, None
        self._allocate(layout)
        for expert in range(self.experts):
            codes, scale = have.opened(expert)
            self._copy(expert, 0, CodedPart(close_chunks(codes), scale, None, None))

    def _widen_zeros(self, dtype: torch.dtype) -> None:
        """Codes so far were symmetric, or had whole zero points."""
        self._check_open()
        have, layout = self.codes, self._layout
        assert isinstance(have, ExpertCodes) and have.scale is not None and layout is not None
        zero = self._new("zero", tuple(have.scale.shape), dtype)
        zero.copy_(torch.tensor(_MIDDLE) if have.zero is None else have.zero)
        self._layout = layout._replace(zeros=dtype)
        self.codes = ExpertCodes(have.form, have.codes, have.width, have.scale, have.block, zero, have.row_scale)

    def _copy(self, expert: int, start: int, part: CodedPart) -> None:
        codes = self.codes
        assert isinstance(codes, ExpertCodes)
        stop, step = start + part.codes.shape[0], codes.block[0]
        codes.codes[expert, start:stop].copy_(part.codes)
        if part.row_scale is not None and codes.row_scale is not None:
            codes.row_scale[expert, start:stop].copy_(part.row_scale)
        for target, values in ((codes.scale, part.scale), (codes.zero, part.zero)):
            if target is not None and values is not None:
                target[expert, start // step : -(-stop // step), : values.shape[1]].copy_(values)

    def _decode(self) -> None:
        """From now on, numbers of the model's dtype."""
        self._check_open()
        shape = self.experts, self.shape.rows, self.shape.width.count
        plain = new_parameter(shape, self._dtype, self._arena)
        if self.codes is not None:
            for expert in range(self.experts):
                plain.data[expert].copy_(self.codes.numbers(expert))
        self.plain, self.codes, self._layout = plain, None, None
        self._parameters = {self.name: plain}

    def fill_dummy(self, normal: Tensor) -> None:
        """Codes from a sequence of normal numbers, with scales that make them as large as other dummy weights."""
        codes = self.codes
        if codes is None:
            return
        if isinstance(codes, MxCodes):
            codes.fill(normal.view(torch.uint8)[::4].contiguous().to(codes.codes.device), _DUMMY_EXPONENT)
            return
        small = codes.form != "e4m3"
        ring = normal.view(torch.uint8)[::4] if small else normal.to(torch.float8_e4m3fn).view(torch.uint8)
        ring = ring.contiguous().to(codes.codes.device)
        flat = codes.codes.view(torch.uint8).view(-1)
        for start in range(0, flat.numel(), len(ring)):
            part = flat[start : start + len(ring)]
            part.copy_(ring[: len(part)])
        size = _DUMMY_SCALE[codes.form]
        if codes.zero is not None:
            codes.zero.fill_(_MIDDLE)
        if codes.row_scale is not None:
            codes.row_scale.fill_(size if codes.scale is None else 1.0)
        if codes.scale is not None:
            codes.scale.fill_(_DUMMY_EXPONENT if codes.scale.dtype == torch.uint8 else size)


class CodedExperts(StoredExperts):
    """w1: gate rows, then up rows; w2: down; biases are plain."""

    name = "coded"

    def __init__(self, shape: ExpertShape, scheme: CodedExpertScheme) -> None:
        self.shape = shape
        up, down = shape.matrices()
        dtype, arena, packs = scheme.dtype, scheme.arena, scheme.packs(shape)
        self.up, self.down = (
            CodedSide(name, shape.experts, side, dtype, arena, scheme.layout_for(side), scheme.rounds, packs)
            for name, side in (("w1", up), ("w2", down))
        )
        count = shape.experts
        self.b1 = new_parameter((count, up.rows), dtype, arena) if up.has_bias else None
        self.b2 = new_parameter((count, down.rows), dtype, arena) if down.has_bias else None
        self._run, self._linear = scheme.run, scheme.linear

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for side in (self.up, self.down):
            yield from side.parameters()
        for name, bias in (("b1", self.b1), ("b2", self.b2)):
            if bias is not None:
                yield name, bias

    def num_numbers(self) -> dict[str, int]:
        """Scales stand for none."""
        counts = {}
        for side in (self.up, self.down):
            for name, _ in side.parameters():
                if name != side.name:
                    whole = side.experts * side.shape.rows * side.shape.width.count
                    counts[name] = whole if name.endswith("_codes") else 0
        return counts

    def slots(self) -> Iterator[Slot]:
        for fused, side, bias in ((self.shape.fused, self.up, self.b1), ("down_proj", self.down, self.b2)):
            yield from self._slots("weight", fused, side.shape, side, None)
            if self.shape.bias:
                yield from self._slots("bias", fused, side.shape, None, bias)

    def _slots(
        self, leaf: str, fused: str, shape: MatrixShape, side: CodedSide | None, bias: nn.Parameter | None
    ) -> Iterator[Slot]:
        names, run = [], tuple(shape.parts)
        places: list[list[Tensor | WeightTarget]] = []
        for expert in range(self.shape.experts):
            places.append([])
            for part in run:
                start, stop = shape.rows_of((part,))
                target: Tensor | WeightTarget | None = None
                if side is not None:
                    target = ExpertTarget(side, expert, start, (stop - start, shape.width.count))
                elif bias is not None:
                    target = bias.data[expert, start:stop]
                names.append(f"{expert}.{part}.{leaf}")
                cut = shape.cut_of((part,)) if side is not None else cut_to(0, [shape.parts[part]])
                places[expert] += [] if target is None else [target]
                yield Slot(names[-1], target, cut=cut)
        whole = shape.cut_of(run) if side is not None else cut_to(0, [shape.parts[part] for part in run])
        name = fused if side is not None else f"{fused}_bias"
        every = StackTarget(places) if places[0] else None
        yield Slot(name, every, tuple(names), None if whole is None else whole.behind(1))

    def finish(self) -> None:
        """Kernels of MxCodes take both sides as such, or none."""
        sides = self.up, self.down
        if any(side.is_packed for side in sides) and not all(side.fits_packed for side in sides):
            for side in sides:
                side.unpack()
        for side in sides:
            side.finish()

    def fill_dummy(self, normal: Tensor) -> None:
        for side in (self.up, self.down):
            side.fill_dummy(normal)

    def multiply_up(self, expert: int, x: Tensor) -> Tensor:
        return self._times(self.up, self.b1, expert, x)

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        return self._times(self.down, self.b2, expert, x)

    def _times(self, side: CodedSide, bias: Tensor | None, expert: int, x: Tensor) -> Tensor:
        """Decodes the matrix, some rows of it at a time: for the few tokens whose adapters change an expert."""
        weight, own_bias = side.weight(), None if bias is None else bias[expert]
        if isinstance(weight, Tensor):
            return self._linear(x, weight[expert], own_bias)
        _, rows, width = weight.shape
        at_once = max(_DECODED // width // weight.block[0], 1) * weight.block[0]
        starts = range(0, rows, at_once)
        parts = [self._linear(x, weight.numbers(expert, at, at + at_once).to(x.dtype)) for at in starts]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return y if own_bias is None else y + own_bias

    def multiply(self, x: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> Tensor:
        return self._run(
            x, weights, index, self.up.weight(), self.down.weight(), b1=self.b1, b2=self.b2, act=self.shape.act,
            stream=stream, all_experts=self.shape.all_experts,
        )  # fmt: skip


class ExpertTarget(WeightTarget):
    """One part of one expert's matrix."""

    takes_codes = True

    def __init__(self, side: CodedSide, expert: int, start: int, shape: tuple[int, int]) -> None:
        self._side, self._expert, self._start, self.shape = side, expert, start, shape

    def copy_(self, source: Tensor | CodedMatrix) -> None:
        self._side.put(self._expert, self._start, source)


class CodedExpertScheme:
    name = "coded"

    def __init__(
        self, dtype: torch.dtype, arena: Arena, kernels: Kernels, layout: CodeLayout | None = None, rounds: bool = False
    ) -> None:
        """`layout`: known before a matrix comes. `rounds`: plain numbers become fp8 with a scale for each row."""
        self.dtype, self.arena, self.rounds = dtype, arena, rounds
        self._layout = FP8_ROWS if rounds else layout
        self.run, self.linear = kernels.of(run_coded_experts), kernels.of(linear)
        self._multiplies_mx = kernels.of(multiplies_mx)

    def packs(self, shape: ExpertShape) -> bool:
        """Whether experts in MXFP4 become MxCodes."""
        return shape.gated and self._multiplies_mx(self.dtype, shape.width, shape.ffn.count, shape.act)

    def layout_for(self, shape: MatrixShape) -> CodeLayout | None:
        """The layout known beforehand, where these rows and columns fit it."""
        layout = self._layout
        if layout is None or not layout.block[1]:
            return layout
        rows, columns = layout.block
        if any(span.count % rows for span in shape.parts.values()):
            layout = layout._replace(block=(1, columns))
        return layout

    def create(self, shape: ExpertShape) -> StoredExperts:
        return CodedExperts(shape, self)


def has_kernels(kernels: Kernels) -> bool:
    """Whether this device multiplies codes of experts."""
    return bool(kernels.of(coded_forms)())
