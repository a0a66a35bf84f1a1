"""Matmuls of some rows with blocks of GGUF files on Hopper, on tensor cores: skinny_coded.py for blocks.

Tiles of codes and the words that hold their scales go through a ring in shared memory into registers. There codes
become 16-bit whole numbers (or numbers of a table), exactly, and these, times their scale and plus the middle of their
group, the M operand of `wgmma`: numbers as they would be decoded, but for two more roundings to 16 bits (of the scale
and of the middle). The rows are the narrow N operand, from shared memory. Splits of K are added up by the consumer
(ops/parts.py).

Floor: the bytes of the codes and scales at 4.3 TB/s. 24576 x 4096 of Q4_K: 58 MB, 14 us.
Needs: chunks of 128 columns, scales of 8 or 16 bits, a multiple of 8 rows.
"""

from __future__ import annotations

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

from quire.ops.coded import CENTRES, TABLES, CodedWeight, is_packed
from quire.ops.parts import PartialSums
from quire.ops.triton.coded_blocks import table_words
from quire.ops.triton.descriptors import describe, described, load_tile
from quire.ops.triton.skinny_coded import (
    CodeRing,
    _fp4,
    _int4,
    _int8,
    _pairs_layout,
    _side,
    store_silu,
)

MOST_ROWS, MOST_GATED = 256, 64  # of a matmul; of one with its activation
DEPTH = gl.constexpr(128)  # entries of K that are widened at once: one chunk
_MOST_PARTS = 8
_WIDE = 8192  # columns of a matrix that has few rows, in models
_KINDS = ("int8", "int4", "fp4", "int6", *TABLES)


# --- codes in registers, two bytes of them at a time


def _quarters(kind: str) -> str:
    """Two bytes of low halves in $8, two others in $9, and those of upper bits in $10 -> four pairs of numbers."""
    one = 0x4300 if kind == "bf16" else 0x6400
    base = one + CENTRES["int6"]
    text = f"""{{
        .reg .b32 l0, l1, h, a, b, c, e;
        mov.b32 e, 0x{base:04X}{base:04X};
        cvt.u32.u16 l0, $8;
        cvt.u32.u16 l1, $9;
        cvt.u32.u16 h, $10;
        prmt.b32 l0, l0, 0, 0x4140;
        prmt.b32 l1, l1, 0, 0x4140;
        prmt.b32 h, h, 0, 0x4140;"""
    for quarter in range(4):
        shift = 2 * quarter - 4
        text += f"""
        shr.b32 a, l{quarter % 2}, {4 if quarter > 1 else 0};
        {"shr" if shift > 0 else "shl"}.b32 b, h, {abs(shift)};
        lop3.b32 c, a, 0x000F000F, 0x{one:04X}{one:04X}, 0xEA;
        lop3.b32 c, b, 0x00300030, c, 0xEA;
        sub.{kind}x2 c, c, e;
        mov.b32 {{${2 * quarter}, ${2 * quarter + 1}}}, c;"""
    return text + "}"


def _looked_up(kind: str, table: tuple[float, ...]) -> str:
    """PRMT takes bytes of two registers by three bits of a half byte; the fourth chooses between two of its results.
    Once for the lower bytes of the numbers, once for the upper ones."""
    words = table_words(kind, table)
    text = """{
        .reg .b32 x, s, u, p, q, lo, hi;
        cvt.u32.u16 x, $4;
        and.b32 s, x, 0x7777;
        shr.b32 u, x, 1;
        lop3.b32 u, u, 0x4444, 0x3210, 0xEA;"""
    for side, shift in (("lo", 0), ("hi", 8)):
        parts = [sum((words[4 * part + i] >> shift & 255) << 8 * i for i in range(4)) for part in range(4)]
        text += f"""
        mov.b32 p, 0x{parts[0]:08X};
        mov.b32 q, 0x{parts[1]:08X};
        prmt.b32 {side}, p, q, s;
        mov.b32 p, 0x{parts[2]:08X};
        mov.b32 q, 0x{parts[3]:08X};
        prmt.b32 p, p, q, s;
        prmt.b32 {side}, {side}, p, u;"""
    return (
        text
        + """
        prmt.b32 p, lo, hi, 0x6240;
        prmt.b32 q, lo, hi, 0x7351;
        mov.b32 {$0, $1}, p;
        mov.b32 {$2, $3}, q;
    }"""
    )


def _texts(kind: str) -> tuple[str, ...]:
    """By the places of _KINDS."""
    return _int8(kind), _int4(kind), _fp4(kind), _quarters(kind), *(_looked_up(kind, t) for t in TABLES.values())


_BF16, _F16 = gl.constexpr(_texts("bf16")), gl.constexpr(_texts("f16"))
_SCALED = gl.constexpr(("mul.bf16x2 $0, $1, $2;", "mul.f16x2 $0, $1, $2;"))
_SHIFTED = gl.constexpr(("fma.rn.bf16x2 $0, $1, $2, $3;", "fma.rn.f16x2 $0, $1, $2, $3;"))
_TWO_HALVES = gl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
}""")


@gluon.jit
def _beside(first, second, operand: gl.constexpr):
    """[TILE, n] twice -> [TILE, 2 n], which costs nothing."""
    both = gl.permute(gl.join(first, second), [0, 2, 1]).reshape([first.shape[0], 2 * first.shape[1]])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def _wide(codes, high, like, CODING: gl.constexpr, operand: gl.constexpr):
    """A piece in shared memory as [TILE, DEPTH] whole numbers, as wide as `like`."""
    TILE: gl.constexpr = codes.shape[0]
    TEXT: gl.constexpr = _BF16[CODING] if gl.bfloat16 == like.dtype else _F16[CODING]
    if CODING == 0:
        a, b = gl.inline_asm_elementwise(
            TEXT, "=h,=h,h", [codes.load(_pairs_layout(TILE, 64))], dtype=(like.dtype, like.dtype), is_pure=True, pack=1
        )
        return _side(a, b, operand)
    elif CODING == 3:
        layout: gl.constexpr = _pairs_layout(TILE, 16)
        halves = gl.permute(codes.load(_pairs_layout(TILE, 32)).reshape([TILE, 2, 16]), [0, 2, 1])
        first, second = gl.split(halves)
        first = gl.convert_layout(first, layout, assert_trivial=True)
        second = gl.convert_layout(second, layout, assert_trivial=True)
        pieces = [first, second, high.load(layout)]
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,h,h,h", pieces,
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype, like.dtype, like.dtype, like.dtype, like.dtype),
            is_pure=True, pack=1,
        )  # fmt: skip
        low = _beside(_side(a, b, operand), _side(c, d, operand), operand)
        return _beside(low, _beside(_side(e, f, operand), _side(g, h, operand), operand), operand)
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,h", [codes.load(_pairs_layout(TILE, 32))],
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=1,
        )  # fmt: skip
        return _beside(_side(a, b, operand), _side(c, d, operand), operand)


@gluon.constexpr_function
def _words_layout(tile: int, words: int) -> gl.DistributedLinearLayout:
    """What a thread has of [1, tile * words]: the words of every row of the M operand that it has."""
    entries = [*([0, 1 << i] for i in range(words.bit_length() - 1)), [0, 8 * words]]
    lanes = [[0, 0], [0, 0], [0, words], [0, 2 * words], [0, 4 * words]]
    warps = [[0, 16 * words << i] for i in range((tile // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(entries, lanes, warps, [], [1, tile * words])


@gluon.jit
def _factors(words, TILE: gl.constexpr, W: gl.constexpr, BITS: gl.constexpr, SIGNED: gl.constexpr):
    """W words of each row in shared memory as its float32 numbers, [TILE, W * 32 / BITS]."""
    word = words.load(_words_layout(TILE, W)).reshape([TILE, W])
    if BITS == 16:
        low, high = gl.inline_asm_elementwise(
            _TWO_HALVES, "=f,=f,r", [word], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        factors = gl.join(low, high).reshape([TILE, 2 * W])
    else:
        if SIGNED:
            a, b = ((word << 24) >> 24).to(gl.float32), ((word << 16) >> 24).to(gl.float32)
            c, d = ((word << 8) >> 24).to(gl.float32), (word >> 24).to(gl.float32)
        else:
            a, b = (word & 255).to(gl.float32), ((word >> 8) & 255).to(gl.float32)
            c, d = ((word >> 16) & 255).to(gl.float32), ((word >> 24) & 255).to(gl.float32)
        factors = gl.join(gl.join(a, c), gl.join(b, d)).reshape([TILE, 4 * W])
    return factors


@gluon.jit
def _scaled(
    wide, scale, least, coarse,
    W: gl.constexpr, BITS: gl.constexpr, SIGNED: gl.constexpr, LEAST: gl.constexpr, FINE: gl.constexpr,
    OFFSET: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Whole numbers [TILE, DEPTH] times the scales of their groups, and the groups' middles added."""
    TILE: gl.constexpr = wide.shape[0]
    GROUPS: gl.constexpr = W * 32 // BITS
    HALF: gl.constexpr = 0 if wide.dtype == gl.bfloat16 else 1
    parts = wide.reshape([TILE, GROUPS, DEPTH // GROUPS])
    own: gl.constexpr = gl.SliceLayout(2, parts.type.layout)
    by = gl.convert_layout(_factors(scale, TILE, W, BITS, SIGNED), own, assert_trivial=True)
    if FINE:
        pair = coarse.load(_words_layout(TILE, 1)).reshape([TILE])
        first, second = gl.inline_asm_elementwise(
            _TWO_HALVES, "=f,=f,r", [pair], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        by *= gl.convert_layout(first, gl.SliceLayout(1, own), assert_trivial=True)[:, None]
    if LEAST:
        low = gl.convert_layout(_factors(least, TILE, W, BITS, False), own, assert_trivial=True)
        if FINE:
            low *= gl.convert_layout(second, gl.SliceLayout(1, own), assert_trivial=True)[:, None]
        add = by * OFFSET - low
        parts = gl.inline_asm_elementwise(
            _SHIFTED[HALF], "=r,r,r,r", [parts, by.to(wide.dtype)[:, :, None], add.to(wide.dtype)[:, :, None]],
            dtype=wide.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        parts = gl.inline_asm_elementwise(
            _SCALED[HALF], "=r,r,r", [parts, by.to(wide.dtype)[:, :, None]], dtype=wide.dtype, is_pure=True, pack=2
        )
    return gl.convert_layout(parts.reshape([TILE, DEPTH]), operand, assert_trivial=True)


# --- the ring


@gluon.jit
def _fill_rows(source, at_row, at_column, other, barrier, to, GATED: gl.constexpr):
    """A tile of rows. GATED: half of them are `other` rows further."""
    if GATED:
        HALF: gl.constexpr = to.shape[0] // 2
        load_tile(source, [at_row, at_column], barrier, to.slice(0, HALF, 0))
        load_tile(source, [at_row + other, at_column], barrier, to.slice(HALF, HALF, 0))
    else:
        load_tile(source, [at_row, at_column], barrier, to)


@gluon.jit
def _fill_words(source, chunk, column, other, barrier, to, W: gl.constexpr, GATED: gl.constexpr):
    """W words for each row of the tile."""
    if GATED:
        HALF: gl.constexpr = to.shape[1] // 2
        load_tile(source, [chunk, column * W], barrier, to.slice(0, HALF, 1))
        load_tile(source, [chunk, (column + other) * W], barrier, to.slice(HALF, HALF, 1))
    else:
        load_tile(source, [chunk, column * W], barrier, to)


@gluon.jit
def _fill(
    matrix, high, scale, least, coarse, ring, highs, scales, leasts, coarses, barrier, place, buffer, column, other,
    count,
    BYTES: gl.constexpr, PIECES: gl.constexpr, CODING: gl.constexpr, W: gl.constexpr, LEAST: gl.constexpr,
    FINE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Load what a buffer has of the matrix; `barrier` waits for the rows too."""
    mbarrier.expect(barrier, BYTES)
    for piece in gl.static_range(PIECES):
        spot, chunk = place * PIECES + piece, buffer * PIECES + piece
        if CODING == 0:
            _fill_rows(matrix, column, chunk * (DEPTH // 2), other, barrier, ring.index(spot), GATED)
        else:
            _fill_rows(matrix, chunk * count + column, 0, other, barrier, ring.index(spot), GATED)
        if CODING == 3:
            _fill_rows(high, chunk * count + column, 0, other, barrier, highs.index(spot), GATED)
        _fill_words(scale, chunk, column, other, barrier, scales.index(spot), W, GATED)
        if LEAST:
            _fill_words(least, chunk, column, other, barrier, leasts.index(spot), W, GATED)
        if FINE:
            _fill_words(coarse, chunk // 2, column, other, barrier, coarses.index(spot), 1, GATED)


@gluon.jit
def _fill_inputs(rows, staged, barrier, place, buffer, first, PIECES: gl.constexpr):
    for piece in gl.static_range(PIECES):
        load_tile(rows, [first, (buffer * PIECES + piece) * DEPTH], barrier, staged.index(place * PIECES + piece))


@gluon.jit
def _words_ring(COUNT: gl.constexpr, WORDS: gl.constexpr, USED: gl.constexpr):
    """Room for COUNT pieces; if it is not USED, the least that can be allocated."""
    return gl.allocate_shared_memory(gl.int32, [COUNT if USED else 1, 1, WORDS], gl.NVMMASharedLayout(0, 32, 2))


@gluon.jit
def _product(
    matrix, high, scale, least, coarse, rows, first, column, begin, end, count, other,
    TILE: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, CODING: gl.constexpr,
    W: gl.constexpr, BITS: gl.constexpr, SIGNED: gl.constexpr, LEAST: gl.constexpr, FINE: gl.constexpr,
    OFFSET: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """[TILE, ROWS]: the tile's rows of the matrix, which has `count`, times ROWS rows from `first` on, over buffers
    [begin, end) of PIECES chunks."""
    KIND: gl.constexpr = rows.dtype
    PAIRS: gl.constexpr = DEPTH // 2 if CODING == 0 else DEPTH // 4
    COUNT: gl.constexpr = BUFFERS * PIECES
    ring = gl.allocate_shared_memory(
        gl.int16, [COUNT, TILE, PAIRS], gl.NVMMASharedLayout(128 if CODING == 0 else 64, 16, 2)
    )
    highs = gl.allocate_shared_memory(
        gl.int16, [COUNT if CODING == 3 else 1, TILE, DEPTH // 8], gl.NVMMASharedLayout(32, 16, 2)
    )
    staged = gl.allocate_shared_memory(KIND, [COUNT, ROWS, DEPTH], gl.NVMMASharedLayout(128, 16, 2))
    scales = _words_ring(COUNT, TILE * W, True)
    leasts = _words_ring(COUNT, TILE * W, LEAST)
    coarses = _words_ring(COUNT, TILE, FINE)
    barriers = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    CODES: gl.constexpr = TILE * (2 * PAIRS + (DEPTH // 4 if CODING == 3 else 0))
    WORDS: gl.constexpr = TILE * 4 * ((2 * W if LEAST else W) + (1 if FINE else 0))
    BYTES: gl.constexpr = PIECES * (CODES + WORDS + ROWS * DEPTH * 2)
    for at in gl.static_range(BUFFERS):
        mbarrier.init(barriers.index(at), count=1)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            _fill(
                matrix, high, scale, least, coarse, ring, highs, scales, leasts, coarses, barriers.index(at), at,
                begin + at, column, other, count, BYTES, PIECES, CODING, W, LEAST, FINE, GATED,
            )  # fmt: skip
    if EARLY:
        gdc_wait()
    for at in gl.static_range(BUFFERS):
        if begin + at < end:
            _fill_inputs(rows, staged, barriers.index(at), at, begin + at, first, PIECES)
    own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [TILE // 16, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, own, 2)
    acc = gl.zeros([TILE, ROWS], gl.float32, layout=own)
    for buffer in range(begin, end):
        turn = buffer - begin
        place = turn % BUFFERS
        mbarrier.wait(barriers.index(place), (turn // BUFFERS) & 1)
        for piece in gl.static_range(PIECES):
            spot = place * PIECES + piece
            wide = _wide(ring.index(spot), highs.index(spot if CODING == 3 else 0), staged, CODING, operand)
            wide = _scaled(
                wide, scales.index(spot), leasts.index(spot if LEAST else 0), coarses.index(spot if FINE else 0), W,
                BITS, SIGNED, LEAST, FINE, OFFSET, operand,
            )  # fmt: skip
            acc = warpgroup_mma(wide, staged.index(spot).permute((1, 0)), acc, is_async=True)
            acc, wide = warpgroup_mma_wait(0, deps=(acc, wide))
        if buffer + BUFFERS < end:
            _fill(
                matrix, high, scale, least, coarse, ring, highs, scales, leasts, coarses, barriers.index(place), place,
                buffer + BUFFERS, column, other, count, BYTES, PIECES, CODING, W, LEAST, FINE, GATED,
            )  # fmt: skip
            _fill_inputs(rows, staged, barriers.index(place), place, buffer + BUFFERS, first, PIECES)
    for at in gl.static_range(BUFFERS):
        mbarrier.invalidate(barriers.index(at))
    return acc


@gluon.jit(do_not_specialize=["num_rows", "columns", "buffers", "parts"])
def _parts_kernel(
    matrix, high, scale, least, coarse, rows, bias, sums, num_rows, columns, buffers, parts,
    TILE: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, CODING: gl.constexpr,
    W: gl.constexpr, BITS: gl.constexpr, SIGNED: gl.constexpr, LEAST: gl.constexpr, FINE: gl.constexpr,
    OFFSET: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles * parts). sums [parts, num_rows, columns] = rows matrix', each over its split of K."""
    first, column, part = gl.program_id(0) * ROWS, gl.program_id(1) // parts * TILE, gl.program_id(1) % parts
    begin, end = part * buffers // parts, (part + 1) * buffers // parts
    acc = _product(
        matrix, high, scale, least, coarse, rows, first, column, begin, end, columns, 0, TILE, ROWS, PIECES, BUFFERS,
        CODING, W, BITS, SIGNED, LEAST, FINE, OFFSET, False, EARLY,
    )  # fmt: skip
    own: gl.constexpr = acc.type.layout
    n = column + gl.arange(0, TILE, layout=gl.SliceLayout(1, own))
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, own))
    if BIAS:
        acc += gl.load(bias + n, mask=(n < columns) & (part == 0), other=0.0).to(gl.float32)[:, None]
    at = sums + (part * num_rows + m).to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(at, acc.to(sums.dtype.element_ty), mask=(n < columns)[:, None] & (m < num_rows)[None, :])


@gluon.jit(do_not_specialize=["num_rows", "columns", "buffers"])
def _silu_kernel(
    matrix, high, scale, least, coarse, rows, bias, out, num_rows, columns, buffers,
    TILE: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr, CODING: gl.constexpr,
    W: gl.constexpr, BITS: gl.constexpr, SIGNED: gl.constexpr, LEAST: gl.constexpr, FINE: gl.constexpr,
    OFFSET: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, tiles). out [num_rows, columns] = silu(gate) * up; the matrix holds gate rows, then up
    rows."""
    first, column = gl.program_id(0) * ROWS, gl.program_id(1) * (TILE // 2)
    acc = _product(
        matrix, high, scale, least, coarse, rows, first, column, 0, buffers, 2 * columns, columns, TILE, ROWS, PIECES,
        BUFFERS, CODING, W, BITS, SIGNED, LEAST, FINE, OFFSET, True, EARLY,
    )  # fmt: skip
    store_silu(acc, out, bias, out, first, column, num_rows, columns, False, BIAS)


# --- calls


def fits_weight(weight: CodedWeight) -> bool:
    """Whether the kernels read blocks of this form. TMA reads from multiples of 16 bytes, one of which the second half
    of the rows must begin at."""
    depth = DEPTH.value
    return (
        weight.is_blocked
        and weight.chunk == depth
        and weight.kind in _KINDS
        and weight.scale.dtype in (torch.uint8, torch.int8, torch.float16)
        and (weight.least is None or weight.least.dtype == weight.scale.dtype)
        and weight.rows % 8 == 0
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in weight.tensors().values())
    )


def fits(x: Tensor, weight: CodedWeight) -> bool:
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.shape[0] <= MOST_ROWS
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and fits_weight(weight)
    )


def ring_of(rows: int, width: int) -> CodeRing:
    """Among the best of those that were tried on an H200, for Q4_K, Q6_K and Q8_0: benchmarks/RESULTS.md."""
    if rows > 64:
        return CodeRing(64, 1, 2, 3)
    if width % 256:
        return CodeRing(64, 1, 4, 4) if rows <= 32 else CodeRing(64, 1, 3, 4)
    if rows > 32:
        return CodeRing(64, 2, 2, 2) if width >= _WIDE else CodeRing(64, 1, 3, 4)
    return CodeRing(64, 2, 2, 3)


def _padded(rows: int) -> int:
    """Rows of a tile."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


def _words_of(values: Tensor) -> int:
    """Words of a row in a chunk."""
    return values.shape[2] * values.element_size() // 4


def _describe_words(values: Tensor | None, box: int) -> TensorDescriptor | None:
    if values is None:
        return None
    words = _words_of(values)
    width = values.shape[1] * words
    return described(values.data_ptr(), torch.int32, (values.shape[0], width), width, (1, box * words), 0)


def _tensors(weight: CodedWeight, box: int) -> tuple[TensorDescriptor | None, ...]:
    """Codes as pairs of bytes, chunks of 4-bit codes one below the other; upper bits likewise; words of scales."""
    chunks, high = weight.width // DEPTH.value, None
    if is_packed(weight.kind):
        codes = described(weight.codes.data_ptr(), torch.int16, (weight.rows * chunks, 32), 32, (box, 32), 64)
        if weight.high is not None:
            high = described(weight.high.data_ptr(), torch.int16, (weight.rows * chunks, 16), 16, (box, 16), 32)
    else:
        pairs = weight.width // 2
        codes = described(weight.codes.data_ptr(), torch.int16, (weight.rows, pairs), pairs, (box, 64), 128)
    words = (_describe_words(each, box) for each in (weight.scale, weight.least, weight.coarse))
    return codes, high, *words


def _arguments(x: Tensor, weight: CodedWeight, bias: Tensor | None, ring: CodeRing, early: bool) -> dict[str, object]:
    scale = weight.scale
    return {
        "TILE": ring.tile, "ROWS": _padded(x.shape[0]), "PIECES": ring.pieces, "BUFFERS": ring.buffers,
        "CODING": _KINDS.index(weight.kind), "W": _words_of(scale), "BITS": 8 * scale.element_size(),
        "SIGNED": scale.dtype is torch.int8, "LEAST": weight.least is not None, "FINE": weight.coarse is not None,
        "OFFSET": CENTRES[weight.kind] - weight.middle if weight.least is not None else 0, "BIAS": bias is not None,
        "EARLY": early, "num_warps": ring.tile // 16, **({"launch_pdl": True} if early else {}),
    }  # fmt: skip


def _launch_parts(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, sums: Tensor, ring: CodeRing, early: bool
) -> None:
    rows, buffers = x.shape[0], weight.width // (DEPTH.value * ring.pieces)
    grid = -(-rows // _padded(rows)), -(-weight.rows // ring.tile) * len(sums)
    _parts_kernel[grid](
        *_tensors(weight, ring.tile), describe(x, (_padded(rows), DEPTH.value)), bias, sums, rows, weight.rows,
        buffers, len(sums), **_arguments(x, weight, bias, ring, early),
    )  # fmt: skip


def _num_parts(rows: int, weight: CodedWeight, ring: CodeRing, processors: int) -> int:
    tiles = -(-weight.rows // ring.tile) * -(-rows // _padded(rows))
    buffers = weight.width // (DEPTH.value * ring.pieces)
    return max(1, min(processors * ring.programs // tiles, buffers // 2, _MOST_PARTS))


def linear_parts(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, *, processors: int, early: bool = False,
    ring: CodeRing | None = None, parts: int = 0,
) -> PartialSums:  # fmt: skip
    ring = ring or ring_of(x.shape[0], weight.width)
    parts = parts or _num_parts(x.shape[0], weight, ring, processors)
    sums = torch.empty((parts, x.shape[0], weight.rows), dtype=torch.float32, device=x.device)
    _launch_parts(x, weight, bias, sums, ring, early)
    return PartialSums(sums, x.dtype)


def linear(x: Tensor, weight: CodedWeight, bias: Tensor | None, *, processors: int, early: bool = False) -> Tensor:
    """Where K need not be split, in one kernel."""
    ring = ring_of(x.shape[0], weight.width)
    if _num_parts(x.shape[0], weight, ring, processors) > 1:
        return linear_parts(x, weight, bias, processors=processors, early=early).whole()
    out = torch.empty((1, x.shape[0], weight.rows), dtype=x.dtype, device=x.device)
    _launch_parts(x, weight, bias, out, ring, early)
    return out[0]


def linear_silu(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, *, early: bool = False, ring: CodeRing | None = None
) -> Tensor:
    """silu(gate) * up."""
    rows, columns = x.shape[0], weight.rows // 2
    ring = ring or ring_of(rows, weight.width)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    half = ring.tile // 2
    _silu_kernel[(-(-rows // _padded(rows)), -(-columns // half))](
        *_tensors(weight, half), describe(x, (_padded(rows), DEPTH.value)), bias, out, rows, columns,
        weight.width // (DEPTH.value * ring.pieces), **_arguments(x, weight, bias, ring, early),
    )  # fmt: skip
    return out
