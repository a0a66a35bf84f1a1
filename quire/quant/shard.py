"""Shards: the ranks that hold a model together, which part of an axis one of them has, and how a tensor is cut to it.

Stages of a pipeline have layers each, and the ranks of a stage share every one of these layers. A layer says what it is
cut by (heads, entries of an mlp, rows of a vocabulary) and asks its `ShardGroup` for the `Span`; a weight scheme turns
spans into a `Cut` of the tensor that a checkpoint stores. Sums over ranks go through `ShardGroup.reduce`, whoever
provides it. Experts may be divided among the ranks of several engines (`ExpertSpread`). Must not know: processes,
devices, which layer it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.schema.errors import ConfigError

if TYPE_CHECKING:
    from quire.quant.placement import Placement


@dataclass(frozen=True, slots=True)
class Span:
    """Entries [start, start + count) of an axis of `whole` entries."""

    whole: int
    start: int
    count: int

    @classmethod
    def all(cls, whole: int) -> Span:
        return cls(whole, 0, whole)

    @property
    def is_whole(self) -> bool:
        return self.count == self.whole

    def times(self, each: int) -> Span:
        """Where every entry is `each` entries."""
        return Span(self.whole * each, self.start * each, self.count * each)


class Cut(NamedTuple):
    """What a rank keeps of a checkpoint's tensor: some ranges of one axis, one after another."""

    axis: int
    whole: int  # length of the axis in the checkpoint
    ranges: tuple[tuple[int, int], ...]  # (start, stop)

    def of(self, tensor: Tensor) -> Tensor:
        parts = [tensor.narrow(self.axis, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)

    def uncut(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The checkpoint's shape, of a tensor that was cut to this one."""
        return (*shape[: self.axis], self.whole, *shape[self.axis + 1 :])

    def behind(self, axis: int) -> Cut:
        """The same where so many axes come before."""
        return self._replace(axis=self.axis + axis)


def cut_to(axis: int, spans: Sequence[Span]) -> Cut | None:
    """Spans of tensors that lie one after another along this axis; None: nothing is cut."""
    if all(span.is_whole for span in spans):
        return None
    ranges, at = [], 0
    for span in spans:
        ranges.append((at + span.start, at + span.start + span.count))
        at += span.whole
    return Cut(axis, at, tuple(ranges))


def as_it_is(x: Tensor) -> Tensor:
    return x


class StepNews(Protocol):
    """What a rank has to tell its peers of other engines before a step, and to hear from them."""

    @property
    def is_pending(self) -> bool:
        """Whether there is anything to tell."""

    def exchange(self, exchange: Callable[[Sequence[bytes]], list[bytes]]) -> None:
        """Called on all peers if one of them has news: each calls `exchange` equally often, with a message for every
        engine, and gets one of every engine."""


class ExpertSpread(Protocol):
    """The ranks of all engines that divide experts among themselves. Each engine has tokens of its own, and all run
    every step together: so a layer's experts see the tokens of all. Outside a step an engine is by itself."""

    rank: int  # among those of all engines
    size: int
    engine: int
    peers: tuple[int, ...]  # ranks that exchange rows with this one, by engine; itself included
    news: StepNews | None  # None: there never are any, on no engine

    def begin(self, num_tokens: int) -> bool:
        """A step in which this engine has so many tokens; returns once all engines are there: whether any has one."""

    def end(self) -> None:
        """Of the step."""

    def gather(self, rows_per_token: int, *parts: Tensor) -> tuple[Tensor, ...]:
        """Rows [this engine's tokens * rows_per_token, any] of each part -> those of all engines."""

    def scatter(self, rows_per_token: int, y: Tensor) -> Tensor:
        """Rows of all engines -> the sum over engines of this one's rows."""


class ContextRanks(Protocol):
    """Neighbouring ranks with the same heads of keys, each of which keeps some of a context's tokens (context
    parallelism for decode): `interleave` tokens in a row, in turn."""

    rank: int  # among these
    size: int
    interleave: int
    by_exchange: bool  # partial results are exchanged (all-to-all) and merged by each rank, instead of summed

    def gather(self, x: Tensor) -> Tensor:
        """What each rank brings, all of one shape -> [size, *x.shape]."""

    def scatter(self, parts: Tensor) -> Tensor:
        """[size, ..] -> the sum over ranks of what they have for this one."""

    def exchange(self, parts: Tensor) -> Tensor:
        """[size, ..], one for each rank -> what each rank has for this one."""


@dataclass(frozen=True)
class ShardGroup:
    """The ranks among which matrices are cut, as one of them sees it; and which of a pipeline's stages they are."""

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], Tensor] = as_it_is  # the sum over these ranks, on each of them; may be done in place
    stage: int = 0
    stages: int = 1
    placement: str = ""  # of whole experts: linear | round_robin; "": every rank has some entries of each
    spread: ExpertSpread | None = None  # None: these ranks have all experts among themselves
    context: ContextRanks | None = None  # None: every rank keeps all tokens of its heads of keys
    redundant: int = 0  # copies of experts, besides one of each
    # what one of the ranks that share the experts has, on all of them, in place; None: experts stay where they are
    broadcast: Callable[[Tensor, int], None] | None = None
    sums_alone: bool = False  # `reduce` is called by a single rank too, wherever one of several would
    captures: bool = True  # whether `reduce` may be part of a CUDA graph

    @property
    def is_alone(self) -> bool:
        """One worker has all of the model."""
        return self.world_size == 1

    @property
    def world_size(self) -> int:
        return self.size * self.stages

    @property
    def world_rank(self) -> int:
        """Among the workers of all stages."""
        return self.stage * self.size + self.rank

    def say(self, number: int, device: torch.device) -> list[int]:
        """What each of these ranks says, by rank. All have to say something at the same point: what one of them alone
        has met (memory, files, its device) must not decide what it does next. Waits for the device."""
        if self.size == 1:
            return [number]
        own = torch.zeros(self.size, dtype=torch.int64, device=device)
        own[self.rank] = number
        numbers: list[int] = self.reduce(own).tolist()
        return numbers

    def all_say(self, yes: bool, device: torch.device) -> bool:
        """Whether each of these ranks says yes, as `say`."""
        return all(self.say(int(yes), device))

    def span(self, what: str, units: int, *, repeats: bool = False) -> Span:
        """An equal share of so many units. `repeats`: where there are fewer units than ranks, neighbours have the same
        one. ConfigError: they cannot be shared out."""
        if units % self.size == 0:
            share = units // self.size
            return Span(units, self.rank * share, share)
        if repeats and self.size % units == 0:
            return Span(units, self.rank * units // self.size, 1)
        raise ConfigError(f"{units} {what} cannot be shared out among {self.size} ranks", value=units)

    def sum_over(self, shared: Span) -> Callable[[Tensor], Tensor] | None:
        """What adds up results to which each rank brings what it has of this span; None: one rank brings all."""
        return None if shared.is_whole and not self.sums_alone else self.reduce

    def keys_span(self, units: int) -> Span:
        """Heads of keys and values. Ranks that divide a context among themselves must have the same ones."""
        span = self.span("heads of keys", units, repeats=True)
        copies = self.size // units
        if self.context is not None and (not copies or copies % self.context.size):
            raise ConfigError(
                f"decode_context_parallel_size={self.context.size} divides a context among ranks that have the same "
                f"heads of keys: it must divide tensor_parallel_size={self.size} / {units} heads of keys",
                param="decode_context_parallel_size",
                value=self.context.size,
            )
        return span

    def own_experts(self, count: int) -> tuple[int, ...] | None:
        """The experts that this rank has whole, some ranks one more than others; None: a share of every one."""
        placed = self.place_experts(count)
        return None if placed is None else placed[self.expert_rank]

    def place_experts(self, count: int) -> Placement | None:
        """Those of all ranks that share them, at first."""
        size = self.size if self.spread is None else self.spread.size
        if not self.placement or size == 1:
            return None
        from quire.quant.placement import first_placement  # lazy

        placed: Placement = first_placement(count, size, self.placement, self.redundant)
        return placed

    @property
    def expert_rank(self) -> int:
        """Among the ranks that share experts."""
        return self.rank if self.spread is None else self.spread.rank

    def uneven_span(self, units: int) -> Span:
        """A share where some ranks may have one more than others."""
        if units < self.size:
            raise ConfigError(f"{units} rows cannot be shared out among {self.size} ranks", value=units)
        start, stop = (units * rank // self.size for rank in (self.rank, self.rank + 1))
        return Span(units, start, stop - start)


ALONE = ShardGroup()
