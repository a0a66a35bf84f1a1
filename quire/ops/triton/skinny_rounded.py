"""Matmuls of some rows of 8 bits with a matrix of fp8 codes on Hopper: skinny.py for codes on both sides.

Both operands of `wgmma` are codes in shared memory, so nothing is widened: the matrix is the M operand, in tiles of 64
or 128 of its rows, and all rows of inputs are the N operand. A program has a tile and a split of K, which come by TMA
through a ring of buffers; while one buffer is multiplied, the one before it is filled again. Scales, of a row on either
side, multiply the float32 sums. Splits of K are added up by the consumer (ops/parts.py).

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

from quire.ops.coded import CodedWeight, is_simple
from quire.ops.parts import PartialSums
from quire.ops.rounded import RoundedRows
from quire.ops.triton.descriptors import describe, load_tile

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
def _fill_rows(rows, staged, barrier, place, buffer, first, PIECES: gl.constexpr):
    for piece in gl.static_range(PIECES):
        load_tile(rows, [first, (buffer * PIECES + piece) * DEPTH], barrier, staged.index(place * PIECES + piece))


@gluon.constexpr_function
def _layout(tile: int, rows: int, warps: int) -> gl.NVMMADistributedLayout:
    """Of a tile's sums: warp groups share its rows of the matrix, and where there are not enough, the inputs."""
    across = warps * 16 // tile
    return gl.NVMMADistributedLayout([3, 0], [warps // across, across], [16, rows // across, 32])


@gluon.jit
def _product(
    matrix, narrow, rows, first, column, begin, end, other,
    TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr,
    GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """[TILE, ROWS]: the tile's rows of the matrix times ROWS rows from `first` on, over buffers [begin, end) of PIECES
    pieces of K; and [ADDED, ROWS] of the rows of the matrix that follow, if there are any."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ring = gl.allocate_shared_memory(matrix.dtype, [BUFFERS * PIECES, TILE, DEPTH], layout)
    staged = gl.allocate_shared_memory(rows.dtype, [BUFFERS * PIECES, ROWS, DEPTH], layout)
    added = ring
    if ADDED:
        added = gl.allocate_shared_memory(matrix.dtype, [BUFFERS * PIECES, ADDED, DEPTH], layout)
    barriers = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = PIECES * (TILE + ADDED + ROWS) * DEPTH
    for at in gl.static_range(BUFFERS):
        mbarrier.init(barriers.index(at), count=1)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            barrier = barriers.index(at)
            mbarrier.expect(barrier, BYTES)
            _fill_both(
                matrix, narrow, ring, added, barrier, at, begin + at, column, other, TILE, ADDED, PIECES, GATED
            )  # fmt: skip
    if EARLY:
        gdc_wait()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            _fill_rows(rows, staged, barriers.index(at), at, begin + at, first, PIECES)
    acc = gl.zeros([TILE, ROWS], gl.float32, layout=_layout(TILE, ROWS, gl.num_warps()))
    more = gl.zeros([ADDED or 64, ROWS], gl.float32, layout=_layout(ADDED or 64, ROWS, gl.num_warps()))
    MATMULS: gl.constexpr = PIECES * (2 if ADDED else 1)  # of a turn
    turns = end - begin
    gl.assume(turns > 0)  # without a way around the loop the assembler lets matmuls overlap
    for turn in range(0, turns):
        place = turn % BUFFERS
        mbarrier.wait(barriers.index(place), (turn // BUFFERS) & 1)
        for piece in gl.static_range(PIECES):
            inputs = staged.index(place * PIECES + piece).permute((1, 0))
            acc = warpgroup_mma(ring.index(place * PIECES + piece), inputs, acc, is_async=True)
            if ADDED:
                more = warpgroup_mma(added.index(place * PIECES + piece), inputs, more, is_async=True)
        if ADDED:
            acc, more = warpgroup_mma_wait(MATMULS, deps=(acc, more))
        else:
            acc = warpgroup_mma_wait(MATMULS, deps=(acc,))
        buffer = begin + turn - 1 + BUFFERS  # into the place of the turn before, whose matmuls are over
        if (turn > 0) & (buffer < end):
            free = (turn + BUFFERS - 1) % BUFFERS
            mbarrier.expect(barriers.index(free), BYTES)
            _fill_both(
                matrix, narrow, ring, added, barriers.index(free), free, buffer, column, other, TILE, ADDED, PIECES,
                GATED,
            )  # fmt: skip
            _fill_rows(rows, staged, barriers.index(free), free, buffer, first, PIECES)
    if ADDED:
        acc, more = warpgroup_mma_wait(0, deps=(acc, more))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    for at in gl.static_range(BUFFERS):
        mbarrier.invalidate(barriers.index(at))
    return acc, more


@gluon.jit
def _store_part(
    acc, scale, row_scale, bias, sums, first, column, part, num_rows, columns, BIAS: gl.constexpr
):  # fmt: skip
    """acc times the scales of both sides, to sums [parts, num_rows, columns], in pieces of 16 bytes."""
    LANES: gl.constexpr = min(32, acc.shape[0] // 4)  # along a row of the result
    own: gl.constexpr = gl.BlockedLayout([4, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1])
    wide = gl.convert_layout(acc, own)
    n = column + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, own))
    m = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, own))
    wide *= gl.load(scale + n, mask=n < columns, other=0.0)[:, None]
    wide *= gl.load(row_scale + m, mask=m < num_rows, other=0.0)[None, :]
    if BIAS:
        wide += gl.load(bias + n, mask=(n < columns) & (part == 0), other=0.0).to(gl.float32)[:, None]
    at = sums + (part * num_rows + m).to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, wide, mask=(n < columns)[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "buffers", "parts"])
def _parts_kernel(
    matrix, narrow, rows, scale, row_scale, bias, sums, num_rows, columns, buffers, parts,
    TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr,
    BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles * parts). sums [parts, num_rows, columns] = rows matrix', each over its split
    of K."""
    first, part = gl.program_id(0) * ROWS, gl.program_id(1) % parts
    column = gl.program_id(1) // parts * (TILE + ADDED)
    begin, end = part * buffers // parts, (part + 1) * buffers // parts
    acc, more = _product(
        matrix, narrow, rows, first, column, begin, end, 0, TILE, ADDED, ROWS, PIECES, BUFFERS, False, EARLY
    )  # fmt: skip
    _store_part(acc, scale, row_scale, bias, sums, first, column, part, num_rows, columns, BIAS)
    if ADDED:
        _store_part(more, scale, row_scale, bias, sums, first, column + TILE, part, num_rows, columns, BIAS)


@gluon.jit
def _store_silu(
    acc, scale, row_scale, bias, out, first, column, num_rows, columns, BIAS: gl.constexpr
):  # fmt: skip
    """acc holds gates, then ups, without scales: out [num_rows, columns] = silu(gate) * up, in pieces of 16 bytes."""
    HALF: gl.constexpr = acc.shape[0] // 2
    LANES: gl.constexpr = HALF // 8  # along a row of the result
    WARPS: gl.constexpr = gl.num_warps()
    kind: gl.constexpr = out.dtype.element_ty
    pairs: gl.constexpr = gl.BlockedLayout([8, 1, 2], [LANES, 32 // LANES, 1], [1, WARPS, 1], [2, 0, 1])
    own: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    both = gl.convert_layout(gl.permute(gl.reshape(acc, [2, HALF, acc.shape[1]]), [1, 2, 0]), pairs)
    gate, up = gl.split(both)  # of one column in one thread
    gate, up = gl.convert_layout(gate, own), gl.convert_layout(up, own)
    n = column + gl.arange(0, HALF, layout=gl.SliceLayout(1, own))
    m = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, own))
    inside = n < columns
    by = gl.load(row_scale + m, mask=m < num_rows, other=0.0)[None, :]
    gate *= gl.load(scale + n, mask=inside, other=0.0)[:, None] * by
    up *= gl.load(scale + columns + n, mask=inside, other=0.0)[:, None] * by
    if BIAS:
        gate += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)[:, None]
        up += gl.load(bias + columns + n, mask=inside, other=0.0).to(gl.float32)[:, None]
    gate, up = gate.to(kind).to(gl.float32), up.to(kind).to(gl.float32)  # rounded where separate ops round
    gate = (gate / (1.0 + gl.exp(-gate))).to(kind).to(gl.float32)
    at = out + m.to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, (gate * up).to(kind), mask=inside[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "buffers"])
def _silu_kernel(
    matrix, narrow, rows, scale, row_scale, bias, out, num_rows, columns, buffers,
    TILE: gl.constexpr, ADDED: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr,
    BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles). out [num_rows, columns] = silu(gate) * up; the matrix holds gate rows, then up
    rows."""
    first, column = gl.program_id(0) * ROWS, gl.program_id(1) * ((TILE + ADDED) // 2)
    acc, more = _product(
        matrix, narrow, rows, first, column, 0, buffers, columns, TILE, ADDED, ROWS, PIECES, BUFFERS, True, EARLY
    )  # fmt: skip
    _store_silu(acc, scale, row_scale, bias, out, first, column, num_rows, columns, BIAS)
    if ADDED:
        begin = column + TILE // 2
        _store_silu(more, scale, row_scale, bias, out, first, begin, num_rows, columns, BIAS)


def fits_weight(weight: CodedWeight) -> bool:
    """Whether the kernels read codes of this form."""
    return (
        is_simple(weight)
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


# Among the best of those that were tried on an H200 (docs/log.md), by the most rows of a tile. The tall ones of a gated
# matrix are for those that they divide evenly among the multiprocessors.
_RINGS = {64: RoundedRing(64, 64, 2, 3, 2), 128: RoundedRing(128, 128, 1, 6, 1), 256: RoundedRing(128, 256, 1, 4, 1)}
_GATED = {64: RoundedRing(64, 64, 1, 4, 3), 128: RoundedRing(64, 128, 1, 3, 3), 256: RoundedRing(64, 128, 1, 3, 3)}
_TALL = {128: RoundedRing(192, 128, 1, 5, 1), 256: RoundedRing(192, 256, 1, 4, 1)}
_ODD = RoundedRing(64, 64, 1, 4, 3)  # of a K that is no multiple of two pieces
_EVEN = 0.8  # least share of the multiprocessors that such tiles keep busy


def ring_of(rows: int, columns: int, width: int, processors: int, *, gated: bool = False) -> RoundedRing:
    most = 64 if rows <= 64 else 128 if rows <= 128 else 256
    ring = _GATED[most] if gated else _RINGS[most]
    if gated and most in _TALL:
        tiles = -(-columns // _TALL[most].tile)
        if tiles >= _EVEN * processors * -(-tiles // processors):
            ring = _TALL[most]
    return ring if width % (ring.pieces * DEPTH.value) == 0 else _ODD


def _tiles(ring: RoundedRing) -> tuple[int, int]:
    """Rows of the matrix that warp groups have as a whole, and those added to them."""
    return (128, ring.tile - 128) if ring.tile > 128 else (ring.tile, 0)


def _arguments(bias: Tensor | None, ring: RoundedRing, early: bool) -> dict[str, object]:
    tile, added = _tiles(ring)
    warps = tile // 16
    return {
        "TILE": tile, "ADDED": added, "ROWS": ring.rows, "PIECES": ring.pieces, "BUFFERS": ring.buffers,
        "BIAS": bias is not None, "EARLY": early, "num_warps": warps,
        **({"launch_pdl": True} if early else {}),
    }  # fmt: skip


def _described(x: RoundedRows, weight: CodedWeight, ring: RoundedRing, share: int) -> tuple[TensorDescriptor, ...]:
    """The matrix, once for each height of tiles, of which a load has one part of `share`; the inputs."""
    (tile, added), depth = _tiles(ring), DEPTH.value
    matrices = [describe(weight.codes, (height // share, depth)) for height in (tile, added or tile)]
    return *matrices, describe(x.codes, (ring.rows, depth))


def linear_parts(
    x: RoundedRows, weight: CodedWeight, bias: Tensor | None, *, processors: int, early: bool = False,
    ring: RoundedRing | None = None, parts: int = 0,
) -> PartialSums:  # fmt: skip
    rows, columns = x.codes.shape[0], weight.rows
    ring = ring or ring_of(rows, columns, weight.width, processors)
    buffers, tiles = weight.width // (DEPTH.value * ring.pieces), -(-columns // ring.tile)
    row_tiles = -(-rows // ring.rows)
    parts = parts or max(1, min(processors * ring.programs // (tiles * row_tiles), buffers // 2, _MOST_PARTS))
    sums = torch.empty((parts, rows, columns), dtype=torch.float32, device=x.codes.device)
    _parts_kernel[(row_tiles, tiles * parts)](
        *_described(x, weight, ring, 1), weight.scale, x.scale, bias, sums, rows, columns, buffers, parts,
        **_arguments(bias, ring, early),
    )  # fmt: skip
    return PartialSums(sums, x.dtype)


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
        **_arguments(bias, ring, early),
    )  # fmt: skip
    return out
