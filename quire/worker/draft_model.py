"""DraftModel (method draft_model): a smaller model of the same vocabulary says what the text goes on with.

It reads every token that the text has and continues it greedily, all rows together, one token after another, by steps
of a runner of its own, so that on a device each is launched before the one before it has ended. What it has not seen (a
prompt, tokens that it did not draft) it catches up on when it drafts next. Must not know: what verifies its drafts, or
whether they are worth it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.drafting.proposer import MODEL_EVIDENCE, NOTHING, Proposal
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker.draft_memory import DraftMemory
from quire.worker.runner import ModelRunner


class DraftModel:
    def __init__(self, runner: ModelRunner, memory: DraftMemory, max_num_batched_tokens: int) -> None:
        """`runner`: of the draft model, over the rows of the memory; its sampler is told of no row, so it is greedy."""
        self._runner, self._memory, self._most_tokens = runner, memory, max_num_batched_tokens

    def begin(self, new: NewRow) -> None:
        self._memory.begin(new)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._memory.extend(request_id, token_ids)

    def end(self, request_id: str) -> None:
        self._memory.end(request_id)

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
        lengths = [memory.length(name) for name in names]
        for name, length in zip(names, lengths, strict=True):  # its last token is always computed: it says what follows
            memory.computed[name] = min(memory.computed[name], length - 1)
        self._catch_up(names, lengths)
        for i in range(count):
            self._step(names, [length + i for length in lengths], samples=True)
        rows, places = memory.places(names, lengths)
        tokens = memory.rows.tokens[rows[:, None], places[:, None] + torch.arange(count, device=rows.device)].tolist()
        drafts: dict[str, list[int]] = dict(zip(names, tokens, strict=True))
        memory.drafted.update(drafts)
        for name, length in zip(names, lengths, strict=True):  # drafts are no part of a text
            memory.rows.lengths[memory.rows.row_of[name]] = length
        return drafts

    def _step(self, names: Sequence[str], ends: Sequence[int], *, samples: bool) -> None:
        """Compute every text up to its end; the token that follows it is put there."""
        computed = self._memory.computed
        grants = [
            Grant(name, computed[name], end - computed[name], samples, 0)
            for name, end in zip(names, ends, strict=True)
        ]  # fmt: skip
        self._runner.forward(StepPlan(step=0, grants=tuple(grants)))
        self._runner.sample(0, None)
        computed.update(zip(names, ends, strict=True))

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
            self._step(part, ends, samples=False)
