"""Steps that hold prompts as CUDA graphs: one per number of tokens, replayed for any mix of chunks and decodes.

A graph holds the model from the tokens' places to the hidden states; tokens past the step's own are padding. Who
attends to what is written into the attention plans' fixed lists before each replay (RefilledPlan), so one graph serves
every mix that its lists have room for. The head and the choice of tokens follow outside: how many rows sample varies.
Larger steps keep the device busy for longer than launching them takes, and run without a graph.

Static buffers, T = tokens of the bucket, `scrap` = rows.max_rows (see graphs.py):

    row_index, positions   int32 [T]    in the staging buffer; padding: scrap, 0; behind them what GraphFields names
    slots                  int64 [T]    per KV group; padding: -1, nothing is written
    hidden                 [T, width]   what a replay leaves behind, until the next replay of any graph

Must not know: requests, how tokens are chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.base.clock import now
from quire.base.log import logger
from quire.layers.batch import GroupStep, RefilledPlan
from quire.quant.shard import ShardGroup
from quire.schema.kv import KVGroup, KVKind
from quire.worker.capture import Capturer, borrow
from quire.worker.device_inputs import DeviceInputs, SamplingIndices
from quire.worker.inputs import StepShape

if TYPE_CHECKING:
    from quire.models.build import Model

# A library's matmuls take as long for a few rows more than a multiple of 128 as for the next one, so sizes between
# would save nothing (8B on an H200: 512 tokens 11.2 ms, 544 13.6, 576 14.7, 640 13.9). A size takes 30 ms at the start.
SIZES = (
    16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048,
)  # fmt: skip
PAGED = (KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK)
_log = logger(__name__)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    plans: list[RefilledPlan]
    hidden: Tensor


class MixedStep(NamedTuple):
    """A step whose inputs lie ready for the graph of `bucket`."""

    bucket: int
    sampled: SamplingIndices


class MixedGraphs:
    def __init__(
        self,
        sizes: Sequence[int],
        model: Model,
        backend: AttentionBackend,
        inputs: DeviceInputs,
        capturer: Capturer,
    ) -> None:
        """`sizes`: the buckets, rising."""
        self.sizes = list(sizes)
        self._model, self._backend, self._inputs, self._capturer = model, backend, inputs, capturer
        self._captured: dict[int, _Captured] = {}
        self._ready: list[int] = []  # buckets captured, rising

    @torch.inference_mode()
    def send(self, shape: StepShape) -> MixedStep | None:
        """Fill a graph's inputs with this step; None where no graph fits it."""
        at = bisect_left(self._ready, int(shape.ends[-1]))
        if at == len(self._ready) or not self._inputs.holds(shape):
            return None
        bucket = self._ready[at]
        if not all(
            plan.refill(step) for plan, step in zip(self._captured[bucket].plans, self._steps(shape), strict=True)
        ):
            return None
        return MixedStep(bucket, self._inputs.send_mixed(shape, bucket))

    def replay(self, bucket: int) -> Tensor:
        """Hidden states [T, width]; the next replay of any graph overwrites them."""
        captured = self._captured[bucket]
        captured.graph.replay()
        return captured.hidden

    @torch.inference_mode()
    def capture(self) -> None:
        """The largest first: it runs before, which makes the room that all share. A small one runs too, since few
        tokens take other kernels."""
        began, free = now(), torch.cuda.mem_get_info(self._inputs.device)[0]
        largest, smallest = self.sizes[-1], self.sizes[0]
        for size in reversed(self.sizes):
            plans = self._plans(size)
            first = partial(self._run_padding, size, plans) if size in (largest, smallest) else None
            graph, hidden = self._capturer.capture(partial(self._run, size, plans), first)
            self._captured[size] = _Captured(graph, plans, borrow(hidden))
            del hidden  # back to the pool, for the next size
        self._ready = list(self.sizes)
        torch.cuda.synchronize(self._inputs.device)
        taken = free - torch.cuda.mem_get_info(self._inputs.device)[0]
        _log.info(
            "captured %d graphs of steps with prompts (up to %d tokens) in %.2f s, %.2f GiB",
            len(self.sizes), largest, now() - began, taken / 2**30,
        )  # fmt: skip

    @torch.inference_mode()
    def run_uncaptured(self, bucket: int) -> None:
        """A step of nothing but padding, as it would be captured."""
        self._run_padding(bucket, self._plans(bucket))

    def _run_padding(self, bucket: int, plans: Sequence[RefilledPlan]) -> None:
        self._inputs.clear_static(bucket)
        self._run(bucket, plans)

    def _plans(self, bucket: int) -> list[RefilledPlan]:
        inputs = self._inputs
        buffers = inputs.buffers.first(bucket)
        plans = []
        for table, mirror, slots in zip(inputs.rows.tables, inputs.mirror.tables, buffers.slots, strict=True):
            step = GroupStep(
                block_tables=mirror, query_starts=buffers.contexts, context_lens=(), query_lens=(), slots=slots,
                is_static=True,
            )  # fmt: skip
            plans.append(cast(RefilledPlan, self._backend.plan(step, table.group)))
        return plans

    def _run(self, bucket: int, plans: Sequence[RefilledPlan]) -> Tensor:
        """Everything a graph holds."""
        buffers = self._inputs.gather(*self._inputs.static_inputs(bucket))
        return self._model.forward(self._inputs.static_batch(bucket, buffers, list(plans)))

    def _steps(self, shape: StepShape) -> list[GroupStep]:
        """What refilling a plan needs: the host's view alone."""
        inputs, contexts = self._inputs, (shape.starts + shape.counts)
        none = inputs.buffers.contexts[:0]
        return [
            GroupStep(
                block_tables=mirror, query_starts=none, context_lens=cast(Sequence[int], contexts),
                query_lens=cast(Sequence[int], shape.counts), slots=none, host_tables=table.host, host_rows=shape.rows,
            )
            for table, mirror in zip(inputs.rows.tables, inputs.mirror.tables, strict=True)
        ]  # fmt: skip


def fit_alike(ranks: ShardGroup, device: torch.device) -> bool:
    """Whether a step that fits a graph on one of these ranks fits it on all: attention is cut into as many pieces as a
    GPU has multiprocessors for."""
    if ranks.is_alone:
        return True
    counts = ranks.say(multiprocessors(device), device)
    if len(set(counts)) > 1 and ranks.rank == 0:
        _log.warning(
            "GPUs of %s multiprocessors: steps with prompts run without graphs", " and ".join(map(str, counts))
        )
    return len(set(counts)) == 1


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def mixed_sizes(groups: Sequence[KVGroup], most_tokens: int) -> tuple[int, ...]:
    """Buckets for these KV groups and steps of at most so many tokens; none where a layer keeps more than tokens."""
    if any(group.kind not in PAGED for group in groups):
        return ()
    return tuple(size for size in SIZES if size <= most_tokens)
