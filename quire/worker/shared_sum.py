"""Memory through which the ranks of one machine sum: made by one of them, mapped by all, and without a name.

In: a process group (gloo) whose ranks are processes of this machine. Out: what ShardGroup.reduce is, or None with a
line in the log that says why; then sums go through the group. All ranks come to the same answer. The memory is a file
that has no name (memfd) and is gone with the last rank, however it ends; others open it through the first rank's folder
in /proc, which the system lets only the same user do. Must not know: models.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from quire.base import env
from quire.base.log import logger
from quire.base.memory_file import memory_file, seal_size
from quire.ops.cpu.native import kernels, why_not
from quire.ops.cpu.rank_sums import NativeSum, memory_bytes
from quire.worker.threads import processors_of_ranks

_log = logger(__name__)
ROOM_BYTES = 256 << 10  # of a tensor that is summed at once; fits a core's cache beside the parts of some other ranks
MOST_RANKS = 64
SPIN_US = 50  # about what a rank needs to fall asleep and be woken
_THROUGH_GLOO = "Sums of ranks go through gloo: %s"


class _UnsharedError(Exception):
    """Why memory cannot be shared."""


def share_sums(rank: int, ranks: int, group: Any, otherwise: Callable[[Tensor], Tensor]) -> NativeSum | None:
    """Called by all ranks of the group at the same time. `otherwise`: the sum over the group, for other dtypes."""
    library, why, memory = kernels(), _why_off(ranks), None
    if why or library is None:  # on all ranks: they have the same files and variables
        if rank == 0:
            _log.info(_THROUGH_GLOO, why)
        return None
    size, descriptor = memory_bytes(ranks, ROOM_BYTES), -1
    try:
        descriptor = _make(size) if rank == 0 else -1
    except _UnsharedError as wrong:
        why = str(wrong)
    place = torch.tensor(_place_of(descriptor), dtype=torch.int64)
    distributed.all_reduce(place, group=group)
    try:
        if place[0]:
            memory = _map(descriptor, size) if rank == 0 else _open(place.tolist(), size)
    except _UnsharedError as wrong:
        why = str(wrong)
    votes = torch.tensor([memory is None, processors_of_ranks(ranks) < ranks], dtype=torch.int64)
    distributed.all_reduce(votes, group=group)
    if descriptor >= 0:
        os.close(descriptor)  # all that could have opened it
    num_unable, num_crowded = votes.tolist()
    if memory is None or num_unable:
        if why or rank == 0:
            _log.info(_THROUGH_GLOO, why or "another rank cannot map shared memory, and says why")
        return None
    if rank == 0:
        _log.info("Sums of %d ranks go through shared memory (%d KiB)", ranks, size >> 10)
    spin_us, patience_s = 0 if num_crowded else SPIN_US, float(env.ENGINE_START_TIMEOUT_S.get())
    return NativeSum(library, memory, rank, ranks, otherwise, spin_us=spin_us, patience_s=patience_s)


def _why_off(ranks: int) -> str:
    if not env.SHARED_SUMS.get():
        return "QUIRE_SHARED_SUMS is 0"
    if sys.platform != "linux":
        return f"ranks share memory on Linux only, not on {sys.platform}"
    if kernels() is None:
        return f"no compiled CPU kernels, which sum in shared memory: {why_not()}"
    return f"{ranks} ranks share no memory, at most {MOST_RANKS} do" if ranks > MOST_RANKS else ""


def _place_of(descriptor: int) -> list[int]:
    """Where others find it; zeros: there is none."""
    if descriptor < 0:
        return [0, 0, 0, 0]
    file = os.fstat(descriptor)
    return [os.getpid(), descriptor, file.st_dev, file.st_ino]


def _make(size: int) -> int:
    """A descriptor of so many zeros, whose size nobody changes any more."""
    descriptor = -1
    try:
        descriptor = memory_file("quire-sums", sealable=True)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        seal_size(descriptor)
    except OSError as wrong:
        if descriptor >= 0:
            os.close(descriptor)
        raise _UnsharedError(f"there is no shared memory of {size} bytes ({wrong})") from None
    return descriptor


def _open(place: list[int], size: int) -> Tensor:
    """What rank 0 has made: its process, its descriptor there, and which file that is."""
    pid, number, *file = place
    path = f"/proc/{pid}/fd/{number}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as wrong:
        raise _UnsharedError(f"{path}, the memory of rank 0, cannot be opened ({wrong.strerror})") from None
    try:
        status = os.fstat(descriptor)
        if [status.st_dev, status.st_ino] != file or status.st_size != size:
            raise _UnsharedError(f"{path} is not the memory of rank 0")
        return _map(descriptor, size)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> Tensor:
    try:
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError) as wrong:
        raise _UnsharedError(f"{size} bytes of shared memory cannot be mapped ({wrong})") from None
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map
