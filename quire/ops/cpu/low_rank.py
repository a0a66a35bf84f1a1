"""The CPU form of `add_low_rank`, and adapters as compiled blocks take them; see csrc/cpu/low_rank.h.

`NativeSlots` is what kernels read of a LowRank: one entry per slot, at addresses that stay the same while adapters come
and go. Must not know: modules, files, which adapter is in a slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.ops.cpu.native import DTYPES
from quire.ops.lora import AdapterRows, LowRank, LowRankPiece, add_low_rank
from quire.ops.op import FormTable, Kernels

_RANKS, _RESULTS = 16, 32  # of a panel


class PieceWork(Structure):
    _fields_ = [
        ("a", c_void_p), ("b", c_void_p), ("start", c_int64), ("stop", c_int64), ("rank", c_int64), ("scale", c_float),
        ("dtype", c_int32),
    ]  # fmt: skip


class LowRankWork(Structure):
    _fields_ = [("pieces", c_void_p), ("count", c_int64)]


class NativeSlots:
    def __init__(self, low: LowRank) -> None:
        self._entries = (LowRankWork * len(low.pieces))()
        self._alive: list[Any] = [None] * len(low.pieces)
        self.address, self.count = ctypes.addressof(self._entries), len(low.pieces)
        for slot, pieces in enumerate(low.pieces, 1):
            self.put(slot, pieces)

    def put(self, slot: int, pieces: tuple[LowRankPiece, ...]) -> None:
        """Copies, in the order in which kernels read them."""
        pieces = tuple(_arranged(piece) for piece in pieces)
        works = (PieceWork * len(pieces))(
            *(
                PieceWork(a.data_ptr(), b.data_ptr(), start, stop, b.shape[1], scale, DTYPES[a.dtype])
                for start, stop, a, b, scale in pieces
            )
        )
        self._entries[slot - 1] = LowRankWork(ctypes.addressof(works) if pieces else None, len(pieces))
        self._alive[slot - 1] = works, pieces


def _arranged(piece: LowRankPiece) -> LowRankPiece:
    """Numbers of 32 bits that are ones of 16 bits are stored as such: a step reads all of them."""
    a, b = piece.a, piece.b
    if a.dtype is torch.float32:
        for narrow in (torch.bfloat16, torch.float16):
            if all(torch.equal(one.to(narrow).float(), one) for one in (a, b)):
                a, b = a.to(narrow), b.to(narrow)
                break
    return piece._replace(a=_in_panels(a, _RANKS), b=_in_panels(b, _RESULTS))


def _in_panels(rows: Tensor, size: int) -> Tensor:
    """[N, K] -> [panels, K, size], filled up with zeros."""
    count, width = rows.shape
    panels = -(-count // size)
    return torch.nn.functional.pad(rows, (0, 0, 0, panels * size - count)).view(panels, size, width).mT.contiguous()


def native_slots(low: LowRank | None) -> NativeSlots | None:
    """None: there are no adapters, or others than kernels add."""
    if low is None or low.dtype not in DTYPES or low.stacks is not None:
        return None
    if low.form is None:
        low.form = NativeSlots(low)
    assert isinstance(low.form, NativeSlots)
    return low.form


def add_forms(table: FormTable, library: ctypes.CDLL) -> None:
    table.made(add_low_rank)(partial(_form, library))


def _form(library: ctypes.CDLL, before: Callable[..., Tensor], kernels: Kernels) -> Callable[..., Tensor]:
    add = library.qc_add_low_rank

    def add_low_rank_native(y: Tensor, x: Tensor, rows: AdapterRows, low: LowRank) -> Tensor:
        slots = native_slots(low)
        is_plain = x.dtype in DTYPES and y.dtype is x.dtype and x.dim() == 2 and x.stride(1) == y.stride(1) == 1
        if slots is None or not is_plain:
            return before(y, x, rows, low)
        add(
            x.data_ptr(), x.stride(0), rows.index.data_ptr(), slots.address, slots.count, y.data_ptr(), y.stride(0),
            x.shape[0], y.shape[1], x.shape[1], DTYPES[x.dtype],
        )  # fmt: skip
        return y

    return add_low_rank_native
