"""HeadProposer (medusa, mlp_speculator): drafts from the hidden state that led to a row's last token.

Of what a step computed, one state per row is kept: that of the last position whose token was kept. A row that has none
(nothing was sampled for it here yet) gets no drafts. Must not know: how heads compute, what verifies their drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.drafting.proposer import MODEL_EVIDENCE, NOTHING, Proposal
from quire.schema.step import NewRow
from quire.worker.draft_choice import DraftChoice

if TYPE_CHECKING:
    from quire.models.draft_heads import Heads


class HeadProposer:
    def __init__(self, heads: Heads, choice: DraftChoice) -> None:
        self._heads, self.choice = heads, choice
        self._lengths: dict[str, int] = {}
        # by row: where each step began whose tokens are not known yet, and that step's states
        self._read: dict[str, list[tuple[int, Tensor]]] = {}
        # by row: states among which is the one that led to its last token, its place there, and the token
        self._last: dict[str, tuple[Tensor, int, int]] = {}

    def begin(self, new: NewRow) -> None:
        self.end(new.request_id)
        self._lengths[new.request_id] = len(new.token_ids)
        self.choice.begin(new)

    def a_state(self) -> Tensor:
        storage = self._heads.storage
        return torch.zeros((1, self._heads.width), dtype=storage.dtype, device=storage.device)

    def read(self, request_id: str, start: int, states: Tensor) -> None:
        if request_id in self._lengths:
            length, earlier = self._lengths[request_id], self._read.get(request_id, ())
            sampled = [(at, some) for at, some in earlier if at + len(some) >= length]  # others were chunks of a prompt
            self._read[request_id] = [*sampled, (start, states)]

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        length = self._lengths[request_id] = self._lengths[request_id] + len(token_ids)
        self._last.pop(request_id, None)
        unknown = list[tuple[int, Tensor]]()
        for start, states in self._read.pop(request_id, ()):
            if start >= length - 1:
                unknown.append((start, states))  # a later step was read before the tokens of this one were known
            elif length - 2 - start < len(states):
                self._last[request_id] = states, length - 2 - start, token_ids[-1]
        if unknown:
            self._read[request_id] = unknown

    def end(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)
        self._read.pop(request_id, None)
        self._last.pop(request_id, None)
        self.choice.end(request_id)

    def behind(self, request_id: str) -> int | None:
        return 1 if request_id in self._last else None

    @torch.inference_mode()
    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        names = [name for name in request_ids if name in self._last]
        if not names:
            return [NOTHING] * len(request_ids)
        states = torch.stack([states[place] for states, place, _ in map(self._last.__getitem__, names)])
        tokens = torch.tensor([self._last[name][2] for name in names], device=states.device)
        choose = self.choice.of(names, [self._lengths[name] for name in names])
        drafts = dict(zip(names, self._heads.draft(states, tokens, count, choose).tolist(), strict=True))
        return [Proposal(drafts[name], MODEL_EVIDENCE) if name in drafts else NOTHING for name in request_ids]
