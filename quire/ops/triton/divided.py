"""Which tokens of a row a rank keeps, where several divide every context (attention/context_ranks.py).

INTERLEAVE tokens in a row are on each of RANKS ranks, in turn; what a rank keeps is numbered without gaps. With one
rank a token's number is its position, and nothing is computed. Must not know: blocks, attention.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(length, rank, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """How many of a row's first `length` tokens this rank keeps."""
    if RANKS == 1:
        return length
    else:
        rest = length % (RANKS * INTERLEAVE) - rank * INTERLEAVE
        return length // (RANKS * INTERLEAVE) * INTERLEAVE + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)


@triton.jit
def position(number, rank, RANKS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Of what this rank keeps."""
    if RANKS == 1:
        return number
    else:
        return (number // INTERLEAVE * RANKS + rank) * INTERLEAVE + number % INTERLEAVE
