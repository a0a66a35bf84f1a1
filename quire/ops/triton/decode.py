"""Codes of 8 and 4 bits as numbers, inside other kernels: values of codes, scales, and a scale for every column.

Nothing here is a conversion from an integer, which a GPU does at a quarter of the speed: codes become the bits of a
float. Must not know: what is multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3, E2M1, INT4 = range(3)
CODES = {"e4m3": E4M3, "e2m1": E2M1, "int4": INT4}


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
