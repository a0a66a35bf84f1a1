"""Matmuls of some rows with a matrix of 4- or 8-bit codes on Hopper, on tensor cores: skinny.py for codes.

Tiles of codes go through a ring in shared memory into registers, become 16-bit numbers there, and are the M operand of
`wgmma` as such; the rows are its narrow N operand, from shared memory. What is multiplied is exact: scales multiply the
float32 sum of a group, or of a whole row. Splits of K are added up by the consumer (ops/parts.py).

Floor: the bytes of the codes at 4.3 TB/s. 24576 x 4096: fp8 101 MB, 23 us; 4 bits with scales 52 MB, 12 us.
Needs: K a multiple of 128; groups of a multiple of 128 with float32 scales, or whole rows; no zero points.
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

from quire.ops.coded import CodedWeight, is_packed
from quire.ops.parts import PartialSums
from quire.ops.triton.descriptors import describe, described, load_tile

MOST_ROWS, MOST_ROUNDING = 256, 64  # of a matmul; of one whose inputs would be rounded to 8 bits otherwise
LEAST_ROWS = 9  # from which these kernels win though somebody has to add up the splits of K
DEPTH = gl.constexpr(128)  # entries of K that are widened at once: one chunk of 4-bit codes
_MOST_PARTS = 8
_KINDS = {"fp8": 0, "int8": 1, "int4": 2, "fp4": 3}


class CodeRing(NamedTuple):
    """How a program reads its split of K."""

    tile: int  # columns of the result, as rows of the matrix: 64 for every four warps
    pieces: int  # of DEPTH entries in a buffer
    buffers: int
    programs: int  # per multiprocessor, for which K is split


def _pair(position: str, body: str) -> str:
    """A register of two bytes -> two numbers: `body` makes c of a, in whose 16-bit halves PRMT places the bytes."""
    return f"""{{
        .reg .b32 a, b, c, d;
        cvt.u32.u16 a, $2;
        prmt.b32 a, a, 0, {position};
        {body}
        mov.b32 {{$0, $1}}, c;
    }}"""


def _fp8(kind: str) -> str:
    """Exponent and mantissa in the places of the wider kind's, times the power of two by which its bias differs."""
    shift, by = (4, "0x7B807B80") if kind == "bf16" else (1, "0x5C005C00")
    return _pair(
        "0x1404",
        f"""and.b32 c, a, 0x7F007F00;
        shr.b32 c, c, {shift};
        lop3.b32 c, a, 0x80008000, c, 0xEA;
        mov.b32 d, {by};
        mul.{kind}x2 c, c, d;""",
    )


def _int8(kind: str) -> str:
    """A power of two plus the bits of the code, less that power; bfloat16 holds only 7 of them beside it."""
    if kind == "bf16":
        body = """lop3.b32 b, a, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
        sub.bf16x2 c, b, c;"""
    else:
        body = """lop3.b32 b, a, 0x00800080, 0x64006400, 0xBE;
        mov.b32 d, 0x64806480;
        sub.f16x2 c, b, d;"""
    return _pair("0x4140", body)


def _quad(body: str) -> str:
    """A register of two bytes -> four numbers: `body` makes c of a, whose 16-bit halves each begin with a code."""
    return f"""{{
        .reg .b32 a, b, c, d;
        cvt.u32.u16 a, $4;
        prmt.b32 a, a, 0, 0x4140;
        {body}
        mov.b32 {{$0, $1}}, c;
        shr.b32 a, a, 4;
        {body}
        mov.b32 {{$2, $3}}, c;
    }}"""


def _int4(kind: str) -> str:
    """A power of two plus the code, less that and the middle."""
    one, base = ("0x43004300", "0x43084308") if kind == "bf16" else ("0x64006400", "0x64086408")
    return _quad(f"""lop3.b32 c, a, 0x000F000F, {one}, 0xEA;
        mov.b32 d, {base};
        sub.{kind}x2 c, c, d;""")


def _fp4(kind: str) -> str:
    """As _fp8."""
    shift, by = (6, "0x7E807E80") if kind == "bf16" else (9, "0x74007400")
    mask = f"0x{7 << shift:04X}{7 << shift:04X}"
    return _quad(f"""shl.b32 b, a, {shift};
        shl.b32 c, a, 12;
        and.b32 c, c, 0x80008000;
        lop3.b32 c, b, {mask}, c, 0xEA;
        mov.b32 d, {by};
        mul.{kind}x2 c, c, d;""")


_BF16 = gl.constexpr((_fp8("bf16"), _int8("bf16"), _int4("bf16"), _fp4("bf16")))
_F16 = gl.constexpr((_fp8("f16"), _int8("f16"), _int4("f16"), _fp4("f16")))


@gluon.constexpr_function
def _pairs_layout(tile: int, pairs: int) -> gl.DistributedLinearLayout:
    """A thread's pairs of columns in the left operand of `wgmma`, [tile, pairs]."""
    entries = [[8, 0], *([0, 4 << i] for i in range((pairs // 4).bit_length() - 1))]
    warps = [[16 << i, 0] for i in range((tile // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(entries, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [tile, pairs])


@gluon.constexpr_function
def _rows_layout(tile: int) -> gl.DistributedLinearLayout:
    """What a thread has of [1, tile], a number for each row of that operand and of the result."""
    warps = [[0, 16 << i] for i in range((tile // 16).bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[0, 8]], lanes, warps, [], [1, tile])


@gluon.jit
def _side(first, second, operand: gl.constexpr):
    """Even and odd columns [TILE, n] -> [TILE, 2 n], which costs nothing: a thread has the pairs that it needs."""
    both = gl.join(first, second).reshape([first.shape[0], 2 * first.shape[1]])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def _wide(pairs, CODING: gl.constexpr, KIND: gl.constexpr, operand: gl.constexpr):
    """[TILE, n] pairs of bytes as [TILE, 2 n] numbers of KIND."""
    if gl.bfloat16 == KIND:
        a, b = gl.inline_asm_elementwise(
            _BF16[CODING], "=h,=h,h", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        a, b = gl.inline_asm_elementwise(
            _F16[CODING], "=h,=h,h", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return _side(a, b, operand)


@gluon.jit
def _opened(pairs, CODING: gl.constexpr, KIND: gl.constexpr, operand: gl.constexpr):
    """[TILE, n] pairs of bytes as twice [TILE, 2 n] numbers of KIND: the low halves of bytes, and the high ones."""
    if gl.bfloat16 == KIND:
        a, b, c, d = gl.inline_asm_elementwise(
            _BF16[CODING], "=h,=h,=h,=h,h", [pairs],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            _F16[CODING], "=h,=h,=h,=h,h", [pairs], dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
    return _side(a, b, operand), _side(c, d, operand)


@gluon.jit
def _fill_codes(
    matrix, ring, barrier, place, buffer, column, other, count,
    PIECES: gl.constexpr, GATED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Load the tile's codes of one buffer. GATED: half of its rows are `other` rows further. Chunks of 4-bit codes are
    `count` rows apart."""
    HALF: gl.constexpr = ring.shape[1] // 2
    for piece in gl.static_range(PIECES):
        to = ring.index(place * PIECES + piece)
        if PACKED:
            row, k = (buffer * PIECES + piece) * count, 0
        else:
            row, k = 0, (buffer * PIECES + piece) * (DEPTH // 2)
        if GATED:
            load_tile(matrix, [row + column, k], barrier, to.slice(0, HALF, 0))
            load_tile(matrix, [row + other + column, k], barrier, to.slice(HALF, HALF, 0))
        else:
            load_tile(matrix, [row + column, k], barrier, to)


@gluon.jit
def _fill_groups(
    values, ring, barrier, place, buffer, column, other, group_pieces, PIECES: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Load scales: of a piece, those of its group."""
    HALF: gl.constexpr = ring.shape[2] // 2
    for piece in gl.static_range(PIECES):
        group, to = (buffer * PIECES + piece) // group_pieces, ring.index(place * PIECES + piece)
        if GATED:
            load_tile(values, [group, column], barrier, to.slice(0, HALF, 1))
            load_tile(values, [group, other + column], barrier, to.slice(HALF, HALF, 1))
        else:
            load_tile(values, [group, column], barrier, to)


@gluon.jit
def _fill_rows(rows, staged, barrier, place, buffer, first, PIECES: gl.constexpr):
    for piece in gl.static_range(PIECES):
        k = (buffer * PIECES + piece) * DEPTH
        load_tile(rows, [first, k], barrier, staged.index(place * PIECES + piece))


@gluon.jit
def _times(
    codes, rows, acc,
    own: gl.constexpr, KIND: gl.constexpr, CODING: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """acc (FRESH: zero) + one piece of codes times that of the rows [ROWS, DEPTH]; both are in shared memory."""
    operand: gl.constexpr = gl.DotOperandLayout(0, own, 2)
    pairs = codes.load(_pairs_layout(codes.shape[0], codes.shape[1]))
    if CODING < 2:
        wide = _wide(pairs, CODING, KIND, operand)
        acc = warpgroup_mma(wide, rows.permute((1, 0)), acc, use_acc=not FRESH, is_async=True)
        acc, wide = warpgroup_mma_wait(0, deps=(acc, wide))
    else:
        HALF: gl.constexpr = DEPTH // 2
        low, high = _opened(pairs, CODING, KIND, operand)
        acc = warpgroup_mma(low, rows.slice(0, HALF, 1).permute((1, 0)), acc, use_acc=not FRESH, is_async=True)
        acc = warpgroup_mma(high, rows.slice(HALF, HALF, 1).permute((1, 0)), acc, is_async=True)
        acc, low, high = warpgroup_mma_wait(0, deps=(acc, low, high))
    return acc


@gluon.jit
def _of_rows(values, layout: gl.constexpr):
    """[1, TILE] in shared memory as [TILE]."""
    TILE: gl.constexpr = values.shape[1]
    return gl.convert_layout(values.load(_rows_layout(TILE)).reshape([TILE]), layout, assert_trivial=True)


@gluon.jit
def _group_ring(values, TILE: gl.constexpr, COUNT: gl.constexpr, USED: gl.constexpr):
    """Room for COUNT pieces' scales; if they are not USED, the least that can be allocated."""
    bits: gl.constexpr = values.dtype.primitive_bitwidth if USED else 32
    kind: gl.constexpr = values.dtype if USED else gl.float32
    return gl.allocate_shared_memory(kind, [COUNT if USED else 1, 1, TILE], gl.NVMMASharedLayout(0, bits, 2))


@gluon.jit
def _fill(
    matrix, scale, ring, scales, barrier, place, buffer, column, other, count, group_pieces,
    BYTES: gl.constexpr, PIECES: gl.constexpr, PACKED: gl.constexpr, GROUPED: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Load what a buffer has of the matrix; `barrier` waits for the rows too."""
    mbarrier.expect(barrier, BYTES)
    _fill_codes(matrix, ring, barrier, place, buffer, column, other, count, PIECES, GATED, PACKED)
    if GROUPED:
        _fill_groups(scale, scales, barrier, place, buffer, column, other, group_pieces, PIECES, GATED)


@gluon.jit
def _product(
    matrix, rows, scale, first, column, begin, end, count, other, group_pieces,
    TILE: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, CODING: gl.constexpr,
    GROUPED: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """[TILE, ROWS]: the tile's rows of the matrix, which has `count`, times ROWS rows from `first` on, over buffers
    [begin, end) of PIECES pieces of K. GROUPED: times the scales too, one for every `group_pieces` of them."""
    KIND: gl.constexpr = rows.dtype
    PACKED: gl.constexpr = CODING >= 2
    PAIRS: gl.constexpr = DEPTH // 4 if PACKED else DEPTH // 2
    codes_layout: gl.constexpr = gl.NVMMASharedLayout(64 if PACKED else 128, 16, 2)
    ring = gl.allocate_shared_memory(matrix.dtype, [BUFFERS * PIECES, TILE, PAIRS], codes_layout)
    staged = gl.allocate_shared_memory(KIND, [BUFFERS * PIECES, ROWS, DEPTH], gl.NVMMASharedLayout(128, 16, 2))
    scales = _group_ring(scale, TILE, BUFFERS * PIECES, GROUPED)
    barriers = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    SCALE: gl.constexpr = scale.dtype.primitive_bitwidth // 8 if GROUPED else 0
    BYTES: gl.constexpr = PIECES * (TILE * (2 * PAIRS + SCALE) + ROWS * DEPTH * 2)
    for at in gl.static_range(BUFFERS):
        mbarrier.init(barriers.index(at), count=1)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            _fill(
                matrix, scale, ring, scales, barriers.index(at), at, begin + at, column, other, count, group_pieces,
                BYTES, PIECES, PACKED, GROUPED, GATED,
            )  # fmt: skip
    if EARLY:
        gdc_wait()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            _fill_rows(rows, staged, barriers.index(at), at, begin + at, first, PIECES)
    own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [TILE // 16, 1], [16, ROWS, 16])
    acc = gl.zeros([TILE, ROWS], gl.float32, layout=own)
    for buffer in range(begin, end):
        turn = buffer - begin
        place = turn % BUFFERS
        mbarrier.wait(barriers.index(place), (turn // BUFFERS) & 1)
        for piece in gl.static_range(PIECES):
            at_piece = place * PIECES + piece
            codes, inputs = ring.index(at_piece), staged.index(at_piece)
            if GROUPED:
                by = _of_rows(scales.index(at_piece), gl.SliceLayout(1, own)).to(gl.float32)
                acc += _times(codes, inputs, acc, own, KIND, CODING, True) * by[:, None]
            else:
                acc = _times(codes, inputs, acc, own, KIND, CODING, False)
        if buffer + BUFFERS < end:
            _fill(
                matrix, scale, ring, scales, barriers.index(place), place, buffer + BUFFERS, column, other, count,
                group_pieces, BYTES, PIECES, PACKED, GROUPED, GATED,
            )  # fmt: skip
            _fill_rows(rows, staged, barriers.index(place), place, buffer + BUFFERS, first, PIECES)
    for at in gl.static_range(BUFFERS):
        mbarrier.invalidate(barriers.index(at))
    return acc


@gluon.constexpr_function
def stored_layout(columns: int, entries: int, warps: int) -> gl.BlockedLayout:
    """Of results that are stored in pieces of so many neighbouring columns."""
    lanes = min(32, columns // entries)
    return gl.BlockedLayout([entries, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def _scaled(acc, scale, bias, n, columns, part, GROUPED: gl.constexpr, BIAS: gl.constexpr):
    """What is left to do to the sums of columns n."""
    if not GROUPED:
        acc *= gl.load(scale + n, mask=n < columns, other=0.0).to(gl.float32)[:, None]
    if BIAS:
        acc += gl.load(bias + n, mask=(n < columns) & (part == 0), other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit(do_not_specialize=["num_rows", "columns", "buffers", "parts", "group_pieces"])
def _parts_kernel(
    matrix, rows, scale, bias, sums, num_rows, columns, buffers, parts, group_pieces,
    TILE: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, CODING: gl.constexpr,
    GROUPED: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles * parts). sums [parts, num_rows, columns] = rows matrix', each over its split
    of K."""
    first, column, part = gl.program_id(0) * ROWS, gl.program_id(1) // parts * TILE, gl.program_id(1) % parts
    begin, end = part * buffers // parts, (part + 1) * buffers // parts
    acc = _product(
        matrix, rows, scale, first, column, begin, end, columns, 0, group_pieces, TILE, ROWS, PIECES, BUFFERS, CODING,
        GROUPED, False, EARLY,
    )  # fmt: skip
    own: gl.constexpr = acc.type.layout
    n = column + gl.arange(0, TILE, layout=gl.SliceLayout(1, own))
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, own))
    acc = _scaled(acc, scale, bias, n, columns, part, GROUPED, BIAS)
    at = sums + (part * num_rows + m).to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, acc, mask=(n < columns)[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "buffers", "group_pieces"])
def _whole_kernel(
    matrix, rows, scale, bias, out, num_rows, columns, buffers, group_pieces,
    TILE: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, CODING: gl.constexpr,
    GROUPED: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles). out [num_rows, columns] = rows matrix' + bias, in pieces of 16 bytes."""
    first, column = gl.program_id(0) * ROWS, gl.program_id(1) * TILE
    acc = _product(
        matrix, rows, scale, first, column, 0, buffers, columns, 0, group_pieces, TILE, ROWS, PIECES, BUFFERS, CODING,
        GROUPED, False, EARLY,
    )  # fmt: skip
    n = column + gl.arange(0, TILE, layout=gl.SliceLayout(1, acc.type.layout))
    acc = _scaled(acc, scale, bias, n, columns, 0, GROUPED, BIAS)
    own: gl.constexpr = stored_layout(TILE, 8, gl.num_warps())
    narrow = gl.convert_layout(acc.to(out.dtype.element_ty), own)
    n = column + gl.arange(0, TILE, layout=gl.SliceLayout(1, own))
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, own))
    at = out + m.to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, narrow, mask=(n < columns)[:, None] & (m < num_rows)[None, :])


@gluon.jit
def store_silu(acc, scale, bias, out, first, column, num_rows, columns, SCALE: gl.constexpr, BIAS: gl.constexpr):
    """acc [tile, rows] holds gates, then ups: out [num_rows, columns] = silu(gate) * up, from `first`, `column` on."""
    HALF: gl.constexpr = acc.shape[0] // 2
    WARPS: gl.constexpr = acc.shape[0] // 16
    kind: gl.constexpr = out.dtype.element_ty
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])  # both in one thread
    own: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
    both = gl.convert_layout(gl.permute(gl.reshape(acc, [2, HALF, acc.shape[1]]), [1, 2, 0]), pairs)
    gate, up = gl.split(both)
    gate, up = gl.convert_layout(gate, own), gl.convert_layout(up, own)
    n = column + gl.arange(0, HALF, layout=gl.SliceLayout(1, own))
    m = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, own))
    inside = n < columns
    if SCALE:
        gate *= gl.load(scale + n, mask=inside, other=0.0).to(gl.float32)[:, None]
        up *= gl.load(scale + columns + n, mask=inside, other=0.0).to(gl.float32)[:, None]
    if BIAS:
        gate += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)[:, None]
        up += gl.load(bias + columns + n, mask=inside, other=0.0).to(gl.float32)[:, None]
    gate, up = gate.to(kind).to(gl.float32), up.to(kind).to(gl.float32)  # rounded where separate ops round
    gate = (gate / (1.0 + gl.exp(-gate))).to(kind).to(gl.float32)
    at = out + m.to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, (gate * up).to(kind), mask=inside[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "columns", "buffers", "group_pieces"])
def _silu_kernel(
    matrix, rows, scale, bias, out, num_rows, columns, buffers, group_pieces,
    TILE: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, CODING: gl.constexpr,
    GROUPED: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles). out [num_rows, columns] = silu(gate) * up; the matrix holds gate rows, then
    up rows."""
    first, column = gl.program_id(0) * ROWS, gl.program_id(1) * (TILE // 2)
    acc = _product(
        matrix, rows, scale, first, column, 0, buffers, 2 * columns, columns, group_pieces, TILE, ROWS, PIECES, BUFFERS,
        CODING, GROUPED, True, EARLY,
    )  # fmt: skip
    store_silu(acc, scale, bias, out, first, column, num_rows, columns, not GROUPED, BIAS)


def _describe_codes(weight: CodedWeight, box: int) -> TensorDescriptor:
    """As pairs of bytes; chunks of 4-bit codes one below the other."""
    packed = is_packed(weight.kind)
    pairs = DEPTH.value // 4 if packed else weight.width // 2
    rows = weight.rows * (weight.width // DEPTH.value) if packed else weight.rows
    box_pairs = DEPTH.value // 4 if packed else DEPTH.value // 2
    at, swizzle = weight.codes.data_ptr(), 64 if packed else 128
    return described(at, torch.int16, (rows, pairs), pairs, (box, box_pairs), swizzle)


def _describe_scales(weight: CodedWeight, box: int) -> TensorDescriptor | Tensor:
    """Of groups; those of whole rows are read as they are."""
    return weight.scale if weight.group == weight.width else describe(weight.scale, (1, box), 0)


def _describe_rows(x: Tensor, count: int) -> TensorDescriptor:
    return describe(x, (count, DEPTH.value))


def fits_weight(weight: CodedWeight) -> bool:
    """Whether the kernels read codes of this form."""
    depth = DEPTH.value
    return (
        weight.zero is None
        and not weight.is_blocked
        and weight.width % depth == 0
        and weight.group % depth == 0
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        and (not is_packed(weight.kind) or weight.half == depth // 2)
        and (weight.group == weight.width or _is_described(weight.scale))
    )


def _is_described(scale: Tensor) -> bool:
    """Whether TMA loads these scales: it writes to places that are multiples of 128 bytes, of which half a tile of
    float32 is one, and one of float16 is not; and reads from multiples of 16 bytes, one of which the second half of
    the columns must begin at: elsewhere it ends in an illegal instruction."""
    return (
        scale.dtype is torch.float32
        and scale.is_contiguous()
        and scale.data_ptr() % 16 == 0
        and scale.shape[1] % 8 == 0
    )


def most_rows(weight: CodedWeight) -> int:
    return MOST_ROUNDING if weight.rounds else MOST_ROWS


def fits(x: Tensor, weight: CodedWeight) -> bool:
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.shape[0] <= most_rows(weight)
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and fits_weight(weight)
    )


def ring_of(rows: int, width: int, *, gated: bool = False) -> CodeRing:
    """Among the best of those that were tried on an H200, for both 4 and 8 bits: docs/log.md."""
    if rows > 64:
        return CodeRing(64, 1, 3, 2)
    if rows > 32 or width % 256:
        return CodeRing(64, 1, 3, 4)
    return CodeRing(64, 2, 3, 2) if gated and rows <= 16 else CodeRing(64, 2, 2, 3)


def _padded(rows: int) -> int:
    """Rows of a tile."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


def _row_tiles(rows: int) -> int:
    return -(-rows // _padded(rows))


def _arguments(x: Tensor, weight: CodedWeight, bias: Tensor | None, ring: CodeRing, early: bool) -> dict[str, object]:
    return {
        "TILE": ring.tile, "ROWS": _padded(x.shape[0]), "PIECES": ring.pieces, "BUFFERS": ring.buffers,
        "CODING": _KINDS[weight.kind], "GROUPED": weight.group != weight.width,
        "BIAS": bias is not None, "EARLY": early, "num_warps": ring.tile // 16,
        **({"launch_pdl": True} if early else {}),
    }  # fmt: skip


def _num_parts(rows: int, weight: CodedWeight, ring: CodeRing, processors: int) -> int:
    """Parts of K: as many as there are multiprocessors for the tiles."""
    tiles, buffers = -(-weight.rows // ring.tile) * _row_tiles(rows), weight.width // (DEPTH.value * ring.pieces)
    return max(1, min(processors * ring.programs // tiles, buffers // 2, _MOST_PARTS))


def is_whole(rows: int, weight: CodedWeight, processors: int) -> bool:
    """Whether K need not be split, as with a matrix of the output."""
    return _num_parts(rows, weight, ring_of(rows, weight.width), processors) == 1


def linear(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, *, early: bool = False, ring: CodeRing | None = None
) -> Tensor:
    """In one kernel, where K need not be split."""
    rows, columns = x.shape[0], weight.rows
    ring = ring or ring_of(rows, weight.width)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    _whole_kernel[(_row_tiles(rows), -(-columns // ring.tile))](
        _describe_codes(weight, ring.tile), _describe_rows(x, _padded(rows)), _describe_scales(weight, ring.tile),
        bias, out, rows, columns, weight.width // (DEPTH.value * ring.pieces), weight.group // DEPTH.value,
        **_arguments(x, weight, bias, ring, early),
    )  # fmt: skip
    return out


def linear_parts(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, *, processors: int, early: bool = False,
    ring: CodeRing | None = None, parts: int = 0,
) -> PartialSums:  # fmt: skip
    rows, columns = x.shape[0], weight.rows
    ring = ring or ring_of(rows, weight.width)
    buffers, tiles = weight.width // (DEPTH.value * ring.pieces), -(-columns // ring.tile)
    parts = parts or _num_parts(rows, weight, ring, processors)
    sums = torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    _parts_kernel[(_row_tiles(rows), tiles * parts)](
        _describe_codes(weight, ring.tile), _describe_rows(x, _padded(rows)), _describe_scales(weight, ring.tile),
        bias, sums, rows, columns, buffers, parts, weight.group // DEPTH.value,
        **_arguments(x, weight, bias, ring, early),
    )  # fmt: skip
    return PartialSums(sums, x.dtype)


def linear_silu(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, *, early: bool = False, ring: CodeRing | None = None
) -> Tensor:
    """silu(gate) * up."""
    rows, columns = x.shape[0], weight.rows // 2
    ring = ring or ring_of(rows, weight.width, gated=True)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    half = ring.tile // 2
    _silu_kernel[(_row_tiles(rows), -(-columns // half))](
        _describe_codes(weight, half), _describe_rows(x, _padded(rows)), _describe_scales(weight, half), bias, out,
        rows, columns, weight.width // (DEPTH.value * ring.pieces), weight.group // DEPTH.value,
        **_arguments(x, weight, bias, ring, early),
    )  # fmt: skip
    return out
