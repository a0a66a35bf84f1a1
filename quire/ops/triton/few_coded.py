"""Matmuls of one row with a matrix of 4- or 8-bit codes on CUDA, fused with the ops around them: few.py for codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops import few as few_ops
from quire.ops.coded import CodedWeight, is_packed
from quire.ops.few import NormRule
from quire.ops.op import Fits, FormTable
from quire.ops.triton import few
from quire.ops.triton.act import SILU

MOST_ROWS = 8  # that the kernel multiplies at once
FASTER = 1  # up to so many rows it is faster than what other rows use
DTYPES = (torch.bfloat16, torch.float16)
_KINDS = {"fp8": 0, "int8": 1, "int4": 2, "fp4": 3}


class FewCodedConfig(NamedTuple):
    warps: int  # that share K
    ahead: int  # chunks of a warp whose codes are loaded at once
    registers: int = 0  # of a thread at most; 0: as many as the compiler takes
    summed: bool = True


def _fp8(kind: str) -> str:
    """c: the numbers of codes in the high bytes of the 16-bit halves of a."""
    shift, mask, by = (4, "0x07F007F0", "0x7B807B80") if kind == "bf16" else (1, "0x3F803F80", "0x5C005C00")
    return f"""shr.b32 b, a, {shift};
        and.b32 b, b, {mask};
        lop3.b32 b, a, 0x80008000, b, 0xEA;
        mov.b32 d, {by};
        mul.{kind}x2 c, b, d;"""


def _int8(kind: str) -> str:
    """c: the numbers of codes in the low bytes of the 16-bit halves of a."""
    if kind == "bf16":
        return """lop3.b32 b, a, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
        sub.bf16x2 c, b, c;"""
    return """and.b32 b, a, 0x00FF00FF;
        lop3.b32 b, b, 0x00800080, 0x64006400, 0xBE;
        mov.b32 d, 0x64806480;
        sub.f16x2 c, b, d;"""


def _int4(kind: str, summed: bool) -> str:
    """c: codes in the low bits of the 16-bit halves of a, plus a power of two; not summed: less that and the middle."""
    one, base = ("0x43004300", "0x43084308") if kind == "bf16" else ("0x64006400", "0x64086408")
    text = f"lop3.b32 c, a, 0x000F000F, {one}, 0xEA;"
    return text if summed else text + f"mov.b32 d, {base};sub.{kind}x2 c, c, d;"


def _fp4(kind: str) -> str:
    shift, by = (6, "0x7E807E80") if kind == "bf16" else (9, "0x74007400")
    mask = f"0x{7 << shift:04X}{7 << shift:04X}"
    return f"""shl.b32 b, a, {shift};
        shl.b32 c, a, 12;
        and.b32 c, c, 0x80008000;
        lop3.b32 c, b, {mask}, c, 0xEA;
        mov.b32 d, {by};
        mul.{kind}x2 c, c, d;"""


def _mma(kind: str, to: str, a: tuple[str, str, str, str], b: tuple[str, str]) -> str:
    sums = ", ".join(f"{to}{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, "
        f"{{{sums}}};"
    )


def _chain(names: str) -> str:
    regs = ", ".join(f"{name}{i}" for name in names for i in range(4))
    return f".reg .f32 {regs};" + "".join(f"mov.f32 {name}{i}, 0f00000000;" for name in names for i in range(4))


def _joined(names: str) -> str:
    if len(names) == 1:
        return "".join(f"mov.f32 ${i}, {names}{i};" for i in range(4))
    return "".join(f"add.f32 ${i}, {names[0]}{i}, {names[1]}{i};" for i in range(4))


def _product(coding: int, kind: str, summed: bool) -> str:
    """$4 to $7: 16 bytes of codes of one row of the matrix, $8 to $11: of the row 8 further; then the inputs."""
    body = (_fp8(kind), _int8(kind), _int4(kind, summed), _fp4(kind))[coding]
    lines = ["{", ".reg .b32 a, b, c, d, p<8>;", _chain("uv")]

    def widened(source: int, moved: str, to: int) -> None:
        lines.append(f"{moved.format(source=f'${source}')}{body}mov.b32 p{to}, c;")

    for word in range(4):
        if coding < 2:
            even, odd = ("shl.b32 a, {source}, 8;", "mov.b32 a, {source};")
            if coding == 1:
                even, odd = ("mov.b32 a, {source};", "shr.b32 a, {source}, 8;")
            for row in range(2):
                widened(4 + 4 * row + word, even, row)
                widened(4 + 4 * row + word, odd, 2 + row)
            to = "uv"[word % 2]
            lines.append(_mma(kind, to, ("p0", "p1", "p2", "p3"), (f"${12 + 2 * word}", f"${13 + 2 * word}")))
        else:
            for row in range(2):
                widened(4 + 4 * row + word, "mov.b32 a, {source};", row)
                widened(4 + 4 * row + word, "shr.b32 a, {source}, 8;", 2 + row)
                widened(4 + 4 * row + word, "shr.b32 a, {source}, 4;", 4 + row)
                widened(4 + 4 * row + word, "shr.b32 a, {source}, 12;", 6 + row)
            lines.append(_mma(kind, "u", ("p0", "p1", "p2", "p3"), (f"${12 + 2 * word}", f"${13 + 2 * word}")))
            lines.append(_mma(kind, "v", ("p4", "p5", "p6", "p7"), (f"${20 + 2 * word}", f"${21 + 2 * word}")))
    return "\n".join([*lines, _joined("uv"), "}"])


def _sum(kind: str) -> str:
    """The sum of a chunk's inputs, as often as `_product` has sums."""
    one = "0x3F803F80" if kind == "bf16" else "0x3C003C00"
    lines = ["{", ".reg .b32 p;", f"mov.b32 p, {one};", _chain("uv")]
    for word in range(8):
        lines.append(_mma(kind, "uv"[word % 2], ("p",) * 4, (f"${4 + 2 * word}", f"${5 + 2 * word}")))
    return "\n".join([*lines, _joined("uv"), "}"])


_BF16 = gl.constexpr(tuple(_product(coding, "bf16", summed) for coding in range(4) for summed in (False, True)))
_F16 = gl.constexpr(tuple(_product(coding, "f16", summed) for coding in range(4) for summed in (False, True)))
_SUMS = gl.constexpr((_sum("bf16"), _sum("f16")))
_FOUR = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 16))
_EIGHT = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 24))
_ONLY = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 16))


# From Triton 3.9 on it has another name.
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _seen_as(memory, kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory.reinterpret(kind, shape, layout)

else:

    @gluon.jit
    def _seen_as(memory, kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory._reinterpret(kind, shape, layout)


@gluon.constexpr_function
def _words_layout(warps, rows, words):
    """[warps, 8 / rows, rows, 4, words]: a warp has 8 rows of the matrix, four threads of it `words` each of one."""
    return gl.BlockedLayout([1, 1, 1, 1, words], [1, 8 // rows, rows, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _along(layout, dim, rank):
    """The layout of a vector along one dimension of this one."""
    for other in range(rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _places(first, step, WARPS: gl.constexpr, M: gl.constexpr, WORDS: gl.constexpr):
    """Of every entry of `_words_layout`: its chunk, its row of the matrix, its thread, its word."""
    own: gl.constexpr = _words_layout(WARPS, M, WORDS)
    chunk = step * WARPS + gl.arange(0, WARPS, layout=_along(own, 0, 5))[:, None, None, None, None]
    row = gl.arange(0, 8 // M, layout=_along(own, 1, 5))[None, :, None, None, None] * M
    row += gl.arange(0, M, layout=_along(own, 2, 5))[None, None, :, None, None]
    thread = gl.arange(0, 4, layout=_along(own, 3, 5))[None, None, None, :, None]
    word = gl.arange(0, WORDS, layout=_along(own, 4, 5))[None, None, None, None, :]
    return chunk, first + row, thread, word


@gluon.constexpr_function
def _slab(k, width):
    """Columns that are staged at once: a power of two, and as many as do not lie past the end."""
    while k % (2 * width) == 0:
        width *= 2
    return width


@gluon.jit
def _load_words(
    codes, first, step, N: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """16 bytes of each of 8 rows from `first` on, of every warp's chunk."""
    CHUNKS: gl.constexpr = K // 128 if PACKED else K // 64
    chunk, row, thread, word = _places(first, step, WARPS, M, 4)
    if PACKED:
        at = (chunk * COUNT + row) * 16 + thread * 4 + word
    else:
        at = row * (K // 4) + chunk * 16 + thread * 4 + word
    if CHUNKS % WARPS == 0 and N % 16 == 0:
        return gl.load(codes + at)
    return gl.load(codes + at, mask=(chunk < CHUNKS) & (row < COUNT), other=0)


@gluon.jit
def _load_scales(
    scale, first, step, N: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr,
    WARPS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Of rows and of those 8 further."""
    WIDTH: gl.constexpr = 128 if PACKED else 64
    chunk, row, thread, word = _places(first, step, WARPS, M, 2)
    group, n = chunk * WIDTH // GROUP, row + word * 8 + thread * 0
    if K // WIDTH % WARPS == 0 and N % 16 == 0:
        return gl.load(scale + group * COUNT + n).to(gl.float32)
    return gl.load(scale + group * COUNT + n, mask=(group < K // GROUP) & (n < COUNT), other=0.0).to(gl.float32)


@gluon.jit
def _twice(by, own: gl.constexpr):
    """A scale for each sum of `_product`."""
    both = gl.join(by, by).reshape([by.shape[0], by.shape[1], by.shape[2], 4, 4])
    return gl.convert_layout(both, own, assert_trivial=True)


@gluon.jit
def _columns(start, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    EACH: gl.constexpr = WIDTH // (32 * WARPS) if WIDTH // (32 * WARPS) < 8 else 8
    own: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    return start + gl.arange(0, WIDTH, layout=own)


@gluon.jit
def _inputs(x, k, K: gl.constexpr, WHOLE: gl.constexpr):
    if WHOLE:
        return gl.load(x + k).to(gl.float32)
    return gl.load(x + k, mask=k < K, other=0.0).to(gl.float32)


@gluon.jit
def _gains(gains, K: gl.constexpr, SLAB: gl.constexpr, WARPS: gl.constexpr, NORM: gl.constexpr):
    loaded = ()
    if NORM > 0:
        for slab in gl.static_range((K + SLAB - 1) // SLAB):
            loaded = loaded + (_inputs(gains, _columns(slab * SLAB, SLAB, WARPS), K, K % SLAB == 0),)
    return loaded


@gluon.jit
def _stage(
    x, gains, slabs, eps, offset, M: gl.constexpr, ROW: gl.constexpr,
    K: gl.constexpr, SLAB: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """A row, normalized if NORM, to shared memory in the order of `_product`: pairs of every other column."""
    SLABS: gl.constexpr = (K + SLAB - 1) // SLAB
    WHOLE: gl.constexpr = K % SLAB == 0
    kind: gl.constexpr = x.dtype.element_ty
    by = 0.0
    if NORM > 0:
        squares = gl.zeros_like(_columns(0, SLAB, WARPS)).to(gl.float32)
        for slab in gl.static_range(SLABS):
            h = _inputs(x, _columns(slab * SLAB, SLAB, WARPS), K, WHOLE)
            squares += h * h
        by = gl.rsqrt(gl.sum(squares, 0) / K + eps)
    for slab in gl.static_range(SLABS):
        h = _inputs(x, _columns(slab * SLAB, SLAB, WARPS), K, WHOLE)
        if NORM > 0:
            h = h * by
            if NORM == 1:
                h = h.to(kind).to(gl.float32)
            h = h * (gains[slab] + offset)
        # step, warp, half of a chunk, thread, block, pair of words, high, word
        h = h.to(kind).reshape([SLAB // WIDTH, WARPS, WIDTH // WARPS // 64, 4, 2, 2, 2, 2])
        h = h.permute((0, 2, 4, 1, 3, 5, 7, 6)).reshape([SLAB // WARPS // 32, WARPS, 1, 32])
        slabs.index(slab).slice(ROW, 1, 2).store(h)


@gluon.jit
def _block(staged, at, M: gl.constexpr, WARPS: gl.constexpr):
    """Four words of inputs for each thread: of row lane / 4 % M."""
    own: gl.constexpr = gl.SliceLayout(1, _words_layout(WARPS, M, 4))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    BLOCKS: gl.constexpr = staged.shape[0]
    words = _seen_as(staged, gl.int32, (BLOCKS, WARPS, M, 4, 4), flat)
    return words.index(at).load(own).expand_dims(1)


@gluon.jit
def _times(a, b, x0, x1, x2, x3, TEXT: gl.constexpr, PACKED: gl.constexpr):
    if PACKED:
        return gl.inline_asm_elementwise(
            TEXT, _EIGHT, [a, b, x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=4
        )
    return gl.inline_asm_elementwise(TEXT, _FOUR, [a, b, x0, x1], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def _load(
    codes, scale, first, BEGIN: gl.constexpr, N: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, STEPS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Codes and scales of AHEAD steps from BEGIN on."""
    loaded = ()
    for step in gl.static_range(AHEAD):
        for tile in gl.static_range(COUNT // N):
            if BEGIN + step < STEPS:
                n = first + tile * N
                loaded = loaded + (_load_words(codes, n, BEGIN + step, N, COUNT, K, M, WARPS, PACKED),)
                loaded = loaded + (_load_words(codes, n + 8, BEGIN + step, N, COUNT, K, M, WARPS, PACKED),)
                if GROUP != K:
                    loaded = loaded + (_load_scales(scale, n, BEGIN + step, N, COUNT, K, GROUP, M, WARPS, PACKED),)
    return loaded


@gluon.jit
def _step(
    loaded, acc, acc_up, staged, STEP: gl.constexpr, PLACE: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
    CODING: gl.constexpr, SUMS: gl.constexpr, GROUPED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Both sums plus a chunk of every warp."""
    PACKED: gl.constexpr = CODING >= 2
    BLOCKS: gl.constexpr = 4 if PACKED else 2
    IS_HALF: gl.constexpr = staged.dtype != gl.bfloat16
    TEXT: gl.constexpr = _F16[2 * CODING + SUMS] if IS_HALF else _BF16[2 * CODING + SUMS]
    SUM_TEXT: gl.constexpr = _SUMS[1] if IS_HALF else _SUMS[0]
    MIDDLE: gl.constexpr = 1032.0 if IS_HALF else 136.0
    EACH: gl.constexpr = 3 if GROUPED else 2
    TILES: gl.constexpr = 2 if GATED else 1
    own: gl.constexpr = acc.type.layout
    x0 = _block(staged, STEP * BLOCKS, M, WARPS)
    x1 = _block(staged, STEP * BLOCKS + 1, M, WARPS)
    x2, x3 = x0, x1
    if PACKED:
        x2 = _block(staged, STEP * BLOCKS + 2, M, WARPS)
        x3 = _block(staged, STEP * BLOCKS + 3, M, WARPS)
    less = acc
    if SUMS:
        less = MIDDLE * gl.inline_asm_elementwise(
            SUM_TEXT, _ONLY, [x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=4
        )
    for tile in gl.static_range(TILES):
        part = _times(
            loaded[EACH * (TILES * PLACE + tile)], loaded[EACH * (TILES * PLACE + tile) + 1], x0, x1, x2, x3, TEXT,
            PACKED,
        )  # fmt: skip
        if SUMS:
            part = part - less
        if GROUPED:
            part = part * _twice(loaded[EACH * (TILES * PLACE + tile) + 2], own)
        if tile == 0:
            acc += part
        else:
            acc_up += part
    return acc, acc_up


@gluon.jit
def _of_rows(values, n, count, INSIDE: gl.constexpr):
    if INSIDE:
        return gl.load(values + n).to(gl.float32)
    return gl.load(values + n, mask=n < count, other=0.0).to(gl.float32)


@gluon.jit
def _few_coded_kernel(
    x, gains, codes, scale, bias, stream, out, x_stride, eps, offset,
    M: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, CODING: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr, SUMMED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (columns / 16,). out [ROWS, N] = f(norm(x) weight' + bias) or stream + .. ; GATED: gate rows, then up rows.
    M: ROWS, rounded up to a power of two."""
    kind: gl.constexpr = x.dtype.element_ty
    own: gl.constexpr = _words_layout(WARPS, M, 4)
    PACKED: gl.constexpr = CODING >= 2
    COUNT: gl.constexpr = 2 * N if GATED else N
    SUMS: gl.constexpr = SUMMED and CODING == 2
    WIDTH: gl.constexpr = WARPS * 128 if PACKED else WARPS * 64
    SLAB: gl.constexpr = _slab(K, WIDTH)
    SLABS: gl.constexpr = (K + SLAB - 1) // SLAB
    STEPS: gl.constexpr = SLABS * (SLAB // WIDTH)
    BLOCKS: gl.constexpr = SLAB // (WARPS * 32)
    ROUNDS: gl.constexpr = (STEPS + AHEAD - 1) // AHEAD
    GROUPED: gl.constexpr = GROUP != K
    first = gl.program_id(0) * 16
    staged = gl.allocate_shared_memory(
        kind, [SLABS * BLOCKS, WARPS * M * 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    slabs = _seen_as(staged, kind, (SLABS, BLOCKS, WARPS, M, 32), gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    if EARLY:
        gdc_launch_dependents()
    loaded = _load(codes, scale, first, 0, N, COUNT, K, GROUP, M, WARPS, AHEAD, STEPS, PACKED)
    by = _gains(gains, K, SLAB, WARPS, NORM)
    if EARLY:
        gdc_wait()
    for row in gl.static_range(ROWS):
        _stage(x + row * x_stride, by, slabs, eps, offset, M, row, K, SLAB, WIDTH, WARPS, NORM)
    acc = gl.zeros([WARPS, 8 // M, M, 4, 4], gl.float32, layout=own)
    acc_up = acc
    for round in gl.static_range(ROUNDS):
        after = _load(
            codes, scale, first, (round + 1) * AHEAD, N, COUNT, K, GROUP, M, WARPS, AHEAD, STEPS, PACKED
        )  # fmt: skip
        for ahead in gl.static_range(AHEAD):
            if round * AHEAD + ahead < STEPS:
                acc, acc_up = _step(
                    loaded, acc, acc_up, staged, round * AHEAD + ahead, ahead, M, WARPS, CODING, SUMS, GROUPED, GATED
                )  # fmt: skip
        loaded = after
    sums: gl.constexpr = gl.SliceLayout(0, own)
    row = gl.arange(0, 8 // M, layout=_along(sums, 0, 4))[:, None, None, None] * M
    row += gl.arange(0, M, layout=_along(sums, 1, 4))[None, :, None, None]
    word = gl.arange(0, 4, layout=_along(sums, 3, 4))[None, None, None, :]
    m = gl.arange(0, 4, layout=_along(sums, 2, 4))[None, None, :, None] * 2 + word % 2
    n = first + row + word // 2 * 8 + m * 0
    y = gl.sum(acc, 0)
    up = y
    if GATED:
        up = gl.sum(acc_up, 0)
    INSIDE: gl.constexpr = N % 16 == 0
    if not GROUPED:
        y *= _of_rows(scale, n, N, INSIDE)
        if GATED:
            up *= _of_rows(scale + N, n, N, INSIDE)
    if BIAS:
        y += _of_rows(bias, n, N, INSIDE)
        if GATED:
            up += _of_rows(bias + N, n, N, INSIDE)
    y = y.to(kind).to(gl.float32)
    if GATED:
        up = up.to(kind).to(gl.float32)
        y = (y / (1.0 + gl.exp(-y))).to(kind).to(gl.float32)
        y = (y * up).to(kind).to(gl.float32)
    here = (m < ROWS) & (n < N)
    if ADD:
        y += gl.load(stream + m * N + n, mask=here, other=0.0).to(gl.float32)
    gl.store(out + m * N + n, y.to(kind), mask=here)


def fits(x: Tensor, weight: CodedWeight) -> bool:
    return (
        0 < x.shape[0] <= MOST_ROWS
        and x.dtype in DTYPES
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and fits_weight(weight)
    )


def fits_weight(weight: CodedWeight) -> bool:
    """Whether the kernel reads codes of this form."""
    return (
        weight.zero is None
        and weight.width % 128 == 0
        and weight.group % 128 == 0
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        and (not is_packed(weight.kind) or weight.half == 64)
    )


def config_of(n: int, k: int, *, packed: bool, gated: bool) -> FewCodedConfig:
    return FewCodedConfig(8, 4 if packed and not gated else 2)


def options_of(config: FewCodedConfig) -> dict[str, int]:
    """For the compiler."""
    return {"maxnreg": config.registers} if config.registers else {}


def few_coded_linear(
    x: Tensor,  # [M, K], rows may be apart
    weight: CodedWeight,
    bias: Tensor | None = None,
    *,
    norm: NormRule | None = None,
    gated: bool = False,  # silu(gate) * up
    stream: Tensor | None = None,  # [M, N] contiguous, to be added
    config: FewCodedConfig | None = None,
    early: bool = False,
) -> Tensor:
    n, k = weight.rows // 2 if gated else weight.rows, weight.width
    packed = is_packed(weight.kind)
    config = config or config_of(n, k, packed=packed, gated=gated)
    warps, ahead, _, summed = config
    rows = x.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    rule = norm or NormRule(None, 0.0, 0.0, False)
    kind = 0 if norm is None else 2 if rule.wide or rule.offset else 1
    options = ({"launch_pdl": True} if early else {}) | options_of(config)
    _few_coded_kernel[(-(-n // 16),)](
        x, rule.weight, weight.codes.view(torch.int32), weight.scale, bias, stream, out, x.stride(0),
        rule.eps, rule.offset, M=1 << (rows - 1).bit_length(), ROWS=rows, N=n, K=k, GROUP=weight.group, CODING=_KINDS[weight.kind], NORM=kind, GATED=gated, BIAS=bias is not None,
        ADD=stream is not None, WARPS=warps, AHEAD=ahead, SUMMED=summed, EARLY=early, num_warps=warps, **options,
    )  # fmt: skip
    return out


# --- forms of ops/few.py


def few_rows(width: int, dtype: torch.dtype, matrices: Sequence[Tensor | CodedWeight]) -> int:
    codes = [matrix for matrix in matrices if isinstance(matrix, CodedWeight)]
    if codes and dtype in DTYPES and all(map(fits_weight, codes)):
        return FASTER
    return few.few_rows(width, dtype, matrices)


def norm_linear(
    x: Tensor, norm: NormRule, weight: Tensor | CodedWeight, bias: Tensor | None,
    act: Callable[[Tensor], Tensor] | None = None, *, codes: Mapping[Callable, int], early: bool = False,
) -> Tensor:  # fmt: skip
    """`codes`: gated activations by function; SiLU is fused into the matmul, others run after it."""
    if not isinstance(weight, CodedWeight) or not fits(x, weight):
        return few.norm_linear(x, norm, weight, bias, act, codes=codes, early=early)
    gated = act is not None and codes.get(act) == SILU
    y = few_coded_linear(x, weight, bias, norm=norm, gated=gated, early=early)
    return y if act is None or gated else act(y)


def linear_add(
    x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, stream: Tensor, *, early: bool = False
) -> Tensor:
    if not isinstance(weight, CodedWeight) or not fits(x, weight):
        return few.linear_add(x, weight, bias, stream, early=early)
    return few_coded_linear(x, weight, bias, stream=stream.contiguous(), early=early)


def add_forms(table: FormTable, codes: Mapping[Callable, int], fits: Fits, *, early: bool) -> None:
    """The forms of this device; `codes` as in `norm_linear`."""
    table.form(few_ops.few_rows, fits)(few_rows)
    table.form(few_ops.norm_linear, fits)(partial(norm_linear, codes=codes, early=early))
    table.form(few_ops.linear_add, fits)(partial(linear_add, early=early))
