"""ExpertBalance: experts move between ranks, so that all of them have about the same work.

In: steps; each mixture counts how often its experts are chosen. Every so many steps the ranks take the counts of the
first of them, come to the same placement each by itself (quant/placement.py), and hand over the experts that move, one
mixture after another, between two steps. All ranks count the same steps, so nobody has to be told. Must not know:
plans, requests, how ranks talk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from torch import Tensor

from quire.base.clock import now
from quire.base.log import logger
from quire.layers.moe import Experts, ExpertShare, Moe
from quire.quant.placement import Placement, balanced, balancedness
from quire.schema.errors import NotBuiltError

_log = logger(__name__)


class ExpertBalance:
    def __init__(
        self,
        mixtures: Sequence[Moe],
        broadcast: Callable[[Tensor, int], None],
        *,
        rank: int,
        interval: int,
        window: int,
        log_every: int = 0,  # steps between two lines that say how even the load is; 0: never
    ) -> None:
        self._layers = [
            (mixture.experts, share) for mixture in mixtures if (share := mixture.experts.share) is not None
        ]
        self._broadcast, self._rank = broadcast, rank
        self._interval, self._window, self._log_every = interval, min(window, interval), log_every
        self.num_steps = self.num_moved = 0
        self._check()

    def _check(self) -> None:
        """An expert must be stored alike wherever it may come to."""
        if not self._layers:
            return
        forms = [
            [[(tuple(part.shape), str(part.dtype)) for part in experts.stored.tensors_of(place)]
             for place in range(len(share.placed[self._rank]))]
            for experts, share in self._layers
        ]  # fmt: skip
        one = [layer[0] for layer in forms]
        own = _loads(self._layers[0][1]).new_tensor([crc32(repr(one).encode())])
        first = own.clone()
        self._broadcast(first, 0)
        if first.item() != own.item() or any(form != layer[0] for layer in forms for form in layer):
            raise NotBuiltError(
                "enable_eplb: experts of this checkpoint are stored in different forms, and cannot move between ranks",
                param="enable_eplb",
                value=True,
            )

    def end_step(self) -> None:
        """One step is over, on all ranks."""
        self.num_steps += 1
        into = self.num_steps % self._interval
        if self._log_every and self.num_steps % self._log_every == 0 and self._rank == 0:
            self._log()
        if into == 0:
            self._move()
        if into == self._interval - self._window or into == 0:
            for _, share in self._layers:
                _loads(share).zero_()

    def _move(self) -> None:
        began, moved = now(), 0
        for experts, share in self._layers:
            self._broadcast(_loads(share), 0)
            moved += self._move_to(experts, share, balanced(_loads(share).tolist(), share.placed))
        self.num_moved += moved
        if self._rank == 0:
            _log.info("Step %d: %d experts moved in %.2f s", self.num_steps, moved, now() - began)

    def _move_to(self, experts: Experts, share: ExpertShare, placed: Placement) -> int:
        """How many experts of a mixture came to a rank that did not have them."""
        come = [sorted(set(new) - set(was)) for was, new in zip(share.placed, placed, strict=True)]
        staged: dict[int, list[Tensor]] = {}
        for expert in sorted({expert for own in come for expert in own}):
            source = next(rank for rank, own in enumerate(share.placed) if expert in own)
            if source == self._rank:
                parts = experts.stored.tensors_of(share.placed[source].index(expert))
                parts = [part.clone() for part in parts]
            else:
                parts = [part.new_empty(part.shape) for part in experts.stored.tensors_of(0)]
            for part in parts:
                self._broadcast(part.reshape(-1).view(torch.uint8), source)
            if expert in come[self._rank]:
                staged[expert] = parts
        for expert, parts in staged.items():
            experts.stored.replace(placed[self._rank].index(expert), parts)
        experts.place(placed)
        return sum(map(len, come))

    def _log(self) -> None:
        even = [balancedness(_loads(share).tolist(), share.placed) for _, share in self._layers]
        _log.info("Step %d: balancedness of experts %.3f (1 is even)", self.num_steps, sum(even) / len(even))


def _loads(share: ExpertShare) -> Tensor:
    assert share.loads is not None  # mixtures whose experts move count
    return share.loads
