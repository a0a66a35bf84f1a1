"""SharedSum: sums over CPU ranks of one machine through memory that they share, instead of sockets.

Each rank copies its tensor to its place, says so, and waits for the others. Of a small tensor each then adds up all, in
the order of ranks; of a larger one each adds up a slice, and all copy the result. Either way the bits are the same on
every rank. Halves are used in turn, so that a rank that is ahead writes where none reads: it begins sum n + 2 only when
all have said that they are at n + 1, and so are done with n.

What is written before a rank's count is seen by who sees the count: so do x86 processors order stores. Others have
weaker rules, and sum over sockets. Must not know: models.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed

from quire.base.log import logger

_log = logger(__name__)
PIECE = 1 << 20  # bytes that are summed at a time
SMALL = 16 << 10  # bytes up to which every rank adds up all of it
_LINE = 64  # bytes: counts of two ranks do not share a cache line
_SPINS = 2000  # looks at another rank's count before this one sleeps in between
_SLEEP = 2e-5
_FOLDER = Path("/dev/shm")


class SharedSum:
    def __init__(self, rank: int, ranks: int, memory: mmap.mmap, otherwise: Callable[[Tensor], Tensor]) -> None:
        """`otherwise`: sums what this does not."""
        self._rank, self._ranks, self._otherwise = rank, ranks, otherwise
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._counts = whole[: ranks * _LINE].numpy().view(np.int64).reshape(ranks, -1)[:, 0]
        places = whole[ranks * _LINE :].view(2, ranks + 1, PIECE)
        self._parts, self._results = places[:, :ranks], places[:, ranks]
        self._count = self._num_sums = 0

    def __call__(self, x: Tensor) -> Tensor:
        if not x.dtype.is_floating_point or not x.is_contiguous():
            return self._otherwise(x)
        for piece in x.view(-1).split(PIECE // x.element_size()):
            self._sum(piece)
        return x

    def _sum(self, piece: Tensor) -> None:
        half, size = self._num_sums & 1, piece.nbytes
        self._num_sums += 1
        parts = self._parts[half, :, :size].view(piece.dtype)
        parts[self._rank].copy_(piece)
        self._meet()
        if size <= SMALL:
            piece.copy_(_in_order(parts))
            return
        start, stop = (piece.numel() * rank // self._ranks for rank in (self._rank, self._rank + 1))
        result = self._results[half, :size].view(piece.dtype)
        result[start:stop].copy_(_in_order(parts[:, start:stop]))
        self._meet()
        piece.copy_(result)

    def _meet(self) -> None:
        """Returns once all ranks are here."""
        self._count += 1
        self._counts[self._rank] = self._count
        for rank in range(self._ranks):
            spins = 0
            while self._counts[rank] < self._count:
                spins += 1
                if spins > _SPINS:
                    time.sleep(_SLEEP)
                else:
                    os.sched_yield()


def _in_order(parts: Tensor) -> Tensor:
    """[ranks, entries] -> their sum, in float32 at least, added from the first to the last."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


def share_sums(rank: int, ranks: int, otherwise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Called by all ranks of the process group at the same time, which are on one machine. What sums: `otherwise`,
    where memory cannot be shared."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not hasattr(os, "sched_yield"):
        return otherwise
    size = ranks * _LINE + 2 * (ranks + 1) * PIECE
    name = torch.zeros(16, dtype=torch.uint8)
    if rank == 0:
        name = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    distributed.broadcast(name, 0)
    path = _FOLDER / f"quire-{name.numpy().tobytes().hex()}"
    if not _agree(rank != 0 or _made(path, size)):
        return otherwise
    memory = _opened(path, size)
    is_open = _agree(memory is not None)
    if rank == 0:
        path.unlink(missing_ok=True)
    if memory is None or not is_open:
        return otherwise
    _log.debug("Ranks sum through shared memory, %.1f MiB", size / 2**20)
    return SharedSum(rank, ranks, memory, otherwise)


def _agree(is_so: bool) -> bool:
    """Whether it is so for all ranks."""
    count = torch.tensor([is_so], dtype=torch.int64)
    distributed.all_reduce(count, distributed.ReduceOp.MIN)
    return bool(count)


def _made(path: Path, size: int) -> bool:
    try:
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as wrong:
        _log.info("Ranks sum over sockets: no shared memory (%s)", wrong)
        return False
    try:
        os.posix_fallocate(made, 0, size)  # a file that has no room would end the process that writes to it
    except OSError as wrong:
        _log.info("Ranks sum over sockets: no %d bytes of shared memory (%s)", size, wrong)
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(made)
    return True


def _opened(path: Path, size: int) -> mmap.mmap | None:
    try:
        opened = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return mmap.mmap(opened, size)
    except OSError:
        return None
    finally:
        os.close(opened)
