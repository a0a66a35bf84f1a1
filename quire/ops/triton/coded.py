"""Matmuls with weights of 4 and 8 bits on CUDA: see ops/coded.py for how they lie in memory.

One kernel for all kinds. The matrix is the left operand: a tile of codes goes from memory through shared memory into
registers, becomes 16-bit numbers there, and meets a tile of inputs on the tensor cores. Scales multiply the float32 sum
of a group, so what is multiplied is exact. Inputs that were rounded to 8 bits are multiplied with the codes themselves.

    rows of inputs        fp8, int8 that round          others
    up to _ROUNDED        codes widened, tiles for a few rows, at the bandwidth of memory
    up to _SCRATCH        inputs rounded                codes widened, larger tiles
    more                  inputs rounded                decoded to a scratch matrix, multiplied by the library

On Hopper, few_coded.py has the matmuls of one row, skinny_coded.py those of some rows, with codes that they read, and
skinny_rounded.py those of 33 to 256 rows with fp8 and int8 that round, a scale for each row.

In batch-invariant mode there is one tile for any number of rows, and inputs are never rounded.

Floor: the bytes of the codes at 4.3 TB/s for a few rows: 24576 x 4096, fp8 101 MB, 23 us; int4 in groups of 128 with
scales 52 MB, 12 us. Many rows: 2 T N K operations, of 16 bits at 800 TFLOP/s, of 8 bits at 1500.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.base.log import logger
from quire.ops import coded as coded_ops
from quire.ops import rounded as rounded_ops
from quire.ops.coded import CodedWeight, is_packed
from quire.ops.few import NormRule
from quire.ops.op import Fits, FormTable, same_bits
from quire.ops.parts import Delta
from quire.ops.rounded import RoundedRows, RowCode
from quire.ops.triton import coded_blocks
from quire.ops.triton import norm as norm_kernel
from quire.ops.triton.act import CLAMPED, MOST_ROUNDED, gated_rounded
from quire.ops.triton.norm import rounded
from quire.ops.triton.sizes import cdiv, next_power_of_2

_ROUNDED, _SCRATCH = 64, 192
_GROUPED = 128  # columns of a group that the library multiplies
_BAND = 8  # tiles of inputs that share their tiles of the matrix in cache
_WIDEST = 32768  # of a row that one program rounds
_FEW_ROUNDED = 64  # rows that many warps round
DIRECT, WIDENED, HALVES = 0, 1, 2  # what is done to codes
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_log = logger(__name__)


class CodedTile(NamedTuple):
    inputs: int  # rows of x
    columns: int  # rows of the matrix
    depth: int  # entries of K; chunks of 4-bit codes have a depth of their own
    warps: int
    stages: int
    split: int = 0  # pieces of K at a time, by different warps, where one tile has all rows of x; 0: K is not split


def _halves(kind: str) -> str:
    """Four bytes in a register -> 8 numbers of 16 bits: code + 128 (bf16) or 1024 (f16), less that and the middle."""
    one, base = ("0x43004300", "0x43084308") if kind == "bf16" else ("0x64006400", "0x64086408")
    return f"""
    {{
    .reg .b32 a, b, c, one, base;
    mov.b32 one, {one};
    mov.b32 base, {base};
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    lop3.b32 c, a, 0x000F000F, one, 0xEA;
    sub.{kind}x2 $0, c, base;
    lop3.b32 c, b, 0x000F000F, one, 0xEA;
    sub.{kind}x2 $1, c, base;
    shr.b32 a, a, 4;
    shr.b32 b, b, 4;
    lop3.b32 c, a, 0x000F000F, one, 0xEA;
    sub.{kind}x2 $2, c, base;
    lop3.b32 c, b, 0x000F000F, one, 0xEA;
    sub.{kind}x2 $3, c, base;
    }}
    """


# Four e4m3 codes in a register -> 4 of bf16: exponent and mantissa in the places of bf16's, whose exponent is 120 more.
# The instruction that the compiler takes goes by way of float32, at a sixteenth of the rate of these.
_E4M3 = tl.constexpr("""
    {
    .reg .b32 a, b, c, d, by;
    mov.b32 by, 0x7B807B80;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 c, a, 0x7F007F00;
    and.b32 d, b, 0x7F007F00;
    shr.b32 c, c, 4;
    shr.b32 d, d, 4;
    lop3.b32 c, a, 0x80008000, c, 0xEA;
    lop3.b32 d, b, 0x80008000, d, 0xEA;
    mul.bf16x2 $0, c, by;
    mul.bf16x2 $1, d, by;
    }
""")
_BF16_HALVES, _F16_HALVES = tl.constexpr(_halves("bf16")), tl.constexpr(_halves("f16"))
_MIDDLE = tl.constexpr(float(coded_ops.MIDDLE))


@triton.jit
def _e2m1(code, KIND: tl.constexpr):
    """Codes of 4 bits as numbers: exponent and mantissa moved to those of float32, which are 126 too low."""
    bits = ((code & 8).to(tl.uint32) << 28) | ((code & 7).to(tl.uint32) << 22)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(KIND)


@triton.jit
def _opened(packed, KIND: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr):
    """Both halves of bytes as numbers of KIND: whole ones less MIDDLE."""
    if FLOAT:
        low, high = _e2m1(packed & 15, KIND), _e2m1(packed >> 4, KIND)
    elif ASM and tl.bfloat16 == KIND:
        low, high = tl.inline_asm_elementwise(
            _BF16_HALVES, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif ASM:
        low, high = tl.inline_asm_elementwise(
            _F16_HALVES, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = (packed & 15).to(KIND) - _MIDDLE, (packed >> 4).to(KIND) - _MIDDLE
    return low.to(KIND), high.to(KIND)


@triton.jit
def _widened(tile, KIND: tl.constexpr, ASM: tl.constexpr):
    """Codes of 8 bits as numbers of KIND."""
    if ASM and tl.bfloat16 == KIND and tile.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [tile.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return tile.to(KIND)


@triton.jit
def _inputs(x, m, k, rows, x_stride, K: tl.constexpr, BK: tl.constexpr):
    """[BK, BM]: a tile of inputs, as the right operand."""
    at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    if K % BK == 0:
        return tl.load(at, mask=(m < rows)[None, :], other=0.0)
    return tl.load(at, mask=(m < rows)[None, :] & (k < K)[:, None], other=0.0)


@triton.jit
def _of_group(values, n, group, N: tl.constexpr):
    return tl.load(values + group * N + n, mask=n < N, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _coded_kernel(
    x, x_scale, codes, scale, zero, bias, out, rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BAND: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (tiles,). out [rows, N] = x weight' + bias. FORM: codes as they are (DIRECT), widened, or two in a byte."""
    columns: tl.constexpr = (N + BN - 1) // BN
    tiles = (rows + BM - 1) // BM
    program = tl.program_id(0)
    band = program // (BAND * columns)
    height = tl.minimum(tiles - band * BAND, BAND)
    inner = program % (BAND * columns)
    m = (band * BAND + inner % height) * BM + tl.arange(0, BM)
    n = inner // height * BN + tl.arange(0, BN)
    inside = (n < N)[:, None]
    kind: tl.constexpr = x.dtype.element_ty
    sums: tl.constexpr = tl.int32 if kind == tl.int8 else tl.float32
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    by = _of_group(scale, n, 0, N)
    x_by = tl.zeros((BM,), tl.float32)
    if FORM == 0:
        x_by = tl.load(x_scale + m, mask=m < rows, other=0.0)
    if FORM == 2:
        j = tl.arange(0, HALF)
        at = codes + n.to(tl.int64)[:, None] * HALF + j[None, :]
        for chunk in range(0, K // (2 * HALF)):
            packed = tl.load(at, mask=inside, other=0.0)
            low, high = _opened(packed, kind, FLOAT, ASM)
            start = chunk * 2 * HALF
            if ZERO:
                less = (_of_group(zero, n, start // GROUP, N) - _MIDDLE).to(kind)[:, None]
                low = low - less
                if GROUP == HALF:
                    less = (_of_group(zero, n, start // GROUP + 1, N) - _MIDDLE).to(kind)[:, None]
                high = high - less
            first = _inputs(x, m, start + j, rows, x_stride, K, HALF)
            second = _inputs(x, m, start + HALF + j, rows, x_stride, K, HALF)
            if GROUP == K:
                acc = tl.dot(low, first, acc)
                acc = tl.dot(high, second, acc)
            elif GROUP == HALF:
                acc += tl.dot(low, first) * by[:, None]
                acc += tl.dot(high, second) * _of_group(scale, n, start // GROUP + 1, N)[:, None]
            else:
                acc += tl.dot(high, second, tl.dot(low, first)) * by[:, None]
            if GROUP != K:  # of the next piece: this one's dots hide the time it takes
                by = _of_group(scale, n, tl.minimum((start + 2 * HALF) // GROUP, K // GROUP - 1), N)
            at += N * HALF
    else:
        k = tl.arange(0, BK)
        at = codes + n.to(tl.int64)[:, None] * K + k[None, :]
        whole = tl.zeros((BN, BM), sums)
        for start in range(0, K, BK):
            if K % BK == 0:
                tile = tl.load(at, mask=inside, other=0.0)
            else:
                tile = tl.load(at, mask=inside & (k < K - start)[None, :], other=0.0)
            if FORM == 1:
                tile = _widened(tile, kind, ASM)
            if ZERO:
                tile = tile - _of_group(zero, n, start // GROUP, N).to(kind)[:, None]
            inputs = _inputs(x, m, start + k, rows, x_stride, K, BK)
            if GROUP == K:
                whole = tl.dot(tile, inputs, whole, out_dtype=sums)
            else:
                part = tl.dot(tile, inputs, out_dtype=sums).to(tl.float32)
                ahead = tl.minimum((start + BK) // GROUP, K // GROUP - 1)
                if FORM == 0:
                    acc += part * (by[:, None] * x_by[None, :])
                    x_by = tl.load(x_scale + ahead * rows + m, mask=m < rows, other=0.0)
                else:
                    acc += part * by[:, None]
                by = _of_group(scale, n, ahead, N)
            at += BK
        if GROUP == K:
            acc = whole.to(tl.float32)
    if GROUP == K:
        acc = acc * by[:, None]
        if FORM == 0:
            acc = acc * x_by[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at_out = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=inside & (m < rows)[None, :])


@triton.jit
def _scales_of(scale, n, group, last, N: tl.constexpr):
    """[S, BN]: of one group for each split."""
    at = scale + tl.minimum(group, last)[:, None] * N + n[None, :]
    return tl.load(at, mask=(n < N)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _few_coded_kernel(
    x, codes, scale, zero, bias, out, rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SPLIT: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (columns,). As `_coded_kernel`, for up to BM rows: each group of warps has every SPLIT-th piece of K,
    because one that widens whole rows would be slower than memory. Scales are read one piece ahead."""
    PIECE: tl.constexpr = 2 * HALF if FORM == 2 else BK
    PIECES: tl.constexpr = K // PIECE
    n, m, split = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, SPLIT)
    j = tl.arange(0, HALF if FORM == 2 else BK)
    step: tl.constexpr = SPLIT * N * HALF if FORM == 2 else SPLIT * BK
    kind: tl.constexpr = x.dtype.element_ty
    here = (m < rows)[None, None, :]
    if FORM == 2:
        at = codes + (split.to(tl.int64)[:, None, None] * N + n[None, :, None]) * HALF + j[None, None, :]
    else:
        at = codes + n.to(tl.int64)[None, :, None] * K + split[:, None, None] * BK + j[None, None, :]
    x_at = x + m.to(tl.int64)[None, None, :] * x_stride + (split[:, None] * PIECE + j[None, :])[:, :, None]
    if EARLY:
        gdc_launch_dependents()
    last: tl.constexpr = K // GROUP - 1
    TWO: tl.constexpr = FORM == 2 and GROUP == HALF
    by = tl.zeros((SPLIT, BN), tl.float32)
    other = by
    if GROUP != K:
        by = _scales_of(scale, n, split * PIECE // GROUP, last, N)
        if TWO:
            other = _scales_of(scale, n, split * PIECE // GROUP + 1, last, N)
    if EARLY:
        gdc_wait()
    acc = tl.zeros((SPLIT, BN, BM), tl.float32)
    for start in range(0, PIECES, SPLIT):
        if N % BN == 0 and PIECES % SPLIT == 0:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(n < N)[None, :, None] & (start + split < PIECES)[:, None, None], other=0.0)
        if PIECES % SPLIT == 0:
            there = here
        else:
            there = here & (start + split < PIECES)[:, None, None]
        inputs = tl.load(x_at, mask=there, other=0.0)
        group = (start + split) * PIECE // GROUP
        ahead = (start + SPLIT + split) * PIECE // GROUP
        if FORM == 2:
            low, high = _opened(tile, kind, FLOAT, ASM)
            second = tl.load(x_at + HALF, mask=there, other=0.0)
            if ZERO:
                less = (_scales_of(zero, n, group, last, N) - _MIDDLE).to(kind)[:, :, None]
                low = low - less
                if TWO:
                    less = (_scales_of(zero, n, group + 1, last, N) - _MIDDLE).to(kind)[:, :, None]
                high = high - less
            if GROUP == K:
                acc = tl.dot(high, second, tl.dot(low, inputs, acc))
            elif TWO:
                acc += tl.dot(low, inputs) * by[:, :, None]
                acc += tl.dot(high, second) * other[:, :, None]
                other = _scales_of(scale, n, ahead + 1, last, N)
            else:
                acc += tl.dot(high, second, tl.dot(low, inputs)) * by[:, :, None]
        else:
            wide = _widened(tile, kind, ASM)
            if ZERO:
                wide = wide - _scales_of(zero, n, group, last, N).to(kind)[:, :, None]
            if GROUP == K:
                acc = tl.dot(wide, inputs, acc)
            else:
                acc += tl.dot(wide, inputs) * by[:, :, None]
        if GROUP != K:
            by = _scales_of(scale, n, ahead, last, N)
        at += step
        x_at += SPLIT * PIECE
    y = tl.sum(acc, 0)
    if GROUP == K:
        y = y * _of_group(scale, n, 0, N)[:, None]
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at_out = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at_out, y.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < rows)[None, :])


@triton.jit
def _decode_kernel(
    codes, scale, zero, out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr,
    FLOAT: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, chunks or tiles of BK). out [N, K]."""
    n, step = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    kind: tl.constexpr = out.dtype.element_ty
    row = n.to(tl.int64)[:, None]
    inside = (n < N)[:, None]
    if FORM == 2:
        j = tl.arange(0, HALF)
        packed = tl.load(codes + step.to(tl.int64) * N * HALF + row * HALF + j[None, :], mask=inside, other=0.0)
        low, high = _opened(packed, kind, FLOAT, ASM)
        start = step * 2 * HALF
        first, second = _of_group(scale, n, start // GROUP, N), _of_group(scale, n, (start + HALF) // GROUP, N)
        less = tl.zeros((BN,), tl.float32)
        less_second = less
        if ZERO:
            less = _of_group(zero, n, start // GROUP, N) - _MIDDLE
            less_second = _of_group(zero, n, (start + HALF) // GROUP, N) - _MIDDLE
        at = out + row * K + start + j[None, :]
        tl.store(at, ((low.to(tl.float32) - less[:, None]) * first[:, None]).to(kind), mask=inside)
        tl.store(at + HALF, ((high.to(tl.float32) - less_second[:, None]) * second[:, None]).to(kind), mask=inside)
    else:
        k = step * BK + tl.arange(0, BK)
        valid = inside & (k < K)[None, :]
        values = tl.load(codes + row * K + k[None, :], mask=valid, other=0.0).to(tl.float32)
        group = step * BK // GROUP
        if ZERO:
            values -= _of_group(zero, n, group, N)[:, None]
        values *= _of_group(scale, n, group, N)[:, None]
        tl.store(out + row * K + k[None, :], values.to(kind), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(
    x, out, scales, rows, x_stride,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """grid (rows,). A row as codes and a scale for each group."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group, j = tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    k = group[:, None] * GROUP + j[None, :]
    inside = (k < K) & (j < GROUP)[None, :]
    values, scale = rounded(tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32), LARGEST, BLOCK)
    scale = tl.reshape(scale, (GROUPS,))
    tl.store(out + row * K + k, values.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + group.to(tl.int64) * rows + row, scale, mask=group < K // GROUP)


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int, *, early: bool = False) -> tuple[Tensor, Tensor]:
    """ops.coded.quantize_rows; whole numbers are rounded half away from zero."""
    rows, width = x.shape
    codes = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty((width // group, rows), dtype=torch.float32, device=x.device)
    if rows == 0:
        return codes, scales
    _quantize_kernel[(rows,)](
        x, codes, scales, rows, x.stride(0), K=width, GROUP=group, GROUPS=next_power_of_2(width // group),
        BLOCK=next_power_of_2(group), LARGEST=coded_ops.LARGEST[dtype], EARLY=early,
        num_warps=_rounding_warps(rows, width), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return codes, scales


def _rounding_warps(rows: int, width: int) -> int:
    """Few rows leave multiprocessors to one or two programs each, which then have many."""
    if rows > _FEW_ROUNDED:
        return 4 if width <= 4096 else 8
    return min(32, max(4, next_power_of_2(width) // 512))


def decode_weight(weight: CodedWeight, dtype: torch.dtype, *, asm: bool = True) -> Tensor:
    """ops.coded.decode_weight."""
    if weight.is_blocked:
        return coded_blocks.decode_blocks(weight, dtype)
    out = torch.empty((weight.rows, weight.width), dtype=dtype, device=weight.codes.device)
    packed = is_packed(weight.kind)
    half = weight.half if packed else 0
    depth = 2 * half if packed else min(128, _power_below(weight.group))
    tile = 64 if packed else 32
    _decode_kernel[(cdiv(weight.rows, tile), cdiv(weight.width, depth))](
        weight.codes, weight.scale, weight.zero, out, N=weight.rows, K=weight.width, GROUP=weight.group, HALF=half,
        FORM=HALVES if packed else WIDENED, FLOAT=weight.kind == "fp4", ZERO=weight.zero is not None, BN=tile,
        BK=depth, ASM=asm and dtype in _KINDS, num_warps=4,
    )  # fmt: skip
    return out


def _power_below(group: int) -> int:
    """The largest power of two that divides `group`; a whole row that none divides is read in tiles of 128."""
    power = group & -group
    return power if power >= 16 else 128


def multiply(
    x: Tensor,  # [T, K]; 8 bits with x_scale
    weight: CodedWeight,
    bias: Tensor | None,
    tile: CodedTile,
    *,
    x_scale: Tensor | None = None,  # [groups, T]
    dtype: torch.dtype | None = None,  # of the result; None: that of x
    early: bool = False,
    asm: bool = True,
) -> Tensor:
    rows, packed = x.shape[0], is_packed(weight.kind)
    out = torch.empty((rows, weight.rows), dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    form = HALVES if packed else DIRECT if x_scale is not None else WIDENED
    depth = tile.depth if weight.group == weight.width else min(tile.depth, _power_below(weight.group))
    if tile.split and rows <= tile.inputs and form != DIRECT and (packed or weight.width % depth == 0):
        _few_coded_kernel[(cdiv(weight.rows, tile.columns),)](
            x, weight.codes, weight.scale, weight.zero, bias, out, rows, x.stride(0), N=weight.rows, K=weight.width,
            GROUP=weight.group, HALF=weight.half if packed else 0, FORM=form, FLOAT=weight.kind == "fp4",
            ZERO=weight.zero is not None, BIAS=bias is not None, BM=tile.inputs, BN=tile.columns, BK=depth,
            SPLIT=tile.split, ASM=asm and x.dtype in _KINDS, EARLY=early, num_warps=tile.warps,
            num_stages=tile.stages, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
        return out
    inputs = max(16, tile.inputs)
    grid = (cdiv(rows, inputs) * cdiv(weight.rows, tile.columns),)
    _coded_kernel[grid](
        x, x_scale, weight.codes, weight.scale, weight.zero, bias, out, rows, x.stride(0), N=weight.rows,
        K=weight.width, GROUP=weight.group, HALF=weight.half if packed else 0, FORM=form, FLOAT=weight.kind == "fp4",
        ZERO=weight.zero is not None, BIAS=bias is not None, BM=inputs, BN=tile.columns, BK=depth, BAND=_BAND,
        ASM=asm and x.dtype in _KINDS, EARLY=early, num_warps=tile.warps, num_stages=tile.stages,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


FIXED = CodedTile(64, 64, 64, 4, 3)  # in batch-invariant mode, for any number of rows


def tile_for(rows: int, weight: CodedWeight) -> CodedTile:
    """By counting instructions for each code and reads of x from the L2 cache; benchmarks/gpu/quant.py --sweep compares
    others. As many warps as splits: more would widen the same codes twice."""
    narrow = weight.rows <= 8192
    if rows <= 8:
        return CodedTile(8, 16 if narrow else 32, 128, 4, 4, 4)
    if rows <= 32:
        return CodedTile(16 if rows <= 16 else 32, 32 if narrow else 64, 128, 4, 3, 4)
    if rows <= 64:
        return CodedTile(64, 64, 128, 4, 4)
    if rows <= 256:
        return CodedTile(64, 128, 128, 8, 3)
    return CodedTile(128, 128, 64, 8, 3)


ROUNDED_TILE = CodedTile(128, 128, 128, 8, 3)  # of inputs of 8 bits


def library_takes(x: RoundedRows, weight: CodedWeight) -> bool:
    """Whether torch._scaled_mm multiplies this: small floats with a scale for each row on both sides, or for each group
    of 128 on both."""
    return (
        weight.kind == "fp8"
        and x.dtype is torch.bfloat16
        and weight.rows % 16 == 0
        and weight.width % 16 == 0
        and x.codes.is_cuda
        and weight.scale.dtype is torch.float32
        and (weight.group == weight.width or weight.group == _GROUPED)
        and _library_multiplies(x.codes.device, grouped=weight.group != weight.width)
    )


@cache
def _library_multiplies(device: torch.device, *, grouped: bool) -> bool:
    """Whether the library takes scales of rows, or of groups, by trying: versions, devices and builds differ. The
    result is compared, so that scales are known to mean the same. Waits for the device: the first step of so many rows
    runs before one is captured."""
    draw = torch.Generator().manual_seed(0)
    rows, width = 256, 4 * _GROUPED
    codes = torch.randn((2, rows, width), generator=draw).to(torch.float8_e4m3fn).to(device)
    scale = (0.5 + torch.rand((2, 4 if grouped else 1, rows), generator=draw)).to(device)
    weight = CodedWeight("fp8", codes[1], scale[1], None, rows, width, _GROUPED if grouped else width, True)
    x = RoundedRows(codes[0], scale[0], torch.bfloat16)
    wanted = rounded_ops.rounded_linear.reference(x, weight, None).float()
    try:
        found = _by_library(x, weight, None).float()
    except (RuntimeError, ValueError, TypeError) as wrong:  # which of them, depends on the version
        _log.debug("torch._scaled_mm takes no scales of %s here: %s", "groups" if grouped else "rows", wrong)
        return False
    return bool(((found - wanted).abs().max() < 1e-2 * wanted.abs().max()).item())


def _by_library(x: RoundedRows, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    if weight.group == weight.width:
        whole: Tensor = torch._scaled_mm(
            x.codes, weight.codes.t(), x.scale.view(-1, 1), weight.scale, bias=bias, out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip
        return whole
    rows, codes, scale = len(x.codes), x.codes, x.scale
    if padding := -rows % 4:  # the library takes multiples of four
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, padding)).view(codes.dtype)
        scale = F.pad(scale, (0, padding))
    out = torch._scaled_mm(codes, weight.codes.t(), scale.t(), weight.scale, out_dtype=x.dtype)[:rows]
    return out if bias is None else out + bias


def rounded_linear(x: RoundedRows, weight: CodedWeight, bias: Tensor | None, *, early: bool = False) -> Tensor:
    """ops.rounded.rounded_linear."""
    if library_takes(x, weight):
        return _by_library(x, weight, bias)
    return multiply(x.codes, weight, bias, ROUNDED_TILE, x_scale=x.scale, dtype=x.dtype, early=early)


def rounded_rows(matrices: Sequence[Tensor | CodedWeight]) -> int:
    """From more rows on than codes are widened for; only where inputs of all are rounded alike, in whole rows or in
    groups that are powers of two."""
    codes = [matrix for matrix in matrices if isinstance(matrix, CodedWeight)]
    if not codes or len(codes) < len(matrices) or len({RowCode.of(code) for code in codes}) > 1:
        return 0
    group = RowCode.of(codes[0]).group
    fits = all(code.rounds and code.width <= MOST_ROUNDED for code in codes) and group & (group - 1) == 0
    return _ROUNDED + 1 if fits else 0


def rounded_act(
    x: RoundedRows, weight: CodedWeight, bias: Tensor | None, act: Callable[[Tensor], Tensor], code: RowCode, *,
    acts: Mapping[Callable, int], early: bool = False,
) -> RoundedRows:  # fmt: skip
    """ops.rounded.rounded_act."""
    return act_rounded(rounded_linear(x, weight, bias, early=early), act, code, acts=acts, early=early)


def act_rounded(
    x: Tensor, act: Callable[[Tensor], Tensor], code: RowCode, *, acts: Mapping[Callable, int], early: bool = False
) -> RoundedRows:
    """act(x) rounded. `acts`: gated activations by function."""
    known = acts.get(act)
    if known is not None and known != CLAMPED and x.ndim == 2 and x.stride(1) == 1:
        return gated_rounded(x, known, code, early=early)
    y = act(x)
    return RoundedRows(*quantize_rows(y, code.dtype, code.group or y.shape[1], early=early), y.dtype)


def add_norm_rounded(
    x: Tensor, delta: Delta, norm: NormRule, code: RowCode, *, early: bool = False
) -> tuple[RoundedRows, Tensor]:
    if norm_kernel.fits(x, norm.weight, delta):
        return norm_kernel.add_norm_rounded(x, delta, norm, code, early=early)
    return rounded_ops.add_norm_rounded.reference(x, delta, norm, code)


class CodedLinear:
    """ops.coded.coded_linear."""

    def __init__(self, *, fixed: bool = False, early: bool = False) -> None:
        self._fixed, self._early = fixed, early

    def __call__(self, x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, weight.width)
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        return self._product(flat, weight, bias).view(*x.shape[:-1], weight.rows)

    def _product(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if weight.is_blocked and (self._fixed or rows <= coded_blocks.MOST_ROWS):
            tile = coded_blocks.FIXED if self._fixed else coded_blocks.tile_for(rows)
            return coded_blocks.multiply_blocks(x, weight, bias, tile, early=self._early)
        if self._fixed:
            return multiply(x, weight, bias, FIXED, early=self._early)
        if weight.rounds and rows > _ROUNDED and weight.width <= _WIDEST:
            codes, scale = quantize_rows(x, weight.codes.dtype, weight.group, early=self._early)
            return rounded_linear(RoundedRows(codes, scale, x.dtype), weight, bias, early=self._early)
        if rows > _SCRATCH or weight.is_blocked:
            return F.linear(x, decode_weight(weight, x.dtype), bias)
        return multiply(x, weight, bias, tile_for(rows, weight), early=self._early)


def add_forms(table: FormTable, acts: Mapping[Callable, int], free: Fits, *, early: bool) -> None:
    """`acts`: gated activations by function."""
    table.form(coded_ops.coded_linear, free)(CodedLinear(early=early))
    table.form(coded_ops.coded_linear, same_bits)(CodedLinear(fixed=True, early=early))
    table.form(coded_ops.decode_weight)(decode_weight)
    table.form(coded_ops.decode_rows)(coded_blocks.decode_rows)
    table.form(coded_ops.quantize_rows)(partial(quantize_rows, early=early))
    table.form(rounded_ops.rounded_rows, free)(rounded_rows)
    table.form(rounded_ops.add_norm_rounded, free)(partial(add_norm_rounded, early=early))
    table.form(rounded_ops.rounded_act, free)(partial(rounded_act, acts=acts, early=early))
    table.form(rounded_ops.rounded_linear, free)(partial(rounded_linear, early=early))
    table.form(rounded_ops.rounded_parts, free)(partial(rounded_linear, early=early))
