"""Drafts: what a proposer drafted for each row, where the tokens of a step that verifies them really lie, and which of
them were right.

The row knows how far it is; a plan knows how far it can be (schema/step.py). `resolve` turns the one into the other
and writes the drafts behind the row's last token, where the forward pass and the sampler read them. Every position is
then sampled as plain decoding would, and `accept` keeps tokens up to the first that is not the draft: so an answer
depends on no draft. (Where drafts are drawn from distributions, the rejection rule samples their positions instead, and
answers are only distributed as without them.)

A device of its own need not be waited for to launch its next step, unless that step is to verify drafts, which are made
from the tokens of the step before. So while drafts are not worth it, steps follow each other without a wait, tokens
come late, and some rows' proposals are only compared with what was said; once these promise a gain, `wants_tokens` says
that the next step has to wait for the one before. Must not know: how drafts are made.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from quire.base.clock import now
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.step import Grant, Mask, StepPlan
from quire.worker.rows import Rows

if TYPE_CHECKING:
    from quire.drafting.budget import DraftBudget
    from quire.drafting.lengths import DraftLengths
    from quire.drafting.proposer import ModelProposer, Proposal, Proposer
    from quire.sampling.rejection import DrawnDrafts
    from quire.worker.draft_choice import DraftChoice
    from quire.worker.draft_states import DraftStates
    from quire.worker.inputs import StepShape


_COMPARED, _COMPARED_QUIET = 16, 4  # rows of a step whose drafts are only compared; when none were worth it for long
_QUIET_STEPS = 32  # without a draft, after which none is expected
_QUIET_EVERY = 8  # of which steps a drafter is asked whether it may be worth it again
_COPIED_AT_ONCE = 512  # states of a step that rows may share: each keeps all of them alive


@runtime_checkable
class ReadsStates(Protocol):
    """A proposer that drafts from hidden states of the model."""

    def a_state(self) -> Tensor:
        """[1, width] zeros, as `read` takes them."""

    def read(self, request_id: str, start: int, states: Tensor) -> None:
        """A row has computed these [n, width], from this position on, those of wrong drafts included: a copy, which
        may be kept. Tokens that were kept follow with `extend`, if the row sampled."""


@runtime_checkable
class DrawsDrafts(Protocol):
    """A proposer whose drafts may be drawn."""

    choice: DraftChoice


class Drafts:
    def __init__(
        self,
        proposer: Proposer,
        rows: Rows,
        most: int,
        lengths: DraftLengths | None = None,
        drafter: tuple[ModelProposer, DraftBudget] | None = None,
        clock: DraftClock | None = None,
    ) -> None:
        """`most`: drafts per row. `lengths`: how many of them are worth it; None: all. `drafter`: the proposer again,
        if it has to be worth its own cost too."""
        self._clock = clock or DraftClock()
        self._proposer, self._rows, self._most = proposer, rows, most
        self.reader: ReadsStates | None = proposer if isinstance(proposer, ReadsStates) else None
        # of a step's first tokens what the reader wants of the model's inside; None: what the step gives
        self.inner_states: Callable[[int], Tensor] | None = None
        self.states: DraftStates | None = None  # of a model that has some
        # how often each draft of a step is kept, with all before it, whatever was sampled; None: where they are right
        self.invented: Sequence[float] | None = None
        self.lengths, self._drafter = lengths, drafter
        self._choice = proposer.choice if isinstance(proposer, DrawsDrafts) else None
        self.of: dict[str, list[int]] = {}  # by request: what its next step verifies
        self._drawn_from: dict[str, Tensor] = {}  # and what that was drawn from, if it was
        self.lock = threading.Lock()  # of whoever starts a step or looks at the tokens of one
        self.wants_tokens = True  # whether the next step should wait for the tokens of the one before
        self._epochs: dict[str, int] = {}
        self._num_quiet = 0  # steps since one led to drafts
        self._turn = 0  # which rows are compared next
        self._began = 0.0

    def follow(self, plan: StepPlan) -> None:
        """Rows that come and go with this plan."""
        for request_id in plan.left:
            self._proposer.end(request_id)
            self._drop(request_id)
            self._epochs.pop(request_id, None)
            if self.lengths is not None:
                self.lengths.end(request_id)
            if self._drafter is not None:
                self._drafter[1].end(request_id)
        for new in plan.joined:
            self._drop(new.request_id)
            self._epochs[new.request_id] = new.epoch
            self._proposer.begin(new)

    def is_current(self, grant: Grant) -> bool:
        """Whether its request is in the batch, and was not preempted since."""
        return self._epochs.get(grant.request_id) == grant.epoch

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was worth drafting for some time."""
        return self._num_quiet >= _QUIET_STEPS

    def resolve(self, grants: Sequence[Grant]) -> tuple[Grant, ...]:
        """The grants with the starts, counts and numbers of drafts that are true."""
        self._began = self._clock.now()
        if not self.of and self._are_true(grants):
            return tuple(grants)
        written: list[tuple[int, int, int]] = []
        if self.states is None:
            resolved = tuple([self._resolve(grant, written) for grant in grants])
        else:
            resolved = self._resolve_with_states(grants, self.states, written)
        if written:
            self._rows.put(written)
        return resolved

    def _are_true(self, grants: Sequence[Grant]) -> bool:
        """Whether no drafts were planned for, in these grants or those before them."""
        if any(grant.num_drafts for grant in grants):
            return False
        row_of = self._rows.row_of
        rows, starts = [row_of[grant.request_id] for grant in grants], [grant.start for grant in grants]
        return self.states is None and bool((self._rows.lengths[rows] > starts).all())

    def _resolve_with_states(
        self, grants: Sequence[Grant], states: DraftStates, written: list[tuple[int, int, int]]
    ) -> tuple[Grant, ...]:
        """No more drafts than states can be kept for."""
        resolved, left = list[Grant](), states.most
        for grant in grants:
            if len(drafts := self.of.get(grant.request_id, [])) > left:
                self.of[grant.request_id] = drafts[:left]
            resolved.append(self._resolve(grant, written))
            left -= resolved[-1].num_drafts
        row_of = self._rows.row_of
        states.place(
            [(one.request_id, one.num_drafts) for one in sorted(resolved, key=lambda one: row_of[one.request_id])]
        )
        return tuple(resolved)

    def _resolve(self, grant: Grant, written: list[tuple[int, int, int]]) -> Grant:
        """`written`: gets row, position and token of each draft."""
        row = self._rows.row_of[grant.request_id]
        length = int(self._rows.lengths[row])
        start = min(grant.start, length - 1)
        drafts = self.of.get(grant.request_id, [])[: grant.num_drafts]
        if drafts:
            written.extend((row, at, token) for at, token in enumerate(drafts, length))
        elif not grant.num_drafts and start == grant.start:
            return grant
        count = grant.count - grant.num_drafts + len(drafts)
        return Grant(grant.request_id, start, count, grant.samples, grant.epoch, grant.new_blocks, len(drafts))

    def accept(self, plan: StepPlan, sample_grants: list[int], tokens: list[int], mask: Mask | None) -> list[bool]:
        """Which of the sampled tokens are kept: in each row up to the first that is not its draft, and under a grammar
        no more than the mask has rows. The rows' lengths count those. Where acceptance is invented, `tokens` gets the
        drafts."""
        written: list[tuple[int, int, int]] = []
        masked = Counter(mask.index) if mask is not None and mask.index else None
        keeps, at = [False] * len(tokens), 0
        while at < len(tokens):
            index = sample_grants[at]
            grant = plan.grants[index]
            drafts, most = self.of.get(grant.request_id, []), grant.num_drafts + 1
            if masked is not None and index in masked:
                most = min(most, masked[index])
            count, row = 1, self._rows.row_of[grant.request_id]
            first = grant.start + grant.count - grant.num_drafts
            if self.invented is not None:
                count += min(most - 1, _num_invented(self.invented, grant.request_id, first))
                tokens[at : at + count - 1] = drafts[: count - 1]
                written += [(row, first + i, token) for i, token in enumerate(drafts[: count - 1])]
            while self.invented is None and count < most and tokens[at + count - 1] == drafts[count - 1]:
                count += 1
            keeps[at : at + count] = [True] * count
            self._rows.lengths[row] = first + count
            if self.states is not None:
                self.states.settle(grant, count - 1)
            at += grant.num_drafts + 1
        if written:
            self._rows.put(written)
        return keeps

    def read(self, shape: StepShape, hidden: Tensor, reader: ReadsStates) -> None:
        """What a step computed, before it is known what its rows said."""
        num_tokens = int(shape.ends[-1])
        states = hidden[:num_tokens] if self.inner_states is None else self.inner_states(num_tokens)
        is_small = num_tokens <= _COPIED_AT_ONCE
        pieces = (states.clone() if is_small else states).split(shape.counts.tolist())
        request_of = self._rows.request_of
        for row, start, own in zip(shape.rows.tolist(), shape.starts.tolist(), pieces, strict=True):
            reader.read(request_of[row], start, own if is_small else own.clone())

    def advance(self, sampled: dict[str, list[int]], num_tokens: int, *, prompts: bool, late: bool = False) -> None:
        """After a step: what rows said, and what their next step verifies. `prompts`: it computed prompts too. `late`:
        that next step was started before."""
        names, lengths, most = list(sampled), self.lengths, self._most
        learns, seconds = lengths is not None and not prompts and not lengths.costs.is_fixed, 0.0
        if lengths is not None:
            if learns:
                seconds = self._clock.since(self._began)
                lengths.costs.learn(num_tokens, seconds)
            most = min(most, lengths.most(len(names)))
        extend = self._proposer.extend
        for name, token_ids in sampled.items():
            extend(name, token_ids)
        if self.of:
            for name in names:
                self._drop(name)
        if lengths is not None:
            lengths.observe_all(sampled)
        if self._drafter is not None:
            budget = self._drafter[1]
            for name, token_ids in sampled.items():
                budget.observe(name, len(token_ids))
            if learns:
                budget.learn_step(num_tokens, seconds)
        if not names:
            return
        if late and lengths is not None:
            self.wants_tokens = most > 0 and self._promises(names, most, lengths)
        else:
            if most:
                self._draft(names, most)
            self.wants_tokens = lengths is None or bool(self.of)
        self._num_quiet = 0 if self.of or lengths is None else self._num_quiet + 1

    def _draft(self, names: list[str], most: int) -> None:
        if self._drafter is None:
            self._take(names, self._proposer.propose(names, most), len(names), most)
        else:
            self._draft_if_worth(names, most, *self._drafter)

    def _promises(self, names: list[str], most: int, lengths: DraftLengths) -> bool:
        """Whether drafts would be worth a wait for tokens, by those of some rows: they come too late to be verified."""
        if self._drafter is not None:
            self._turn += 1
            if self.is_quiet and self._turn % _QUIET_EVERY:
                return False
            proposer, budget = self._drafter
            return budget.promises(names, proposer.behind, _QUIET_EVERY if self.is_quiet else 1)
        first = self._turn % len(names)
        some = (names[first:] + names[:first])[: _COMPARED_QUIET if self.is_quiet else _COMPARED]
        self._turn += len(some)
        return lengths.promises(some, self._proposer.propose(some, most), len(names))

    def _draft_if_worth(self, names: list[str], most: int, proposer: ModelProposer, budget: DraftBudget) -> None:
        num_rows = len(names)
        names, count = budget.plan(names, proposer.behind)
        if not names:
            return
        behind = [proposer.behind(name) or 0 for name in names]
        began = self._clock.now()
        proposals = proposer.propose(names, min(count, most))
        seconds = self._clock.since(began)
        if max(behind) <= 2:
            budget.learn_drafting(len(names), min(count, most), seconds)
        else:
            budget.learn_reading(sum(behind), len(names), min(count, most), seconds)
        self._take(names, proposals, num_rows, most)

    def _take(self, names: list[str], proposals: Sequence[Proposal], num_rows: int, most: int) -> None:
        lengths = self.lengths
        counts = [most] * len(names) if lengths is None else lengths.choose(names, proposals, num_rows)
        for name, proposal, count in zip(names, proposals, counts, strict=True):
            if count and proposal.token_ids:
                self.of[name] = list(proposal.token_ids[:count])
                if self._choice is not None and (drawn_from := self._choice.drawn_from(name)) is not None:
                    self._drawn_from[name] = drawn_from[:count]

    def _drop(self, request_id: str) -> None:
        self.of.pop(request_id, None)
        self._drawn_from.pop(request_id, None)

    def drawn(self, grants: Sequence[Grant], sample_grants: list[int]) -> DrawnDrafts | None:
        """Those of a step that were drawn."""
        if not self._drawn_from:
            return None
        from quire.sampling.rejection import DrawnDrafts  # lazy

        places, token_ids, shares, at = list[int](), list[int](), list[Tensor](), 0
        while at < len(sample_grants):
            grant = grants[sample_grants[at]]
            drawn_from, count = self._drawn_from.get(grant.request_id), grant.num_drafts
            if drawn_from is not None and count:
                places += range(at, at + count)
                token_ids += self.of[grant.request_id][:count]
                shares.append(drawn_from[:count])
            at += count + 1
        return DrawnDrafts(torch.tensor(places), torch.tensor(token_ids), torch.cat(shares)) if shares else None


class DraftClock:
    """What steps and drafts take. Where the processor computes, its seconds in this process, all threads: unlike those
    of a clock, they are the same on a machine that others use; else the clock's. Ranks that share a model have to draft
    the same, so all go by the sum of theirs, and ask for it at the same time."""

    def __init__(self, ranks: ShardGroup = ALONE, *, of_processor: bool = True) -> None:
        self._ranks, self.now = ranks, time.process_time if of_processor else now

    def since(self, began: float) -> float:
        seconds = self.now() - began
        if self._ranks.size == 1:
            return seconds
        return float(self._ranks.reduce(torch.tensor([seconds], dtype=torch.float64)))


def _num_invented(rates: Sequence[float], request_id: str, position: int) -> int:
    """Drafts that are accepted, by a number from 0 to 1 that all ranks know."""
    share = zlib.crc32(f"{request_id} {position}".encode()) / 2**32
    return sum(share < rate for rate in rates)


def num_sampled(shape_grants: np.ndarray, samples: np.ndarray, grants: Sequence[Grant]) -> np.ndarray:
    """[R] positions of each row of a step that are sampled: one, and one for each draft."""
    drafts = np.array([grants[i].num_drafts for i in shape_grants.tolist()], np.int64)
    counts: np.ndarray = np.where(samples, drafts + 1, 0)
    return counts
