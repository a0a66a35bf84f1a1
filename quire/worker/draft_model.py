"""DraftModel (method draft_model): a smaller model of the same vocabulary says what the text goes on with.

It reads every token that the text has and continues it, all rows together, one token after another; on a device of its
own by steps of a runner, so that each is launched before the one before it has ended. A model that is trained for it
drafts all tokens in one pass, reading a token of its own in the place of those to come (parallel drafting). What it has
not seen (a prompt, tokens that it did not draft) it catches up on when it drafts next. Must not know: what verifies its
drafts, or whether they are worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.drafting.proposer import MODEL_EVIDENCE, NOTHING, Proposal
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker.draft_choice import DraftChoice
from quire.worker.draft_memory import DraftMemory
from quire.worker.runner import ModelRunner

if TYPE_CHECKING:
    from quire.models.build import Model


class DraftModel:
    def __init__(
        self,
        model: Model,
        memory: DraftMemory,
        max_num_batched_tokens: int,
        choice: DraftChoice,
        runner: ModelRunner | None = None,
        unknown_token: int | None = None,
    ) -> None:
        """`runner`: of the model, over the rows of the memory, where a device computes. Its sampler is told of no row,
        so it is greedy. `unknown_token`: stands for tokens to come; None: they are drafted one after another."""
        self._unknown_token = unknown_token
        self._model, self._memory, self._most_tokens = model, memory, max_num_batched_tokens
        self.choice, self._runner = choice, runner

    def begin(self, new: NewRow) -> None:
        self._memory.begin(new)
        self.choice.begin(new)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._memory.extend(request_id, token_ids)

    def end(self, request_id: str) -> None:
        self._memory.end(request_id)
        self.choice.end(request_id)

    def behind(self, request_id: str) -> int | None:
        """Tokens of the text that it has to compute before it drafts; None: nothing can be drafted for it."""
        computed = self._memory.computed.get(request_id)
        return None if computed is None else max(1, self._memory.length(request_id) - computed)

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        memory = self._memory
        names = [
            name for name in request_ids
            if name in memory.computed and memory.reserve(name, memory.length(name) + count - 1)
        ]  # fmt: skip
        drafts = self._draft(memory.in_order(names), count) if names else {}
        return [Proposal(drafts[name], MODEL_EVIDENCE) if name in drafts else NOTHING for name in request_ids]

    @torch.inference_mode()
    def _draft(self, names: list[str], count: int) -> dict[str, list[int]]:
        memory = self._memory
        memory.write(names)
        lengths = [memory.length(name) for name in names]
        for name, length in zip(names, lengths, strict=True):  # its last token is always computed: it says what follows
            memory.computed[name] = min(memory.computed[name], length - 1)
        self._catch_up(names, lengths)
        if self._unknown_token is not None:
            return self._at_once(names, lengths, count, self._unknown_token)
        if self._runner is None:
            drafts = self._compute(names, lengths, count)
        else:
            drafts = self._launch(names, lengths, count, self._runner)
        memory.drafted.update(drafts)
        return drafts

    def _at_once(self, names: list[str], lengths: list[int], count: int, unknown: int) -> dict[str, list[int]]:
        """All in one pass. What it computes behind the text is for tokens that are not there, and is forgotten."""
        memory, choose = self._memory, self.choice.of(names, lengths)
        rows, places = memory.places(names, lengths)
        for i in range(count - 1):
            memory.rows.tokens[rows, places + i] = unknown
        starts = [memory.computed[name] for name in names]
        batch = memory.batch(names, [length + count - 1 for length in lengths])
        ends = np.cumsum([length + count - 1 - start for start, length in zip(starts, lengths, strict=True)])
        index = (torch.from_numpy(ends)[:, None] + torch.arange(-count, 0)).flatten().to(rows.device)
        logits = self._model.narrow_logits(self._model.forward(batch).index_select(0, index))
        of_rows = logits.unflatten(0, (len(names), count))
        chosen = [choose(of_rows[:, i], None) for i in range(count)]
        memory.computed.update(zip(names, lengths, strict=True))
        return dict(zip(names, torch.stack(chosen, 1).tolist(), strict=True))

    def _compute(self, names: list[str], lengths: list[int], count: int) -> dict[str, list[int]]:
        memory, choose, tokens = self._memory, self.choice.of(names, lengths), self._memory.rows.tokens
        rows, places = memory.places(names, lengths)
        chosen: list[Tensor] = []
        for i in range(count):
            batch = memory.batch(names, [length + i for length in lengths])
            hidden = self._model.forward(batch).index_select(0, batch.logit_index)
            chosen.append(choose(self._model.narrow_logits(hidden), None))
            tokens[rows, places + i] = chosen[-1].to(tokens.dtype)
        return dict(zip(names, torch.stack(chosen, 1).tolist(), strict=True))

    def _launch(self, names: list[str], lengths: list[int], count: int, runner: ModelRunner) -> dict[str, list[int]]:
        memory, own = self._memory, self._memory.rows
        for i in range(count):
            ends = [length + i for length in lengths]
            starts = [memory.computed[name] for name in names]
            grants = [
                Grant(name, start, end - start, True, 0) for name, start, end in zip(names, starts, ends, strict=True)
            ]
            runner.forward(StepPlan(step=0, grants=tuple(grants)))
            runner.sample(0, None)
            memory.computed.update(zip(names, ends, strict=True))
        rows, places = memory.places(names, lengths)
        tokens = own.tokens[rows[:, None], places[:, None] + torch.arange(count, device=rows.device)].tolist()
        for name, length in zip(names, lengths, strict=True):  # drafts are no part of a text
            own.lengths[own.row_of[name]] = length
        return dict(zip(names, tokens, strict=True))

    def _catch_up(self, names: list[str], lengths: list[int]) -> None:
        """Compute what is missing in steps of a bounded size, until one more step holds all that is left."""
        computed = self._memory.computed
        while sum(lengths) - sum(computed[name] for name in names) > max(self._most_tokens, len(names)):
            left, part, ends = self._most_tokens, list[str](), list[int]()
            for name, length in zip(names, lengths, strict=True):
                share = min(left, length - 1 - computed[name])
                if share > 0:
                    part.append(name)
                    ends.append(computed[name] + share)
                    left -= share
            self._model.forward(self._memory.batch(part, ends))
