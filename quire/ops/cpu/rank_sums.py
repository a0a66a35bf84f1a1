"""Sums over the ranks of one machine in the compiled kernels: csrc/cpu/sums.h, over memory that the ranks share.

In: that memory, as bytes. Out: what ShardGroup.reduce is; compiled blocks sum through the same memory inside of a call
(`work`). Must not know: where the memory comes from, or what else joins ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, c_int32, c_int64, c_void_p

from torch import Tensor

from quire.ops.cpu.block import NativeReduce
from quire.ops.cpu.native import DTYPES

LINE_BYTES = 128  # RankLine of csrc/cpu/ranks.h
_MOST_MS = (1 << 31) - 1


class RanksWork(Structure):
    _fields_ = [
        ("memory", c_void_p), ("bytes", c_int64), ("rank", c_int32), ("ranks", c_int32), ("spin_us", c_int32),
        ("patience_ms", c_int32),
    ]  # fmt: skip


def memory_bytes(ranks: int, room: int) -> int:
    """Of all ranks together. `room`: a multiple of 64 bytes, of a tensor that is summed at once."""
    return ranks * (LINE_BYTES + 2 * room)


class NativeSum(NativeReduce):
    """In place. All ranks call it with the same sizes in the same order, and get the same bits: float32 sums in the
    order of ranks, rounded once. Where they differ, all are refused. `otherwise`: for tensors of other dtypes, and
    those that are not contiguous."""

    def __init__(
        self, library: ctypes.CDLL, memory: Tensor, rank: int, ranks: int, otherwise: Callable[[Tensor], Tensor],
        *, spin_us: int, patience_s: float,
    ) -> None:  # fmt: skip
        patience_ms = min(int(patience_s * 1000), _MOST_MS)
        self.work = RanksWork(memory.data_ptr(), memory.nbytes, rank, ranks, spin_us, patience_ms)
        self._memory, self._otherwise = memory, otherwise
        self._sum, self._address = library.qc_sum_ranks, ctypes.addressof(self.work)

    def __call__(self, x: Tensor) -> Tensor:
        dtype = DTYPES.get(x.dtype)
        if dtype is None or not x.is_contiguous():
            return self._otherwise(x)
        self._sum(self._address, x.data_ptr(), x.numel(), dtype)
        return x
