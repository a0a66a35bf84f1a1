"""PoolingRunner: one step of a pooling model on one device. forward(plan): rows, Batch or Texts, hidden states;
sample(step): what each request that is complete comes to.

In: StepPlan. Out: a PendingStep whose StepResult has `pooled`. A prompt may come in chunks: until its last one, what
its pooling needs of earlier ones is kept here (the first vector, a running sum, or all vectors). Only LAST needs
nothing of them, so only LAST may begin after a cached prefix. A result that is not a number fails its request alone.
Must not know: why this plan, how a model is built or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.base.clock import now
from quire.layers.packed import Texts
from quire.models.pooled import PoolingModel
from quire.ops.copy import upload
from quire.ops.texts import text_sums
from quire.schema.errors import NotBuiltError
from quire.schema.params import PoolingParams, ResolvedParams
from quire.schema.step import Grant, Mask, NewRow, StepPlan, StepResult
from quire.worker.device_inputs import DeviceInputs
from quire.worker.inputs import StepShape, build, places_of, shape_of, shape_of_texts
from quire.worker.kv_memory import KVMemory
from quire.worker.moves import BlockCopies
from quire.worker.pooling_results import Complete, PendingResults, ResultRules, results_of
from quire.worker.rows import Rows

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.build import Model
    from quire.worker.adapters import WorkerAdapters

TYPE_START = "compressed_token_type_ids"


@dataclass(slots=True)
class PooledRow:
    """A request that is pooled, as far as it is computed."""

    params: PoolingParams
    kind: str  # CLS | LAST | MEAN | ALL | STEP
    token_ids: tuple[int, ...]
    vector: Tensor | None = None  # [width]: the first, or the sum so far (float32)
    chunks: tuple[Tensor, ...] = ()  # all vectors, chunk by chunk
    slot: int = 0  # of its adapter; 0: none

    def take(self, hidden: Tensor, start: int) -> None:
        """The next chunk's hidden states."""
        if self.kind == "LAST":
            self.vector = hidden[-1]
        elif self.kind == "CLS":
            self.vector = hidden[0] if start == 0 else self.vector
        elif self.kind == "MEAN":
            total = hidden.float().sum(0)
            self.vector = total if self.vector is None else self.vector + total
        else:
            self.chunks += (hidden,)

    def vectors(self) -> Tensor:
        """[N, width], once all chunks are in."""
        if self.kind in ("ALL", "STEP"):
            hidden = self.chunks[0] if len(self.chunks) == 1 else torch.cat(list(self.chunks))
            if self.kind == "STEP" and self.params.step_tag_id is not None:
                places = [i for i, token in enumerate(self.token_ids) if token == self.params.step_tag_id]
                hidden = hidden[places]
            return hidden
        assert self.vector is not None
        return (self.vector / len(self.token_ids) if self.kind == "MEAN" else self.vector)[None]


@dataclass
class PendingPooled:
    """One step's results on their way to the host; complete once `ready` has passed (None: at once)."""

    plan: StepPlan
    coming: PendingResults
    seconds: float = 0.0
    ready: torch.cuda.Event | None = None

    def result(self) -> StepResult:
        if self.ready is not None:
            self.ready.synchronize()
        self.coming.arrive()
        return StepResult(
            step=self.plan.step, sampled=[[] for _ in self.plan.grants], pooled=self.coming.pooled,
            failed=self.coming.failed, forward_seconds=self.seconds,
        )  # fmt: skip


def make_pooling_runner(
    model: Model,
    config: EngineConfig,
    make_rows: Callable[[torch.device], Rows],
    backend: AttentionBackend,
    kv: KVMemory,
    adapters: WorkerAdapters | None = None,
) -> PoolingRunner:
    """`make_rows`: rows whose tokens lie on a device. An encoder's texts are read once, and have none."""
    assert isinstance(model, PoolingModel)  # as runner=pooling has it
    device = model.storage.device
    rows = make_rows(torch.device("cpu") if model.both_ways else device)  # on CPU they cost nothing until written
    most = config.scheduler_config.max_num_batched_tokens
    inputs = None if device.type == "cpu" or model.both_ways else DeviceInputs(rows, most)
    return PoolingRunner(
        model, rows, backend, ResultRules.of(config.model_config), kv=kv, inputs=inputs, adapters=adapters
    )


class PoolingRunner:
    graphs = None
    mixed = None

    def __init__(
        self,
        model: PoolingModel,
        rows: Rows,
        backend: AttentionBackend,
        rules: ResultRules,
        *,
        kv: KVMemory,
        inputs: DeviceInputs | None = None,  # None: a CPU worker
        adapters: WorkerAdapters | None = None,
    ) -> None:
        self.model, self.rows, self.backend, self.rules, self.kv, self.inputs = model, rows, backend, rules, kv, inputs
        self.copies, self.adapters, self._device = BlockCopies(kv), adapters, model.storage.device
        self._sums = model.storage.of(text_sums)
        self._pooled: dict[str, PooledRow] = {}
        self._kinds: dict[str, str] = {}  # of a task
        self._flight: tuple[StepPlan, StepShape, Tensor, float] | None = None

    def forward(self, plan: StepPlan) -> None:
        began = now()
        self._flight = None
        if plan.moves:
            self.copies.check(plan.moves)
            self.copies.run(plan.moves, after=False)
        if plan.adapters:
            if self.adapters is None:
                raise NotBuiltError("a plan places adapters, and the worker was made without slots for them")
            self.adapters.place(plan.adapters)
        both_ways, pooled = self.model.both_ways, self._pooled
        if not both_ways:
            self.rows.apply(plan)
        for name in plan.left:
            pooled.pop(name, None)
        for new in plan.joined:
            pooled[new.request_id] = self._row(new)
        if plan.grants:
            shape = shape_of_texts(plan.grants) if both_ways else shape_of(plan.grants, self.rows)
            self._flight = plan, shape, self._read(plan.grants, shape) if both_ways else self._hidden(shape), began
            if plan.moves:
                self.copies.run(plan.moves, after=True)

    def _row(self, new: NewRow) -> PooledRow:
        params = new.params
        if isinstance(params, ResolvedParams):  # the warm-up's
            params = PoolingParams(task=self.rules.tasks[0], use_activation=False)
        task = str(params.task)
        if (kind := self._kinds.get(task)) is None:
            kind = self._kinds[task] = self.rules.kind_of(task)
        return PooledRow(params, kind, new.token_ids, slot=new.lora_id)

    @torch.inference_mode()
    def _hidden(self, shape: StepShape) -> Tensor:
        if self.inputs is not None:
            return self.model.forward(self.inputs.build(shape, self.backend).batch)
        return self.model.forward(build(shape, self.rows, self.backend))

    @torch.inference_mode()
    def _read(self, grants: Sequence[Grant], shape: StepShape) -> Tensor:
        """The same of an encoder: each text is here as a whole."""
        texts = [self._pooled[grant.request_id] for grant in grants]
        lens = shape.counts.tolist()
        if bool(shape.starts.any()) or [len(text.token_ids) for text in texts] != lens:
            raise RuntimeError("a plan splits a prompt whose tokens read each other both ways")
        rows, positions = places_of(shape)
        both = np.empty((2, len(positions)), np.int64)
        both[0] = np.fromiter(chain.from_iterable([text.token_ids for text in texts]), np.int64, len(positions))
        both[1] = positions
        tokens, places = upload(both, self._device).unbind()
        types, slots = self._types(texts, rows, positions), None
        if self.adapters is not None and any(text.slot for text in texts):
            slots = upload(np.array([text.slot for text in texts], np.int32)[rows], self._device)
        return self.model.read(Texts(tokens, tuple(lens), types, places, slots))

    def _types(self, texts: Sequence[PooledRow], rows: np.ndarray, positions: np.ndarray) -> Tensor | None:
        """Token types: 1 from where a request says. `rows`: which text a token is of."""
        with_more = [(row, text.params.extra_kwargs) for row, text in enumerate(texts) if text.params.extra_kwargs]
        starts = {row: begin for row, more in with_more if isinstance(begin := more.get(TYPE_START), int)}
        if not starts:
            return None
        first = np.full(len(texts), np.iinfo(np.int64).max)
        for row, begin in starts.items():
            first[row] = begin
        return upload((positions >= first[rows]).astype(np.int64), self._device)

    def sample(self, step: int, mask: Mask | None) -> PendingPooled:
        """What the step that was started last completes; the caller names it."""
        flight, self._flight = self._flight, None
        if flight is None or flight[0].step != step:
            raise RuntimeError(f"sample() of step {step} without its forward()")
        plan, shape, hidden, began = flight
        complete = self._take(plan.grants, shape, hidden)
        coming = results_of(self.model, self.rules, complete)
        for name in complete.names:
            del self._pooled[name]
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return PendingPooled(plan, coming, now() - began, ready)

    @torch.inference_mode()
    def _take(self, grants: Sequence[Grant], shape: StepShape, hidden: Tensor) -> Complete:
        """Hand every row its hidden states; those that are complete."""
        if bool(shape.samples.all()) and not shape.starts.any():
            return self._take_whole(grants, shape, hidden)
        names, rows = [], []
        for hidden_rows, index, start in zip(
            hidden.split(shape.counts.tolist()), shape.grants.tolist(), shape.starts.tolist(), strict=True
        ):
            grant = grants[index]
            row = self._pooled[grant.request_id]
            row.take(hidden_rows, start)
            if grant.samples:
                names.append(grant.request_id)
                rows.append(row)
        return Complete(names, [row.params for row in rows], [row.vectors() for row in rows])

    def _take_whole(self, grants: Sequence[Grant], shape: StepShape, hidden: Tensor) -> Complete:
        """The same of prompts that are all here as a whole: vectors of one kind are made at once."""
        names = [grants[index].request_id for index in shape.grants.tolist()]
        rows = [self._pooled[name] for name in names]
        params, kinds, counts = [row.params for row in rows], {row.kind for row in rows}, shape.counts.tolist()
        if kinds == {"MEAN"}:
            sizes = upload(shape.counts[:, None].astype(np.float32), hidden.device)
            return Complete(names, params, self._sums(hidden, counts) / sizes)
        if kinds == {"CLS"} or kinds == {"LAST"}:
            places = shape.ends - (shape.counts if kinds == {"CLS"} else 1)
            return Complete(names, params, hidden[upload(places, hidden.device)])
        for row, part in zip(rows, hidden.split(counts), strict=True):
            row.take(part, 0)
        return Complete(names, params, [row.vectors() for row in rows])
