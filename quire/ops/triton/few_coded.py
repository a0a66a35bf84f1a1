"""Matmuls of one row with a matrix of 4- or 8-bit codes on Hopper, fused with the ops around them: few.py for codes.

A program has 16 rows of the matrix, or 16 of a gate and the 16 beside them; its warps share K in chunks, 64 bytes of
every row. Codes go from memory straight to registers, 16 bytes a thread, become float16 there and are the left operand
of `mma`; the right one is the input row in all columns, since there is only one. Both have K in the order in which the
bytes of a word are widened. The row, normalized where a norm comes first, is staged in shared memory as float16 times
a power of two: exact for bfloat16 down to 2^-29 of its largest number.

Codes of int4 are multiplied as 1024 + code and 1024 + 16 code, the bits of which are one instruction away; what that
adds to a chunk's sum is what the sum starts with, negative.

Sums of warps are added up by way of shared memory, where the threads of a warp write side by side.

With `early` a program starts while the previous kernel still runs, and loads its first chunks before it waits. When its
last chunks are on their way, it may bring the beginning of the next matrix to the L2 cache.

Floor: the bytes of the codes at 4.3 TB/s. 24576 x 4096: fp8 101 MB, 23 us; 4 bits with scales 53 MB, 12 us.
Needs: K a multiple of 128; groups of a multiple of 128, or whole rows; no zero points.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.coded import CodedWeight, is_packed
from quire.ops.few import NormRule

DTYPES = (torch.bfloat16, torch.float16)
TALL = 1 << 16  # rows of a matrix past which launch overhead is negligible
_WIDEST = 1 << 15  # columns, all of which lie in shared memory
_KINDS = {"fp8": 0, "int8": 1, "int4": 2, "fp4": 3}


class FewCodedConfig(NamedTuple):
    warps: int  # that share K
    ahead: int  # chunks of a warp that are in flight
    registers: int  # of a thread at most
    repeat: int = 1  # tiles of 16 rows that a program multiplies one after the other


_FP8 = "mov.b32 {l, h}, a; cvt.rn.f16x2.e4m3x2 c, l; cvt.rn.f16x2.e4m3x2 d, h;"
# c: the numbers of codes in the low bytes of the 16-bit halves of a
_INT8 = """and.b32 b, a, 0x00FF00FF;
    lop3.b32 b, b, 0x00800080, 0x64006400, 0xBE;
    mov.b32 d, 0x64806480;
    sub.f16x2 c, b, d;"""
# c: the numbers of codes in the low bits of the 16-bit halves of a
_FP4 = """shl.b32 b, a, 9;
    shl.b32 c, a, 12;
    and.b32 c, c, 0x80008000;
    lop3.b32 c, b, 0x0E000E00, c, 0xEA;
    mov.b32 d, 0x74007400;
    mul.f16x2 c, c, d;"""


def _mma(to: str, a: tuple[str, str, str, str], first: int) -> str:
    sums = ", ".join(f"{to}{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{sums}}}, {{{', '.join(a)}}}, "
        f"{{${first}, ${first + 1}}}, {{{sums}}};"
    )


def _widened(coding: int, source: int, row: int) -> list[str]:
    """Two or four pairs of numbers of the codes in one word, to p{row} and every other register after it."""
    at = f"${source}"
    if coding == 0:
        return [f"mov.b32 a, {at}; {_FP8} mov.b32 p{row}, c; mov.b32 p{row + 2}, d;"]
    if coding == 1:
        return [
            f"mov.b32 a, {at}; {_INT8} mov.b32 p{row}, c;",
            f"shr.b32 a, {at}, 8; {_INT8} mov.b32 p{row + 2}, c;",
        ]
    if coding == 2:  # 1024 + code, and 1024 + 16 code
        return [
            f"shr.b32 a, {at}, 8;",
            f"lop3.b32 p{row}, {at}, 0x000F000F, 0x64006400, 0xEA;",
            f"lop3.b32 p{row + 2}, a, 0x000F000F, 0x64006400, 0xEA;",
            f"lop3.b32 p{row + 4}, {at}, 0x00F000F0, 0x64006400, 0xEA;",
            f"lop3.b32 p{row + 6}, a, 0x00F000F0, 0x64006400, 0xEA;",
        ]
    moved = ((0, "mov.b32 a, {};"), (2, "shr.b32 a, {}, 8;"), (4, "shr.b32 a, {}, 4;"), (6, "shr.b32 a, {}, 12;"))
    return [f"{move.format(at)} {_FP4} mov.b32 p{row + to}, c;" for to, move in moved]


def _product(coding: int) -> str:
    """$4 to $7: what the sums begin with; $8 to $11: 16 bytes of codes of one row of the matrix, $12 to $15: of the row
    8 further; then the inputs."""
    regs = ", ".join(f"{name}{i}" for name in "uv" for i in range(4))
    lines = ["{", ".reg .b32 a, b, c, d, p<8>;", ".reg .b16 l, h;", f".reg .f32 {regs};"]
    lines += [f"mov.f32 u{i}, ${4 + i}; mov.f32 v{i}, 0f00000000;" for i in range(4)]
    for word in range(4):
        for row in range(2):
            lines += _widened(coding, 8 + 4 * row + word, row)
        packed = coding in (2, 3)
        lines.append(_mma("u" if packed else "uv"[word % 2], ("p0", "p1", "p2", "p3"), 16 + 2 * word))
        if packed:
            lines.append(_mma("v", ("p4", "p5", "p6", "p7"), 24 + 2 * word))
    lines += [f"add.f32 ${i}, u{i}, v{i};" for i in range(4)]
    return "\n".join([*lines, "}"])


_TEXTS = gl.constexpr(tuple(_product(coding) for coding in range(4)))
_FOUR = gl.constexpr(",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 16))
_EIGHT = gl.constexpr(",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 24))


# Two of float32, rounded to another kind. The compiler converts one at a time, at a fraction of the rate.
_TO_BF16 = gl.constexpr("""{
    .reg .b32 both;
    cvt.rn.bf16x2.f32 both, $3, $2;
    .reg .b32 low, high;
    shl.b32 low, both, 16;
    and.b32 high, both, 0xFFFF0000;
    mov.b32 $0, low;
    mov.b32 $1, high;
}""")
_TO_F16 = gl.constexpr("""{
    .reg .b32 both;
    .reg .b16 low, high;
    cvt.rn.f16x2.f32 both, $3, $2;
    mov.b32 {low, high}, both;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}""")


# Two of float32, rounded to bfloat16, times two of bfloat16, rounded again, in float16.
_GAINED = gl.constexpr("""{
    .reg .b32 both, low, high;
    cvt.rn.bf16x2.f32 both, $2, $1;
    mul.bf16x2 both, both, $3;
    shl.b32 low, both, 16;
    and.b32 high, both, 0xFFFF0000;
    cvt.rn.f16x2.f32 $0, high, low;
}""")


@gluon.jit
def _rounded(x, IS_HALF: gl.constexpr):
    if IS_HALF:
        return gl.inline_asm_elementwise(_TO_F16, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)
    return gl.inline_asm_elementwise(_TO_BF16, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)


# From Triton 3.9 on they have other names.
_synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _seen_as(memory, kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory.reinterpret(kind, shape, layout)

else:

    @gluon.jit
    def _seen_as(memory, kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory._reinterpret(kind, shape, layout)


@gluon.constexpr_function
def _words_layout(warps, words):
    """[warps, 8, 4, words]: a warp has 8 rows of the matrix, four threads of it `words` each of one."""
    return gl.BlockedLayout([1, 1, 1, words], [1, 8, 4, 1], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _along(layout, dim):
    """The layout of a vector along one of four dimensions of this one."""
    for other in (3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _places(first, step, WARPS: gl.constexpr, WORDS: gl.constexpr):
    """Of every entry of `_words_layout`: its chunk, its row of the matrix, its thread, its word."""
    own: gl.constexpr = _words_layout(WARPS, WORDS)
    chunk = step * WARPS + gl.arange(0, WARPS, layout=_along(own, 0))[:, None, None, None]
    row = first + gl.arange(0, 8, layout=_along(own, 1))[None, :, None, None]
    thread = gl.arange(0, 4, layout=_along(own, 2))[None, None, :, None]
    return chunk, row, thread, gl.arange(0, WORDS, layout=_along(own, 3))[None, None, None, :]


@gluon.constexpr_function
def _slab(k, width, warps):
    """Columns that are staged at once: a power of two, not past the end, and not too many for a thread's registers."""
    while k % (2 * width) == 0 and 2 * width <= 512 * warps:
        width *= 2
    return width


@gluon.constexpr_function
def _divisor(steps, most):
    while steps % most:
        most -= 1
    return most


@gluon.jit
def _load_words(
    codes, first, step, N: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """16 bytes of each of 8 rows from `first` on, of every warp's chunk."""
    CHUNKS: gl.constexpr = K // 128 if PACKED else K // 64
    chunk, row, thread, word = _places(first, step, WARPS, 4)
    if PACKED:
        at = (chunk * COUNT + row) * 16 + thread * 4 + word
    else:
        at = row * (K // 4) + chunk * 16 + thread * 4 + word
    if CHUNKS % WARPS == 0 and N % 16 == 0:
        return gl.load(codes + at)
    return gl.load(codes + at, mask=(chunk < CHUNKS) & (row < COUNT), other=0)


@gluon.jit
def _load_scales(
    scale, first, step, N: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Of rows and of those 8 further."""
    WIDTH: gl.constexpr = 128 if PACKED else 64
    chunk, row, thread, word = _places(first, step, WARPS, 2)
    group, n = chunk * WIDTH // GROUP, row + word * 8 + thread * 0
    if K // WIDTH % WARPS == 0 and N % 16 == 0:
        return gl.load(scale + group * COUNT + n)
    return gl.load(scale + group * COUNT + n, mask=(group < K // GROUP) & (n < COUNT), other=0.0)


@gluon.jit
def _twice(by, own: gl.constexpr):
    """A scale for each sum of `_product`."""
    both = gl.join(by, by).reshape([by.shape[0], by.shape[1], 4, 4])
    return gl.convert_layout(both, own, assert_trivial=True)


@gluon.jit
def _columns(start, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    EACH: gl.constexpr = WIDTH // (32 * WARPS) if WIDTH // (32 * WARPS) < 8 else 8
    own: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    return start + gl.arange(0, WIDTH, layout=own)


@gluon.jit
def _inputs(x, k, K: gl.constexpr, WHOLE: gl.constexpr):
    if WHOLE:
        return gl.load(x + k)
    return gl.load(x + k, mask=k < K, other=0.0)


@gluon.jit
def _gains(gains, K: gl.constexpr, SLAB: gl.constexpr, WARPS: gl.constexpr, NORM: gl.constexpr):
    loaded = ()
    if NORM > 0:
        for slab in gl.static_range((K + SLAB - 1) // SLAB):
            one = _inputs(gains, _columns(slab * SLAB, SLAB, WARPS), K, K % SLAB == 0)
            loaded = loaded + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _of_warps(values, exchange, LARGEST: gl.constexpr):
    """The largest of `_columns`, or their sum: within warps, then one exchange."""
    WARPS: gl.constexpr = exchange.shape[0]
    EACH: gl.constexpr = values.shape[0] // (32 * WARPS) if values.shape[0] // (32 * WARPS) < 8 else 8
    split = values.reshape([values.shape[0] // (32 * WARPS * EACH), WARPS, 32 * EACH])
    own = gl.max(gl.max(split, 0), 1) if LARGEST else gl.sum(gl.sum(split, 0), 1)
    exchange.store(own)
    every = exchange.load(gl.BlockedLayout([WARPS], [32], [WARPS], [0]))
    return gl.max(every, 0) if LARGEST else gl.sum(every, 0)


@gluon.jit
def _power(largest, MOST: gl.constexpr):
    """A power of two, of an exponent up to MOST, that brings numbers up to `largest` to less than 2^15, and its
    inverse."""
    field = 268 - (largest.to(gl.int32, bitcast=True) >> 23)
    field = gl.minimum(gl.maximum(field, 1), 127 + MOST)
    return (field << 23).to(gl.float32, bitcast=True), ((254 - field) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _norm_power(gains, offset, K: gl.constexpr, ROOT: gl.constexpr):
    """As `_power`, for all rows that the norm may give: none of its numbers exceeds the root of K before the gains. It
    multiplies what they are divided by, 2^20 where they are zeros and eps is 1e-12, even if all gains are zeros."""
    most = gl.abs(gains[0].to(gl.float32) + offset)
    for slab in gl.static_range(1, len(gains)):
        most = gl.maximum(most, gl.abs(gains[slab].to(gl.float32) + offset))
    return _power(gl.max(most, 0) * ROOT, 100)


@gluon.jit
def _stage(
    x, gains, up, down, slabs, sums, exchange, eps, offset, K: gl.constexpr, SLAB: gl.constexpr, WARPS: gl.constexpr,
    CODING: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """The row, normalized if NORM, to shared memory in the order of `_product`, as float16 times a power of two, whose
    inverse is returned; and what `_product` has too much of int4, in `sums`."""
    SLABS: gl.constexpr = (K + SLAB - 1) // SLAB
    WHOLE: gl.constexpr = K % SLAB == 0
    HALVES: gl.constexpr = 2 if CODING >= 2 else 1
    WIDTH: gl.constexpr = WARPS * HALVES * 64
    kind: gl.constexpr = x.dtype.element_ty
    IS_HALF: gl.constexpr = kind != gl.bfloat16
    first = _inputs(x, _columns(0, SLAB, WARPS), K, WHOLE).to(gl.float32)
    by = 0.0
    if NORM > 0:
        squares = first * first
        for slab in gl.static_range(1, SLABS):
            h = _inputs(x, _columns(slab * SLAB, SLAB, WARPS), K, WHOLE).to(gl.float32)
            squares += h * h
        by = gl.rsqrt(_of_warps(squares, exchange, False) / K + eps)
        if not IS_HALF:
            by *= up  # a power of two changes no rounding, unless the range ends
    else:
        most = gl.abs(first)
        for slab in gl.static_range(1, SLABS):
            most = gl.maximum(most, gl.abs(_inputs(x, _columns(slab * SLAB, SLAB, WARPS), K, WHOLE).to(gl.float32)))
        up, down = _power(_of_warps(most, exchange, True), 126)
    for slab in gl.static_range(SLABS):
        k = _columns(slab * SLAB, SLAB, WARPS)
        h = _inputs(x, k, K, WHOLE).to(gl.float32)
        if NORM == 1 and CODING != 2 and not IS_HALF:
            h = gl.inline_asm_elementwise(
                _GAINED, "=r,f,f,r", [h * by, gains[slab]], dtype=gl.float16, is_pure=True, pack=2
            )
        elif NORM > 0:
            h = h * by
            if NORM == 1:
                h = _rounded(h, IS_HALF)
            h = _rounded(h * (gains[slab].to(gl.float32) + offset), IS_HALF)
        if NORM == 0 or IS_HALF:
            h = h * up
        if CODING == 2:
            halves = h.reshape([SLAB // 64, 64])
            is_high = gl.arange(0, SLAB // 64, layout=gl.SliceLayout(1, halves.type.layout)) % 2 == 1
            halves = halves * gl.where(is_high, 0.0625, 1.0)[:, None]
            total = gl.sum(halves, 1) * gl.where(is_high, 1152.0, 1032.0)
            total = gl.sum(total.reshape([SLAB // 128, 2]), 1).reshape([SLAB // WIDTH, WARPS])
            sums.index(slab).store(total)
            h = halves
        # step, warp, half of a chunk, thread, block, pair of words, and in every four columns: high, word or word, high
        h = h.to(gl.float16).reshape([SLAB // WIDTH, WARPS, HALVES, 4, 2, 2, 2, 2])
        if CODING == 0:
            h = h.permute((0, 2, 4, 1, 3, 5, 6, 7))
        else:
            h = h.permute((0, 2, 4, 1, 3, 5, 7, 6))
        slabs.index(slab).store(h.reshape([SLAB // WARPS // 32, WARPS, 32]))
    return down


@gluon.jit
def _block(staged, at, WARPS: gl.constexpr):
    """Four words of inputs for each thread, the same for all rows of the matrix."""
    own: gl.constexpr = gl.SliceLayout(1, _words_layout(WARPS, 4))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    BLOCKS: gl.constexpr = staged.shape[0]
    words = _seen_as(staged, gl.int32, (BLOCKS, WARPS, 4, 4), flat)
    return words.index(at).load(own).expand_dims(1)


@gluon.jit
def _times(start, a, b, x0, x1, x2, x3, TEXT: gl.constexpr, PACKED: gl.constexpr):
    """`start` plus two rows of codes for each thread times the inputs."""
    if PACKED:
        return gl.inline_asm_elementwise(
            TEXT, _EIGHT, [start, a, b, x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=4
        )
    return gl.inline_asm_elementwise(TEXT, _FOUR, [start, a, b, x0, x1], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def _load(
    codes, scale, first, step, N: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Codes and scales of a step."""
    loaded = ()
    for tile in gl.static_range(COUNT // N):
        n = first + tile * N
        one = _load_words(codes, n, step, N, COUNT, K, WARPS, PACKED)
        other = _load_words(codes, n + 8, step, N, COUNT, K, WARPS, PACKED)
        loaded = loaded + (one, other)  # type: ignore[assignment]  # noqa: RUF005
        if GROUP != K:
            by = _load_scales(scale, n, step, N, COUNT, K, GROUP, WARPS, PACKED)
            loaded = loaded + (by,)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _step(
    loaded, acc, acc_up, staged, sums, step, PLACE: gl.constexpr, WARPS: gl.constexpr, CODING: gl.constexpr,
    GROUPED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Both sums plus a chunk of every warp."""
    PACKED: gl.constexpr = CODING >= 2
    BLOCKS: gl.constexpr = 4 if PACKED else 2
    TEXT: gl.constexpr = _TEXTS[CODING]
    EACH: gl.constexpr = 3 if GROUPED else 2
    TILES: gl.constexpr = 2 if GATED else 1
    own: gl.constexpr = acc.type.layout
    x0 = _block(staged, step * BLOCKS, WARPS)
    x1 = _block(staged, step * BLOCKS + 1, WARPS)
    x2, x3 = x0, x1
    if PACKED:
        x2 = _block(staged, step * BLOCKS + 2, WARPS)
        x3 = _block(staged, step * BLOCKS + 3, WARPS)
    start = gl.zeros([WARPS, 1, 1, 1], gl.float32, layout=own)
    if CODING == 2:
        ALL: gl.constexpr = sums.shape[0] * sums.shape[1]
        lines = _seen_as(sums, gl.float32, (ALL, WARPS), gl.SwizzledSharedLayout(1, 1, 1, [0]))
        start = start - lines.index(step).load(_along(own, 0))[:, None, None, None]
    for tile in gl.static_range(TILES):
        begin = start
        if not GROUPED:
            begin = acc if tile == 0 else acc_up
            if CODING == 2:
                begin = begin + start
        part = _times(
            begin, loaded[EACH * (TILES * PLACE + tile)], loaded[EACH * (TILES * PLACE + tile) + 1], x0, x1, x2, x3,
            TEXT, PACKED,
        )  # fmt: skip
        if GROUPED:
            part = part * _twice(loaded[EACH * (TILES * PLACE + tile) + 2].to(gl.float32), own)
            part = part + (acc if tile == 0 else acc_up)
        if tile == 0:
            acc = part
        else:
            acc_up = part
    return acc, acc_up


@gluon.jit
def _put_sums(parts, acc):
    """To shared memory for `_whole`: the threads of a warp write side by side, since numbers of several warps side by
    side would all be in one bank."""
    WARPS: gl.constexpr = acc.shape[0]
    y, _ = gl.split(acc.reshape([WARPS, 8, 4, 2, 2]))  # both columns of a pair are the same
    parts.store(y.reshape([WARPS, 64]))


@gluon.jit
def _whole(parts):
    """[64] of the sums of all warps, in the order of `_results`."""
    return gl.sum(parts.load(_sums_layout(parts.shape[0])), 0)


@gluon.constexpr_function
def _sums_layout(warps):
    return gl.BlockedLayout([warps, 1], [1, 32], [1, warps], [1, 0])


@gluon.jit
def _results(WARPS: gl.constexpr):
    """Of every entry of `_whole`: its row of the matrix, and whether it is the first of the four that are the same."""
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, _sums_layout(WARPS)))
    return at // 8 + at % 2 * 8, at // 2 % 4 == 0


_PIECE = gl.constexpr(16384)  # bytes
# By one thread of a warp, if the size is positive.
_FETCH = gl.constexpr("""{
    .reg .pred one, some;
    elect.sync _|one, 0xFFFFFFFF;
    setp.gt.and.s32 some, $2, 0, one;
    @some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, $2;
}""")


@gluon.jit
def _fetch(following, size, PROGRAMS: gl.constexpr, WARPS: gl.constexpr):
    """This program's share of `size` bytes that later kernels read is brought to the L2 cache."""
    share = (size + PROGRAMS * WARPS * 128 - 1) // (PROGRAMS * WARPS * 128) * 128
    each: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
    start = (gl.program_id(0) * WARPS + gl.arange(0, WARPS, layout=each)) * share
    end = gl.minimum(start + share, size)
    for piece in range(0, share, _PIECE):
        at = start + piece
        count = gl.minimum(end - at, _PIECE)
        gl.inline_asm_elementwise(
            _FETCH, "=r,l,r", [following.to(gl.int64) + at, count], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _of_rows(values, n, count, INSIDE: gl.constexpr):
    if INSIDE:
        return gl.load(values + n).to(gl.float32)
    return gl.load(values + n, mask=n < count, other=0.0).to(gl.float32)


@gluon.jit
def _of_tiles(values, n, count, INSIDE: gl.constexpr, REPEAT: gl.constexpr):
    loaded = ()
    for tile in gl.static_range(REPEAT):
        loaded = loaded + (_of_rows(values, n + tile * 16, count, INSIDE),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _few_coded_kernel(
    x, gains, codes, scale, bias, stream, out, following, following_size, eps, offset,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, CODING: gl.constexpr, NORM: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    REPEAT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (columns / 16 / REPEAT,). out [N] = f(norm(x) weight' + bias) or stream + .. ; GATED: gate rows, then up
    rows."""
    kind: gl.constexpr = x.dtype.element_ty
    own: gl.constexpr = _words_layout(WARPS, 4)
    PACKED: gl.constexpr = CODING >= 2
    HALVES: gl.constexpr = 2 if PACKED else 1
    COUNT: gl.constexpr = 2 * N if GATED else N
    WIDTH: gl.constexpr = WARPS * HALVES * 64
    SLAB: gl.constexpr = _slab(K, WIDTH, WARPS)
    SLABS: gl.constexpr = (K + SLAB - 1) // SLAB
    STEPS: gl.constexpr = SLABS * (SLAB // WIDTH)
    BLOCKS: gl.constexpr = SLAB // (WARPS * 32)
    LOADED: gl.constexpr = _divisor(STEPS, AHEAD)
    GROUPED: gl.constexpr = GROUP != K
    INSIDE: gl.constexpr = N % 16 == 0
    staged = gl.allocate_shared_memory(gl.float16, [SLABS * BLOCKS, WARPS * 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slabs = _seen_as(staged, gl.float16, (SLABS, BLOCKS, WARPS, 32), gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    sums = gl.allocate_shared_memory(
        gl.float32, [SLABS, SLAB // WIDTH, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    exchange = gl.allocate_shared_memory(gl.float32, [WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    parts = gl.allocate_shared_memory(gl.float32, [WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    parts_up = parts
    if GATED:
        parts_up = gl.allocate_shared_memory(gl.float32, [WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    first = gl.program_id(0) * (16 * REPEAT)
    row, is_first = _results(WARPS)
    if EARLY:
        gdc_launch_dependents()
    loaded = ()
    for place in gl.static_range(LOADED):
        loaded = loaded + _load(codes, scale, first, place, N, COUNT, K, GROUP, WARPS, PACKED)
    by = _gains(gains, K, SLAB, WARPS, NORM)
    larger, smaller = 1.0, 1.0
    if NORM > 0:
        larger, smaller = _norm_power(by, offset, K, K**0.5)
    of_rows, of_ups = (), ()  # scales of rows of the matrix, and of those beside them
    if not GROUPED:
        of_rows = _of_tiles(scale, first + row, N, INSIDE, REPEAT)
        if GATED:
            of_ups = _of_tiles(scale + N, first + row, N, INSIDE, REPEAT)
    if EARLY:
        gdc_wait()
    smaller = _stage(x, by, larger, smaller, slabs, sums, exchange, eps, offset, K, SLAB, WARPS, CODING, NORM)
    residuals = ()
    if ADD:
        residuals = _of_tiles(stream, first + row, N, INSIDE, REPEAT)
    _synchronize()  # the compiler would do so in every turn of the loop
    for tile in gl.static_range(REPEAT):
        acc = gl.zeros([WARPS, 8, 4, 4], gl.float32, layout=own)
        acc_up = acc
        for step in range(0, STEPS - LOADED, LOADED):
            after = ()
            for place in gl.static_range(LOADED):
                acc, acc_up = _step(
                    loaded, acc, acc_up, staged, sums, step + place, place, WARPS, CODING, GROUPED, GATED
                )  # fmt: skip
                after = after + _load(codes, scale, first, step + place + LOADED, N, COUNT, K, GROUP, WARPS, PACKED)
            loaded = after
        if following is not None and tile == REPEAT - 1:  # all of this program's codes are on their way
            _fetch(following, following_size, (N + 16 * REPEAT - 1) // (16 * REPEAT), WARPS)
        n = first + row
        first += 16
        after = ()
        for place in gl.static_range(LOADED):
            acc, acc_up = _step(
                loaded, acc, acc_up, staged, sums, STEPS - LOADED + place, place, WARPS, CODING, GROUPED, GATED
            )  # fmt: skip
            if tile + 1 < REPEAT:
                after = after + _load(codes, scale, first, place, N, COUNT, K, GROUP, WARPS, PACKED)
        loaded = after
        _put_sums(parts, acc)
        if GATED:
            _put_sums(parts_up, acc_up)
        y = _whole(parts) * smaller
        if not GROUPED:
            y *= of_rows[tile]
        if BIAS:
            y += _of_rows(bias, n, N, INSIDE)
        y = y.to(kind).to(gl.float32)
        if GATED:
            up = _whole(parts_up) * smaller
            if not GROUPED:
                up *= of_ups[tile]
            if BIAS:
                up += _of_rows(bias + N, n, N, INSIDE)
            up = up.to(kind).to(gl.float32)
            y = (y / (1.0 + gl.exp(-y))).to(kind).to(gl.float32)
            y = (y * up).to(kind).to(gl.float32)
        if ADD:
            y += residuals[tile]
        gl.store(out + n, y.to(kind), mask=is_first & (n < N))


def fits(x: Tensor, weight: CodedWeight) -> bool:
    return x.shape[0] == 1 and x.dtype in DTYPES and x.stride(1) == 1 and x.data_ptr() % 16 == 0 and fits_weight(weight)


def fits_weight(weight: CodedWeight) -> bool:
    """Whether the kernel reads codes of this form."""
    return (
        weight.zero is None
        and not weight.is_blocked
        and weight.width % 128 == 0
        and weight.width <= _WIDEST
        and weight.group % 128 == 0
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        and (not is_packed(weight.kind) or weight.half == 64)
    )


def config_of(n: int, k: int, *, packed: bool, gated: bool) -> FewCodedConfig:
    """The best of those tried on an H200, in the sequence of an 8B layer: docs/log.md."""
    if n > TALL and not packed:
        return FewCodedConfig(4, 8, 128)
    if gated:
        return FewCodedConfig(4, 2, 128, 2) if packed else FewCodedConfig(8, 4, 128)
    if k > n:
        return FewCodedConfig(8, 4, 96) if packed else FewCodedConfig(8, 12, 128)
    if k == n:
        return FewCodedConfig(8, 4, 80) if packed else FewCodedConfig(8, 8, 96)
    return FewCodedConfig(8, 2, 80) if packed else FewCodedConfig(8, 4, 80)


def few_coded_linear(
    x: Tensor,  # [1, K]
    weight: CodedWeight,
    bias: Tensor | None = None,
    *,
    norm: NormRule | None = None,
    gated: bool = False,  # silu(gate) * up
    stream: Tensor | None = None,  # [1, N], to be added
    out: Tensor | None = None,  # [1, N]
    config: FewCodedConfig | None = None,
    following: Tensor | None = None,  # uint8 [n]: what the next matmul reads, to be brought to the L2 cache
    early: bool = False,
) -> Tensor:
    n, k = weight.rows // 2 if gated else weight.rows, weight.width
    packed = is_packed(weight.kind)
    config = config or config_of(n, k, packed=packed, gated=gated)
    if out is None:
        out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    rule = norm or NormRule(None, 0.0, 0.0, False)
    kind = 0 if norm is None else 2 if rule.wide or rule.offset else 1
    repeat = config.repeat if n % (16 * config.repeat) == 0 else 1
    _few_coded_kernel[(-(-n // (16 * repeat)),)](
        x, rule.weight, weight.codes.view(torch.int32), weight.scale, bias, stream, out, following,
        0 if following is None else following.numel(), rule.eps, rule.offset,
        N=n, K=k, GROUP=weight.group, CODING=_KINDS[weight.kind], NORM=kind, GATED=gated, BIAS=bias is not None,
        ADD=stream is not None, WARPS=config.warps, AHEAD=config.ahead, REPEAT=repeat, EARLY=early,
        num_warps=config.warps, maxnreg=config.registers, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def is_faster(weight: CodedWeight) -> bool:
    """Whether the kernel is known to beat skinny_coded.py with one row of such codes; the others were not timed."""
    is_timed = weight.kind == "fp8" if weight.group == weight.width else weight.kind == "int4"
    return is_timed and fits_weight(weight)


_FETCHED = 8 << 20  # bytes


def beginning(weight: Tensor | CodedWeight | None) -> Tensor | None:
    """uint8 [n]: what of a matrix is worth bringing to the L2 cache before the matmul that reads it begins. Nothing of
    4 bits, whose matmuls gained nothing."""
    if not isinstance(weight, CodedWeight) or is_packed(weight.kind) or not fits_weight(weight):
        return None
    codes = weight.codes.view(torch.uint8).view(-1)
    return codes[: min(_FETCHED, len(codes)) // 16 * 16]
