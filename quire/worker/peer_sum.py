"""PeerSum: sums of small tensors over the ranks of one machine, through memory that GPUs read from each other.

In: a process group of GPUs that reach each other's memory (torch's symmetric memory). Out: what ShardGroup.reduce is;
larger tensors go through the group. Off unless asked for (QUIRE_PEER_SUMS): it has not been measured on several GPUs.
Must not know: models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from quire.base import registry
from quire.ops.triton.peer_sum import MOST_PROGRAMS, peer_sum

MOST_BYTES = 256 << 10  # of a tensor; beyond, what a ring saves on the links counts more than its turns
ROOM_BYTES = 8 << 10  # of one program's piece, in each of two halves
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SYMMETRIC = "torch.distributed._symmetric_memory"


class PeerSum:
    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        """Called by all ranks at the same time; `ranks` is the whole process group."""
        self._rank, self._ranks = rank, ranks
        told_at = 2 * MOST_PROGRAMS * ROOM_BYTES
        size = told_at + 4 * MOST_PROGRAMS * ranks
        self._memory, self._handle, addresses = _shared(size, ranks, device)
        self._memory.zero_()
        self._pieces = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._told = self._pieces + told_at
        self._turns = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        distributed.barrier()  # nobody tells before everybody is at zero

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype not in _DTYPES or not x.is_contiguous() or not 0 < x.nbytes <= MOST_BYTES or x.data_ptr() % 16:
            distributed.all_reduce(x)
            return x
        room = ROOM_BYTES // x.element_size()
        return peer_sum(x, self._pieces, self._told, self._turns, rank=self._rank, ranks=self._ranks, room=room)


def _shared(size: int, ranks: int, device: torch.device) -> tuple[Tensor, Any, list[int]]:
    """Memory of this rank, what keeps that of the others open, and the addresses of all by rank."""
    if ranks == 1:
        own = torch.empty(size, dtype=torch.uint8, device=device)
        return own, None, [own.data_ptr()]
    own = registry.load(f"{_SYMMETRIC}:empty")(size, dtype=torch.uint8, device=device)
    handle = registry.load(f"{_SYMMETRIC}:rendezvous")(own, distributed.group.WORLD)
    return own, handle, list(handle.buffer_ptrs)
