"""Several ranks as threads of one process: sums over ranks without processes or sockets, for tests of layers.

`on_ranks(size, work)` calls work(group) once per rank, at the same time, and returns the results by rank. A rank that
fails ends the others, and its error is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from quire.quant.shard import ShardGroup

Result = TypeVar("Result")
_PATIENCE = 120.0  # seconds that one rank waits for the others


class _Sums:
    """Adds up what all ranks bring, in the order of ranks, so that all of them get the same bits."""

    def __init__(self, size: int, turn: threading.Lock | None = None) -> None:
        self.barrier, self._turn = threading.Barrier(size), turn
        self._brought: list[Tensor | None] = [None] * size

    def _wait(self) -> None:
        """Until all ranks are here; the rank that has the turn gives it to another one meanwhile."""
        if self._turn is None:
            self.barrier.wait(_PATIENCE)
            return
        self._turn.release()
        try:
            self.barrier.wait(_PATIENCE)
        finally:
            self._turn.acquire()

    def reduce(self, rank: int, x: Tensor) -> Tensor:
        self._brought[rank] = x
        self._wait()
        everything = [part for part in self._brought if part is not None]
        assert len({(part.shape, part.dtype) for part in everything}) == 1, "ranks add up different things"
        total = everything[0].clone()
        for part in everything[1:]:
            total += part
        self._wait()
        return total

    def gather(self, rank: int, x: Tensor) -> Tensor:
        self._brought[rank] = x
        self._wait()
        every = torch.stack([part for part in self._brought if part is not None])
        self._wait()
        return every

    def broadcast(self, rank: int, x: Tensor, source: int) -> None:
        self._brought[rank] = x
        self._wait()
        there = self._brought[source]
        assert there is not None and (there.shape, there.dtype) == (x.shape, x.dtype), "ranks expect different things"
        if rank != source:
            x.copy_(there)
        self._wait()


class ThreadContext:
    """As a ContextRanks."""

    def __init__(self, rank: int, sums: _Sums, *, interleave: int, by_exchange: bool) -> None:
        self.rank, self.size, self.interleave, self.by_exchange = rank, sums.barrier.parties, interleave, by_exchange
        self._sums = sums

    def gather(self, x: Tensor) -> Tensor:
        return self._sums.gather(self.rank, x)

    def scatter(self, parts: Tensor) -> Tensor:
        return self._sums.reduce(self.rank, parts)[self.rank]

    def exchange(self, parts: Tensor) -> Tensor:
        return self.gather(parts)[:, self.rank]


def on_ranks(
    size: int,
    work: Callable[[ShardGroup], Result],
    *,
    moves: bool = False,
    context: int = 1,
    interleave: int = 1,
    by_exchange: bool = False,
    in_turns: bool = False,
) -> list[Result]:
    """`moves`: experts may move between ranks. `context`: neighbours that divide contexts among themselves. `in_turns`:
    a rank runs only while all others wait, for what several threads of a process must not do at a time."""
    turn = threading.Lock() if in_turns else None
    sums = _Sums(size, turn)
    contexts = [_Sums(context, turn) for _ in range(size // context)]
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with turn or nullcontext():
            run_one(rank)

    def run_one(rank: int) -> None:
        try:
            broadcast = (lambda x, source: sums.broadcast(rank, x, source)) if moves else None
            shared = ThreadContext(
                rank % context, contexts[rank // context], interleave=interleave, by_exchange=by_exchange
            )
            results[rank] = work(
                ShardGroup(
                    rank, size, lambda x: sums.reduce(rank, x), broadcast=broadcast,
                    context=shared if context > 1 else None,
                )
            )  # fmt: skip
        except BaseException as failed:  # noqa: BLE001  # the calling thread raises it
            errors.append(failed)
            for meeting in (sums, *contexts):
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failed in errors:
        if not isinstance(failed, threading.BrokenBarrierError):
            raise failed
    assert not errors
    return [results[rank] for rank in range(size)]
