"""Decode steps as CUDA graphs: one per bucket of rows, captured once, replayed for every step that fits.

There may be two sets: steps in which a row has an adapter are replayed from graphs that add adapters, captured when
such steps come; others never pay for them. The slots of the rows are among the static buffers, so a graph serves
whatever adapters lie in the slots; it is captured again when an adapter is the first to change some layer.

A graph holds a whole decode step: row gathers, embedding, layers, logits, the plain choice of a token (top_k and top_p
included: rows without them cost next to nothing), and writing it into its row. What changes between replays is only the
content of static buffers, written by one copy before a replay.
Must not know: requests, parameters that need more than the plain choice (the sampler runs those after the replay).

Static buffers, B = rows of the bucket, `scrap` = rows.max_rows (the row of tokens and tables that belongs to nobody):

    device.inputs   int32 [2, B]     row of each entry | position it computes        real entries, then padding
    row_index       int32 [B]        = inputs[0]; padding: scrap
    positions       int64 [B]        = inputs[1]; padding: 0
    fields          int32 [B] each   what GraphFields names beside them; padding: 0 (of adapters: none)
    contexts        int32 [B]        positions + 1; padding: 0                       tokens an entry attends over
    block_tables    int32 [max_rows + 1, W]   per KV group, the rows' mirror on the device; row `scrap` is all -1
    slots           int64 [B]        per KV group: block * block_size + offset; padding: -1, nothing may be written
    query_starts    int32 [B + 1]    0, 1, .. B

What an attention backend promises for a GroupStep with is_static (and so is_decode): `plan(step, group)` and `run` are
called while the stream is captured, after one call of both outside of it with the same shapes (so kernels are compiled
by then). They read nothing back and copy nothing from the host; what they launch and allocate is the same whatever the
tensors hold; lengths come from `contexts`; a table is never read past a row's context; no key is written where slots is
-1; and padding (context 0) gives finite numbers. `context_lens` is [longest context] * B, for sizing grids and splits.
Memory allocated in plan or run belongs to the graphs' common pool: the next bucket's graph reuses it.
Steps that hold prompts have graphs of their own (mixed_graphs.py).

A start captures as many buckets as it has time for; a larger one serves for those that are left. They are captured
while nothing else is to be done (`capture_next`), or when padding has cost as much time as a capture takes. Several
ranks capture all at start but those with adapters; of these they agree what was captured.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.base.clock import now
from quire.base.log import logger
from quire.base.progress import progress
from quire.layers.batch import AttentionPlan, GroupStep
from quire.quant.shard import ALONE, ShardGroup
from quire.sampling.sampler import PlainSampler
from quire.schema.errors import EngineDeadError
from quire.schema.kv import KVKind
from quire.worker.capture import Capturer, borrow, seconds_on_device
from quire.worker.device_inputs import DeviceInputs
from quire.worker.inputs import StepShape

if TYPE_CHECKING:
    from quire.layers.adapters import StepAdapters
    from quire.models.build import Model

START_SECONDS = 1.5  # what capturing of all graphs may take at start; buckets left out are captured while running
LATE_AFTER = 64  # steps that needed a bucket before it is captured, where times do not decide
COMMON = 256  # rows: the time of a row is measured with so many at most
_log = logger(__name__)


class Replayed(NamedTuple):
    """What a graph leaves behind; the next replay of any bucket overwrites it."""

    row_index: Tensor  # int32 [B]
    contexts: Tensor  # int32 [B]
    hidden: Tensor  # [B, width]
    logits: Tensor  # [B, V]
    result: Tensor  # int32 [2, B]: chosen tokens, bits of their scores


@dataclass
class GraphTimes:
    """What decides whether a graph is worth capturing while requests wait: seconds, as the start measured them."""

    capture: float = 0.0  # of one graph
    row: float = 0.0  # what one more row adds to a step, even if it is padding


class DecodeGraphs:
    def __init__(
        self,
        sizes: Sequence[int],
        model: Model,
        backend: AttentionBackend,
        inputs: DeviceInputs,
        plain: PlainSampler,
        capturer: Capturer,
        *,
        max_context: int,
        adapters: StepAdapters | None = None,
        times: GraphTimes | None = None,
        ranks: ShardGroup = ALONE,
    ) -> None:
        """`sizes`: the buckets, rising. `adapters`: of the model's layers, for the set of graphs that adds them.
        `times`: shared with another set; `capture` measures them. `ranks`: that sum in every step, and so must replay
        the same bucket: they go by nothing that each has measured or met for itself."""
        self.sizes, self._capturer, self._adapters, self._ranks = list(sizes), capturer, adapters, ranks
        self.times = times or GraphTimes()
        self._version = -1  # of the adapters' layers that are captured
        self._is_off = False  # a graph with adapters could not be captured
        self._is_full = False  # a graph that a larger one can stand for could not be captured
        self._model, self._backend, self._inputs, self._plain = model, backend, inputs, plain
        self._max_context = max_context
        device, largest = inputs.device, self.sizes[-1]
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._results = torch.zeros(2 * largest, dtype=torch.int32, device=device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Replayed]] = {}
        self._tried: set[int] = set()  # buckets whose step ran outside of a capture
        self._uses: dict[int, int] = {}  # bucket that is not captured -> how often it was needed
        self._padded: dict[int, float] = {}  # the same -> seconds that larger ones took for padding

    def bucket_of(self, shape: StepShape) -> int | None:
        """The smallest bucket for a step of decodes; None: not such a step, more rows than any bucket has, or one that
        brings what graphs were not captured with."""
        count = len(shape.rows)
        if (
            self._is_off
            or shape.ends[-1] != count
            or count > self.sizes[-1]
            or not shape.samples.all()
            or not self._inputs.holds(shape, adapters=self._adapters is not None)
        ):
            return None
        return self.sizes[bisect_left(self.sizes, count)]

    def replay(self, bucket: int) -> Replayed:
        if bucket not in self._captured:
            raise RuntimeError(f"bucket {bucket} was not captured")
        graph, replayed = self._captured[bucket]
        graph.replay()
        return replayed

    def prepare(self, bucket: int) -> int | None:
        """The bucket to replay; None: it cannot be captured. One that the start left out is captured once that is worth
        its time, or if none larger is there; until then a larger one serves. Before inputs are sent: a capture
        overwrites them."""
        if self._adapters is not None and self._adapters.version != self._version:
            self._forget(self._adapters.version)
        if bucket in self._captured:
            return bucket
        larger = next((size for size in self.sizes if size > bucket and size in self._captured), None)
        if larger is not None and (self._is_full or not self._is_worth(bucket, larger)):
            return larger
        return bucket if self._capture_late(bucket) else larger

    def _is_worth(self, bucket: int, larger: int) -> bool:
        """Whether padding up to the larger one took as long by now as capturing this one does. A power of two may have
        kernels of its own, so what padding costs there is not known: there uses are counted; and where there are
        several ranks, each of which has measured other times."""
        self._uses[bucket] = uses = self._uses.get(bucket, 0) + 1
        self._padded[bucket] = padded = self._padded.get(bucket, 0.0) + (larger - bucket) * self.times.row
        goes_by_time = self._ranks.is_alone and not _is_power(bucket)
        return padded > self.times.capture if goes_by_time else uses >= LATE_AFTER

    def capture_next(self) -> bool:
        """Capture one that the start left out, while no step is under way; whether more are left."""
        left = [] if self._is_full else [size for size in capture_order(self.sizes) if size not in self._captured]
        if left:
            self._capture_late(left[0])
        return len(left) > 1 and not self._is_full

    def _forget(self, version: int) -> None:
        """A layer that no graph has an addition for has one now."""
        if self._captured and self._inputs.device.type == "cuda":
            torch.cuda.synchronize(self._inputs.device)  # one of them may be running
        self._captured.clear()
        self._version = version

    @torch.inference_mode()
    def _capture_late(self, bucket: int) -> bool:
        """False: it failed, on this rank or on another, and no further one will be tried: larger ones serve, and where
        there is none steps with adapters run without a graph."""
        began = now()
        kind = "a decode graph" if self._adapters is None else "a decode graph with adapters"
        failed = ""  # not the error itself: with it stays what the failed step had allocated
        try:
            self._capture(bucket)
        except RuntimeError as wrong:  # torch's own, of memory and of the device, are such
            self._check_in_step(bucket, wrong)
            if self._ranks.is_alone and not self._can_do_without(bucket):
                raise
            failed = str(wrong) or type(wrong).__name__
        if self._ranks.all_say(not failed, self._inputs.device):
            _log.debug("captured %s of %d rows in %.0f ms", kind, bucket, 1000 * (now() - began))
            return True
        self._captured.pop(bucket, None)
        if not self._can_do_without(bucket):
            raise RuntimeError(failed or f"another rank could not capture a decode graph of {bucket} rows")
        self._is_full = self._has_larger(bucket)
        self._is_off = not self._is_full
        instead = "larger ones serve" if self._is_full else "such steps run without graphs"
        _log.warning("capturing %s of %d rows failed, %s: %s", kind, bucket, instead, failed or "on another rank")
        return False

    def _has_larger(self, bucket: int) -> bool:
        return any(size > bucket for size in self._captured)

    def _can_do_without(self, bucket: int) -> bool:
        return self._adapters is not None or self._has_larger(bucket)

    def _check_in_step(self, bucket: int, failed: RuntimeError) -> None:
        """What is captured sums nothing yet, so ranks can still agree. The step that runs before does: a rank that has
        not ended it has left the others in a sum, where nothing can be asked of them."""
        ranks = self._ranks
        if not (ranks.is_alone or bucket in self._tried or self._is_between_tried(bucket)):
            raise EngineDeadError(
                f"rank {ranks.rank} of {ranks.size} could not run a step of {bucket} rows before its capture, in which "
                f"the other ranks wait for it: {failed}"
            ) from failed

    @torch.inference_mode()
    def capture(self, seconds: float = START_SECONDS) -> None:
        """In the order of `capture_order`: powers of two and the largest in any case, others while time allows."""
        began = now()
        free = torch.cuda.mem_get_info(self._inputs.device)[0]
        largest = self.sizes[-1]
        with progress(_log, "Capturing decode graphs", len(self.sizes), "graphs") as advance:
            for size in capture_order(self.sizes):
                if not _is_power(size) and size != largest and now() - began > seconds:
                    break
                self._capture(size)
                advance(1)
        torch.cuda.synchronize(self._inputs.device)
        self.times.capture, self.times.row = (now() - began) / len(self._captured), self._row_seconds()
        torch.cuda.empty_cache()  # what the runs before the captures left behind
        taken = free - torch.cuda.mem_get_info(self._inputs.device)[0]
        _log.info(
            "captured %d of %d decode graphs (up to %d rows) in %.2f s, %.2f GiB",
            len(self._captured), len(self.sizes), largest, now() - began, taken / 2**30,
        )  # fmt: skip

    def run_uncaptured(self, bucket: int) -> None:
        """A step of nothing but padding, as it would be captured."""
        self._inputs.clear_static(bucket)
        self._step(bucket)

    def _row_seconds(self) -> float:
        """By replays of nothing but padding in two sizes; 0: there are no two."""
        both = [size for size in self.sizes if _is_power(size) and size <= COMMON][-2:]
        if len(both) < 2:
            return 0.0
        less, more = (self._seconds_of(size) for size in both)
        return max(0.0, more - less) / (both[1] - both[0])

    def _seconds_of(self, bucket: int) -> float:
        """Of a replay; the first one is slower."""
        self._inputs.clear_static(bucket)
        return min(seconds_on_device(partial(self.replay, bucket), self._inputs.device) for _ in range(3))

    def _capture(self, bucket: int) -> None:
        """Its step runs once before, so that kernels are loaded and libraries set up; sizes between two powers of two
        that ran find everything there."""
        first = None
        if not self._is_between_tried(bucket):
            self._tried.discard(bucket)
            first = partial(self._try, bucket)
        graph, replayed = self._capturer.capture(partial(self._step, bucket), first)
        self._keep(bucket, graph, replayed)

    def _is_between_tried(self, bucket: int) -> bool:
        below = 1 << bucket.bit_length() - 1
        return below < bucket and {below, min(2 * below, self.sizes[-1])} <= self._tried

    def _try(self, bucket: int) -> None:
        self.run_uncaptured(bucket)
        self._tried.add(bucket)

    def _keep(self, bucket: int, graph: torch.cuda.CUDAGraph, replayed: Replayed) -> None:
        # The memory of states and logits goes back to the pool, so that all buckets share it; a borrowed view stays.
        borrowed = replayed._replace(hidden=borrow(replayed.hidden), logits=borrow(replayed.logits))
        self._captured[bucket] = graph, borrowed

    def _step(self, bucket: int) -> Replayed:
        """Everything a graph holds."""
        inputs = self._inputs
        rows, positions = inputs.static_inputs(bucket)
        buffers = inputs.gather(rows, positions)
        plans: list[AttentionPlan] = []
        for table, mirror, slots in zip(inputs.rows.tables, inputs.mirror.tables, buffers.slots, strict=True):
            is_cross = table.group.kind is KVKind.CROSS  # whose blocks are filled already
            step = GroupStep(
                block_tables=mirror, query_starts=self._starts[: bucket + 1],
                context_lens=[self._max_context] * bucket, query_lens=[1] * bucket, slots=slots, row_index=rows,
                contexts=inputs.static_encoder_lens(bucket) if is_cross else buffers.contexts, is_decode=True,
                is_static=True,
            )  # fmt: skip
            plans.append(self._backend.plan(step, table.group))
        batch = inputs.static_batch(bucket, buffers, plans, adapters=self._adapters is not None)
        hidden = self._model.forward(batch)
        logits = self._model.narrow_logits(hidden)
        result = self._results[: 2 * bucket].view(2, bucket)
        self._plain(logits, rows, buffers.contexts, result, filters=True)
        return Replayed(rows, buffers.contexts, hidden, logits, result)


def _is_power(size: int) -> bool:
    return size & (size - 1) == 0


def capture_order(sizes: Sequence[int]) -> list[int]:
    """The largest first, whose memory the others share; then powers of two; then always the roundest number in the
    relatively widest gap, so that padding is a small share of a step however many there are."""
    largest = max(sizes)
    order = [largest, *sorted((size for size in sizes if _is_power(size) and size != largest), reverse=True)]
    left, done = sorted(set(sizes).difference(order)), sorted(order)
    while left:
        gaps = [(low, high, [size for size in left if low < size < high]) for low, high in pairwise((0, *done))]
        low, high, inside = max((gap for gap in gaps if gap[2]), key=lambda gap: gap[1] / max(gap[0], 0.5))
        size = max(inside, key=lambda size: (size & -size, -abs(2 * size - low - high)))  # whole tiles of matmuls
        order.append(size)
        left.remove(size)
        insort(done, size)
    return order


def useful_sizes(sizes: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """Rising, without those larger than the first that holds every row."""
    rising = sorted(set(sizes))
    enough = next((i for i, size in enumerate(rising) if size >= max_rows), len(rising))
    return tuple(rising[: enough + 1])
