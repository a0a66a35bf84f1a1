"""SpreadAdapters: what adapters add to experts that are at other engines, handed to the ranks that have these experts.

In: copies that plans place in slots of this engine. Out: at every rank that has experts of its rows, the halves of
these experts, in the slot of the same number that it keeps for this engine. An adapter is read by the ranks of the
engine that is to use it, and by no others: one that cannot be read fails there, the others never hear of it, and all
compute with the same weights. Whether anybody has placed adapters is told to all at the start of a step; if so, all
ranks go through the mixtures together, one after another, whatever each has to say. What is in a slot of another engine
stays until that engine says otherwise. Must not know: files, requests, how ranks talk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch
from torch import Tensor

from quire.layers.adapters import ExpertPieces
from quire.layers.moe import Experts
from quire.ops.lora import LowRankPiece

if TYPE_CHECKING:
    from quire.loader.adapter import HostAdapter
    from quire.quant.shard import ExpertSpread

Exchange: TypeAlias = "Callable[[Sequence[bytes]], list[bytes]]"  # a message for each engine -> one of each engine


class SentPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A LowRankPiece of an expert."""

    expert: int
    is_down: bool
    start: int
    stop: int
    rank: int
    scale: float
    a: bytes
    b: bytes


class SentSlot(msgspec.Struct, frozen=True, array_like=True):
    """All that a slot of the sender has in a mixture for the experts of who gets this."""

    slot: int
    pieces: list[SentPiece]


class SpreadAdapters:
    """As the ExpertSpread's StepNews. `dtype`: of all adapters' numbers."""

    def __init__(self, layers: Iterable[object], spread: ExpertSpread, dtype: torch.dtype) -> None:
        self._mixtures = [layer for layer in layers if isinstance(layer, Experts) and layer.spread is not None]
        self._spread, self._dtype = spread, dtype
        self._placed: dict[int, HostAdapter] = {}  # by slot: what others have not been told yet
        self._told: set[int] = set()  # slots that have something at other engines

    def place(self, slot: int, adapter: HostAdapter) -> None:
        """Adapters without experts concern nobody else, unless others have some of the one before."""
        if adapter.experts or slot in self._told:
            self._placed[slot] = adapter
        else:
            self._placed.pop(slot, None)

    @property
    def is_pending(self) -> bool:
        return bool(self._placed)

    def exchange(self, exchange: Exchange) -> None:
        """Tell the others, and hear what they tell."""
        placed, self._placed = self._placed, {}
        self._told.update(slot for slot, adapter in placed.items() if adapter.experts)
        self._told.difference_update(slot for slot, adapter in placed.items() if not adapter.experts)
        for mixture in self._mixtures:
            messages = [self._message(mixture, engine, placed) for engine in range(len(self._spread.peers))]
            for engine, message in enumerate(exchange(messages)):
                self._take(mixture, engine, message)

    def _message(self, mixture: Experts, engine: int, placed: Mapping[int, HostAdapter]) -> bytes:
        if engine == self._spread.engine or not placed:
            return b""
        rank = self._spread.peers[engine]
        slots = [
            SentSlot(slot, pieces_sent(mixture.pieces_for(rank, adapter.experts.get(mixture, {}))))
            for slot, adapter in placed.items()
        ]
        return msgspec.msgpack.encode(slots)

    def _take(self, mixture: Experts, engine: int, message: bytes) -> None:
        if not message:
            return
        assert mixture.adapters is not None
        for sent in msgspec.msgpack.decode(message, type=list[SentSlot]):
            mixture.adapters.put_of(engine, sent.slot, pieces_received(sent.pieces, self._dtype))


def pieces_sent(pieces: Mapping[int, ExpertPieces]) -> list[SentPiece]:
    return [
        SentPiece(expert, is_down, one.start, one.stop, len(one.a), one.scale, _bytes_of(one.a), _bytes_of(one.b))
        for expert, own in pieces.items()
        for is_down, side in ((False, own.up), (True, own.down))
        for one in side
    ]


def pieces_received(sent: Iterable[SentPiece], dtype: torch.dtype) -> dict[int, ExpertPieces]:
    pieces: dict[int, ExpertPieces] = {}
    for one in sent:
        a = _tensor_of(one.a, dtype).view(one.rank, -1)
        piece = LowRankPiece(one.start, one.stop, a, _tensor_of(one.b, dtype).view(-1, one.rank), one.scale)
        own = pieces.get(one.expert, ExpertPieces())
        pieces[one.expert] = own._replace(down=(*own.down, piece)) if one.is_down else own._replace(up=(*own.up, piece))
    return pieces


def _bytes_of(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _tensor_of(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)
