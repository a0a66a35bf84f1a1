"""EngineSpread: what the ranks of several engines exchange so that each token finds its experts, wherever they are.

A step begins with the numbers of tokens that all engines have in it. In every mixture, the rows of all engines are
gathered, each rank computes what its experts are for all of them, and the sums go back to where the rows came from
(reduce-scatter). Rows are padded to the largest engine's, because collectives want equal shapes; the padding is not
computed with. Where an engine tries something by itself, nothing is exchanged, and the others are taken to have as many
tokens as it has. A step may begin with news: what a rank tells its peers before anything is computed. Must not know:
models, what news are about, or why an engine has as many tokens as it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed

from quire.base import env
from quire.schema.errors import PEERS_LOST, EngineDeadError

if TYPE_CHECKING:
    from quire.quant.shard import StepNews


class EngineSpread:
    """As an ExpertSpread. `across`: the process group of this rank's peers, one in each engine; `talk`: the same for
    numbers, on the CPU."""

    def __init__(self, engine: int, engines: int, rank: int, ranks: int, across: Any, talk: Any) -> None:
        self.rank, self.size = engine * ranks + rank, engines * ranks
        self.engine, self.peers = engine, tuple(range(rank, engines * ranks, ranks))
        self.news: StepNews | None = None
        self._engines, self._across, self._talk = engines, across, talk
        self._counts: list[int] | None = None  # of each engine's tokens; None: no step is under way
        self._limit: timedelta | None = None  # None: the process group's, for an engine that may still be loading

    def begin(self, num_tokens: int) -> bool:
        has_news = self.news is not None and self.news.is_pending
        own = torch.tensor([num_tokens, has_news], dtype=torch.int64)
        every = [torch.zeros_like(own) for _ in range(self._engines)]
        self._together(lambda: self._await(distributed.all_gather(every, own, group=self._talk, async_op=True)))
        counts, news = zip(*(one.tolist() for one in every), strict=True)
        if self.news is not None and any(news):
            self.news.exchange(self._exchange)
        self._counts = list(counts)
        return any(counts)

    def _exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """One for each engine -> one of each."""
        lengths = torch.tensor([len(message) for message in messages], dtype=torch.int64)
        lengths_in = torch.empty_like(lengths)
        self._send_to_all(lengths_in, lengths)
        parts, parts_in = lengths.tolist(), lengths_in.tolist()
        data = torch.empty(sum(parts), dtype=torch.uint8)
        for part, message in zip(data.split(parts), messages, strict=True):
            if message:
                part.numpy()[:] = np.frombuffer(message, np.uint8)
        data_in = torch.empty(sum(parts_in), dtype=torch.uint8)
        self._send_to_all(data_in, data, parts_in, parts)
        return [part.numpy().tobytes() for part in data_in.split(parts_in)]

    def _send_to_all(
        self, into: Tensor, x: Tensor, into_parts: list[int] | None = None, parts: list[int] | None = None
    ) -> None:
        send = partial(distributed.all_to_all_single, into, x, into_parts, parts, group=self._talk, async_op=True)
        self._together(lambda: self._await(send()))

    def _await(self, under_way: Any) -> None:
        """The others come to a step as soon as they have ended theirs."""
        if self._limit is None:
            under_way.wait()
        else:
            under_way.wait(self._limit)

    def _together(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as lost:  # what torch.distributed raises, timeouts included; it does not say who
            others = [str(engine) for engine in range(self._engines) if engine != self.engine]
            who = f"engine {others[0]}" if len(others) == 1 else f"one of the engines {', '.join(others)}"
            raise EngineDeadError(f"{who} {PEERS_LOST}: {lost}") from None

    def end(self) -> None:
        self._counts = None
        if self._limit is None and (seconds := env.EXECUTE_MODEL_TIMEOUT_SECONDS.get()) > 0:
            self._limit = timedelta(seconds=seconds)

    def gather(self, rows_per_token: int, *parts: Tensor) -> tuple[Tensor, ...]:
        if self._counts is None:
            return tuple(part.repeat(self._engines, 1) for part in parts)
        widths = [part.shape[1] * part.element_size() for part in parts]
        most = max(self._counts) * rows_per_token
        own = parts[0].new_zeros((most, sum(widths)), dtype=torch.uint8)
        own[: len(parts[0])] = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        every = [torch.empty_like(own) for _ in self._counts]
        self._together(lambda: distributed.all_gather(every, own, group=self._across))
        rows = torch.cat([one[: count * rows_per_token] for one, count in zip(every, self._counts, strict=True)])
        return tuple(
            piece.contiguous().view(part.dtype) for piece, part in zip(rows.split(widths, 1), parts, strict=True)
        )

    def scatter(self, rows_per_token: int, y: Tensor) -> Tensor:
        if self._counts is None:
            return y[: len(y) // self._engines]
        most = max(self._counts) * rows_per_token
        padded = y.new_zeros((self._engines, most, y.shape[1]))
        counts = [count * rows_per_token for count in self._counts]
        for place, rows in zip(padded, y.split(counts), strict=True):
            place[: len(rows)] = rows
        own = torch.empty_like(padded[0])
        self._together(lambda: distributed.reduce_scatter(own, list(padded.unbind()), group=self._across))
        return own[: counts[self.engine]]
