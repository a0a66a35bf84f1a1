"""ModelRunner: one step on one device. forward(plan): rows, Batch, model; sample(step, mask): logits, tokens,
results.

In: StepPlan, Mask. Out: a PendingStep whose result() is the StepResult. Several steps may be started before the first
result is read: each writes its tokens into the rows, where the next one finds them.
On a device of its own (device_inputs.py) nothing here waits for it but drafts: results are copied to pinned memory
behind an event, and a step whose rows need only the plain choice is launched whole by forward(), as a graph where one
fits.
A request whose logits are not numbers, whose parameters cannot be served, or whose processor failed is named in
StepResult.failed; the others go on.
Of a pipeline every stage has a runner: the model gets its input and gives its output through a Pipe, and only the last
stage samples; the others are told what was sampled by plans. Must not know: why this plan, how a model is built or
loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.base import env
from quire.base.clock import now
from quire.layers.batch import Batch, ScaledCache
from quire.ops.copy import downloader, upload
from quire.sampling.logprobs import LogprobRequest, Picked, join, pick, values_of
from quire.sampling.sampler import FILTERS, Sampler
from quire.schema.errors import NotBuiltError
from quire.schema.kv import KVKind
from quire.schema.step import FORBIDS_ALL, LogprobRows, Mask, StepPlan, StepResult
from quire.worker.device_inputs import DeviceInputs, SamplingIndices
from quire.worker.drafts import Drafts, num_sampled
from quire.worker.graphs import DecodeGraphs
from quire.worker.inputs import StepShape, build, refuse_unbuilt, sampled_of, shape_of
from quire.worker.kv_memory import KVMemory
from quire.worker.mixed_graphs import MixedGraphs
from quire.worker.moves import BlockCopies
from quire.worker.rows import Rows

if TYPE_CHECKING:
    from quire.models.build import Model
    from quire.quant.shard import ExpertSpread
    from quire.worker.adapters import WorkerAdapters
    from quire.worker.balance import ExpertBalance
    from quire.worker.media import WorkerMedia
    from quire.worker.pipe import Pipe

FEW_ROWS = 64  # up to which decodes have kernels of their own
_LOGIT_BYTES = 1 << 26  # largest temporary for the logits of prompt positions


@dataclass
class PendingStep:
    """One step's results on their way to the host; complete once `ready` has passed (None: at once)."""

    plan: StepPlan
    sample_grants: list[int] = field(default_factory=list)
    token_ids: Tensor | None = None  # [S]; None: nothing sampled
    scores: Tensor | None = None  # [S]: NaN or -inf means that nothing could be chosen
    logprobs: list[tuple[LogprobRequest, Picked]] = field(default_factory=list)
    prompt: dict[str, list[Picked]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    ready: torch.cuda.Event | None = None
    keeps: list[bool] | None = None  # [S]: where drafts were verified, the tokens up to the first that is no draft
    drafts: dict[str, list[int]] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)
    no_drafts: bool = False
    follow: Callable[[], None] | None = (
        None  # what its tokens lead to, where rows draft: to be called when they are there
    )
    is_followed: bool = False
    is_passed: bool = False  # a later step was started before its tokens were looked at

    def settle(self) -> None:
        """Wait for the tokens, and do what follows from them."""
        if self.ready is not None:
            self.ready.synchronize()
        if self.follow is not None:
            self.follow()

    def result(self) -> StepResult:
        self.settle()
        out: list[list[int]] = [[] for _ in self.plan.grants]
        failed = dict(self.failed)
        if self.token_ids is not None and self.scores is not None:
            tokens, scores = self.token_ids.tolist(), self.scores.numpy()
            keeps = self.keeps or [True] * len(tokens)
            if not (scores > -math.inf).all():
                for index, score, keep in zip(self.sample_grants, scores.tolist(), keeps, strict=True):
                    if keep and not score > -math.inf:
                        failed.setdefault(self.plan.grants[index].request_id, _why(score))
            for index, token, keep in zip(self.sample_grants, tokens, keeps, strict=True):
                if keep and (not failed or self.plan.grants[index].request_id not in failed):
                    out[index].append(token)
        return StepResult(
            step=self.plan.step,
            sampled=out,
            logprobs=self._logprobs(failed),
            prompt_logprobs={name: join([p.rows() for p in pieces]) for name, pieces in self.prompt.items()},
            drafts=self.drafts,
            verified=self.verified,
            no_drafts=self.no_drafts,
            forward_seconds=self.seconds,
            failed=failed,
        )

    def _logprobs(self, failed: dict[str, str]) -> list[LogprobRows | None] | None:
        if not self.logprobs:
            return None
        out: list[LogprobRows | None] = [None] * len(self.plan.grants)
        for ask, picked in self.logprobs:
            rows = picked.rows()
            for i, place in enumerate(ask.places):
                index = self.sample_grants[place]
                if (self.keeps and not self.keeps[place]) or self.plan.grants[index].request_id in failed:
                    continue
                own = out[index] = out[index] or LogprobRows([], [], [])  # several tokens of a row: in their order
                own.token_ids.append(rows.token_ids[i])
                own.logprobs.append(rows.logprobs[i])
                own.ranks.append(rows.ranks[i])
        return out


@dataclass
class _Flight:
    """A step between forward and sample. `pending` is set when forward() already chose the tokens."""

    plan: StepPlan
    shape: StepShape
    sample_rows: np.ndarray
    sample_positions: np.ndarray
    sample_grants: list[int]
    hidden: Tensor | None = None  # [T, dim]; None: a graph kept it
    logits: Tensor | None = None  # [S, V], of a graph
    logit_index: Tensor | None = None
    adapter_index: Tensor | None = None  # [T], as of the Batch; None: no row of the step has an adapter
    pending: PendingStep | None = None
    seconds: float = 0.0  # what forward took; the caller may do other things before it samples


class ModelRunner:
    def __init__(
        self,
        model: Model,
        rows: Rows,
        sampler: Sampler,
        backend: AttentionBackend,
        *,
        kv: KVMemory,
        inputs: DeviceInputs | None = None,  # None: a CPU worker
        graphs: DecodeGraphs | None = None,
        adapter_graphs: DecodeGraphs | None = None,  # of steps in which a row has an adapter
        mixed: MixedGraphs | None = None,
        scaled: Mapping[str, ScaledCache] | None = None,  # caches with scales per layer, by the layer's name
        adapters: WorkerAdapters | None = None,  # None: no plan may place one
        pipe: Pipe | None = None,  # None: all layers are here
        media: WorkerMedia | None = None,  # None: no request may have any
        spread: ExpertSpread | None = None,  # None: no experts are in other engines
    ) -> None:
        self.model, self.rows, self.sampler, self.backend = model, rows, sampler, backend
        self.kv, self.inputs, self.graphs, self.mixed = kv, inputs, graphs, mixed
        self.adapter_graphs = adapter_graphs
        self.copies, self.adapters, self.media = BlockCopies(kv), adapters, media
        self._download, self._spread = downloader(rows.tokens.device), spread
        self.scaled = scaled or {}
        self.drafts: Drafts | None = None
        self.pipe, self.samples = pipe, pipe is None or pipe.is_last
        self.balance: ExpertBalance | None = None  # None: experts stay where they are
        self._flight: _Flight | None = None
        self._latest: PendingStep | None = None  # where rows draft: the step before
        self._lost: dict[str, str] = {}  # live requests that already failed, and why

    def calibrate_next(self) -> None:
        """Let the next step measure the scales of the KV cache."""
        for cache in self.scaled.values():
            cache.uncalibrated = True

    def forward(self, plan: StepPlan) -> None:
        if self.drafts is None:
            self._forward(plan)
            return
        before, self._latest = self._latest, None
        if before is not None and (before.verified or self.drafts.wants_tokens):
            before.settle()
        with self.drafts.lock:  # results may be read by another thread
            if before is not None and not before.is_followed:
                before.is_passed = True
            self._forward(plan)

    def _forward(self, plan: StepPlan) -> None:
        began = now()
        self._flight = None
        refuse_unbuilt(plan, drafts=self.drafts is not None, media=self.media is not None)
        moves = plan.moves
        if moves:
            self.copies.check(moves)
            self.copies.run(moves, after=False)
        if plan.adapters:
            if self.adapters is None:
                raise NotBuiltError("a plan places adapters, and the worker was made without slots for them")
            self.adapters.place(plan.adapters)
        if plan.sampled and not self.samples:
            self.rows.write(plan.sampled)
        changes = self.rows.apply(plan)
        if self.drafts is not None and (plan.left or plan.joined):
            self.drafts.follow(plan)
        for name in plan.left:
            self._lost.pop(name, None)
        if self.media is not None and (plan.joined or plan.encode or plan.free_encoded or self.media.failed):
            self._lost |= self.media.follow(plan)
        refused = self.sampler.update(changes.removed, changes.added, changes.moved, self.rows.num_rows)
        self._lose(refused)
        if plan.grants:
            grants = plan.grants
            if self.drafts is not None:
                grants = self.drafts.resolve(grants)
                plan = msgspec.structs.replace(plan, grants=grants)
            shape = shape_of(grants, self.rows)
            if self.drafts is not None and any(grant.num_drafts for grant in grants):
                shape = replace(shape, num_sampled=num_sampled(shape.grants, shape.samples, grants))
            flight = self._start(plan, shape) if self.inputs is None else self._launch(plan, shape, self.inputs)
            if moves:
                self.copies.run(moves, after=True)
            if self.balance is not None:
                self.balance.end_step()
            flight.seconds = now() - began
            self._flight = flight

    @torch.inference_mode()
    def _start(self, plan: StepPlan, shape: StepShape) -> _Flight:
        batch = build(shape, self.rows, self.backend)
        flight = _Flight(plan, shape, *sampled_of(shape, self.rows))
        flight.hidden, flight.logit_index = self._compute(batch), batch.logit_index
        flight.adapter_index = batch.adapter_index
        return flight

    def _compute(self, batch: Batch) -> Tensor:
        if self._spread is not None:
            return self._compute_beside(self._spread, batch)
        return self._compute_here(batch)

    def _compute_here(self, batch: Batch) -> Tensor:
        return self.model.forward(batch) if self.pipe is None else self.pipe.run(self.model.forward, batch)

    def _compute_beside(self, spread: ExpertSpread, batch: Batch) -> Tensor:
        """Together with the steps of other engines."""
        try:
            spread.begin(batch.num_tokens)
            return self._compute_here(batch)
        finally:
            spread.end()

    def _launch(self, plan: StepPlan, shape: StepShape, inputs: DeviceInputs) -> _Flight:
        """The whole step, choice of tokens included, where the rows' parameters allow it."""
        flight = _Flight(plan, shape, *sampled_of(shape, self.rows))
        need = self.sampler.plain_needs(flight.sample_rows) if self.samples else None
        if need is not None:
            self.sampler.plain.refresh()
        measures = any(cache.uncalibrated for cache in self.scaled.values())  # which no graph can
        graphs = None if measures else self._graphs_for(shape)
        bucket = None if graphs is None else graphs.bucket_of(shape)
        if bucket is not None and graphs is not None:
            bucket = graphs.prepare(bucket)
        if bucket is not None and graphs is not None:
            inputs.send_decode(shape, bucket)
            replayed = graphs.replay(bucket)
            flight.logits = replayed.logits[: len(shape.rows)]
            if self.drafts is not None and self.drafts.reader is not None:
                flight.hidden = replayed.hidden[: len(shape.rows)]
            if need is not None:
                flight.pending = self._take(flight, replayed.result)
        elif self.mixed is not None and not measures and (step := self.mixed.send(shape)) is not None:
            self._choose(flight, self.mixed.replay(step.bucket), step.sampled, need)
        else:
            self._run(flight, inputs, need)
        return flight

    def _graphs_for(self, shape: StepShape) -> DecodeGraphs | None:
        """Those that may hold such a step, if it is one of decodes."""
        if shape.adapters is None:
            return self.graphs
        fits = self.adapters is not None and self.adapters.in_graphs(shape.adapters)
        return self.adapter_graphs if fits else None

    @torch.inference_mode()
    def _run(self, flight: _Flight, inputs: DeviceInputs, need: int | None) -> None:
        """A step without a graph."""
        step = inputs.build(flight.shape, self.backend)
        flight.adapter_index = step.batch.adapter_index
        self._choose(flight, self._compute(self.narrowed(step.batch)), step.sampled, need)

    def narrowed(self, batch: Batch) -> Batch:
        """Where that pays and is enough, for the states of sampled tokens alone."""
        return replace(batch, only_sampled=True) if self._needs_few_states(batch) else batch

    def _needs_few_states(self, batch: Batch) -> bool:
        """Whether nobody reads the final states of tokens that are not sampled, and leaving them out pays. Up to a few
        rows other kernels are used, which steps with prompts do not have to find compiled. In batch-invariant mode the
        number of rows in a layer is not to depend on neighbours."""
        if not FEW_ROWS < len(batch.logit_index) <= batch.num_tokens // 2 or env.BATCH_INVARIANT.get():
            return False
        if self.pipe is not None or self._spread is not None or self.drafts is not None:
            return False
        counts = self.sampler.rows.prompt_logprobs[: self.rows.num_rows]
        return batch.adapter_index is None and all(k is None for k in counts)

    @torch.inference_mode()
    def _choose(self, flight: _Flight, hidden: Tensor, sampled: SamplingIndices, need: int | None) -> None:
        """Tokens by the plain choice, where that is all their rows need."""
        flight.hidden, flight.logit_index = hidden, sampled.tokens
        if need is not None and flight.sample_grants:
            logits = self._logits(flight)
            out = torch.empty((2, len(flight.sample_grants)), dtype=torch.int32, device=logits.device)
            filters = bool(need & FILTERS)
            self.sampler.plain(logits, sampled.rows, sampled.positions, out, filters=filters)
            flight.pending = self._take(flight, out)

    def _take(self, flight: _Flight, result: Tensor) -> PendingStep:
        """result int32 [2, at least S]: tokens, and the bits of their scores."""
        host = self._download(result)[:, : len(flight.sample_grants)]
        return PendingStep(flight.plan, flight.sample_grants, host[0], host[1].view(torch.float32))

    def sample(self, step: int, mask: Mask | None) -> PendingStep:
        """Choose the tokens of the step that was started last, which the caller names."""
        began = now()
        flight, self._flight = self._flight, None
        if flight is None:
            raise RuntimeError(f"sample() of step {step} without a forward() that granted tokens")
        if flight.plan.step != step:
            raise RuntimeError(f"step {step} is to be sampled, and step {flight.plan.step} was started last")
        if not self.samples:
            return PendingStep(flight.plan, seconds=flight.seconds)
        if flight.pending is not None and mask is not None and mask.index:
            raise RuntimeError("a mask came for a step none of whose requests asked for structured outputs")
        pending = flight.pending or PendingStep(flight.plan, flight.sample_grants)
        counts = self.sampler.rows.prompt_logprobs[: self.rows.num_rows]
        if flight.hidden is not None and any(k is not None for k in counts):
            pending.prompt = self._prompt_logprobs(flight.shape, flight.hidden, flight.adapter_index)
        if flight.sample_grants and flight.pending is None:
            self._sample_all(flight, mask, pending)
        if self._lost:
            granted = {grant.request_id for grant in flight.plan.grants}
            pending.failed = {name: why for name, why in self._lost.items() if name in granted}
        if self.rows.tokens.device.type == "cuda":
            pending.ready = torch.cuda.Event()
            pending.ready.record()
        pending.seconds = flight.seconds + now() - began
        if self.drafts is not None:
            if self.drafts.reader is not None and flight.hidden is not None:
                with self.drafts.lock:
                    self.drafts.read(flight.shape, flight.hidden, self.drafts.reader)
            if pending.token_ids is not None:
                self._draft_after(flight, mask, pending, self.drafts)
        return pending

    @torch.inference_mode()
    def _sample_all(self, flight: _Flight, mask: Mask | None, pending: PendingStep) -> None:
        """Through the whole pipeline."""
        logits = flight.logits
        if logits is None:
            logits = self._logits(flight)
        drawn = None
        if self.drafts is not None and flight.shape.num_sampled is not None:
            drawn = self.drafts.drawn(flight.plan.grants, flight.sample_grants)
        if mask is not None or drawn is not None or not self.sampler.takes_any_dtype(flight.sample_rows):
            logits = logits.float()
        sampled = self.sampler(
            logits,
            flight.sample_rows,
            flight.sample_positions,
            num_rows=self.rows.num_rows,
            mask=_mask_of(mask, flight.sample_grants, logits) if mask is not None else None,
            drafts=drawn,
        )
        pending.token_ids, pending.scores = self._download(sampled.token_ids), self._download(sampled.scores)
        pending.logprobs = [(ask, picked.on_host()) for ask, picked in sampled.logprobs]
        self._lose(sampled.failed)

    def draft_with(self, drafts: Drafts) -> None:
        """From now on, grants may verify what this proposes."""
        if self.sampler.custom is not None:
            raise NotBuiltError("drafts are not verified beside custom logits processors")
        if any(table.group.kind is KVKind.STATE for table in self.rows.tables):
            if not self.kv.num_spare:
                raise NotBuiltError("the model has recurrent states, and there are no blocks for those after drafts")
            from quire.worker.draft_states import DraftStates  # lazy

            drafts.states = DraftStates(self.rows, self.kv)
        self.drafts, self._latest = drafts, None

    def _draft_after(self, flight: _Flight, mask: Mask | None, pending: PendingStep, drafts: Drafts) -> None:
        """Let tokens be verified and drafted from once they are there: on a device of its own when the next step is
        started, if that has to know them, or when the result is read."""
        if flight.shape.num_sampled is not None:
            grants = flight.plan.grants
            pending.verified = {grant.request_id: grant.num_drafts for grant in grants if grant.num_drafts}
        pending.follow = partial(self._follow, flight, mask, pending, drafts)
        if self.inputs is None:
            pending.settle()
        else:
            self._latest = pending

    def _follow(self, flight: _Flight, mask: Mask | None, pending: PendingStep, drafts: Drafts) -> None:
        """Every position of a draft was sampled with what plain decoding would use, so tokens up to the first that
        differs from its draft are plain decoding's."""
        assert pending.token_ids is not None
        with drafts.lock:
            if pending.is_followed:
                return
            tokens, grants = pending.token_ids.tolist(), [flight.plan.grants[i] for i in flight.sample_grants]
            sampled: dict[str, list[int]] = {}
            if not pending.verified:
                sampled = {
                    grant.request_id: [token]
                    for grant, token in zip(grants, tokens, strict=True)
                    if drafts.is_current(grant)
                }
            else:
                pending.keeps = drafts.accept(flight.plan, flight.sample_grants, tokens, mask)
                if drafts.invented is not None:
                    pending.token_ids = torch.tensor(tokens, dtype=pending.token_ids.dtype)
                for grant, token, keep in zip(grants, tokens, pending.keeps, strict=True):
                    if keep and drafts.is_current(grant):
                        sampled.setdefault(grant.request_id, []).append(token)
            num_tokens = int(flight.shape.ends[-1])
            drafts.advance(sampled, num_tokens, prompts=num_tokens > len(tokens), late=pending.is_passed)
            if drafts.of:
                pending.drafts = {name: drafts.of[name] for name in sampled if name in drafts.of}
            pending.no_drafts = drafts.is_quiet
            pending.is_followed = True  # not where one of these failed: whoever looks next fails, too

    def _logits(self, flight: _Flight) -> Tensor:
        """[S, V] of the positions that sample."""
        hidden, index, slots = flight.hidden, flight.logit_index, flight.adapter_index
        assert hidden is not None and index is not None
        if len(index) < len(hidden):
            hidden = hidden.index_select(0, index)
            slots = None if slots is None else slots.index_select(0, index)
        return self.model.narrow_logits(hidden, slots)

    @torch.inference_mode()
    def _prompt_logprobs(self, shape: StepShape, hidden: Tensor, slots: Tensor | None) -> dict[str, list[Picked]]:
        """The hidden state of position i tells of the token at i + 1: so a chunk answers for the positions one after
        its own, up to the last of the prompt, and the first position of all has no answer."""
        counts, lengths = self.sampler.rows.prompt_logprobs, self.sampler.rows.num_prompt[shape.rows]
        picked: dict[str, list[Picked]] = {}
        for i in np.flatnonzero(shape.starts < lengths - 1).tolist():
            row, k = int(shape.rows[i]), counts[shape.rows[i]]
            if k is None:
                continue
            start, first = int(shape.starts[i]), int(shape.ends[i] - shape.counts[i])
            count = min(int(shape.counts[i]), int(lengths[i]) - 1 - start)
            targets = self.rows.tokens[row, start + 1 : start + 1 + count].long()
            own = None if slots is None else slots[first : first + count]
            picked[self.rows.request_of[row]] = self._pick(hidden[first : first + count], own, targets, k)
        return picked

    def _pick(self, hidden: Tensor, slots: Tensor | None, targets: Tensor, k: int) -> list[Picked]:
        """In pieces, because the logits of a long prompt would be many times the size of the model."""
        at_once = logits_at_once(self.sampler.rows.vocab_size)
        pieces = []
        for at in range(0, len(targets), at_once):
            here = slice(at, at + at_once)
            logits = self.model.logits(hidden[here], None if slots is None else slots[here])
            pieces.append(pick(values_of(logits, self.sampler.mode), targets[here], k).on_host())
        return pieces

    def _lose(self, failed: dict[int, str]) -> None:
        self._lost |= {self.rows.request_of[row]: why for row, why in failed.items()}


def logits_at_once(vocab_size: int) -> int:
    """Positions of a prompt whose logits are computed together."""
    return max(1, _LOGIT_BYTES // (4 * vocab_size))


def _mask_of(mask: Mask, sample_grants: list[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Grammar rows for the places that sample in this step; a row for a grant that does not sample is dropped."""
    first_of: dict[int, int] = {}
    for place, grant in enumerate(sample_grants):  # the tokens of a row follow each other
        first_of.setdefault(grant, place)
    counts, offsets = Counter(sample_grants), mask.offsets or (0,) * len(mask.index)
    used = [
        (i, first_of[grant] + offset)
        for i, (grant, offset) in enumerate(zip(mask.index, offsets, strict=True))
        if offset < counts[grant]
    ]
    words = torch.frombuffer(bytearray(mask.rows), dtype=torch.int32).view(len(mask.index), mask.words)
    chosen = upload(words[[i for i, _ in used]].numpy(), logits.device)
    places = upload(np.array([place for _, place in used], np.int64), logits.device)
    return places, chosen


def _why(score: float) -> str:
    if math.isnan(score):
        return "the model produced logits that are not numbers (NaN), so no token could be chosen"
    return FORBIDS_ALL
