"""RankTalk: what ranks say to each other besides tensors, where each of them has an engine of its own (a launcher's).

Bytes and numbers, over a gloo group of an engine's ranks. Must not know: what is said.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, distributed

_MOST_UNDER_WAY = 64  # messages: more than steps are in flight


class RankTalk:
    """`ranks`: those of the engine, as the whole process group counts them. `share`: ranks of a pipeline stage."""

    def __init__(self, group: Any, ranks: range, share: int) -> None:
        self._group, self._source = group, ranks[-share]
        self._others = [rank for rank in ranks if rank < self._source]
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()  # sends of a message, which must not be freed

    def gather(self, number: int) -> list[int]:
        """What each rank says, by rank."""
        own = torch.tensor([number], dtype=torch.int64)
        numbers = [torch.zeros_like(own) for _ in range(distributed.get_world_size(self._group))]
        distributed.all_gather(numbers, own, group=self._group)
        return [int(one) for one in numbers]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """As gather; what ranks say may be of different lengths."""
        lengths = self.gather(len(data))
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(data)] = _tensor(data)
        every = [torch.zeros_like(own) for _ in lengths]
        distributed.all_gather(every, own, group=self._group)
        return [one[:length].numpy().tobytes() for one, length in zip(every, lengths, strict=True)]

    def tell(self, data: bytes) -> None:
        """To the ranks of the stages before the last, if this is the first of the last. Returns at once, unless
        others have not heard the message so many before."""
        if distributed.get_rank() != self._source:
            return
        while len(self._under_way) >= _MOST_UNDER_WAY:  # gloo says that a send is over only to those who wait for it
            for sent, _ in self._under_way.popleft():
                sent.wait()
        messages = (torch.tensor([len(data)], dtype=torch.int64), _tensor(data))
        sends = [(distributed.isend(x, rank, group=self._group), x) for x in messages for rank in self._others]
        self._under_way.append(sends)

    def hear(self) -> bytes:
        """What the first rank of the last stage told next."""
        length = torch.zeros(1, dtype=torch.int64)
        distributed.recv(length, self._source, group=self._group)
        message = torch.zeros(int(length), dtype=torch.uint8)
        distributed.recv(message, self._source, group=self._group)
        return message.numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
