"""What the matmuls of skinny.py need to add adapters: B of all slots as further columns of the matrix.

    W x + B h = [ W | B of slot 1 | B of slot 2 | .. ] [ x | h or zeros | h or zeros | .. ]'

h = scale * A x are a row's own sums, rounded as its numbers are: zeros stand in the columns of all other slots, so that
one more chunk of K (128 or 256 columns) adds up to 16 adapters of rank 16. B must be finite, which whoever reads
adapters checks. h comes in float32 and in splits of K, from the shrink kernel of skinny.py.

Needs: stacks of the weight's dtype, ranks that fill a chunk, parts of the matrix that begin at a tile.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.ops.lora import LowRank
from quire.ops.triton.descriptors import load_tile
from quire.ops.triton.lora import MOST_COLUMNS

TILE = 64  # rows of a matrix in a tile of skinny.py
RANKS = (8, 16, 32, 64)
MOST_PARTS = 3


@gluon.jit
def fill_low(low, ring, barriers, column, turn, at, other, ENTRIES: gl.constexpr, GATED: gl.constexpr):
    """Load a chunk of the tile's rows of B into one buffer. GATED: turns alternate between gates and ups; the other
    half of the buffer is loaded from past the end of the matrix, where everything is zero."""
    if GATED:
        HALF: gl.constexpr = ring.shape[1] // 2
        to = ring.index(at)
        k, is_up = turn // 2 * ENTRIES, turn % 2
        load_tile(low, [column + is_up * 2 * other, k], barriers.index(at), to.slice(0, HALF, 0))
        load_tile(low, [column + (2 - is_up) * other, k], barriers.index(at), to.slice(HALF, HALF, 0))
    else:
        load_tile(low, [column, turn * ENTRIES], barriers.index(at), ring.index(at))


@gluon.jit
def slots_of(index, num_rows, ROWS: gl.constexpr, layout: gl.constexpr):
    """[ROWS]; 0 past the last row."""
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(1, layout)))
    return gl.load(index + m, mask=m < num_rows, other=0)


@gluon.jit
def own_sums(
    h, scales, slot, piece, num_rows,
    ROWS: gl.constexpr, PIECES: gl.constexpr, RANK: gl.constexpr, SPLITS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """scale * A x of each row, [ROWS, RANK]."""
    own: gl.constexpr = gl.SliceLayout(1, layout)
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, own))
    r = gl.arange(0, RANK, layout=gl.SliceLayout(0, own))
    has = slot > 0
    at = h + ((m * PIECES + piece) * RANK)[:, None] + r[None, :]
    total = gl.zeros([ROWS, RANK], gl.float32, layout=own)
    for split in gl.static_range(SPLITS):
        total += gl.load(at + split * num_rows * (PIECES * RANK), mask=has[:, None], other=0.0)
    return total * gl.load(scales + (slot - 1) * PIECES + piece, mask=has, other=0.0)[:, None]


@gluon.jit
def low_tile(total, slot, first, ROWS: gl.constexpr, ENTRIES: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr):
    """[ROWS, ENTRIES]: the rows' sums in the columns of their own slots, of those that come after `first`."""
    SLOTS: gl.constexpr = ENTRIES // RANK
    number = first + 1 + gl.arange(0, SLOTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    is_own = gl.expand_dims(slot[:, None], 1) == gl.expand_dims(number[None, :], 2)
    return gl.reshape(gl.where(is_own, gl.expand_dims(total, 1), 0.0), [ROWS, ENTRIES])


def adds(weight: Tensor, low: LowRank, parts: int = 0) -> bool:
    """Whether these slots can be further columns of this matrix. `parts`: how many it must have; 0: some."""
    stacks = low.stacks
    if stacks is None:
        return False
    slots, count, rank, _ = stacks.a.shape
    return (
        stacks.a.dtype is weight.dtype
        and stacks.b.is_contiguous()
        and rank in RANKS
        and slots * rank <= MOST_COLUMNS
        and (count == parts if parts else count <= MOST_PARTS)
        and all(bound % TILE == 0 for bounds in stacks.bounds for bound in bounds)
    )
