"""DraftChoice: which tokens a drafter's logits become, and what those that were drawn were drawn from.

Greedily, unless drafts are to be drawn (draft_sample_method): then those of a row that draws itself are drawn at its
temperature, and their distributions are kept until the row is drafted for again, because what verifies the drafts has
to know them (quire/sampling/rejection.py). Must not know: how logits are computed, or what is kept of the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.schema.params import ResolvedParams
from quire.schema.step import NewRow

if TYPE_CHECKING:
    from quire.models.draft_heads import TokenMap

Choose = Callable[[Tensor, "TokenMap | None"], Tensor]  # logits [R, v] of the next drafts -> token ids [R]


def best_tokens(logits: Tensor, mapped: TokenMap | None = None) -> Tensor:
    best = logits.argmax(-1)
    return best if mapped is None else mapped(best)


class DraftChoice:
    """The greedy one."""

    def begin(self, new: NewRow) -> None:
        """A row joins."""

    def end(self, request_id: str) -> None:
        """It leaves."""

    def of(self, request_ids: Sequence[str], lengths: Sequence[int]) -> Choose:
        """To be called once for each next token of these rows, which have so many."""
        return best_tokens

    def drawn_from(self, request_id: str) -> Tensor | None:
        """[drafts, V] float32 of the row's latest drafts; None: they were not drawn."""
        return None


class DrawnChoice(DraftChoice):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[str, tuple[int, float]] = {}  # seed and temperature of those that draw
        self._drawn_from: dict[str, list[Tensor]] = {}

    def begin(self, new: NewRow) -> None:
        self.end(new.request_id)
        if isinstance(new.params, ResolvedParams) and not new.params.greedy:
            seed = new.seed & 0xFFFFFFFFFFFFFFFF
            self._rows[new.request_id] = seed - (seed >> 63 << 64), new.params.temperature

    def end(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
        self._drawn_from.pop(request_id, None)

    def drawn_from(self, request_id: str) -> Tensor | None:
        drawn = self._drawn_from.get(request_id)
        return None if drawn is None else torch.stack(drawn)

    def of(self, request_ids: Sequence[str], lengths: Sequence[int]) -> Choose:
        from quire.sampling.rejection import draw_drafts  # lazy

        own = [(place, self._rows[name]) for place, name in enumerate(request_ids) if name in self._rows]
        where = torch.tensor([place for place, _ in own], dtype=torch.int64)
        seeds = torch.tensor([seed for _, (seed, _) in own], dtype=torch.int64)
        temperatures = torch.tensor([[temperature] for _, (_, temperature) in own])
        places = torch.tensor([lengths[place] for place, _ in own], dtype=torch.int64)
        lists = [self._drawn_from.setdefault(request_ids[place], []) for place, _ in own]
        for one in lists:
            one.clear()

        def choose(logits: Tensor, mapped: TokenMap | None) -> Tensor:
            tokens = best_tokens(logits, mapped)
            if own:
                shares = torch.softmax(logits[where].float() / temperatures, -1)
                if mapped is not None:
                    ids = mapped(torch.arange(shares.shape[1]))
                    shares = shares.new_zeros((len(shares), self._vocab_size)).index_add_(1, ids, shares)
                positions = places + len(lists[0])
                tokens[where] = draw_drafts(shares, seeds, positions).to(tokens.dtype)
                for one, share in zip(lists, shares, strict=True):
                    one.append(share)
            return tokens

        return choose
