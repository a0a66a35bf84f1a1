"""The sum over ranks of a small tensor in one kernel (one-shot all-reduce), over memory that all ranks can read.

Each program copies its piece of the tensor to memory of its own rank, tells every peer so, waits until every peer has
told, and adds up the pieces of all ranks in the order of ranks, in float32: the bits are the same on every rank. A rank
reads (ranks - 1) times the tensor over the link, where a ring moves less but waits 2 (ranks - 1) times.

Memory of each rank, at addresses that all know:

    pieces  [2, MOST_PROGRAMS, ROOM] of its dtype   two halves in turn: who is ahead writes where none reads
    told    int32 [MOST_PROGRAMS, ranks]            turn up to which each rank's piece is there

and for itself `turns` int32 [MOST_PROGRAMS]: how many sums a program has made. Each program has room of its own,
whatever the size of a tensor, so that what is said of turns holds for each by itself. They are counted on the device,
so that a captured graph can be replayed. A rank begins turn t + 2 only when all have told of t + 1, and so have read
what t left. Turns are compared by their difference: they may wrap around.

Every program of every rank must be running at the same time, since they wait for each other: few programs, and no other
kernel between that needs the whole device. Not measured on several GPUs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.sizes import cdiv, next_power_of_2

MOST_PROGRAMS = 64
_TILE = (2048, 8)  # entries and warps of a program, at least


@triton.jit(
    do_not_specialize=["rank"]
)  # loading a kernel may wait for those that run, and so for a peer's: one for all
def _peer_sum(
    x, pieces, told, turns, count, rank,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x [count], in place. pieces, told: addresses int64 [RANKS]. turns [programs]."""
    program = tl.program_id(0)
    turn = tl.load(turns + program)
    kind = tl.pointer_type(x.dtype.element_ty)
    place = tl.arange(0, TILE)
    at = program * TILE + place
    inside = at < count
    place += ((turn & 1) * PROGRAMS + program) * ROOM

    own = tl.multiple_of(tl.load(pieces + rank).to(kind), 16)
    tl.store(own + place, tl.load(x + at, mask=inside), mask=inside, cache_modifier=".cg")
    tl.debug_barrier()  # all of it is written before anybody is told
    for peer in tl.static_range(RANKS):
        there = tl.load(told + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(there + program * RANKS + rank, turn + 1, sem="release", scope="sys")
    here = tl.load(told + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        while tl.atomic_add(here + program * RANKS + peer, 0, sem="acquire", scope="sys") - turn < 1:
            pass
    tl.debug_barrier()  # what was waited for holds for every thread

    total = tl.zeros((TILE,), tl.float32)
    for peer in tl.static_range(RANKS):
        theirs = tl.multiple_of(tl.load(pieces + peer).to(kind), 16)
        total += tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=inside)
    tl.store(turns + program, turn + 1)


def num_programs(count: int) -> tuple[int, int, int]:
    """Programs, entries and warps of each."""
    tile = max(_TILE[0], next_power_of_2(cdiv(count, MOST_PROGRAMS)))
    return cdiv(count, tile), tile, _TILE[1]


def peer_sum(x: Tensor, pieces: Tensor, told: Tensor, turns: Tensor, *, rank: int, ranks: int, room: int) -> Tensor:
    """In place. x has at most MOST_PROGRAMS * room entries; all ranks sum tensors of equal shapes in the same order."""
    programs, tile, warps = num_programs(x.numel())
    assert tile <= room
    _peer_sum[(programs,)](
        x, pieces, told, turns, x.numel(), rank, ranks, MOST_PROGRAMS, room, tile, num_warps=warps
    )  # fmt: skip
    return x
