"""Codes of 8 and 4 bits as numbers, inside other kernels: values of codes, scales, and a scale for every column.

Nothing here is a conversion from an integer, which a GPU does at a quarter of the speed: codes become the bits of a
float. Must not know: what is multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3, E2M1, INT4 = range(3)
CODES = {"e4m3": E4M3, "e2m1": E2M1, "int4": INT4}

_MIDDLE = tl.constexpr(8.0)  # of whole numbers of 4 bits


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


def _floats(kind: str) -> str:
    """Four bytes in a register -> 8 numbers of 16 bits: exponent and mantissa of e2m1 codes in the places of the wider
    kind's, times the power of two by which its bias differs."""
    shift, by = (6, "0x7E807E80") if kind == "bf16" else (9, "0x74007400")
    mask = f"0x{7 << shift:04X}{7 << shift:04X}"
    lines = ["prmt.b32 a, $4, 0, 0x4140;", "prmt.b32 b, $4, 0, 0x4342;"]
    for half in range(2):
        for source, to in (("a", 2 * half), ("b", 2 * half + 1)):
            lines += [
                f"shl.b32 c, {source}, {shift - 4 * half};",
                f"shl.b32 d, {source}, {12 - 4 * half};",
                "and.b32 d, d, 0x80008000;",
                f"lop3.b32 c, c, {mask}, d, 0xEA;",
                f"mul.{kind}x2 ${to}, c, by;",
            ]
    return "\n".join(["{", ".reg .b32 a, b, c, d, by;", f"mov.b32 by, {by};", *lines, "}"])


# Four e4m3 codes in a register -> 4 of bf16: exponent and mantissa in the places of bf16's, whose exponent is 120 more.
# The instruction that the compiler takes goes by way of float32, at a sixteenth of the rate of these.
_E4M3_TO_BF16 = tl.constexpr("""
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
_BF16_FLOATS, _F16_FLOATS = tl.constexpr(_floats("bf16")), tl.constexpr(_floats("f16"))


@triton.jit
def _e2m1(code, KIND: tl.constexpr):
    """Codes of 4 bits as numbers: exponent and mantissa moved to those of float32, which are 126 too low."""
    bits = ((code & 8).to(tl.uint32) << 28) | ((code & 7).to(tl.uint32) << 22)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(KIND)


@triton.jit
def opened(packed, KIND: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr):
    """Both halves of bytes as numbers of KIND: e2m1, or whole ones less 8."""
    if ASM and FLOAT and tl.bfloat16 == KIND:
        low, high = tl.inline_asm_elementwise(
            _BF16_FLOATS, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif ASM and FLOAT:
        low, high = tl.inline_asm_elementwise(
            _F16_FLOATS, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    elif FLOAT:
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
def widened(tile, KIND: tl.constexpr, ASM: tl.constexpr):
    """Codes of 8 bits as numbers of KIND."""
    if ASM and tl.bfloat16 == KIND and tile.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            _E4M3_TO_BF16, "=r,=r,r", [tile.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return tile.to(KIND)


@triton.jit
def values_of(codes, FORM: tl.constexpr):
    """int32 codes of 4 bits -> float32. FORM 1: e2m1; 2: 0 to 15."""
    if FORM == 1:  # exponent and mantissa as float16 has them, which is then 2^14 too small
        bits = ((codes & 7) << 9) | ((codes & 8) << 12)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:  # the last bits of 2^23
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def scales_at(scale, at, inside):
    """As float32; bytes are exponents, of which 0 is read as 1. `inside` None: all of them."""
    if inside is None:
        s = tl.load(scale + at)
    else:
        s = tl.load(scale + at, mask=inside, other=0.0)
    if scale.dtype.element_ty == tl.uint8:
        return (tl.maximum(s.to(tl.int32), 1) << 23).to(tl.float32, bitcast=True)
    else:
        return s.to(tl.float32)


@triton.jit
def zeros_at(zero, at, inside, ZERO: tl.constexpr):
    """Zero points of FORM 2; without a tensor of them, all are 8."""
    if ZERO:
        if inside is None:
            z = tl.load(zero + at)
        else:
            z = tl.load(zero + at, mask=inside, other=0)
        if zero.dtype.element_ty == tl.uint8:
            return values_of(z.to(tl.int32), 2)
        else:
            return z.to(tl.float32)
    else:
        return tl.full(at.shape, 8.0, tl.float32)


@triton.jit
def spread(s, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, GROUPS] -> [ROWS, GROUPS * SIZE], each SIZE times."""
    return tl.reshape(tl.broadcast_to(s[:, :, None], (ROWS, GROUPS, SIZE)), (ROWS, GROUPS * SIZE))
