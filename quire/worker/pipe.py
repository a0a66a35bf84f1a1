"""Pipe: how the hidden states of a step get from one pipeline stage to the next.

In: a Batch; the stage before has sent the stream of its tokens. Out: what the model computes of it, which is sent on
unless this is the last stage. Steps come in the same order on all stages, so nothing is numbered. A stage does not wait
until the next one takes what it sends: it may begin its next step meanwhile. Must not know: plans, rows, how processes
were started (ranks.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.layers.batch import Batch

if TYPE_CHECKING:
    from quire.quant.shard import ShardGroup


class Sent(Protocol):
    """Something on its way to another rank."""

    def wait(self) -> object: ...


class Link(Protocol):
    """Messages to and from the ranks of the stages before and after this one."""

    def receive(self, into: Tensor) -> None:
        """Of the stage before; returns once it is there, or ordered on the device."""

    def send(self, x: Tensor) -> Sent:
        """To the stage after; x must not change before it has arrived."""


@runtime_checkable
class StagedModel(Protocol):
    """A model that may be one stage of a pipeline."""

    @property
    def stream_width(self) -> int: ...


@dataclass
class _Outgoing:
    stream: Tensor
    sent: Sent


class Pipe:
    def __init__(self, group: ShardGroup, link: Link, width: int, dtype: torch.dtype) -> None:
        """`width`: of the stream of one token."""
        self._group, self._link, self._width, self._dtype = group, link, width, dtype
        self.is_first, self.is_last = group.stage == 0, group.stage == group.stages - 1
        self._outgoing: deque[_Outgoing] = deque()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Hidden states on the last stage; on the others what was sent on."""
        if not self.is_first:
            stream = torch.empty((batch.num_tokens, self._width), dtype=self._dtype, device=batch.positions.device)
            self._receive(stream)
            batch = replace(batch, stream=stream)
        computed = forward(batch)
        if not self.is_last:
            self._send(computed)
        return computed

    def blank(self, batch: Batch) -> Batch:
        """For a trial step that no other stage takes part in."""
        shape = (batch.num_tokens, self._width)
        return replace(batch, stream=torch.zeros(shape, dtype=self._dtype, device=batch.positions.device))

    def _receive(self, stream: Tensor) -> None:
        try:
            self._link.receive(stream)
        except RuntimeError as lost:  # what torch.distributed raises, timeouts included
            raise RuntimeError(self._broken("got no hidden states from", self._group.stage - 1, lost)) from None

    def _send(self, computed: Tensor) -> None:
        """At most one step for each stage is on its way."""
        if computed.dtype is not self._dtype:
            raise RuntimeError(f"a stage hands on {computed.dtype}, and the next one expects {self._dtype}")
        computed = computed.contiguous()
        try:
            while len(self._outgoing) >= self._group.stages:
                self._outgoing.popleft().sent.wait()
            self._outgoing.append(_Outgoing(computed, self._link.send(computed)))
        except RuntimeError as lost:
            raise RuntimeError(self._broken("could not send to", self._group.stage + 1, lost)) from None

    def _broken(self, what: str, other: int, lost: RuntimeError) -> str:
        group = self._group
        return f"pipeline stage {group.stage} {what} stage {other} (worker {other * group.size + group.rank}): {lost}"
