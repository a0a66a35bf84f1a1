"""ModelRunner: one step on one device. forward(plan): rows, Batch, model; sample(mask): logits, tokens, results.

In: StepPlan, Mask. Out: a Pending whose result() is the StepResult. Several steps may be started before the first
result is read: each writes its tokens into the rows, where the next one finds them.
A request whose logits are not numbers, whose parameters cannot be served, or whose processor failed is named in
StepResult.failed; the others go on. Must not know: why this plan, how a model is built or loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.base.clock import now
from quire.ops.sample import unpack_mask
from quire.sampling.logprobs import Picked, join, pick, values_of
from quire.sampling.sampler import Sampled, Sampler
from quire.schema.step import LogprobRows, Mask, StepPlan, StepResult
from quire.worker.inputs import StepInputs, StepShape, build
from quire.worker.rows import Rows

if TYPE_CHECKING:
    from quire.models.build import Model

_LOGIT_BYTES = 1 << 26  # largest temporary for the logits of prompt positions


@dataclass
class Pending:
    """One step's results, still where they were computed."""

    plan: StepPlan
    sample_grants: list[int] = field(default_factory=list)
    sampled: Sampled | None = None
    prompt: dict[str, list[Picked]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def result(self) -> StepResult:
        out: list[list[int]] = [[] for _ in self.plan.grants]
        failed = dict(self.failed)
        logprobs: list[LogprobRows | None] | None = None
        if self.sampled is not None:
            chosen = zip(self.sample_grants, self.sampled.token_ids.tolist(), self.sampled.scores.tolist(), strict=True)
            for index, token, score in chosen:
                name = self.plan.grants[index].request_id
                if not score > -math.inf:
                    failed.setdefault(name, _why(score))
                if name not in failed:
                    out[index] = [token]
            logprobs = self._logprobs(failed)
        return StepResult(
            step=self.plan.step,
            sampled=out,
            logprobs=logprobs,
            prompt_logprobs={name: join([p.rows() for p in pieces]) for name, pieces in self.prompt.items()},
            forward_seconds=self.seconds,
            failed=failed,
        )

    def _logprobs(self, failed: dict[str, str]) -> list[LogprobRows | None] | None:
        if self.sampled is None or not self.sampled.logprobs:
            return None
        out: list[LogprobRows | None] = [None] * len(self.plan.grants)
        for ask, picked in self.sampled.logprobs:
            rows = picked.rows()
            for i, place in enumerate(ask.places):
                index = self.sample_grants[place]
                if self.plan.grants[index].request_id not in failed:
                    out[index] = LogprobRows([rows.token_ids[i]], [rows.logprobs[i]], [rows.ranks[i]])
        return out


@dataclass
class _Flight:
    """A step between forward and sample."""

    plan: StepPlan
    inputs: StepInputs
    hidden: Tensor  # [T, dim]
    seconds: float  # what forward took; the caller may do other things before it samples


class ModelRunner:
    def __init__(self, model: Model, rows: Rows, sampler: Sampler, backend: AttentionBackend) -> None:
        self.model, self.rows, self.sampler, self.backend = model, rows, sampler, backend
        self._flight: _Flight | None = None
        self._lost: dict[str, str] = {}  # live requests that already failed, and why

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        began = now()
        self._flight = None
        changes = self.rows.apply(plan)
        for name in plan.left:
            self._lost.pop(name, None)
        refused = self.sampler.update(changes.removed, changes.added, changes.moved, self.rows.num_rows)
        self._lose(refused)
        if plan.grants:
            inputs = build(plan.grants, self.rows, self.backend)
            hidden = self.model.forward(inputs.batch)
            self._flight = _Flight(plan, inputs, hidden, now() - began)

    @torch.inference_mode()
    def sample(self, mask: Mask | None) -> Pending:
        began = now()
        flight, self._flight = self._flight, None
        if flight is None:
            raise RuntimeError("sample() without a forward() that granted tokens")
        inputs, hidden = flight.inputs, flight.hidden
        pending = Pending(flight.plan, inputs.sample_grants, prompt=self._prompt_logprobs(inputs.shape, hidden))
        if inputs.sample_grants:
            index = inputs.batch.logit_index
            logits = self.model.logits(hidden if len(index) == len(hidden) else hidden[index])
            pending.sampled = self.sampler(
                logits,
                inputs.sample_rows,
                inputs.sample_positions,
                num_rows=self.rows.num_rows,
                mask=_mask_of(mask, inputs.sample_grants, logits) if mask is not None else None,
            )
            self._lose(pending.sampled.failed)
        if self._lost:
            granted = {grant.request_id for grant in flight.plan.grants}
            pending.failed = {name: why for name, why in self._lost.items() if name in granted}
        pending.seconds = flight.seconds + now() - began
        return pending

    def _prompt_logprobs(self, shape: StepShape, hidden: Tensor) -> dict[str, list[Picked]]:
        """The hidden state of position i tells of the token at i + 1: so a chunk answers for the positions one after
        its own, up to the last of the prompt, and the first position of all has no answer."""
        asked, lengths = self.sampler.rows.prompt_logprobs, self.sampler.rows.num_prompt[shape.rows]
        found: dict[str, list[Picked]] = {}
        for i in np.flatnonzero(shape.starts < lengths - 1).tolist():
            row, k = int(shape.rows[i]), asked[shape.rows[i]]
            if k is None:
                continue
            start, first = int(shape.starts[i]), int(shape.ends[i] - shape.counts[i])
            count = min(int(shape.counts[i]), int(lengths[i]) - 1 - start)
            given = self.rows.tokens[row, start + 1 : start + 1 + count].long()
            found[self.rows.request_of[row]] = self._pick(hidden[first : first + count], given, k)
        return found

    def _pick(self, hidden: Tensor, given: Tensor, k: int) -> list[Picked]:
        """In pieces, because the logits of a long prompt would be many times the size of the model."""
        at_once = max(1, _LOGIT_BYTES // (4 * self.sampler.rows.vocab_size))
        pieces = []
        for at in range(0, len(given), at_once):
            values = values_of(self.model.logits(hidden[at : at + at_once]), self.sampler.mode)
            pieces.append(pick(values, given[at : at + at_once], k))
        return pieces

    def _lose(self, failed: dict[int, str]) -> None:
        self._lost |= {self.rows.request_of[row]: why for row, why in failed.items()}


def _mask_of(mask: Mask, sample_grants: list[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Grammar rows for the places that sample in this step; a row for a grant that does not sample is dropped."""
    place_of = {grant: place for place, grant in enumerate(sample_grants)}
    used = [(i, place_of[grant]) for i, grant in enumerate(mask.index) if grant in place_of]
    words = torch.frombuffer(bytearray(mask.rows), dtype=torch.int32).view(len(mask.index), mask.words)
    words = words[[i for i, _ in used]].to(logits.device)
    places = torch.tensor([place for _, place in used], dtype=torch.int64, device=logits.device)
    return places, unpack_mask(words, logits.shape[1])


def _why(score: float) -> str:
    if math.isnan(score):
        return "the model produced logits that are not numbers (NaN), so no token could be chosen"
    return "no token could be chosen: masks, allowed_token_ids, bad_words or logits processors together forbid all"
