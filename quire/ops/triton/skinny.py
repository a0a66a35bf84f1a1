"""Matmuls of up to 32 rows with a large matrix on Hopper, on tensor cores, at memory bandwidth.

The matrix is the M operand of `wgmma` (tiles of 64 of its rows), the activations the narrow N operand. A
program has a tile and a split of K; a ring of buffers in shared memory is filled by TMA. A program starts
while the previous kernel still runs (programmatic dependent launch) and fills its ring with weights; only then does it
wait for the rows. Splits of K are added up by the consumer (ops/parts.py): adding them up here would make
every program wait for the last one, some 3 us of a matmul of 10. Adapters of the rows are further columns of K
(skinny_lora.py).

Floor: the bytes of the matrix at 4.3 TB/s. 6144 x 4096 bf16: 50 MB, 11.7 us; 24576 x 4096: 201 MB, 46.8 us.
Needs: K a multiple of 128, 16-bit weights, Hopper's instructions (no other generation has them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops import coded as coded_ops
from quire.ops import few as few_ops
from quire.ops import rounded as rounded_ops
from quire.ops.coded import CodedWeight
from quire.ops.lora import AddedLowRank, LowRank
from quire.ops.op import Fits, FormTable
from quire.ops.parts import PartialSums
from quire.ops.rounded import RoundedRows, RowCode
from quire.ops.triton import coded, launch, skinny_blocks, skinny_coded, skinny_rounded
from quire.ops.triton.act import SILU
from quire.ops.triton.coded import CodedLinear
from quire.ops.triton.descriptors import describe, load_tile
from quire.ops.triton.lora import add_low_rank
from quire.ops.triton.skinny_coded import store_silu
from quire.ops.triton.skinny_lora import adds, fill_low, low_tile, own_sums, slots_of

MOST_ROWS = 32
TILE = gl.constexpr(64)  # columns of the result, as rows of the matrix: what a warp group multiplies at once
_MOST_PARTS = 8
_NOWHERE = 1 << 30  # no column is that far right


class Ring(NamedTuple):
    """How a program reads its split of K."""

    entries: int  # of K in a buffer
    buffers: int
    programs: int  # per multiprocessor


WIDE, NARROW = Ring(256, 2, 2), Ring(128, 3, 3)


@gluon.jit
def _fill(matrix, ring, barriers, column, k, at, other, GATED: gl.constexpr):
    """Load a chunk of the tile's rows of the matrix into one buffer; GATED: half of them are `other` rows further."""
    if GATED:
        HALF: gl.constexpr = TILE // 2
        to = ring.index(at)
        load_tile(matrix, [column, k], barriers.index(at), to.slice(0, HALF, 0))
        load_tile(matrix, [other + column, k], barriers.index(at), to.slice(HALF, HALF, 0))
    else:
        load_tile(matrix, [column, k], barriers.index(at), ring.index(at))


@gluon.jit
def _product(
    matrix, rows, column, begin, end, other, low, h, index, scales, num_rows, piece, extra,
    ROWS: gl.constexpr, ENTRIES: gl.constexpr, BUFFERS: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
    PIECES: gl.constexpr, RANK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """[TILE, ROWS]: the tile's rows of the matrix times all rows, over chunks [begin, end) of K. PIECES > 0: and over
    `extra` chunks of what adapters add to this piece of the matrix (skinny_lora.py)."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = gl.allocate_shared_memory(matrix.dtype, [BUFFERS, TILE, ENTRIES], layout)
    staged = gl.allocate_shared_memory(matrix.dtype, [BUFFERS, ROWS, ENTRIES], layout)
    barriers = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = (TILE + ROWS) * ENTRIES * 2
    LOW_BYTES: gl.constexpr = TILE * ENTRIES * 2
    count = end - begin
    for at in gl.static_range(BUFFERS):
        mbarrier.init(barriers.index(at), count=1)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            mbarrier.expect(barriers.index(at), BYTES)
            _fill(matrix, ring, barriers, column, (begin + at) * ENTRIES, at, other, GATED)
        elif PIECES > 0:
            if at < count + extra:
                mbarrier.expect(barriers.index(at), LOW_BYTES)
                fill_low(low, ring, barriers, column, at - count, at, other, ENTRIES, GATED)
    if EARLY:
        gdc_wait()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            load_tile(rows, [0, (begin + at) * ENTRIES], barriers.index(at), staged.index(at))
    if PIECES > 0:
        lanes: gl.constexpr = RANK // 4
        own_layout: gl.constexpr = gl.BlockedLayout(
            [1, ENTRIES // RANK, 4], [32 // lanes, 1, lanes], [4, 1, 1], [2, 1, 0]
        )
        slot = slots_of(index, gl.where(extra > 0, num_rows, 0), ROWS, own_layout)
        total = own_sums(h, scales, slot, piece, num_rows, ROWS, PIECES, RANK, SPLITS, own_layout)
        total_up = total
        if GATED:
            total_up = own_sums(h, scales, slot, 1, num_rows, ROWS, PIECES, RANK, SPLITS, own_layout)
    own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc = gl.zeros([TILE, ROWS], gl.float32, layout=own)
    for piece_of_k in range(begin, end):
        turn = piece_of_k - begin
        buffer = turn % BUFFERS
        mbarrier.wait(barriers.index(buffer), (turn // BUFFERS) & 1)
        acc = warpgroup_mma(ring.index(buffer), staged.index(buffer).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if piece_of_k + BUFFERS < end:
            k = (piece_of_k + BUFFERS) * ENTRIES
            mbarrier.expect(barriers.index(buffer), BYTES)
            _fill(matrix, ring, barriers, column, k, buffer, other, GATED)
            load_tile(rows, [0, k], barriers.index(buffer), staged.index(buffer))
        elif PIECES > 0:
            if turn + BUFFERS < count + extra:
                mbarrier.expect(barriers.index(buffer), LOW_BYTES)
                fill_low(low, ring, barriers, column, turn + BUFFERS - count, buffer, other, ENTRIES, GATED)
    if PIECES > 0:
        SLOTS: gl.constexpr = ENTRIES // RANK
        for chunk in range(0, extra):
            turn = count + chunk
            buffer = turn % BUFFERS
            if GATED:
                here = gl.where(chunk % 2 == 0, total, total_up)
                tile = low_tile(here, slot, chunk // 2 * SLOTS, ROWS, ENTRIES, RANK, own_layout)
            else:
                tile = low_tile(total, slot, chunk * SLOTS, ROWS, ENTRIES, RANK, own_layout)
            staged.index(buffer).store(tile.to(matrix.dtype))
            fence_async_shared()
            mbarrier.wait(barriers.index(buffer), (turn // BUFFERS) & 1)
            acc = warpgroup_mma(ring.index(buffer), staged.index(buffer).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if chunk + BUFFERS < extra:
                mbarrier.expect(barriers.index(buffer), LOW_BYTES)
                fill_low(low, ring, barriers, column, chunk + BUFFERS, buffer, other, ENTRIES, GATED)
    for at in gl.static_range(BUFFERS):
        mbarrier.invalidate(barriers.index(at))
    return acc


@gluon.jit(do_not_specialize=["num_rows", "columns", "pieces", "parts", "second", "third", "extra"])
def _parts_kernel(
    matrix, rows, bias, sums, low, h, index, scales, num_rows, columns, pieces, parts, second, third, extra,
    ROWS: gl.constexpr, ENTRIES: gl.constexpr, BUFFERS: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
    PIECES: gl.constexpr, RANK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """grid (tiles * parts,). sums [parts, num_rows, columns] = rows matrix', each part over its split of K. The last
    one adds adapters, in `extra` chunks of them; `second` and `third`: columns where pieces begin."""
    column, part = gl.program_id(0) // parts * TILE, gl.program_id(0) % parts
    begin, end = part * pieces // parts, (part + 1) * pieces // parts
    piece = (column >= second).to(gl.int32) + (column >= third).to(gl.int32)
    acc = _product(
        matrix, rows, column, begin, end, 0, low, h, index, scales, num_rows, piece,
        gl.where(part == parts - 1, extra, 0), ROWS, ENTRIES, BUFFERS, False, EARLY, PIECES, RANK, SPLITS,
    )  # fmt: skip
    own: gl.constexpr = acc.type.layout
    n = column + gl.arange(0, TILE, layout=gl.SliceLayout(1, own))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, own))
    if BIAS:
        acc += gl.load(bias + n, mask=(n < columns) & (part == 0), other=0.0).to(gl.float32)[:, None]
    at = sums + (part * num_rows + m).to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, acc, mask=(n < columns)[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "columns", "pieces", "extra"])
def _silu_kernel(
    matrix, rows, bias, out, low, h, index, scales, num_rows, columns, pieces, extra,
    ROWS: gl.constexpr, ENTRIES: gl.constexpr, BUFFERS: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
    PIECES: gl.constexpr, RANK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """grid (tiles,). out [num_rows, columns] = silu(gate) * up; the matrix holds gate rows, then up rows."""
    column = gl.program_id(0) * (TILE // 2)
    acc = _product(
        matrix, rows, column, 0, pieces, columns, low, h, index, scales, num_rows, 0, 2 * extra,
        ROWS, ENTRIES, BUFFERS, True, EARLY, PIECES, RANK, SPLITS,
    )  # fmt: skip
    store_silu(acc, None, bias, out, 0, column, num_rows, columns, False, BIAS)


@gluon.jit(do_not_specialize=["num_rows", "pieces", "parts"])
def _shrink_kernel(
    matrix, rows, index, h, num_rows, pieces, parts,
    ROWS: gl.constexpr, ENTRIES: gl.constexpr, BUFFERS: gl.constexpr, EARLY: gl.constexpr, OF_SLOT: gl.constexpr,
):  # fmt: skip
    """grid (tiles * parts,). h [parts, num_rows, OF_SLOT] = A x of each row's own slot, each part over its split of K;
    the matrix holds OF_SLOT rows of each slot. Nothing is stored for rows without an adapter."""
    column, part = gl.program_id(0) // parts * TILE, gl.program_id(0) % parts
    begin, end = part * pieces // parts, (part + 1) * pieces // parts
    acc = _product(
        matrix, rows, column, begin, end, 0, None, None, None, None, num_rows, 0, 0,
        ROWS, ENTRIES, BUFFERS, False, EARLY, 0, 0, 0,
    )  # fmt: skip
    own: gl.constexpr = acc.type.layout
    n = column + gl.arange(0, TILE, layout=gl.SliceLayout(1, own))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, own))
    slot = gl.load(index + m, mask=m < num_rows, other=0)
    at = h + ((part * num_rows + m) * OF_SLOT)[None, :] + (n % OF_SLOT)[:, None]
    gl.store(at, acc, mask=(n // OF_SLOT + 1)[:, None] == slot[None, :])


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support this. Everything else goes to the library."""
    return (
        x.dtype is weight.dtype
        and x.element_size() == 2
        and 0 < x.shape[0] <= MOST_ROWS
        and x.shape[1] % NARROW.entries == 0
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
    )


def shape_of(columns: int, k: int, processors: int) -> tuple[Ring, int]:
    """(ring, splits of K): of the two rings the one that leaves fewer multiprocessors idle."""
    tiles = -(-columns // TILE.value)
    best: tuple[float, Ring, int] | None = None
    for ring in (WIDE, NARROW):
        if k % ring.entries:
            continue
        slots = processors * ring.programs
        parts = max(1, min(slots // tiles, k // ring.entries // 2, _MOST_PARTS))
        used = tiles * parts / (-(-tiles * parts // slots) * slots)
        if best is None or used > best[0] + 0.05:
            best = used, ring, parts
    assert best is not None
    return best[1], best[2]


def _rows_of(count: int) -> int:
    return 16 if count <= 16 else MOST_ROWS


def shrink_shape_of(k: int, rank: int) -> tuple[Ring, int]:
    """(ring, splits of K) of the shrink kernel: a chunk or two for each program, so that A is there before x is. Every
    program that adds adapters adds the splits up, in registers."""
    ring = WIDE if k % WIDE.entries == 0 else NARROW
    return ring, min(k // ring.entries, max(4, min(16, 256 // rank)))


def _shrunk(x: Tensor, added: AddedLowRank, *, early: bool, shape: tuple[Ring, int] | None = None) -> Tensor:
    """[splits, rows, parts, rank] float32: A x of each row's own slot."""
    assert added.low.stacks is not None
    a, (rows, k) = added.low.stacks.a, x.shape
    slots, parts, rank, _ = a.shape
    ring, splits = shape or shrink_shape_of(k, rank)
    h = torch.empty((splits, rows, parts, rank), dtype=torch.float32, device=x.device)
    padded_rows = _rows_of(rows)
    _shrink_kernel[(-(-slots * parts * rank // TILE.value) * splits,)](
        describe(a.view(-1, k), (TILE.value, ring.entries)), describe(x, (padded_rows, ring.entries)),
        added.rows.index, h, rows, k // ring.entries, splits, ROWS=padded_rows, ENTRIES=ring.entries,
        BUFFERS=ring.buffers, EARLY=early, OF_SLOT=parts * rank, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return h


class _LowColumns(NamedTuple):
    """Arguments of a kernel that adds adapters; the first ones in their order, the last ones by name."""

    tensors: tuple[Any, Any, Any, Any]
    begins: tuple[int, int]  # first columns of the second piece and the third
    chunks: int
    constants: dict[str, int]


_NO_LOW = _LowColumns((None, None, None, None), (0, 0), 0, {"PIECES": 0, "RANK": 0, "SPLITS": 0})


def _low_columns(
    x: Tensor, added: AddedLowRank | None, box: int, entries: int, *, early: bool, shape: tuple[Ring, int] | None = None
) -> _LowColumns:
    """Launches the shrink kernel."""
    if added is None:
        return _NO_LOW
    stacks = added.low.stacks
    assert stacks is not None
    _, parts, rank, _ = stacks.a.shape
    b, h = stacks.b.flatten(1), _shrunk(x, added, early=early, shape=shape)
    begins = [first for first, _ in stacks.bounds[1:]] + [_NOWHERE] * (3 - parts)
    return _LowColumns(
        (describe(b, (box, entries)), h, added.rows.index, stacks.scales), (begins[0], begins[1]),
        -(-b.shape[1] // entries), {"PIECES": parts, "RANK": rank, "SPLITS": h.shape[0]},
    )  # fmt: skip


def linear_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: AddedLowRank | None = None, *, processors: int,
    early: bool = False, shape: tuple[Ring, int] | None = None, shrink: tuple[Ring, int] | None = None,
) -> PartialSums:  # fmt: skip
    if not fits(x, weight) or not (added is None or adds(weight, added.low)):
        return PartialSums(_plain(x, weight, bias, added, early=early).float()[None], x.dtype)
    (rows, k), columns = x.shape, weight.shape[0]
    ring, parts = shape or shape_of(columns, k, processors)
    sums = torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    num_rows = _rows_of(rows)
    low = _low_columns(x, added, TILE.value, ring.entries, early=early, shape=shrink)
    _parts_kernel[(-(-columns // TILE.value) * parts,)](
        describe(weight, (TILE.value, ring.entries)), describe(x, (num_rows, ring.entries)), bias, sums, *low.tensors,
        rows, columns, k // ring.entries, parts, *low.begins, low.chunks, ROWS=num_rows, ENTRIES=ring.entries,
        BUFFERS=ring.buffers, BIAS=bias is not None, EARLY=early, **low.constants, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return PartialSums(sums, x.dtype)


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: Callable[[Tensor], Tensor],
    added: AddedLowRank | None = None, *, codes: Mapping[Callable, int], early: bool = False, ring: Ring = NARROW,
    shrink: tuple[Ring, int] | None = None,
) -> Tensor:  # fmt: skip
    """`codes`: gated activations by function; SiLU is fused into the matmul, others run after it."""
    if codes.get(act) != SILU or not fits(x, weight) or not (added is None or adds(weight, added.low, parts=2)):
        return act(_plain(x, weight, bias, added, early=early))
    (rows, k), columns = x.shape, weight.shape[0] // 2
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    padded_rows, half = _rows_of(rows), TILE.value // 2
    low = _low_columns(x, added, half, ring.entries, early=early, shape=shrink)
    _silu_kernel[(-(-columns // half),)](
        describe(weight, (half, ring.entries)), describe(x, (padded_rows, ring.entries)), bias, out, *low.tensors,
        rows, columns, k // ring.entries, low.chunks, ROWS=padded_rows, ENTRIES=ring.entries, BUFFERS=ring.buffers,
        BIAS=bias is not None, EARLY=early, **low.constants, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, added: AddedLowRank | None, *, early: bool) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if added is None else add_low_rank(y, x, *added, early=early)


def part_rows(width: int, dtype: torch.dtype, matrices: Sequence[Tensor | CodedWeight]) -> int:
    """Up to how many rows a block's matmuls use these kernels and those of skinny_coded.py and skinny_blocks.py."""
    if dtype.itemsize != 2 or width % NARROW.entries:
        return 0
    codes = [matrix for matrix in matrices if isinstance(matrix, CodedWeight)]
    if not all(skinny_coded.fits_weight(code) or skinny_blocks.fits_weight(code) for code in codes):
        return 0
    most = [_most_rows(code) for code in codes] + [MOST_ROWS] * (len(codes) < len(matrices))
    least = rounded_rows(matrices)  # from which on inputs are rounded
    return min(most + [least - 1] * (least > 0))


def rounded_rows(matrices: Sequence[Tensor | CodedWeight]) -> int:
    """ops.rounded.rounded_rows: fewer than elsewhere, where all are multiplied by skinny_rounded.py."""
    least = coded.rounded_rows(matrices)
    is_fast = all(isinstance(matrix, CodedWeight) and skinny_rounded.fits_weight(matrix) for matrix in matrices)
    return min(least, skinny_rounded.LEAST_ROWS) if is_fast else least


def _most_rows(weight: CodedWeight) -> int:
    return skinny_blocks.MOST_ROWS if weight.is_blocked else skinny_coded.most_rows(weight)


def added_rows(matrices: Sequence[tuple[Tensor | CodedWeight, LowRank]]) -> int:
    """Up to how many rows these kernels add adapters themselves."""
    return MOST_ROWS if all(isinstance(matrix, Tensor) and adds(matrix, low) for matrix, low in matrices) else 0


class SkinnyForms:
    """ops.few.linear_parts and linear_act of numbers and of codes, ops.rounded's of rounded inputs; `acts` are the
    gated activations by function."""

    def __init__(self, acts: Mapping[Callable, int], *, processors: int, early: bool) -> None:
        self._acts, self._processors, self._early = acts, processors, early
        self._other = CodedLinear(early=early)

    def linear_parts(
        self, x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, added: AddedLowRank | None = None
    ) -> PartialSums:
        if isinstance(weight, Tensor):
            return linear_parts(x, weight, bias, added, processors=self._processors, early=self._early)
        if added is not None:
            return PartialSums(self._coded_with(x, weight, bias, added).float()[None], x.dtype)
        if skinny_blocks.fits(x, weight):
            return skinny_blocks.linear_parts(x, weight, bias, processors=self._processors, early=self._early)
        if not skinny_coded.fits(x, weight):
            return PartialSums(self._other(x, weight, bias).float()[None], x.dtype)
        return skinny_coded.linear_parts(x, weight, bias, processors=self._processors, early=self._early)

    def linear_act(
        self,
        x: Tensor,
        weight: Tensor | CodedWeight,
        bias: Tensor | None,
        act: Callable[[Tensor], Tensor],
        added: AddedLowRank | None = None,
    ) -> Tensor:
        if isinstance(weight, Tensor):
            return linear_act(x, weight, bias, act, added, codes=self._acts, early=self._early)
        if added is not None:
            return act(self._coded_with(x, weight, bias, added))
        if self._acts.get(act) == SILU and skinny_coded.fits(x, weight):
            return skinny_coded.linear_silu(x, weight, bias, early=self._early)
        if self._acts.get(act) == SILU and skinny_blocks.fits(x, weight) and len(x) <= skinny_blocks.MOST_GATED:
            return skinny_blocks.linear_silu(x, weight, bias, early=self._early)
        return act(self.coded_linear(x, weight, bias))

    def rounded_parts(self, x: RoundedRows, weight: CodedWeight, bias: Tensor | None) -> Tensor | PartialSums:
        """ops.rounded.rounded_parts."""
        if skinny_rounded.fits(x, weight):
            return skinny_rounded.linear_parts(x, weight, bias, processors=self._processors, early=self._early)
        return coded.rounded_linear(x, weight, bias, early=self._early)

    def rounded_act(
        self, x: RoundedRows, weight: CodedWeight, bias: Tensor | None, act: Callable[[Tensor], Tensor], code: RowCode
    ) -> RoundedRows:
        """ops.rounded.rounded_act."""
        if self._acts.get(act) != SILU or not skinny_rounded.fits(x, weight):
            return coded.rounded_act(x, weight, bias, act, code, acts=self._acts, early=self._early)
        y = skinny_rounded.linear_silu(x, weight, bias, processors=self._processors, early=self._early)
        return RoundedRows(*coded.quantize_rows(y, code.dtype, code.group or y.shape[1], early=self._early), y.dtype)

    def _coded_with(self, x: Tensor, weight: CodedWeight, bias: Tensor | None, added: AddedLowRank) -> Tensor:
        return add_low_rank(self.coded_linear(x, weight, bias), x, *added, early=self._early)

    def coded_linear(self, x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
        """ops.coded.coded_linear: what these kernels are faster at than others."""
        rows = x.shape[0] if x.ndim == 2 else 0
        if rows and skinny_blocks.fits(x, weight):
            return skinny_blocks.linear(x, weight, bias, processors=self._processors, early=self._early)
        if rows >= skinny_rounded.LEAST_ROWS and skinny_rounded.takes_whole(x, weight, self._processors):
            codes = RoundedRows(*coded.quantize_rows(x, weight.codes.dtype, weight.group, early=self._early), x.dtype)
            return skinny_rounded.linear(codes, weight, bias, processors=self._processors, early=self._early)
        if rows > 1 and skinny_coded.fits(x, weight) and skinny_coded.is_whole(rows, weight, self._processors):
            return skinny_coded.linear(x, weight, bias, early=self._early)
        if rows >= skinny_coded.LEAST_ROWS and skinny_coded.fits(x, weight):
            return self.linear_parts(x, weight, bias).whole()
        return self._other(x, weight, bias)


def add_forms(table: FormTable, codes: Mapping[Callable, int], fits: Fits, *, early: bool) -> None:
    """The forms of this device; `codes` as in `linear_act`."""
    launch.DESCRIPTORS.add(TensorDescriptor)
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    forms = SkinnyForms(codes, processors=processors, early=early)
    table.form(few_ops.part_rows, fits)(part_rows)
    table.form(few_ops.added_rows, fits)(added_rows)
    table.form(few_ops.linear_parts, fits)(forms.linear_parts)
    table.form(few_ops.linear_act, fits)(forms.linear_act)
    table.form(coded_ops.coded_linear, fits)(forms.coded_linear)
    table.form(rounded_ops.rounded_rows, fits)(rounded_rows)
    table.form(rounded_ops.rounded_parts, fits)(forms.rounded_parts)
    table.form(rounded_ops.rounded_act, fits)(forms.rounded_act)
