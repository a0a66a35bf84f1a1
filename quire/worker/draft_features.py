"""FeatureProposer (eagle, eagle3, mtp): a drafter with keys and values of its own that reads a model's hidden states.

What the model computes for a row is kept until the drafter reads it, which it does when it drafts next: a drafter that
does not pay costs no more than the copies. A row's text begins, for the drafter, at the first position whose state was
computed here: what was found in the prefix cache has none. Together rows keep a bounded number of states; beyond it the
row with the most forgets its older half, and its text begins later. Whatever is missing, drafts are worse, never wrong.

    text       t0  t1  t2  t3  t4  t5          base: 2, found in the prefix cache up to there
    states             h2  h3  h4              of the last token there is none yet
    pairs             (h2  (h3  (h4            position 0, 1, 2 of the drafter's own text (worker/draft_memory.py)
                       t3)  t4)  t5)

Must not know: how a drafter computes, what verifies its drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.drafting.proposer import MODEL_EVIDENCE, NOTHING, Proposal
from quire.schema.step import NewRow
from quire.worker.draft_choice import DraftChoice
from quire.worker.draft_memory import DraftMemory

if TYPE_CHECKING:
    from quire.models.draft_layers import FeatureDrafter


@dataclass
class _PairedText:
    """A row: its tokens, and the states that the drafter has not read, which lie one after another."""

    tokens: list[int]
    base: int = 0  # position of the first pair
    first: int = 0  # position of the first state
    read_from: int = 0  # where the latest states that were read begin
    states: list[Tensor] = field(default_factory=list)  # pieces [n, width]
    count: int = 0  # of states

    @property
    def unread(self) -> int:
        """States that the drafter has to read before it drafts; 0: some are missing, or there is none."""
        number = len(self.tokens) - 1 - self.first
        return number if 0 < number <= self.count else 0

    def cut_back(self, end: int) -> None:
        """Keep no state at or after this position."""
        excess = min(self.count, self.first + self.count - end)  # of which none may be left: rows keep a bounded number
        if excess <= 0:
            return
        self.count -= excess
        while excess > 0:
            piece = self.states.pop()
            if len(piece) > excess:
                self.states.append(piece[: len(piece) - excess])
            excess -= len(piece)

    def append(self, piece: Tensor) -> None:
        self.states.append(piece)
        self.count += len(piece)

    def restart(self, start: int) -> None:
        """It begins here, without a state."""
        self.base = self.first = start
        self.states, self.count = [], 0

    def take(self, count: int) -> list[Tensor]:
        """The first so many states, which are then not kept any more."""
        taken, at = list[Tensor](), 0
        self.first += count
        self.count -= count
        while count:
            piece = self.states[at]
            taken.append(piece[:count])
            count -= len(taken[-1])
            if len(taken[-1]) == len(piece):
                at += 1
            else:
                self.states[at] = piece[len(taken[-1]) :]
        del self.states[:at]
        return taken


class FeatureProposer:
    def __init__(self, model: FeatureDrafter, memory: DraftMemory, most_tokens: int, choice: DraftChoice) -> None:
        """`most_tokens`: of one of its passes, and states that rows keep."""
        self.choice = choice
        self._model, self._memory, self._most_tokens = model, memory, most_tokens
        self._texts: dict[str, _PairedText] = {}
        self._since_bound = 0  # states read since rows were last held to their bound

    def begin(self, new: NewRow) -> None:
        self.end(new.request_id)
        if len(new.token_ids) < self._memory.max_len:
            self._texts[new.request_id] = _PairedText(list(new.token_ids))
            self.choice.begin(new)

    def end(self, request_id: str) -> None:
        if self._texts.pop(request_id, None) is not None:
            self._memory.end(request_id)
            self.choice.end(request_id)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        text = self._texts.get(request_id)
        if text is None:
            return
        is_latest = text.read_from < len(text.tokens)  # else a later step was read, which begins where this one ends
        text.tokens += token_ids
        if is_latest:
            text.cut_back(len(text.tokens) - 1)
        if len(text.tokens) >= self._memory.max_len:
            self.end(request_id)

    def a_state(self) -> Tensor:
        storage = self._model.storage
        return torch.zeros((1, self._model.state_width), dtype=storage.dtype, device=storage.device)

    def read(self, request_id: str, start: int, states: Tensor) -> None:
        """The row has computed these, from this position on; what follows a wrong draft is cut away by `extend`."""
        text = self._texts.get(request_id)
        if text is None:
            return
        if not text.first <= start <= text.first + text.count:
            self._restart(request_id, text, start)
        text.cut_back(start)
        text.read_from = start
        text.append(states)
        self._since_bound += len(states)
        if self._since_bound >= self._most_tokens:
            self._since_bound = 0
            self._bound()

    def _bound(self) -> None:
        """Rows keep no more than `most_tokens` states. (Between two calls as many again may come.)"""
        while sum(text.count for text in self._texts.values()) > self._most_tokens:
            name, text = max(self._texts.items(), key=lambda item: item[1].count)
            states, half = torch.cat(text.states), -(-text.count // 2)
            self._restart(name, text, text.first + half)
            if half < len(states):
                text.append(states[half:].clone())

    def _restart(self, request_id: str, text: _PairedText, start: int) -> None:
        """Its text begins here: what the drafter computed before cannot be continued."""
        self._memory.end(request_id)
        text.restart(start)

    def behind(self, request_id: str) -> int | None:
        text = self._texts.get(request_id)
        return None if text is None else text.unread or None

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        names = [name for name in request_ids if self._prepare(name, count)]
        drafts = self._draft(self._memory.in_order(names), count) if names else {}
        return [Proposal(drafts[name], MODEL_EVIDENCE) if name in drafts else NOTHING for name in request_ids]

    def _prepare(self, name: str, count: int) -> bool:
        """Let the memory know the text. False: nothing can be drafted for it."""
        text, memory = self._texts.get(name), self._memory
        if text is None or not text.unread:
            return False
        if name not in memory.computed:
            text.base = text.first
            memory.open(name, text.tokens[text.base + 1 :])
        else:
            memory.extend(name, text.tokens[text.base + 1 + memory.length(name) :])
        return memory.reserve(name, memory.length(name) + count - 1)

    @torch.inference_mode()
    def _draft(self, names: list[str], count: int) -> dict[str, list[int]]:
        memory, tokens, model = self._memory, self._memory.rows.tokens, self._model
        memory.write(names)
        lengths = [memory.length(name) for name in names]
        rows, places = memory.places(names, lengths)
        self._catch_up(names, lengths)
        batch = memory.batch(names, lengths)
        states = model.forward(batch, self._unread(names)).index_select(0, batch.logit_index)
        choose = self.choice.of(names, [len(self._texts[name].tokens) for name in names])
        chosen = [choose(model.logits(states), model.map)]
        for i in range(1, count):
            tokens[rows, places + i - 1] = chosen[-1].to(tokens.dtype)
            states = model.forward(memory.batch(names, [length + i for length in lengths]), states)
            chosen.append(choose(model.logits(states), model.map))
        for name, length in zip(names, lengths, strict=True):  # the rest was computed from its own states
            memory.computed[name] = length
        return dict(zip(names, torch.stack(chosen, 1).tolist(), strict=True))

    def _unread(self, names: list[str], counts: Sequence[int] | None = None) -> Tensor:
        """States of these rows, all or so many of each, as the drafter takes them."""
        texts = [self._texts[name] for name in names]
        counts = counts or [text.unread for text in texts]
        pieces = [piece for text, count in zip(texts, counts, strict=True) for piece in text.take(count)]
        return self._model.fuse(torch.cat(pieces))

    def _catch_up(self, names: list[str], lengths: list[int]) -> None:
        """Read what is missing in passes of a bounded size, until one more holds all that is left."""
        computed = self._memory.computed
        while sum(lengths) - sum(computed[name] for name in names) > max(self._most_tokens, len(names)):
            left, part, shares = self._most_tokens, list[str](), list[int]()
            for name, length in zip(names, lengths, strict=True):
                share = min(left, length - 1 - computed[name])
                if share > 0:
                    part.append(name)
                    shares.append(share)
                    left -= share
            batch = self._memory.batch(part, [computed[name] + share for name, share in zip(part, shares, strict=True)])
            self._model.forward(batch, self._unread(part, shares))
