"""Matmuls of some rows of 8 bits with a matrix of such codes on Hopper: skinny.py for codes on both sides.

Both operands of `wgmma` are codes in shared memory, so nothing is widened: the matrix is the M operand, in tiles of 64
or 128 of its rows, and all rows of inputs are the N operand. A program has a tile and a split of K, which come by TMA
through a ring of buffers; while one buffer is multiplied, the one before it is filled again. Sums are float32 of fp8
codes, and whole numbers of int8 ones; scales, of a row on either side, multiply them. Splits of K are added up by the
consumer (ops/parts.py); a matrix with tiles enough for all multiprocessors, as that of the output, has no splits.

Floor: the bytes of the codes at 4.3 TB/s, or 2 T N K operations at 1,400 TFLOP/s. 24576 x 4096: 101 MB, 23 us; with 256
rows 37 us. Needs: K a multiple of 128, a scale for each row of the matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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

from quire.ops.coded import CodedWeight
from quire.ops.parts import PartialSums
from quire.ops.rounded import RoundedRows
from quire.ops.triton.descriptors import describe, load_tile
from quire.ops.triton.skinny_coded import stored_layout

DEPTH = gl.constexpr(128)  # entries of K that are multiplied at once: what a row of a swizzled tile holds
_MOST_PARTS = 8
LEAST_ROWS, MOST_ROWS = 33, 256  # of inputs for which these kernels are the fastest


class RoundedRing(NamedTuple):
    """How a program reads its split of K."""

    tile: int  # columns of the result, as rows of the matrix: 64 for every four warps
    rows: int  # of inputs
    pieces: int  # of DEPTH entries in a buffer
    buffers: int
    programs: int  # per multiprocessor, for which K is split


@gluon.jit
def _fill(matrix, ring, barrier, place, buffer, column, other, PIECES: gl.constexpr, GATED: gl.constexpr):
    """Load the tile's codes of one buffer. GATED: half of its rows are `other` rows further."""
    HALF: gl.constexpr = ring.shape[1] // 2
    for piece in gl.static_range(PIECES):
        to, k = ring.index(place * PIECES + piece), (buffer * PIECES + piece) * DEPTH
        if GATED:
            load_tile(matrix, [column, k], barrier, to.slice(0, HALF, 0))
            load_tile(matrix, [other + column, k], barrier, to.slice(HALF, HALF, 0))
        else:
            load_tile(matrix, [column, k], barrier, to)


@gluon.jit
def _fill_both(
    matrix, narrow, ring, added, barrier, place, buffer, column, other,
    TILE: gl.constexpr, ADDED: gl.constexpr, PIECES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    _fill(matrix, ring, barrier, place, buffer, column, other, PIECES, GATED)
    if ADDED:
        begin = column + (TILE // 2 if GATED else TILE)
        _fill(narrow, added, barrier, place, buffer, begin, other, PIECES, GATED)


@gluon.jit
def _fill_rows(
    rows, others, staged, beside, barrier, place, buffer, first, ROWS: gl.constexpr, BESIDE: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    for piece in gl.static_range(PIECES):
        at, k = place * PIECES + piece, (buffer * PIECES + piece) * DEPTH
        load_tile(rows, [first, k], barrier, staged.index(at))
        if BESIDE:
            load_tile(others, [first + ROWS, k], barrier, beside.index(at))


@gluon.constexpr_function
def _layout(tile: int, rows: int, warps: int) -> gl.NVMMADistributedLayout:
    """Of a tile's sums: warp groups share its rows of the matrix, and where there are not enough, the inputs."""
    across = warps * 16 // tile
    return gl.NVMMADistributedLayout([3, 0], [warps // across, across], [16, rows // across, 32])


@gluon.jit
def _begin(
    matrix, narrow, rows, others, first, column, begin, end, other,
    TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr, BESIDE: gl.constexpr, PIECES: gl.constexpr,
    BUFFERS: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The ring (codes of the tile, of the rows of the matrix that follow, inputs, those that follow, barriers), whose
    buffers are on their way. What kernels before this one make may be read from now on."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ring = gl.allocate_shared_memory(matrix.dtype, [BUFFERS * PIECES, TILE, DEPTH], layout)
    staged = gl.allocate_shared_memory(rows.dtype, [BUFFERS * PIECES, ROWS, DEPTH], layout)
    added, beside = ring, staged
    if ADDED:
        added = gl.allocate_shared_memory(matrix.dtype, [BUFFERS * PIECES, ADDED, DEPTH], layout)
    if BESIDE:
        beside = gl.allocate_shared_memory(rows.dtype, [BUFFERS * PIECES, BESIDE, DEPTH], layout)
    barriers = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(BUFFERS):
        mbarrier.init(barriers.index(at), count=1)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            barrier = barriers.index(at)
            mbarrier.expect(barrier, PIECES * (TILE + ADDED + ROWS + BESIDE) * DEPTH)
            _fill_both(
                matrix, narrow, ring, added, barrier, at, begin + at, column, other, TILE, ADDED, PIECES, GATED
            )  # fmt: skip
    if EARLY:
        gdc_wait()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            _fill_rows(rows, others, staged, beside, barriers.index(at), at, begin + at, first, ROWS, BESIDE, PIECES)
    return ring, added, staged, beside, barriers


@gluon.jit
def _zeros(HEIGHT: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    return gl.zeros([HEIGHT or 64, ROWS or 64], SUMS, layout=_layout(HEIGHT or 64, ROWS or 64, gl.num_warps()))


@gluon.jit
def _waited(LEFT: gl.constexpr, acc, more, wide, corner, ADDED: gl.constexpr, BESIDE: gl.constexpr):
    """When no more than LEFT matmuls are under way."""
    if ADDED and BESIDE:
        acc, more, wide, corner = warpgroup_mma_wait(LEFT, deps=(acc, more, wide, corner))
    elif ADDED:
        acc, more = warpgroup_mma_wait(LEFT, deps=(acc, more))
    elif BESIDE:
        acc, wide = warpgroup_mma_wait(LEFT, deps=(acc, wide))
    else:
        acc = warpgroup_mma_wait(LEFT, deps=(acc,))
    return acc, more, wide, corner


@gluon.jit
def _product(
    matrix, narrow, rows, others, ring, added, staged, beside, barriers, first, column, begin, end, other,
    TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr, BESIDE: gl.constexpr, PIECES: gl.constexpr,
    BUFFERS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """[TILE, ROWS]: the tile's rows of the matrix times ROWS rows from `first` on, over buffers [begin, end) of PIECES
    pieces of K; [ADDED, ROWS] of the rows of the matrix that follow, if there are any; and both with the BESIDE rows of
    inputs that follow, if there are any."""
    BYTES: gl.constexpr = PIECES * (TILE + ADDED + ROWS + BESIDE) * DEPTH
    MATMULS: gl.constexpr = PIECES * (2 if ADDED else 1) * (2 if BESIDE else 1)  # of a turn
    SUMS: gl.constexpr = gl.int32 if matrix.dtype == gl.int8 else gl.float32
    acc, more = _zeros(TILE, ROWS, SUMS), _zeros(ADDED, ROWS, SUMS)
    wide, corner = _zeros(TILE, BESIDE, SUMS), _zeros(ADDED, BESIDE, SUMS)
    turns = end - begin
    gl.assume(turns > 0)  # without a way around the loop the assembler lets matmuls overlap
    for turn in range(0, turns):
        place = turn % BUFFERS
        mbarrier.wait(barriers.index(place), (turn // BUFFERS) & 1)
        for piece in gl.static_range(PIECES):
            at = place * PIECES + piece
            inputs = staged.index(at).permute((1, 0))
            acc = warpgroup_mma(ring.index(at), inputs, acc, is_async=True)
            if ADDED:
                more = warpgroup_mma(added.index(at), inputs, more, is_async=True)
            if BESIDE:
                following = beside.index(at).permute((1, 0))
                wide = warpgroup_mma(ring.index(at), following, wide, is_async=True)
                if ADDED:
                    corner = warpgroup_mma(added.index(at), following, corner, is_async=True)
        acc, more, wide, corner = _waited(MATMULS, acc, more, wide, corner, ADDED, BESIDE)
        buffer = begin + turn - 1 + BUFFERS  # into the place of the turn before, whose matmuls are over
        if (turn > 0) & (buffer < end):
            free = (turn + BUFFERS - 1) % BUFFERS
            mbarrier.expect(barriers.index(free), BYTES)
            _fill_both(
                matrix, narrow, ring, added, barriers.index(free), free, buffer, column, other, TILE, ADDED, PIECES,
                GATED,
            )  # fmt: skip
            _fill_rows(rows, others, staged, beside, barriers.index(free), free, buffer, first, ROWS, BESIDE, PIECES)
    acc, more, wide, corner = _waited(0, acc, more, wide, corner, ADDED, BESIDE)
    for at in gl.static_range(BUFFERS):
        mbarrier.invalidate(barriers.index(at))
    return acc, more, wide, corner


@gluon.jit
def _scales(scale, column, columns, other, HEIGHT: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Of a tile's rows of the matrix, where its sums have them: few registers, so they are read before the loop."""
    row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, _layout(HEIGHT, ROWS, gl.num_warps())))
    n = column + (row % (HEIGHT // 2) if GATED else row)
    at = n + row // (HEIGHT // 2) * other if GATED else n
    return gl.load(scale + at, mask=n < columns, other=0.0)


@gluon.jit
def _all_scales(
    scale, column, then, columns, other, TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr,
    BESIDE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """For each of the sums of `_product`; of those that there are not, what is there."""
    first = _scales(scale, column, columns, other, TILE, ROWS, GATED)
    second, third, fourth = first, first, first
    if ADDED:
        second = _scales(scale, then, columns, other, ADDED, ROWS, GATED)
    if BESIDE:
        third = _scales(scale, column, columns, other, TILE, BESIDE, GATED)
        if ADDED:
            fourth = _scales(scale, then, columns, other, ADDED, BESIDE, GATED)
    return first, second, third, fourth


@gluon.jit
def _store_part(
    acc, scale, row_scale, bias, sums, first, column, part, num_rows, columns, BIAS: gl.constexpr
):  # fmt: skip
    """acc times the scales of both sides, to sums [parts, num_rows, columns], in pieces of 16 bytes."""
    ENTRIES: gl.constexpr = 128 // sums.dtype.element_ty.primitive_bitwidth
    own: gl.constexpr = stored_layout(acc.shape[0], ENTRIES, gl.num_warps())
    m = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, own))
    by = gl.load(row_scale + m, mask=m < num_rows, other=0.0)[None, :]
    n = column + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, own))
    wide = gl.convert_layout(acc.to(gl.float32) * scale[:, None], own) * by
    if BIAS:
        wide += gl.load(bias + n, mask=(n < columns) & (part == 0), other=0.0).to(gl.float32)[:, None]
    at = sums + (part * num_rows + m).to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, wide.to(sums.dtype.element_ty), mask=(n < columns)[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "buffers", "parts"])
def _parts_kernel(
    matrix, narrow, rows, others, scale, row_scale, bias, sums, num_rows, columns, buffers, parts,
    TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr, BESIDE: gl.constexpr, PIECES: gl.constexpr,
    BUFFERS: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles * parts). sums [parts, num_rows, columns] = rows matrix', each over its split
    of K."""
    first, part = gl.program_id(0) * (ROWS + BESIDE), gl.program_id(1) % parts
    column = gl.program_id(1) // parts * (TILE + ADDED)
    begin, end = part * buffers // parts, (part + 1) * buffers // parts
    by = _all_scales(scale, column, column + TILE, columns, 0, TILE, ADDED, ROWS, BESIDE, False)
    ring, added, staged, beside, barriers = _begin(
        matrix, narrow, rows, others, first, column, begin, end, 0, TILE, ADDED, ROWS, BESIDE, PIECES, BUFFERS, False,
        EARLY,
    )  # fmt: skip
    acc, more, wide, corner = _product(
        matrix, narrow, rows, others, ring, added, staged, beside, barriers, first, column, begin, end, 0, TILE, ADDED,
        ROWS, BESIDE, PIECES, BUFFERS, False,
    )  # fmt: skip
    _store_part(acc, by[0], row_scale, bias, sums, first, column, part, num_rows, columns, BIAS)
    if ADDED:
        _store_part(more, by[1], row_scale, bias, sums, first, column + TILE, part, num_rows, columns, BIAS)
    if BESIDE:
        first += ROWS
        _store_part(wide, by[2], row_scale, bias, sums, first, column, part, num_rows, columns, BIAS)
        if ADDED:
            _store_part(corner, by[3], row_scale, bias, sums, first, column + TILE, part, num_rows, columns, BIAS)


# Four instructions where the compiler makes ten, to be right to the last bit: a program has one multiprocessor to
# itself, and nothing is multiplied while it does this for 24,576 results.
_SIGMOID = gl.constexpr("""
    {
    .reg .f32 a;
    mul.f32 a, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 a, a;
    add.f32 a, a, 0f3F800000;
    rcp.approx.ftz.f32 $0, a;
    }
""")


@gluon.jit
def _store_silu(
    acc, scale, row_scale, bias, out, first, column, num_rows, columns, BIAS: gl.constexpr
):  # fmt: skip
    """acc holds gates, then ups, without scales: out [num_rows, columns] = silu(gate) * up, in pieces of 16 bytes."""
    acc = acc.to(gl.float32) * scale[:, None]
    HALF: gl.constexpr = acc.shape[0] // 2
    LANES: gl.constexpr = HALF // 8  # along a row of the result
    WARPS: gl.constexpr = gl.num_warps()
    kind: gl.constexpr = out.dtype.element_ty
    pairs: gl.constexpr = gl.BlockedLayout([8, 1, 2], [LANES, 32 // LANES, 1], [1, WARPS, 1], [2, 0, 1])
    own: gl.constexpr = stored_layout(HALF, 8, WARPS)
    both = gl.convert_layout(gl.permute(gl.reshape(acc, [2, HALF, acc.shape[1]]), [1, 2, 0]), pairs)
    gate, up = gl.split(both)  # of one column in one thread
    gate, up = gl.convert_layout(gate, own), gl.convert_layout(up, own)
    n = column + gl.arange(0, HALF, layout=gl.SliceLayout(1, own))
    m = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, own))
    inside = n < columns
    by = gl.load(row_scale + m, mask=m < num_rows, other=0.0)[None, :]
    gate, up = gate * by, up * by
    if BIAS:
        gate += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)[:, None]
        up += gl.load(bias + columns + n, mask=inside, other=0.0).to(gl.float32)[:, None]
    sigmoid = gl.inline_asm_elementwise(_SIGMOID, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)
    at = out + m.to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, (gate * sigmoid * up).to(kind), mask=inside[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "buffers"])
def _silu_kernel(
    matrix, narrow, rows, others, scale, row_scale, bias, out, num_rows, columns, buffers,
    TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr, BESIDE: gl.constexpr, PIECES: gl.constexpr,
    BUFFERS: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles). out [num_rows, columns] = silu(gate) * up; the matrix holds gate rows, then up
    rows."""
    first, column = gl.program_id(0) * (ROWS + BESIDE), gl.program_id(1) * ((TILE + ADDED) // 2)
    then = column + TILE // 2
    by = _all_scales(scale, column, then, columns, columns, TILE, ADDED, ROWS, BESIDE, True)
    ring, added, staged, beside, barriers = _begin(
        matrix, narrow, rows, others, first, column, 0, buffers, columns, TILE, ADDED, ROWS, BESIDE, PIECES, BUFFERS,
        True, EARLY,
    )  # fmt: skip
    acc, more, wide, corner = _product(
        matrix, narrow, rows, others, ring, added, staged, beside, barriers, first, column, 0, buffers, columns, TILE,
        ADDED, ROWS, BESIDE, PIECES, BUFFERS, True,
    )  # fmt: skip
    _store_silu(acc, by[0], row_scale, bias, out, first, column, num_rows, columns, BIAS)
    if ADDED:
        _store_silu(more, by[1], row_scale, bias, out, first, then, num_rows, columns, BIAS)
    if BESIDE:
        first += ROWS
        _store_silu(wide, by[2], row_scale, bias, out, first, column, num_rows, columns, BIAS)
        if ADDED:
            _store_silu(corner, by[3], row_scale, bias, out, first, then, num_rows, columns, BIAS)


def fits_weight(weight: CodedWeight) -> bool:
    """Whether the kernels read codes of this form."""
    return (
        weight.kind in ("fp8", "int8")
        and weight.group == weight.width
        and weight.zero is None
        and not weight.is_blocked
        and weight.width % DEPTH.value == 0
        and weight.scale.dtype is torch.float32
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
    )


def fits(x: RoundedRows, weight: CodedWeight) -> bool:
    return (
        0 < len(x.codes) <= MOST_ROWS
        and x.codes.dtype is weight.codes.dtype
        and x.dtype.itemsize == 2
        and len(x.scale) == 1
        and x.codes.is_contiguous()
        and x.codes.data_ptr() % 16 == 0
        and fits_weight(weight)
    )


# By the most rows of a tile, in the order of preference: taken is the first that keeps _EVEN of the multiprocessors
# busy. These were the fastest for the matrices of 8B, a layer without attention timed as a whole on an H200
# (docs/log.md); with others the first one may leave most multiprocessors idle at the end. Up to _SHORT entries of K,
# few programs with a deep ring are better: most of a split is on its way before the kernel before this one ends.
_SHORT = 4096
_RINGS = {
    64: [RoundedRing(64, 64, 2, 3, 2)],
    96: [RoundedRing(128, 128, 1, 6, 1), RoundedRing(64, 128, 1, 8, 1)],
    128: [RoundedRing(64, 128, 1, 8, 1), RoundedRing(128, 128, 1, 6, 1)],
    192: [RoundedRing(64, 192, 1, 3, 2), RoundedRing(128, 192, 1, 5, 1)],
    256: [RoundedRing(64, 256, 1, 5, 1), RoundedRing(128, 256, 1, 4, 1)],
}
_SHORT_RINGS = _RINGS | {
    64: [RoundedRing(64, 64, 2, 6, 1), RoundedRing(64, 64, 2, 3, 2)],
    256: [RoundedRing(128, 128, 1, 6, 1), RoundedRing(64, 256, 1, 5, 1)],
}
_GATED = {
    64: [RoundedRing(128, 64, 1, 4, 2), RoundedRing(64, 64, 1, 4, 3)],
    96: [RoundedRing(192, 128, 1, 5, 1), RoundedRing(64, 128, 1, 3, 3)],
    128: [RoundedRing(128, 128, 1, 3, 2), RoundedRing(192, 128, 1, 5, 1), RoundedRing(64, 128, 1, 3, 3)],
    192: [RoundedRing(192, 192, 1, 4, 1), RoundedRing(64, 128, 1, 3, 3)],
    256: [RoundedRing(192, 256, 1, 4, 1), RoundedRing(64, 128, 1, 3, 3)],
}
_WHOLE = _GATED  # of matrices with tiles for all multiprocessors several times over, such as that of the output
_ODD = RoundedRing(64, 64, 1, 4, 3)  # of a K that is no multiple of two pieces
_EVEN = 0.7


def ring_of(
    rows: int, columns: int, width: int, processors: int, *, gated: bool = False, whole: bool = False
) -> RoundedRing:
    """`gated` or `whole`: K is not split."""
    most = next((most for most in _RINGS if rows <= most), 256)
    rings = (_GATED if gated else _WHOLE if whole else _SHORT_RINGS if width <= _SHORT else _RINGS)[most]
    rings = [ring for ring in rings if width % (ring.pieces * DEPTH.value) == 0] or [_ODD]
    busy = [_busy(ring, rows, columns, width, processors, split=not (gated or whole)) for ring in rings]
    return next((ring for ring, share in zip(rings, busy, strict=True) if share >= _EVEN), rings[busy.index(max(busy))])


def _busy(ring: RoundedRing, rows: int, columns: int, width: int, processors: int, *, split: bool) -> float:
    """The share of the multiprocessors' time that programs fill."""
    programs = -(-rows // ring.rows) * -(-columns // ring.tile)
    if split:
        programs *= _splits(ring, rows, columns, width, processors)
    return programs / (processors * -(-programs // processors))


def _splits(ring: RoundedRing, rows: int, columns: int, width: int, processors: int) -> int:
    """Parts of K: as many as there are multiprocessors for the tiles."""
    tiles, buffers = -(-columns // ring.tile) * -(-rows // ring.rows), width // (DEPTH.value * ring.pieces)
    return max(1, min(processors * ring.programs // tiles, buffers // 2, _MOST_PARTS))


class _Sides(NamedTuple):
    """Of a ring's tile, two of each side, whose sizes are powers of two."""

    tile: int
    added: int
    rows: int
    beside: int

    @classmethod
    def of(cls, ring: RoundedRing, dtype: torch.dtype) -> _Sides:
        """192 is 128 and 64. Of whole numbers the compiler multiplies no more than 224 rows at once."""
        rows = (128, 128) if ring.rows == 256 and dtype is torch.int8 else _parts_of(ring.rows)
        return cls(*_parts_of(ring.tile), *rows)


def _parts_of(size: int) -> tuple[int, int]:
    return (128, 64) if size == 192 else (size, 0)


def _arguments(bias: Tensor | None, ring: RoundedRing, dtype: torch.dtype, early: bool) -> dict[str, object]:
    """`dtype`: of the codes."""
    sides = _Sides.of(ring, dtype)
    return {
        "TILE": sides.tile, "ADDED": sides.added, "ROWS": sides.rows, "BESIDE": sides.beside, "PIECES": ring.pieces,
        "BUFFERS": ring.buffers, "BIAS": bias is not None, "EARLY": early, "num_warps": sides.tile // 16,
        **({"launch_pdl": True} if early else {}),
    }  # fmt: skip


def _described(x: RoundedRows, weight: CodedWeight, ring: RoundedRing, share: int) -> tuple[TensorDescriptor, ...]:
    """The matrix, once for each height of tiles, of which a load has one part of `share`; likewise the inputs."""
    sides, depth = _Sides.of(ring, weight.codes.dtype), DEPTH.value
    matrices = [describe(weight.codes, (height // share, depth)) for height in (sides.tile, sides.added or sides.tile)]
    return *matrices, *(describe(x.codes, (height, depth)) for height in (sides.rows, sides.beside or sides.rows))


def linear_parts(
    x: RoundedRows, weight: CodedWeight, bias: Tensor | None, *, processors: int, early: bool = False,
    ring: RoundedRing | None = None, parts: int = 0, kind: torch.dtype | None = None,
) -> PartialSums:  # fmt: skip
    rows, columns = x.codes.shape[0], weight.rows
    ring = ring or ring_of(rows, columns, weight.width, processors)
    buffers, tiles = weight.width // (DEPTH.value * ring.pieces), -(-columns // ring.tile)
    row_tiles = -(-rows // ring.rows)
    parts = parts or _splits(ring, rows, columns, weight.width, processors)
    kind = kind or (torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32)
    sums = torch.empty((parts, rows, columns), dtype=kind, device=x.codes.device)
    _parts_kernel[(row_tiles, tiles * parts)](
        *_described(x, weight, ring, 1), weight.scale, x.scale, bias, sums, rows, columns, buffers, parts,
        **_arguments(bias, ring, x.codes.dtype, early),
    )  # fmt: skip
    return PartialSums(sums, x.dtype)


def takes_whole(x: Tensor, weight: CodedWeight, processors: int) -> bool:
    """Whether rows of these numbers may be rounded for `linear`, which does not split K: where the matrix has tiles for
    all multiprocessors, as that of the output has."""
    rows = len(x)
    if not (weight.rounds and rows and x.dtype.itemsize == 2 and x.stride(1) == 1 and fits_weight(weight)):
        return False
    if rows > MOST_ROWS and weight.kind == "fp8":  # which the library multiplies
        return False
    ring = ring_of(rows, weight.rows, weight.width, processors, whole=True)
    return _splits(ring, rows, weight.rows, weight.width, processors) == 1


def linear(
    x: RoundedRows, weight: CodedWeight, bias: Tensor | None, *, processors: int, early: bool = False,
    ring: RoundedRing | None = None,
) -> Tensor:  # fmt: skip
    """In one kernel, where K need not be split."""
    ring = ring or ring_of(len(x.codes), weight.rows, weight.width, processors, whole=True)
    made = linear_parts(x, weight, bias, processors=processors, early=early, ring=ring, parts=1, kind=x.dtype)
    return made.sums[0]


def linear_silu(
    x: RoundedRows, weight: CodedWeight, bias: Tensor | None, *, processors: int, early: bool = False,
    ring: RoundedRing | None = None,
) -> Tensor:  # fmt: skip
    """silu(gate) * up."""
    rows, columns = x.codes.shape[0], weight.rows // 2
    ring = ring or ring_of(rows, weight.rows, weight.width, processors, gated=True)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.codes.device)
    buffers = weight.width // (DEPTH.value * ring.pieces)
    _silu_kernel[(-(-rows // ring.rows), -(-columns // (ring.tile // 2)))](
        *_described(x, weight, ring, 2), weight.scale, x.scale, bias, out, rows, columns, buffers,
        **_arguments(bias, ring, x.codes.dtype, early),
    )  # fmt: skip
    return out
