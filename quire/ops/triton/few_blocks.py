"""Matmuls of one row with blocks of GGUF files on Hopper, fused with the ops around them: few_coded.py for blocks.

A program has 16 rows of the matrix, or 16 of a gate and the 16 beside them; its warps share K in superblocks of 256
columns. Codes go from memory straight to registers, 16 bytes a thread, and are, as bytes, the left operand of an `mma`
of whole numbers. The row, normalized where a norm comes first, is staged in shared memory as whole numbers of 16 bits,
each group of columns times a power of two of its own: exact where a number of bfloat16 is not below 2^-6 of the largest
of its group, and to 2^-14 of that elsewhere. An infinite input, or a group whose sum is, makes all results NaN.

The four threads that have a row of the matrix have other groups of it, and one `mma` multiplies all four: its eight
columns are the upper and the lower bytes of the inputs of four groups, zero wherever a column meets the codes of
another group. So a thread gets the sums of its own group, exactly, and multiplies them by the scale that it loaded.
Sums start as 1.5 * 2^23 in the bits of float32, so that no instruction converts them.

    groups of 32    thread t has group t of a chunk of 128 columns
            16      thread t has groups t and 4 + t

Codes of 4 bits in the upper halves of bytes are multiplied as 16 times what they are; the inputs make up for it.

With `early` a program starts while the previous kernel still runs, and loads its first turns of the matrix, and the
gains of the norm, before it waits. Not used in batch-invariant mode: other numbers of rows have other kernels.

Floor: the bytes of the blocks at 4.3 TB/s. 24576 x 4096 of Q4_K: 58 MB, 14 us.
Needs: K a multiple of 256; groups of 16 or 32; scales of 8 or 16 bits; whole numbers as codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.coded import CENTRES, COARSE, CodedWeight
from quire.ops.few import NormRule
from quire.ops.triton.few_coded import (
    DTYPES,
    _along,
    _columns,
    _divisor,
    _gains,
    _inputs,
    _of_rows,
    _of_warps,
    _rounded,
    _seen_as,
    _sums_layout,
    _synchronize,
    _whole,
    _words_layout,
)

_WIDEST = 1 << 15  # columns, all of which lie in shared memory
_KINDS = ("int8", "int4", "int6")
_PROCESSORS = 132  # multiprocessors of a Hopper card
_SCALES = (torch.uint8, torch.int8, torch.float16)
_STEP = gl.constexpr(COARSE)  # columns of a warp's turn: two chunks, which share the factors of their scales


class FewBlocksConfig(NamedTuple):
    warps: int  # that share K
    ahead: int  # turns of a warp that are in flight
    registers: int  # of a thread at most


# --- codes in registers


def _low_and_high(coding: int, source: str, upper: str, to: int) -> str:
    """Bytes of four columns in l{to}, and of those 64 further in h{to}, from a word of codes (and one of upper bits).
    Codes of 4 bits are 16 times too large in the latter."""
    if coding == 1:
        return f"and.b32 l{to}, {source}, 0x0F0F0F0F; and.b32 h{to}, {source}, 0xF0F0F0F0;"
    return f"""and.b32 l{to}, {source}, 0x0F0F0F0F;
        shr.b32 h{to}, {source}, 4;
        and.b32 h{to}, h{to}, 0x0F0F0F0F;
        shr.b32 v, {upper}, s;
        lop3.b32 h{to}, v, 0x30303030, h{to}, 0xEA;
        shl.b32 v, v, 4;
        lop3.b32 l{to}, v, 0x30303030, l{to}, 0xEA;"""


def _mma(sums: str, codes: list[str], inputs: int, kind: str) -> str:
    """Two words of two rows of the matrix."""
    own = ", ".join(f"{sums}{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32 {{{own}}}, {{{', '.join(codes)}}}, "
        f"{{${inputs}, ${inputs + 1}}}, {{{own}}};"
    )


def _product(coding: int, parts: int) -> str:
    """16 rows of the matrix times a chunk. Words of row and of that 8 further, 4 each: of codes (of 8 bits: of columns
    up to 64, then of the rest), of upper bits and by how much they are shifted; then of inputs. To the sums of both
    parts, of row and of that 8 further."""
    kind = "s8" if coding == 0 else "u8"
    inputs = {0: 20, 1: 12, 2: 24}[coding]
    lines = ["{", ".reg .b32 c<4>, e<4>, l<4>, h<4>, s, v;", ".reg .f32 f, g;"]
    lines += [f"mov.b32 {name}{i}, 0x4B400000;" for name in ("ce" if parts == 2 else "c") for i in range(4)]
    if coding == 2:
        lines.append("mov.b32 s, $20;")
    second = "e" if parts == 2 else "c"
    for pair in (0, 2):
        places = [pair + word + row for word in (0, 1) for row in (0, 4)]
        if coding == 0:
            low, high = ([f"${first + at}" for at in places] for first in (4, 12))
        else:
            lines += [_low_and_high(coding, f"${4 + at}", f"${12 + at}", i) for i, at in enumerate(places)]
            low, high = ([f"{name}{i}" for i in range(4)] for name in "lh")
        lines.append(_mma("c", low, inputs + pair, kind))
        lines.append(_mma(second, high, inputs + 4 + pair, kind))
    for row in (0, 1):
        for part, name in enumerate("ce"):
            to = f"${2 * row + part}"
            if part == parts:
                lines.append(f"mov.b32 {to}, 0;")
                continue
            lines.append(f"sub.f32 f, {name}{2 * row}, 0f4B400000; sub.f32 g, {name}{2 * row + 1}, 0f4B400000;")
            lines.append(f"fma.rn.f32 {to}, f, 0f43800000, g;")
    return "\n".join([*lines, "}"])


_TEXTS = gl.constexpr(tuple(_product(coding, parts) for coding in range(3) for parts in (1, 2)))
_WORDS = gl.constexpr(tuple(",".join(["=f"] * 4 + ["r"] * count) for count in (24, 16, 28)))

# Four numbers below 2^15 - 128 as whole numbers of 16 bits: their upper bytes, rounded, and what the lower ones add.
_BYTES = gl.constexpr("""{
    .reg .f32 p, q, r, s;
    .reg .b32 a, b;
    add.rn.f32 p, $2, 0f4B400080;
    add.rn.f32 q, $3, 0f4B400080;
    add.rn.f32 r, $4, 0f4B400080;
    add.rn.f32 s, $5, 0f4B400080;
    prmt.b32 a, p, q, 0x5140;
    prmt.b32 b, r, s, 0x5140;
    prmt.b32 $0, a, b, 0x7632;
    prmt.b32 a, a, b, 0x5410;
    xor.b32 $1, a, 0x80808080;
}""")
_TWO_HALVES = gl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
}""")


# A byte of a word, or half of it, as a number.
_BYTE = gl.constexpr("""{
    .reg .b32 a;
    prmt.b32 a, $1, 0x4B000000, $2;
    sub.f32 $0, a, 0f4B000000;
}""")
_SIGNED_BYTE = gl.constexpr("""{
    .reg .b32 a;
    xor.b32 a, $1, 0x80808080;
    prmt.b32 a, a, 0x4B000000, $2;
    sub.f32 $0, a, 0f4B000080;
}""")
_HALF = gl.constexpr("""{
    .reg .b32 a;
    .reg .b16 low, high;
    prmt.b32 a, $1, 0, $2;
    mov.b32 {low, high}, a;
    cvt.f32.f16 $0, low;
}""")


@gluon.jit
def _number(word, FORM: gl.constexpr, WARPS: gl.constexpr):
    """What a thread takes of the words of `_load_factors`. FORM: 0, 1: bytes without and with a sign; 2: halves."""
    thread = gl.arange(0, 4, layout=_along(_words_layout(WARPS, 2), 2))[None, None, :, None]
    if FORM == 2:
        return gl.inline_asm_elementwise(
            _HALF, "=f,r,r", [word, 0x4410 + thread % 2 * 0x22], dtype=gl.float32, is_pure=True, pack=1
        )
    TEXT: gl.constexpr = _SIGNED_BYTE if FORM == 1 else _BYTE
    return gl.inline_asm_elementwise(TEXT, "=f,r,r", [word, 0x7540 + thread], dtype=gl.float32, is_pure=True, pack=1)


# --- the row


@gluon.jit
def _group_powers(largest):
    """Powers of two that bring numbers up to `largest` to less than 2^14, and their inverses."""
    field = 267 - (largest.to(gl.int32, bitcast=True) >> 23)
    field = gl.minimum(gl.maximum(field, 1), 253)
    return (field << 23).to(gl.float32, bitcast=True), ((254 - field) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _put_slab(h, bytes_of, factors, totals, slab, GROUP: gl.constexpr, WARPS: gl.constexpr, CODING: gl.constexpr):
    """A turn's inputs to shared memory: bytes, and for each group its factor and its sum."""
    SLAB: gl.constexpr = h.shape[0]
    GROUPS: gl.constexpr = SLAB // GROUP
    parts = h.reshape([GROUPS, GROUP])
    larger, smaller = _group_powers(gl.max(gl.abs(parts), 1))
    total = gl.sum(parts, 1)
    smaller += total * 0.0  # no number if one of the inputs is none
    if CODING == 1:
        group = gl.arange(0, GROUPS, layout=smaller.type.layout)
        smaller *= gl.where(group // (64 // GROUP) % 2 == 1, 0.0625, 1.0)
    whole = (parts * larger[:, None]).reshape([SLAB])
    high, low = gl.inline_asm_elementwise(
        _BYTES, "=r,=r,f,f,f,f", [whole], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    both = gl.join(high, low).reshape([WARPS, 4, 64, 2]).permute((1, 0, 3, 2))
    bytes_of.index(slab).store(both)
    factors.index(slab).store(smaller.reshape([WARPS, GROUPS // WARPS // 4, 4]).permute((1, 0, 2)))
    totals.index(slab).store(total.reshape([WARPS, GROUPS // WARPS // 4, 4]).permute((1, 0, 2)))


@gluon.jit
def _stage(
    x, gains, bytes_of, factors, totals, exchange, eps, offset, K: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr, CODING: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """The row, normalized if NORM, to shared memory."""
    SLAB: gl.constexpr = WARPS * _STEP
    SLABS: gl.constexpr = (K + SLAB - 1) // SLAB
    kind: gl.constexpr = x.dtype.element_ty
    IS_HALF: gl.constexpr = kind != gl.bfloat16
    loaded = (_inputs(x, _columns(0, SLAB, WARPS), K, K % SLAB == 0),)
    for slab in gl.static_range(1, SLABS):
        one = _inputs(x, _columns(slab * SLAB, SLAB, WARPS), K, K % SLAB == 0)
        loaded = loaded + (one,)  # type: ignore[assignment]  # noqa: RUF005
    by = 0.0
    if NORM > 0:
        first = loaded[0].to(gl.float32)
        squares = first * first
        for slab in gl.static_range(1, SLABS):
            h = loaded[slab].to(gl.float32)
            squares += h * h
        by = gl.rsqrt(_of_warps(squares, exchange, False) / K + eps)
    for slab in gl.static_range(SLABS):
        h = loaded[slab].to(gl.float32)
        if NORM > 0:
            h = h * by
            if NORM == 1:
                h = _rounded(h, IS_HALF)
            h = _rounded(h * (gains[slab].to(gl.float32) + offset), IS_HALF)
        _put_slab(h, bytes_of, factors, totals, slab, GROUP, WARPS, CODING)


@gluon.constexpr_function
def _columns_layout(warps):
    """[warps, 4, 2, 4, 4]: of the right operand, a thread has four words of one of its eight columns, which are the
    upper and lower bytes for four groups."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 4, 2, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _slot_layout(warps, dim):
    layout = _columns_layout(warps)
    for other in (4, 3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _operand(bytes_of, at, HALF: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr):
    """Half a chunk of inputs where a column of the right operand meets codes of its group, and zeros elsewhere."""
    own: gl.constexpr = _columns_layout(WARPS)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    HALVES: gl.constexpr = bytes_of.shape[0] * bytes_of.shape[1]
    words = _seen_as(bytes_of, gl.int32, (HALVES, WARPS, 2, 4, 4), flat)
    loaded = words.index(at).load(gl.SliceLayout(1, own)).expand_dims(1)
    group = gl.arange(0, 4, layout=_slot_layout(WARPS, 1))[None, :, None, None, None]
    thread = gl.arange(0, 4, layout=_slot_layout(WARPS, 3))[None, None, None, :, None]
    meets = group == (thread if PARTS == 2 else thread // 2 + 2 * HALF)
    return gl.convert_layout(
        gl.where(meets, loaded, 0).reshape([WARPS, 8, 4, 4]), _words_layout(WARPS, 4), assert_trivial=True
    )


@gluon.jit
def _of_group(values, at, WARPS: gl.constexpr):
    """What is staged for a thread's group."""
    own: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, _words_layout(WARPS, 2)))
    COUNT: gl.constexpr = values.shape[0] * values.shape[1]
    lines = _seen_as(values, gl.float32, (COUNT, WARPS, 4), gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return lines.index(at).load(own)[:, None, :, None]


# --- the matrix


@gluon.jit
def _loaded(at, inside, WHOLE: gl.constexpr):
    if WHOLE:
        return gl.load(at)
    return gl.load(at, mask=inside, other=0)


@gluon.jit
def _load_words(
    words, row, chunk, COUNT: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """16 bytes for each thread. FORM: of codes of 8 bits, of columns up to 64 of a chunk (0) and of the rest (1); of
    those of 4 bits (2); of upper bits (3)."""
    own: gl.constexpr = _words_layout(WARPS, 4)
    thread = gl.arange(0, 4, layout=_along(own, 2))[None, None, :, None]
    word = gl.arange(0, 4, layout=_along(own, 3))[None, None, None, :]
    if FORM < 2:
        at = row * (K // 4) + chunk * 32 + FORM * 16 + thread * 4 + word
    elif FORM == 2:
        at = (chunk * COUNT + row) * 16 + thread * 4 + word
    else:
        at = (chunk * COUNT + row) * 8 + thread % 2 * 4 + word
    return _loaded(words + at, chunk < K // 128, WHOLE)


@gluon.jit
def _load_factors(
    words, row, chunk, COUNT: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr, PART: gl.constexpr,
    PARTS: gl.constexpr, FORM: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """The words that have what belongs to a thread's group, of a row and of that 8 further."""
    thread = gl.arange(0, 4, layout=_along(_words_layout(WARPS, 2), 2))[None, None, :, None]
    if FORM == 2:
        at = (chunk * COUNT + row) * (2 * PARTS) + 2 * PART + thread // 2
    else:
        at = (chunk * COUNT + row) * PARTS + PART + thread * 0
    return _loaded(words + at, chunk < K // 128, WHOLE)


@gluon.jit
def _load_tile(
    codes, high, scale, least, coarse, first, step, COUNT: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, CODING: gl.constexpr, FORM: gl.constexpr, BEGIN: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """What a turn reads of 16 rows from BEGIN + first on; in the place of those past LAST, that one."""
    WHOLE: gl.constexpr = K % (WARPS * _STEP) == 0
    own: gl.constexpr = _words_layout(WARPS, 4)
    pair: gl.constexpr = _words_layout(WARPS, 2)
    block = step * WARPS + gl.arange(0, WARPS, layout=_along(own, 0))[:, None, None, None]
    blocks = step * WARPS + gl.arange(0, WARPS, layout=_along(pair, 0))[:, None, None, None]
    row = first + gl.arange(0, 8, layout=_along(own, 1))[None, :, None, None]
    rows = first + gl.arange(0, 8, layout=_along(pair, 1))[None, :, None, None]
    rows += gl.arange(0, 2, layout=_along(pair, 3))[None, None, None, :] * 8
    one, other = BEGIN + gl.minimum(row, LAST), BEGIN + gl.minimum(row + 8, LAST)
    both = BEGIN + gl.minimum(rows, LAST)
    loaded = ()
    for half in gl.static_range(2):
        chunk, chunks = block * 2 + half, blocks * 2 + half
        if CODING == 0:
            for form in gl.static_range(2):
                a = _load_words(codes, one, chunk, COUNT, K, WARPS, form, WHOLE)
                b = _load_words(codes, other, chunk, COUNT, K, WARPS, form, WHOLE)
                loaded = loaded + (a, b)  # type: ignore[assignment]  # noqa: RUF005
        else:
            a = _load_words(codes, one, chunk, COUNT, K, WARPS, 2, WHOLE)
            b = _load_words(codes, other, chunk, COUNT, K, WARPS, 2, WHOLE)
            loaded = loaded + (a, b)  # type: ignore[assignment]  # noqa: RUF005
        if CODING == 2:
            a = _load_words(high, one, chunk, COUNT, K, WARPS, 3, WHOLE)
            b = _load_words(high, other, chunk, COUNT, K, WARPS, 3, WHOLE)
            loaded = loaded + (a, b)  # type: ignore[assignment]  # noqa: RUF005
        for part in gl.static_range(PARTS):
            by = _load_factors(scale, both, chunks, COUNT, K, WARPS, part, PARTS, FORM, WHOLE)
            loaded = loaded + (by,)  # type: ignore[assignment]  # noqa: RUF005
            if least is not None:
                by = _load_factors(least, both, chunks, COUNT, K, WARPS, part, PARTS, FORM, WHOLE)
                loaded = loaded + (by,)  # type: ignore[assignment]  # noqa: RUF005
    if coarse is not None:
        thread = gl.arange(0, 4, layout=_along(pair, 2))[None, None, :, None]
        by = _loaded(coarse + (blocks * COUNT + both + thread * 0), blocks < K // _STEP, WHOLE)
        loaded = loaded + (by,)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _load(
    codes, high, scale, least, coarse, first, step, N: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr,
    WARPS: gl.constexpr, PARTS: gl.constexpr, CODING: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """What a turn reads of the matrix, in the order in which `_step` takes it."""
    loaded = ()
    for tile in gl.static_range(COUNT // N):
        loaded = loaded + _load_tile(
            codes, high, scale, least, coarse, first, step, COUNT, K, WARPS, PARTS, CODING, FORM, tile * N, N - 1
        )  # fmt: skip
    return loaded


@gluon.constexpr_function
def _each(coding, parts, least, fine):
    """Tensors of a chunk in what `_load` gives, and of a tile."""
    chunk = (2 if coding == 1 else 4) + parts * (2 if least else 1)
    return chunk, 2 * chunk + (1 if fine else 0)


@gluon.jit
def _times(loaded, low, high, BEGIN: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, CODING: gl.constexpr):
    """16 rows of a chunk times the inputs: sums of the first part's groups, and of the second's."""
    own: gl.constexpr = _words_layout(WARPS, 4)
    TEXT: gl.constexpr = _TEXTS[2 * CODING + PARTS - 1]
    if CODING == 1:
        y = gl.inline_asm_elementwise(
            TEXT, _WORDS[1], [loaded[BEGIN], loaded[BEGIN + 1], low, high], dtype=gl.float32, is_pure=True, pack=4
        )
    elif CODING == 0:
        y = gl.inline_asm_elementwise(
            TEXT, _WORDS[0], [loaded[BEGIN], loaded[BEGIN + 1], loaded[BEGIN + 2], loaded[BEGIN + 3], low, high],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        shift = gl.arange(0, 4, layout=_along(own, 2))[None, None, :, None] & 2
        y = gl.inline_asm_elementwise(
            TEXT, _WORDS[2],
            [loaded[BEGIN], loaded[BEGIN + 1], loaded[BEGIN + 2], loaded[BEGIN + 3], shift, low, high],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    first, second = gl.split(y.reshape([WARPS, 8, 4, 2, 2]))
    pair: gl.constexpr = _words_layout(WARPS, 2)
    return gl.convert_layout(first, pair, assert_trivial=True), gl.convert_layout(second, pair, assert_trivial=True)


@gluon.jit
def _scaled(
    dot, below, product, factor, total, loaded, AT: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
    LEAST: gl.constexpr, MIDDLE: gl.constexpr,
):  # fmt: skip
    """Both sums plus those of one group of each thread."""
    product = product * factor
    if MIDDLE != 0:
        product -= total * MIDDLE
    dot += product * _number(loaded[AT], FORM, WARPS)
    if LEAST:
        below += total * _number(loaded[AT + 1], FORM, WARPS)
    return dot, below


@gluon.jit
def _tile(
    loaded, operands, by_group, of_group, BEGIN: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    CODING: gl.constexpr, FORM: gl.constexpr, LEAST: gl.constexpr, FINE: gl.constexpr, MIDDLE: gl.constexpr,
):  # fmt: skip
    """A superblock of 16 rows times the inputs."""
    CHUNK: gl.constexpr = _each(CODING, PARTS, LEAST, FINE)[0]
    PER: gl.constexpr = 2 if LEAST else 1
    dot = gl.zeros([WARPS, 8, 4, 2], gl.float32, layout=_words_layout(WARPS, 2))
    below = dot
    for half in gl.static_range(2):
        first, second = _times(
            loaded, operands[2 * half], operands[2 * half + 1], BEGIN + half * CHUNK, WARPS, PARTS, CODING
        )  # fmt: skip
        for part in gl.static_range(PARTS):
            dot, below = _scaled(
                dot, below, first if part == 0 else second, by_group[half * PARTS + part],
                of_group[half * PARTS + part], loaded, BEGIN + (half + 1) * CHUNK - PER * (PARTS - part), WARPS, FORM,
                LEAST, MIDDLE,
            )  # fmt: skip
    if FINE:
        by, by_least = gl.inline_asm_elementwise(
            _TWO_HALVES, "=f,=f,r", [loaded[BEGIN + 2 * CHUNK]], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        dot *= by
        below *= by_least
    if LEAST:
        dot -= below
    return dot


@gluon.jit
def _step(
    loaded, acc, acc_up, bytes_of, factors, totals, step, PLACE: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, CODING: gl.constexpr, FORM: gl.constexpr, LEAST: gl.constexpr, FINE: gl.constexpr,
    MIDDLE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Both sums plus a superblock of every warp."""
    TILES: gl.constexpr = 2 if GATED else 1
    EACH: gl.constexpr = _each(CODING, PARTS, LEAST, FINE)[1]
    operands, by_group, of_group = (), (), ()
    for half in gl.static_range(2):
        low = _operand(bytes_of, step * 4 + 2 * half, 0, WARPS, PARTS)
        high = _operand(bytes_of, step * 4 + 2 * half + 1, 1, WARPS, PARTS)
        operands = operands + (low, high)  # type: ignore[assignment]  # noqa: RUF005
        for part in gl.static_range(PARTS):
            at = (step * 2 + half) * PARTS + part
            by_group = by_group + (_of_group(factors, at, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
            of_group = of_group + (_of_group(totals, at, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
    acc += _tile(
        loaded, operands, by_group, of_group, EACH * TILES * PLACE, WARPS, PARTS, CODING, FORM, LEAST, FINE, MIDDLE
    )  # fmt: skip
    if GATED:
        acc_up += _tile(
            loaded, operands, by_group, of_group, EACH * (TILES * PLACE + 1), WARPS, PARTS, CODING, FORM, LEAST, FINE,
            MIDDLE,
        )  # fmt: skip
    return acc, acc_up


@gluon.jit
def _put_sums(parts, acc):
    """To shared memory for `_whole`."""
    parts.store(gl.sum(acc, 2).reshape([acc.shape[0], 16]))


@gluon.jit
def _few_blocks_kernel(
    x, gains, codes, high, scale, least, coarse, bias, stream, out, eps, offset,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, CODING: gl.constexpr, FORM: gl.constexpr,
    MIDDLE: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    WARPS: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (columns / 16,). out [N] = f(norm(x) weight' + bias) or stream + .. ; GATED: gate rows, then up rows."""
    kind: gl.constexpr = x.dtype.element_ty
    PARTS: gl.constexpr = 32 // GROUP
    COUNT: gl.constexpr = 2 * N if GATED else N
    SLAB: gl.constexpr = WARPS * _STEP
    STEPS: gl.constexpr = (K + SLAB - 1) // SLAB
    LOADED: gl.constexpr = _divisor(STEPS, AHEAD)
    INSIDE: gl.constexpr = N % 16 == 0
    LEAST: gl.constexpr = least is not None
    FINE: gl.constexpr = coarse is not None
    # steps, halves of a turn's chunks, warps, upper and lower bytes, columns
    bytes_of = gl.allocate_shared_memory(
        gl.int8, [STEPS, 4, WARPS, 2, 64], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )  # fmt: skip
    of_groups: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    factors = gl.allocate_shared_memory(gl.float32, [STEPS, 2 * PARTS, WARPS, 4], of_groups)
    totals = gl.allocate_shared_memory(gl.float32, [STEPS, 2 * PARTS, WARPS, 4], of_groups)
    exchange = gl.allocate_shared_memory(gl.float32, [WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums_up = sums
    if GATED:
        sums_up = gl.allocate_shared_memory(gl.float32, [WARPS, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    first = gl.program_id(0) * 16
    at = gl.arange(0, 16, layout=gl.SliceLayout(0, _sums_layout(WARPS)))
    n = first + at // 2 + at % 2 * 8
    if EARLY:
        gdc_launch_dependents()
    loaded = ()
    for place in gl.static_range(LOADED):
        loaded = loaded + _load(
            codes, high, scale, least, coarse, first, place, N, COUNT, K, WARPS, PARTS, CODING, FORM
        )  # fmt: skip
    by = _gains(gains, K, SLAB, WARPS, NORM)
    if EARLY:
        gdc_wait()
    _stage(x, by, bytes_of, factors, totals, exchange, eps, offset, K, GROUP, WARPS, CODING, NORM)
    residual = 0.0
    if ADD:
        residual = _of_rows(stream, n, N, INSIDE)
    _synchronize()  # the compiler would do so in every turn of the loop
    acc = gl.zeros([WARPS, 8, 4, 2], gl.float32, layout=_words_layout(WARPS, 2))
    acc_up = acc
    for step in range(0, STEPS - LOADED, LOADED):
        after = ()
        for place in gl.static_range(LOADED):
            acc, acc_up = _step(
                loaded, acc, acc_up, bytes_of, factors, totals, step + place, place, WARPS, PARTS, CODING, FORM, LEAST,
                FINE, MIDDLE, GATED,
            )  # fmt: skip
            after = after + _load(
                codes, high, scale, least, coarse, first, step + place + LOADED, N, COUNT, K, WARPS, PARTS, CODING, FORM
            )  # fmt: skip
        loaded = after
    for place in gl.static_range(LOADED):
        acc, acc_up = _step(
            loaded, acc, acc_up, bytes_of, factors, totals, STEPS - LOADED + place, place, WARPS, PARTS, CODING, FORM,
            LEAST, FINE, MIDDLE, GATED,
        )  # fmt: skip
    _put_sums(sums, acc)
    if GATED:
        _put_sums(sums_up, acc_up)
    y = _whole(sums)
    if BIAS:
        y += _of_rows(bias, n, N, INSIDE)
    y = y.to(kind).to(gl.float32)
    if GATED:
        up = _whole(sums_up)
        if BIAS:
            up += _of_rows(bias + N, n, N, INSIDE)
        up = up.to(kind).to(gl.float32)
        y = (y / (1.0 + gl.exp(-y))).to(kind).to(gl.float32)
        y = (y * up).to(kind).to(gl.float32)
    if ADD:
        y += residual
    gl.store(out + n, y.to(kind), mask=n < N)


# --- calls


def fits_weight(weight: CodedWeight) -> bool:
    """Whether the kernel reads blocks of this form."""
    return (
        weight.is_blocked
        and weight.kind in _KINDS
        and weight.group in (16, 32)
        and weight.width % COARSE == 0
        and weight.width <= _WIDEST
        and weight.chunk == 128
        and weight.zero is None
        and weight.scale.dtype in _SCALES
        and (weight.least is None or weight.least.dtype is weight.scale.dtype)
        and weight.rows * weight.width < 1 << 31
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in weight.tensors().values())
    )


def fits(x: Tensor, weight: CodedWeight) -> bool:
    return x.shape[0] == 1 and x.dtype in DTYPES and x.stride(1) == 1 and x.data_ptr() % 16 == 0 and fits_weight(weight)


def config_of(n: int, k: int, *, gated: bool, high: bool) -> FewBlocksConfig:
    """Nearly the fastest for the matrices of 0.6B and 8B on an H200 (docs/log.md). `high`: codes of more than four
    bits, in two planes, for which 128 registers are too few beside an activation."""
    turns = k // COARSE
    if gated and (high or turns <= 4):
        return FewBlocksConfig(4, 1, 168 if high else 128)
    if turns <= 4:
        return FewBlocksConfig(4, 1, 128)
    programs = -(-n // 16)
    fits_at_once = 2 * _PROCESSORS < programs <= 3 * _PROCESSORS  # three on a multiprocessor instead of two
    return FewBlocksConfig(8, 1, 80 if fits_at_once and not gated else 128)


def _words(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.view(torch.int32)


def few_blocks_linear(
    x: Tensor,  # [1, K]
    weight: CodedWeight,
    bias: Tensor | None = None,
    *,
    norm: NormRule | None = None,
    gated: bool = False,  # silu(gate) * up
    stream: Tensor | None = None,  # [1, N], to be added
    out: Tensor | None = None,  # [1, N]
    config: FewBlocksConfig | None = None,
    early: bool = False,
) -> Tensor:
    n, k = weight.rows // 2 if gated else weight.rows, weight.width
    config = config or config_of(n, k, gated=gated, high=weight.high is not None)
    if out is None:
        out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    rule = norm or NormRule(None, 0.0, 0.0, False)
    kind = 0 if norm is None else 2 if rule.wide or rule.offset else 1
    middle = CENTRES[weight.kind] if weight.least is None else weight.middle
    _few_blocks_kernel[(-(-n // 16),)](
        x, rule.weight, _words(weight.codes), _words(weight.high), _words(weight.scale), _words(weight.least),
        _words(weight.coarse), bias, stream, out, rule.eps, rule.offset, N=n, K=k, GROUP=weight.group,
        CODING=_KINDS.index(weight.kind), FORM=_SCALES.index(weight.scale.dtype), MIDDLE=middle, NORM=kind,
        GATED=gated, BIAS=bias is not None, ADD=stream is not None, WARPS=config.warps, AHEAD=config.ahead,
        EARLY=early, num_warps=config.warps, maxnreg=config.registers,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
