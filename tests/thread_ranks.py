"""Several ranks as threads of one process: sums over ranks without processes or sockets, for tests of layers.

`on_ranks(size, work)` calls work(group) once per rank, at the same time, and returns the results by rank. A rank that
fails ends the others, and its error is raised. `on_engines` does the same for ranks of several engines that share
experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.quant.shard import ShardGroup, StepNews

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


class _Meeting:
    """Shows all what each brings."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size

    def show(self, rank: int, thing: Any) -> list[Any]:
        self._brought[rank] = thing
        self.barrier.wait(_PATIENCE)
        every = list(self._brought)
        self.barrier.wait(_PATIENCE)
        return every


class ThreadSpread:
    """As an ExpertSpread: of the ranks of the same number in all engines. Nothing is padded."""

    def __init__(self, engine: int, engines: int, rank: int, ranks: int, peers: _Meeting) -> None:
        self.rank, self.size = engine * ranks + rank, engines * ranks
        self.engine, self.peers = engine, tuple(range(rank, engines * ranks, ranks))
        self.news: StepNews | None = None
        self.num_exchanges = 0
        self._meeting = peers

    def begin(self, num_tokens: int) -> bool:
        own = num_tokens, self.news is not None and self.news.is_pending
        said = self._meeting.show(self.engine, own)
        if self.news is not None and any(has_news for _, has_news in said):
            self.news.exchange(self._exchange)
        return any(count for count, _ in said)

    def _exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        self.num_exchanges += 1
        return [every[self.engine] for every in self._meeting.show(self.engine, list(messages))]

    def end(self) -> None:
        pass

    def gather(self, rows_per_token: int, *parts: Tensor) -> tuple[Tensor, ...]:
        every = self._meeting.show(self.engine, parts)
        self._counts = [len(parts[0]) for parts in every]
        return tuple(torch.cat(part) for part in zip(*every, strict=True))

    def scatter(self, rows_per_token: int, y: Tensor) -> Tensor:
        return torch.stack([part.split(self._counts)[self.engine] for part in self._meeting.show(self.engine, y)]).sum(
            0
        )


def on_engines(engines: int, ranks: int, work: Callable[[ShardGroup], Result], *, moves: bool = False) -> list[Result]:
    """By engine and rank. `moves`: experts may move between all of them."""
    sums, every = [_Sums(ranks) for _ in range(engines)], _Sums(engines * ranks)
    meetings = [_Meeting(engines) for _ in range(ranks)]

    def group_of(number: int) -> ShardGroup:
        engine, rank = divmod(number, ranks)
        broadcast = (lambda x, source: every.broadcast(number, x, source)) if moves else None
        spread = ThreadSpread(engine, engines, rank, ranks, meetings[rank])
        return ShardGroup(rank, ranks, lambda x: sums[engine].reduce(rank, x), spread=spread, broadcast=broadcast)

    return _run_all(engines * ranks, lambda number: work(group_of(number)), [*sums, every, *meetings])


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

    def group_of(rank: int) -> ShardGroup:
        broadcast = (lambda x, source: sums.broadcast(rank, x, source)) if moves else None
        shared = ThreadContext(
            rank % context, contexts[rank // context], interleave=interleave, by_exchange=by_exchange
        )
        return ShardGroup(
            rank, size, lambda x: sums.reduce(rank, x), broadcast=broadcast, context=shared if context > 1 else None
        )

    return _run_all(size, lambda rank: work(group_of(rank)), [sums, *contexts], turn)


def _run_all(
    size: int,
    work: Callable[[int], Result],
    meetings: Sequence[_Sums | _Meeting],
    turn: threading.Lock | None = None,
) -> list[Result]:
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with turn or nullcontext():
            run_one(rank)

    def run_one(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as failed:  # noqa: BLE001  # the calling thread raises it
            errors.append(failed)
            for meeting in meetings:
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
