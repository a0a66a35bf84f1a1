"""Low-rank additions to a matrix that ranks share, where both A and B are cut among them (`AdapterShards`).

Of a matrix cut by rows a rank has some rows of A, and of B those of its part; of one cut by columns it has its columns
of A and some rows of B. Either way the sum over ranks of what each has of x A^T is the whole, as many numbers per token
as the adapter has ranks, and each rank makes other results of it. `add_sharded_pieces` goes through the slots of a step
one by one; `add_sharded_stacks` takes all rows and slots at once and never waits for a device, so that a graph may hold
it. Must not know: layers, process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.lora import LowRankPiece, Multiply, SomeRows


class AdapterShards(NamedTuple):
    """The tensor-parallel ranks among which both A and B of a matrix are cut, as one of them sees it."""

    rank: int
    size: int
    reduce: Callable[[Tensor], Tensor]  # the sum over these ranks, on each of them; may be done in place

    def own(self, units: int) -> slice:
        """Of so many rows. Shares differ by one row at most; with fewer rows than ranks, some are empty."""
        return slice(units * self.rank // self.size, units * (self.rank + 1) // self.size)


def add_sharded_pieces(
    y: Tensor,
    x: Tensor,
    groups: Iterable[tuple[SomeRows, Sequence[LowRankPiece]]],
    shards: AdapterShards,
    multiply: Multiply,
) -> None:
    """As `add_pieces`, for rows of several slots: x [T, width] has all rows of y. There is one sum over ranks, for all
    of them."""
    groups = [(some, pieces) for some, pieces in groups if pieces]
    h = no_inputs(len(x), [pieces for _, pieces in groups], x.device)
    if h is None:
        return
    for some, pieces in groups:
        put_inputs(h, x[some], some, pieces, shards, multiply)
    h = shards.reduce(h)
    for some, pieces in groups:
        add_results(y, h[some], some, pieces, multiply)


def no_inputs(num_rows: int, groups: Iterable[Sequence[LowRankPiece]], device: torch.device) -> Tensor | None:
    """Zeros where x A^T of the pieces of any of these groups has place, side by side; None: there are no pieces."""
    groups = [pieces for pieces in groups if pieces]
    if not groups:
        return None
    columns = max(sum(piece.b.shape[1] for piece in pieces) for pieces in groups)
    return torch.zeros((num_rows, columns), dtype=groups[0][0].a.dtype, device=device)


def put_inputs(
    h: Tensor, x: Tensor, some: SomeRows, pieces: Sequence[LowRankPiece], shards: AdapterShards, multiply: Multiply
) -> None:
    """What this rank has of x A^T, into some rows of h, which x has alone."""
    x, at = x.to(h.dtype), 0
    for piece in pieces:
        here, rank = len(piece.a), piece.b.shape[1]
        first = at + (shards.own(rank).start if here < rank else 0)
        if here:
            h[some, first : first + here] = multiply(x, piece.a)
        at += rank


def add_results(y: Tensor, h: Tensor, some: SomeRows, pieces: Sequence[LowRankPiece], multiply: Multiply) -> None:
    """scale * (x A^T) B^T to some rows of y, which h has alone: x A^T, summed over ranks."""
    at = 0
    for start, stop, _, b, scale in pieces:
        rank = b.shape[1]
        if start < stop:
            delta = multiply(h[:, at : at + rank].contiguous(), b)
            y[some, start:stop] += delta if scale == 1.0 else delta * scale
        at += rank


class ShardedStacks:
    """What this rank has of one matrix's adapters, in tensors as large as all slots may need, so that they stay where
    they are. Of A cut by rows every rank has room for as many rows, and columns of B lie as the ranks' rows of A do."""

    def __init__(
        self, num_slots: int, parts: Iterable[int], width: int, rank: int, shards: AdapterShards, like: Tensor, *,
        by_columns: bool,  # of the matrix
    ) -> None:  # fmt: skip
        self.shards, self.by_columns = shards, by_columns
        each, device = rank if by_columns else -(-rank // shards.size), like.device
        self.columns = each if by_columns else each * shards.size
        whole = list(pairwise((0, *accumulate(parts))))
        self.results = [_share_of(first, last, shards) if by_columns else (first, last) for first, last in whole]
        self.bounds = list(pairwise((0, *accumulate(last - first for first, last in self.results))))  # rows of B
        self.a = torch.zeros((num_slots, len(whole), each, width), dtype=like.dtype, device=device)
        self.b = torch.zeros((self.bounds[-1][1], num_slots, self.columns), dtype=like.dtype, device=device)
        self.scales = torch.zeros((num_slots, len(whole)), dtype=torch.float32, device=device)
        self.slots = torch.arange(1, num_slots + 1, dtype=torch.int32, device=device)

    def put(self, slot: int, pieces: Iterable[LowRankPiece]) -> None:
        """What was in the slot is gone."""
        for stack in (self.a[slot - 1], self.b[:, slot - 1], self.scales[slot - 1]):
            stack.zero_()
        for piece in pieces:
            parts = [
                part for part, (first, last) in enumerate(self.results) if piece.start <= first and last <= piece.stop
            ]
            if not parts or (self.results[parts[0]][0], self.results[parts[-1]][1]) != (piece.start, piece.stop):
                raise ValueError(
                    f"an adapter of rows {piece.start} to {piece.stop} of a matrix whose parts are {self.results}"
                )
            self._put(slot - 1, parts, piece)

    def _put(self, at: int, parts: Sequence[int], piece: LowRankPiece) -> None:
        for part in parts:
            self.a[at, part, : len(piece.a)].copy_(piece.a)
            self.scales[at, part].fill_(piece.scale)
        b = self.b[self.bounds[parts[0]][0] : self.bounds[parts[-1]][1], at]
        if self.by_columns:
            b[:, : piece.b.shape[1]].copy_(piece.b)
            return
        for rank in range(self.shards.size):
            own = self.shards._replace(rank=rank).own(piece.b.shape[1])
            first = rank * self.a.shape[2]
            b[:, first : first + own.stop - own.start].copy_(piece.b[:, own])


def _share_of(first: int, last: int, shards: AdapterShards) -> tuple[int, int]:
    own = shards.own(last - first)
    return first + own.start, first + own.stop


def add_sharded_stacks(y: Tensor, x: Tensor, index: Tensor, stacks: ShardedStacks, multiply: Multiply) -> None:
    """y [T, rows of the matrix], to which every row's adapter adds its part of x [T, width]. `index` [T] int32: the
    rows' slots, 0: none. In place."""
    slots, parts, each, width = stacks.a.shape
    own, shards = (index.long() - 1).clamp(min=0), stacks.shards
    every = multiply(x.to(stacks.a.dtype), stacks.a.view(-1, width)).view(-1, slots, parts, each)
    h = every.new_zeros((len(x), parts, stacks.columns))
    first = 0 if stacks.by_columns else shards.rank * each
    h[:, :, first : first + each] = every[torch.arange(len(x), device=x.device), own]
    h = shards.reduce(h)
    h = (h.float() * stacks.scales[own][:, :, None]).to(h.dtype)
    is_own = (index[:, None] == stacks.slots)[:, :, None]
    for part, ((start, stop), (first, last)) in enumerate(zip(stacks.results, stacks.bounds, strict=True)):
        if start < stop:
            wide = torch.where(is_own, h[:, part, None], 0.0).flatten(1)
            y[:, start:stop] += multiply(wide, stacks.b[first:last].flatten(1))
