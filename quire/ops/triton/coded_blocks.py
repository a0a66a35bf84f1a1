"""Matmuls with blocks of GGUF files on CUDA: codes whose groups are small, with two levels of scales, least numbers, or
numbers from a table. See ops/coded.py for how they lie in memory.

Codes of a tile become 16-bit whole numbers (or numbers of the table) in registers, exactly; times their scale, plus
what the middle of a group is, they are rounded to 16 bits, and meet a tile of inputs on the tensor cores.

    rows of inputs    up to MOST_ROWS    tiles for so many rows
                      more               decoded to a scratch matrix, multiplied by the library

On Hopper, skinny_blocks.py has the matmuls of up to 256 rows, with blocks that it reads.

In batch-invariant mode there is one tile for any number of rows.

Floor: the bytes of the codes at 4.3 TB/s for a few rows: 24576 x 4096 of Q4_K (4.6 bits) 58 MB, 14 us. Measured: 48 us
(bfloat16 58), and with 32 rows 74: these kernels save memory, not time.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.coded import CENTRES, COARSE, E2M1_NUMBERS, TABLES, CodedWeight, is_packed
from quire.ops.triton.sizes import cdiv

MOST_ROWS = 32  # from more on a scratch matrix is faster
_ROWS_AT_ONCE, _COLUMNS_AT_ONCE = 64, 1024  # of a program that decodes
_NUMBERS = TABLES | {"fp4": E2M1_NUMBERS}
_TABLES = tuple(_NUMBERS)
_COARSE = tl.constexpr(COARSE)


class BlockTile(NamedTuple):
    inputs: int  # rows of x
    columns: int  # rows of the matrix
    split: int  # chunks of K at a time, by different warps
    warps: int
    stages: int


FIXED = BlockTile(64, 64, 1, 4, 3)  # in batch-invariant mode, for any number of rows


# --- codes in registers, four bytes of them at a time


def _begin(kind: str, less: int) -> str:
    """d: upper bytes that make 128 (bf16) or 1024 (f16) of what the lower bytes add; e: that and `less`, twice."""
    top, base = ("0x43434343", 0x4300) if kind == "bf16" else ("0x64646464", 0x6400)
    return f"""{{
    .reg .b32 a, b, c, d, e;
    mov.b32 d, {top};
    mov.b32 e, 0x{base + less:04X}{base + less:04X};"""


def _widen(kind: str, first: int) -> str:
    """The bytes of a as numbers, in the operands `first` and the next."""
    return f"""
    prmt.b32 b, a, d, 0x5140;
    prmt.b32 c, a, d, 0x7362;
    sub.{kind}x2 ${first}, b, e;
    sub.{kind}x2 ${first + 1}, c, e;"""


def _halves(kind: str) -> str:
    low = "and.b32 a, $4, 0x0F0F0F0F;" + _widen(kind, 0)
    return _begin(kind, CENTRES["int4"]) + low + "shr.b32 a, $4, 4; and.b32 a, a, 0x0F0F0F0F;" + _widen(kind, 2) + "}"


def _quarters(kind: str) -> str:
    """$8, $9: bytes of low halves; $10: of upper bits."""
    text = _begin(kind, CENTRES["int6"])
    for quarter in range(4):
        source, shift = f"${8 + quarter % 2}", 2 * quarter - 4
        text += f"shr.b32 a, {source}, 4;" if quarter >= 2 else f"mov.b32 a, {source};"
        move = f"shr.b32 b, $10, {shift};" if shift > 0 else f"shl.b32 b, $10, {-shift};"
        text += move + "and.b32 a, a, 0x0F0F0F0F; lop3.b32 a, b, 0x30303030, a, 0xEA;" + _widen(kind, 2 * quarter)
    return text + "}"


def _bytes(kind: str) -> str:
    """bfloat16 holds only 7 bits beside a power of two."""
    if kind == "f16":
        return _begin(kind, 128) + "xor.b32 a, $2, 0x80808080;" + _widen(kind, 0) + "}"
    text = "{ .reg .b32 a, b, c;"
    for at, place in enumerate(("0x4140", "0x4342")):
        text += f"""
    prmt.b32 a, $2, 0, {place};
    lop3.b32 b, a, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
    sub.bf16x2 ${at}, b, c;"""
    return text + "}"


def table_words(kind: str, table: tuple[float, ...]) -> list[int]:
    """The bits of numbers that bf16 or f16 have as they are. (Without torch: see compile_child.py.)"""
    packed = [struct.pack("<f", number)[2:] if kind == "bf16" else struct.pack("<e", number) for number in table]
    return [int.from_bytes(each, "little") for each in packed]


def _looked_up(kind: str, table: tuple[float, ...]) -> str:
    """PRMT takes bytes of two registers by three bits of a half byte; the fourth chooses between two of its results.
    Once for the lower bytes of the numbers, once for the upper ones."""
    words = table_words(kind, table)
    text = "{ .reg .b32 x, s, u, p, q, lo, hi;"
    for side, shift in (("lo", 0), ("hi", 8)):
        for part in range(4):
            value = sum((words[4 * part + i] >> shift & 255) << 8 * i for i in range(4))
            text += f".reg .b32 {side}{part}; mov.b32 {side}{part}, 0x{value:08X};"
    for at in range(2):
        text += "mov.b32 x, $4;" if at == 0 else "shr.b32 x, $4, 16;"
        text += "and.b32 s, x, 0x7777; shr.b32 u, x, 1; lop3.b32 u, u, 0x4444, 0x3210, 0xEA;"
        for side in ("lo", "hi"):
            text += f"prmt.b32 p, {side}0, {side}1, s; prmt.b32 q, {side}2, {side}3, s; prmt.b32 {side}, p, q, u;"
        text += f"prmt.b32 ${at}, lo, hi, 0x6240; prmt.b32 ${2 + at}, lo, hi, 0x7351;"
    return text + "}"


_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_HALVES = tl.constexpr((_halves("bf16"), _halves("f16")))
_QUARTERS = tl.constexpr((_quarters("bf16"), _quarters("f16")))
_BYTES = tl.constexpr((_bytes("bf16"), _bytes("f16")))
_LOOKED_UP = tl.constexpr(tuple(_looked_up(kind, _NUMBERS[name]) for name in _TABLES for kind in ("bf16", "f16")))
_SCALED = tl.constexpr(("mul.bf16x2 $0, $1, $2;", "mul.f16x2 $0, $1, $2;"))
_SHIFTED = tl.constexpr(("fma.rn.bf16x2 $0, $1, $2, $3;", "fma.rn.f16x2 $0, $1, $2, $3;"))


@triton.jit
def _opened(first, second, upper, table, x, FORM: tl.constexpr, TABLE: tl.constexpr, KIND: tl.constexpr,
            ASM: tl.constexpr):  # fmt: skip
    """Bytes of a tile as one, two or four tiles of numbers of KIND (with ASM, that of x), one after another
    in K. TABLE: 1 + which, or 0."""
    HALF: tl.constexpr = 0 if tl.bfloat16 == KIND else 1
    if FORM == 8:
        if ASM:
            whole = tl.inline_asm_elementwise(
                _BYTES[HALF], "=r,=r,r", [first.to(tl.uint8, bitcast=True)], dtype=x.dtype.element_ty, is_pure=True,
                pack=4,
            )  # fmt: skip
        else:
            whole = first.to(KIND)
        tiles = (whole, whole)  # of which the first is used
    elif FORM == 6:
        if ASM:
            tiles = tl.inline_asm_elementwise(
                _QUARTERS[HALF], "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [first, second, upper],
                dtype=(x.dtype.element_ty, x.dtype.element_ty, x.dtype.element_ty, x.dtype.element_ty), is_pure=True,
                pack=4,
            )  # fmt: skip
        else:
            tiles = (  # type: ignore[assignment]  # a kernel is compiled for one of these branches
                ((first & 15) | (upper & 3) << 4).to(KIND) - 32,
                ((second & 15) | (upper >> 2 & 3) << 4).to(KIND) - 32,
                ((first >> 4) | (upper >> 4 & 3) << 4).to(KIND) - 32,
                ((second >> 4) | (upper >> 6) << 4).to(KIND) - 32,
            )
    elif ASM:
        TEXT: tl.constexpr = _LOOKED_UP[2 * TABLE - 2 + HALF] if TABLE else _HALVES[HALF]
        tiles = tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r", [first], dtype=(x.dtype.element_ty, x.dtype.element_ty), is_pure=True, pack=4
        )  # fmt: skip
    elif TABLE:
        tiles = (tl.load(table + (first & 15)).to(KIND), tl.load(table + (first >> 4)).to(KIND))
    else:
        tiles = ((first & 15).to(KIND) - 8, (first >> 4).to(KIND) - 8)
    return tiles


@triton.jit
def _read(at, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0)


@triton.jit
def _factor(values, coarse, k, n, inside, level, N: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
            FINE: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """float32 [rows, groups] of the groups at columns k: of `scale` (level 0), or of `least` (1)."""
    GROUPS: tl.constexpr = CHUNK // GROUP
    at = (k // CHUNK * N + n[:, None]) * GROUPS + k % CHUNK // GROUP
    factor = _read(values + at, inside, WHOLE).to(tl.float32)
    if FINE:
        factor *= _read(coarse + (k // _COARSE * N + n[:, None]) * 2 + level, inside, WHOLE).to(tl.float32)
    return factor


@triton.jit
def _scaled(
    tile, scale, least, coarse, k, n, inside,
    N: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, FINE: tl.constexpr, LEAST: tl.constexpr,
    OFFSET: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """tile [R, T] from column k [R] on, times the scales of its groups, and their middles added."""
    R: tl.constexpr = tile.shape[0]
    T: tl.constexpr = tile.shape[1]
    GROUPS: tl.constexpr = T // GROUP if T > GROUP else 1
    kind: tl.constexpr = tile.dtype
    HALF: tl.constexpr = 0 if kind == tl.bfloat16 else 1
    at = k[:, None] + tl.arange(0, GROUPS)[None, :] * GROUP
    by = _factor(scale, coarse, at, n, inside, 0, N, GROUP, CHUNK, FINE, WHOLE)
    parts = tl.reshape(tile, (R, GROUPS, T // GROUPS))
    if LEAST:
        add = by * OFFSET - _factor(least, coarse, at, n, inside, 1, N, GROUP, CHUNK, FINE, WHOLE)
        if ASM:
            parts = tl.inline_asm_elementwise(
                _SHIFTED[HALF], "=r,r,r,r", [parts, by.to(kind)[:, :, None], add.to(kind)[:, :, None]],
                dtype=tile.dtype, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            parts = (parts.to(tl.float32) * by[:, :, None] + add[:, :, None]).to(kind)
    elif ASM:
        parts = tl.inline_asm_elementwise(
            _SCALED[HALF], "=r,r,r", [parts, by.to(kind)[:, :, None]], dtype=tile.dtype, is_pure=True, pack=2
        )
    else:
        parts = (parts.to(tl.float32) * by[:, :, None]).to(kind)
    return tl.reshape(parts, (R, T))


@triton.jit
def _load_tile(codes, high, n, chunk, inside, N: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
               WHOLE: tl.constexpr):  # fmt: skip
    """Bytes [R, T] of chunks: low halves, the other low halves and the upper bits of codes of 6 bits."""
    j = tl.arange(0, T)[None, :]
    row = (chunk.to(tl.int64) * N + n)[:, None]
    if FORM == 8:
        first = _read(codes + n.to(tl.int64)[:, None] * K + chunk[:, None] * T + j, inside, WHOLE)
        second, upper = first, first
    elif FORM == 6:
        first = _read(codes + row * (2 * T) + j, inside, WHOLE)
        second = _read(codes + row * (2 * T) + T + j, inside, WHOLE)
        upper = _read(high + row * T + j, inside, WHOLE)
    else:
        first = _read(codes + row * T + j, inside, WHOLE)
        second, upper = first, first
    return first, second, upper


@triton.jit(do_not_specialize=["rows"])
def _blocks_kernel(
    x, codes, high, scale, least, coarse, table, bias, out, rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    TABLE: tl.constexpr, FINE: tl.constexpr, LEAST: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (columns, tiles of inputs). out [rows, N] = x weight' + bias; each group of warps has every SPLIT-th chunk
    of K. FORM: bits of a code; T: columns of a tile."""
    TILES: tl.constexpr = 1 if FORM == 8 else 4 if FORM == 6 else 2
    CHUNKS: tl.constexpr = K // (TILES * T)
    WHOLE: tl.constexpr = N % BN == 0 and CHUNKS % SPLIT == 0
    R: tl.constexpr = SPLIT * BN
    kind: tl.constexpr = x.dtype.element_ty
    row = tl.arange(0, R)
    split, n = row // BN, tl.program_id(0) * BN + row % BN
    each, m, j = tl.arange(0, SPLIT), tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, T)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((SPLIT, BN, BM), tl.float32) if SPLIT > 1 else tl.zeros((BN, BM), tl.float32)
    for start in range(0, CHUNKS, SPLIT):
        chunk = start + split
        inside = ((n < N) & (chunk < CHUNKS))[:, None]
        first, second, upper = _load_tile(codes, high, n, chunk, inside, N, K, FORM, T, WHOLE)
        tiles = _opened(first, second, upper, table, x, FORM, TABLE, kind, ASM)
        for t in tl.static_range(TILES):
            k = chunk * (TILES * T) + t * T
            tile = _scaled(
                tiles[t], scale, least, coarse, k, n, inside, N, GROUP, CHUNK, FINE, LEAST, OFFSET, WHOLE, ASM
            )  # fmt: skip
            if SPLIT > 1:
                columns = ((start + each) * (TILES * T) + t * T)[:, None] + j[None, :]
                at = x + m.to(tl.int64)[None, None, :] * x_stride + columns[:, :, None]
                there = (m < rows)[None, None, :] & (columns < K)[:, :, None]
                acc = tl.dot(tl.reshape(tile, (SPLIT, BN, T)), tl.load(at, mask=there, other=0.0), acc)
            else:
                columns = start * (TILES * T) + t * T + j
                at = x + m.to(tl.int64)[None, :] * x_stride + columns[:, None]
                acc = tl.dot(tile, tl.load(at, mask=(m < rows)[None, :], other=0.0), acc)
    y = tl.sum(acc, 0) if SPLIT > 1 else acc
    n_out = tl.program_id(0) * BN + tl.arange(0, BN)
    if BIAS:
        y += tl.load(bias + n_out, mask=n_out < N, other=0.0).to(tl.float32)[:, None]
    at_out = out + m.to(tl.int64)[None, :] * N + n_out[:, None]
    tl.store(at_out, y.to(out.dtype.element_ty), mask=(n_out < N)[:, None] & (m < rows)[None, :])


@triton.jit
def _decode_blocks_kernel(
    codes, high, scale, least, coarse, table, out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    TABLE: tl.constexpr, FINE: tl.constexpr, LEAST: tl.constexpr, OFFSET: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """grid (tiles of rows, chunks). out [N, K]; rounded once."""
    TILES: tl.constexpr = 1 if FORM == 8 else 4 if FORM == 6 else 2
    row, chunk = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    n = tl.minimum(row, N - 1)
    inside = (row < N)[:, None]
    chunks = tl.full((BN,), 0, tl.int32) + chunk
    first, second, upper = _load_tile(codes, high, n, chunks, inside, N, K, FORM, T, True)
    tiles = _opened(first, second, upper, table, out, FORM, TABLE, tl.float32, False)
    for t in tl.static_range(TILES):
        k = chunks * (TILES * T) + t * T
        tile = _scaled(tiles[t], scale, least, coarse, k, n, inside, N, GROUP, CHUNK, FINE, LEAST, OFFSET, True, False)
        at = out + row.to(tl.int64)[:, None] * K + k[:, None] + tl.arange(0, T)[None, :]
        tl.store(at, tile.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decode_rows_kernel(
    index, codes, high, scale, least, coarse, zero, table, out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    TABLE: tl.constexpr, FINE: tl.constexpr, LEAST: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    CENTRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid (rows wanted, tiles of K). One row of a matrix, wherever it is."""
    TILES: tl.constexpr = 1 if FORM == 8 else 4 if FORM == 6 else 2
    n = tl.load(index + tl.program_id(0)).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    if FORM == 8:
        value = tl.load(codes + n * K + k, mask=inside, other=0.0).to(tl.float32)
    else:
        row, place = k // (TILES * T) * N + n, k % (TILES * T)
        HALF: tl.constexpr = TILES * T // 2
        code = tl.load(codes + row * HALF + place % HALF, mask=inside, other=0).to(tl.int32) >> place // HALF * 4 & 15
        if FORM == 6:
            upper = tl.load(high + row * T + place % T, mask=inside, other=0).to(tl.int32)
            code |= (upper >> place // T * 2 & 3) << 4
        value = tl.load(table + code) if TABLE else code.to(tl.float32) - CENTRE
    GROUPS: tl.constexpr = CHUNK // GROUP if CHUNK > GROUP else 1
    group = (k // CHUNK * N + n) * GROUPS + k % CHUNK // GROUP
    if ZERO:
        value -= tl.load(zero + group, mask=inside, other=0).to(tl.float32) - CENTRE
    by = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    if FINE:
        by *= tl.load(coarse + (k // _COARSE * N + n) * 2, mask=inside, other=0.0).to(tl.float32)
    if LEAST:
        value += OFFSET
    value *= by
    if LEAST:
        low = tl.load(least + group, mask=inside, other=0.0).to(tl.float32)
        if FINE:
            low *= tl.load(coarse + (k // _COARSE * N + n) * 2 + 1, mask=inside, other=0.0).to(tl.float32)
        value -= low
    at = out + tl.program_id(0).to(tl.int64) * K + k
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


# --- calls


@cache
def _table_of(kind: str, device: torch.device) -> Tensor | None:
    """Numbers of the codes, float32; None: codes are whole numbers."""
    table = _NUMBERS.get(kind)
    return None if table is None else torch.tensor(table, device=device)


class _Form(NamedTuple):
    """What kernels know of a weight when they are compiled."""

    bits: int
    tile: int  # columns
    offset: int  # from the code of -least to what is subtracted from codes

    @classmethod
    def of(cls, weight: CodedWeight) -> _Form:
        offset = CENTRES.get(weight.kind, 0) - weight.middle if weight.least is not None else 0
        if not is_packed(weight.kind):
            return cls(8, min(weight.chunk, 64) if weight.is_blocked else weight.width, offset)
        return cls(6, weight.half // 2, offset) if weight.kind == "int6" else cls(4, weight.half, offset)


def _constants(weight: CodedWeight, form: _Form) -> dict[str, object]:
    return {
        "N": weight.rows, "K": weight.width, "GROUP": weight.group,
        "CHUNK": weight.chunk if weight.is_blocked else weight.group, "FORM": form.bits, "T": form.tile,
        "TABLE": _TABLES.index(weight.kind) + 1 if weight.kind in _NUMBERS else 0, "FINE": weight.coarse is not None,
        "LEAST": weight.least is not None, "OFFSET": form.offset,
    }  # fmt: skip


def multiply_blocks(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, tile: BlockTile, *, early: bool = False, asm: bool = True
) -> Tensor:
    """x [T, K] @ weight' + bias."""
    rows, form = x.shape[0], _Form.of(weight)
    out = torch.empty((rows, weight.rows), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    asm = asm and x.dtype in _KINDS
    _blocks_kernel[(cdiv(weight.rows, tile.columns), cdiv(rows, tile.inputs))](
        x, weight.codes, weight.high, weight.scale, weight.least, weight.coarse,
        None if asm else _table_of(weight.kind, x.device), bias, out, rows, x.stride(0), **_constants(weight, form),
        BIAS=bias is not None, BM=tile.inputs, BN=tile.columns, SPLIT=tile.split, ASM=asm, EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def tile_for(rows: int) -> BlockTile:
    if rows <= 8:
        return BlockTile(8, 16, 4, 4, 4)
    return BlockTile(16 if rows <= 16 else 32, 32, 4, 4, 3)


def decode_blocks(weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """[rows, width]."""
    form = _Form.of(weight)
    out = torch.empty((weight.rows, weight.width), dtype=dtype, device=weight.codes.device)
    chunk = form.tile * (1 if form.bits == 8 else 4 if form.bits == 6 else 2)
    _decode_blocks_kernel[(cdiv(weight.rows, _ROWS_AT_ONCE), weight.width // chunk)](
        weight.codes, weight.high, weight.scale, weight.least, weight.coarse, _table_of(weight.kind, out.device), out,
        **_constants(weight, form), BN=_ROWS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return out


def decode_rows(weight: CodedWeight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """ops.coded.decode_rows."""
    form, flat = _Form.of(weight), index.reshape(-1)
    out = torch.empty((len(flat), weight.width), dtype=dtype, device=index.device)
    if len(flat):
        table = _table_of(weight.kind, index.device)
        _decode_rows_kernel[(len(flat), cdiv(weight.width, _COLUMNS_AT_ONCE))](
            flat, weight.codes, weight.high, weight.scale, weight.least, weight.coarse, weight.zero, table, out,
            **_constants(weight, form) | {"TABLE": int(table is not None)}, ZERO=weight.zero is not None,
            CENTRE=CENTRES.get(weight.kind, 0), BLOCK=_COLUMNS_AT_ONCE, num_warps=4,
        )  # fmt: skip
    return out.view(*index.shape, weight.width)
