"""From a StepPlan to one step's Batch where rows and block tables live on the device: little is sent, the rest derived.

In: the shape of a step (whose tokens, from where). Out: device tensors, made by one copy of packed integers and a few
kernels; nothing is read back. The CPU worker has its own, simpler way (inputs.build).

    sent, decode step of a bucket of B:  row [B] | position [B] | fields | changes of the block tables
    sent, captured step of T tokens:     row [T] | position [T] | fields | what samples: token, row, position | changes
    sent, any other step:                row, contexts, query starts | row and position of each token |
                                         what samples: token, row, position | changes of the block tables
    fields, of graphs captured with them: each channel of the positions [B] | length of the encoder's output [B] |
                                          adapter [B], if a row has one
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.batch import AttentionPlan, Batch, GroupStep
from quire.ops.copy import upload
from quire.ops.rows import StepBuffers, gather_inputs, make_buffers
from quire.schema.kv import KVKind
from quire.worker.inputs import StepShape, cross_step, fields_of, places_of, sampled_places
from quire.worker.rows import Mirror, Rows
from quire.worker.staging import Staging, align

CHANGES = 1 << 14  # table entries that travel with a step; more go by a copy of their own
_WORDS_PER_CHANGE = 3


class SamplingIndices(NamedTuple):
    """What samples in a step, [S] int32 each."""

    tokens: Tensor  # their place in the step
    rows: Tensor
    positions: Tensor  # where their new token will stand


class DeviceStep(NamedTuple):
    batch: Batch
    sampled: SamplingIndices


class GraphFields(NamedTuple):
    """What the graphs of a worker read beside tokens and positions. A step that brings anything else has no graph."""

    adapters: bool = False  # read by graphs of decodes that have them; others do not
    channels: int = 0  # of positions; 0: one
    encoders: bool = False  # how long the output of each row's encoder is


class DeviceInputs:
    def __init__(self, rows: Rows, max_tokens: int, fields: GraphFields = GraphFields()) -> None:
        device = rows.tokens.device
        self.fields, self.max_tokens = fields, max_tokens
        self.rows, self.device, self.scrap = rows, device, rows.max_rows
        self.mirror = Mirror(rows.tables, device)
        # groups in which a token's place is its position; blocks of cross attention are another text's
        self._placed = [i for i, table in enumerate(rows.tables) if table.group.kind is not KVKind.CROSS]
        self._tables = [self.mirror.tables[i] for i in self._placed]
        self._block_sizes = [rows.tables[i].group.block_size for i in self._placed]
        num_fields = fields.adapters + fields.channels + fields.encoders
        per_token = 5 + num_fields  # row, position; what samples: any token of a step may
        size = per_token * max_tokens + 8 * (rows.max_rows + 1) + _WORDS_PER_CHANGE * CHANGES + 64 + 4 * num_fields
        self.staging = Staging(size, device)
        self.buffers = make_buffers(max(max_tokens, rows.max_rows), len(rows.tables), device)
        self._gather = gather_inputs.on(device)

    def build(self, shape: StepShape, backend: AttentionBackend) -> DeviceStep:
        """Any mix of chunks and decodes."""
        token_rows, positions = places_of(shape)
        self._check_blocks(token_rows, positions)
        contexts = shape.starts + shape.counts
        starts, sampled = np.concatenate(((0,), shape.ends)), sampled_places(shape)
        sent = (
            token_rows, positions, shape.rows, contexts, starts, sampled.tokens, shape.rows[sampled.entries],
            sampled.positions,
        )  # fmt: skip
        views = self._send([part.astype(np.int32) for part in sent])
        buffers = self.gather(views[0], views[1])
        is_decode = len(positions) == len(shape.rows)
        lens, counts = contexts.tolist(), shape.counts.tolist()
        plans: list[AttentionPlan] = []
        steps: list[GroupStep] = []
        for table, mirror, slots in zip(self.rows.tables, self.mirror.tables, buffers.slots, strict=True):
            if table.group.kind is KVKind.CROSS:
                step = cross_step(table, shape, views[4], mirror, views[2])
            else:
                step = GroupStep(
                    block_tables=mirror, query_starts=views[4], context_lens=lens, query_lens=counts, slots=slots,
                    row_index=views[2], contexts=views[3], is_decode=is_decode, host_tables=table.host,
                    host_rows=shape.rows, both_ways=shape.both_ways,
                )  # fmt: skip
            plans.append(backend.plan(step, table.group))
            steps.append(step)
        fields = fields_of(shape, self.device)
        batch = Batch(buffers.token_ids, buffers.positions, plans, views[5], len(positions), steps, **fields)
        return DeviceStep(batch, SamplingIndices(*views[5:]))

    def holds(self, shape: StepShape, *, adapters: bool = False) -> bool:
        """Whether graphs, with or without adapters, have a place for everything that this step brings."""
        if shape.vectors is not None or shape.both_ways or shape.encoded is not None:
            return False
        if shape.encoder_lens is not None and not self.fields.encoders:
            return False
        if shape.adapters is not None and not adapters:
            return False
        return shape.channels is None or len(shape.channels) == self.fields.channels

    def send_decode(self, shape: StepShape, bucket: int) -> None:
        """Fill the static inputs of a decode graph; rows past the step's own are padding."""
        self._check_blocks(shape.rows, shape.starts)
        self._send(self._static_parts(shape, shape.rows, shape.starts, bucket))

    def send_mixed(self, shape: StepShape, bucket: int) -> SamplingIndices:
        """Fill the static inputs of a graph of any mix; tokens past the step's own are padding."""
        token_rows, positions = places_of(shape)
        self._check_blocks(token_rows, positions)
        places = sampled_places(shape)
        static = self._static_parts(shape, token_rows, positions, bucket)
        sampled = (places.tokens, shape.rows[places.entries], places.positions)
        return SamplingIndices(*self._send([*static, *(part.astype(np.int32) for part in sampled)])[len(static) :])

    def _static_parts(self, shape: StepShape, rows: np.ndarray, positions: np.ndarray, bucket: int) -> list[np.ndarray]:
        """[bucket] int32 each: rows and positions of the tokens, then the fields of a graph; padding behind them."""
        count, channels = len(rows), self.fields.channels
        packed = np.zeros((2 + channels + self.fields.encoders + (shape.adapters is not None), bucket), np.int32)
        packed[0, count:] = self.scrap
        packed[0, :count] = rows
        packed[1, :count] = positions
        if channels:
            packed[2 : 2 + channels, :count] = positions if shape.channels is None else shape.channels
        if shape.encoder_lens is not None:
            packed[2 + channels, :count] = np.repeat(shape.encoder_lens, shape.counts)
        if shape.adapters is not None:
            packed[-1, :count] = np.repeat(shape.adapters, shape.counts)
        return [*packed]

    def static_inputs(self, bucket: int) -> tuple[Tensor, Tensor]:
        """Where `send_decode` and `send_mixed` put rows and positions: int32 [B] each, at fixed addresses."""
        rows, positions = self._static_words(bucket)[:2]
        return rows, positions

    def static_encoder_lens(self, bucket: int) -> Tensor:
        """The same of how long the outputs of encoders are; padding: 0."""
        return self._static_words(bucket)[2 + self.fields.channels]

    def static_batch(
        self, bucket: int, buffers: StepBuffers, plans: list[AttentionPlan], *, adapters: bool = False
    ) -> Batch:
        """What a graph of this bucket runs. Who samples is left open: nothing in a graph picks by it."""
        words, channels = self._static_words(bucket), self.fields.channels
        last = 2 + channels + self.fields.encoders
        return Batch(
            buffers.token_ids, buffers.positions, plans, buffers.positions, num_tokens=bucket, is_captured=True,
            adapter_index=words[last] if adapters else None,
            position_channels=words[2 : 2 + channels].long() if channels else None,
        )  # fmt: skip

    def clear_static(self, bucket: int) -> None:
        """A step of nothing but padding."""
        parts = self._static_words(bucket)
        parts.zero_()
        parts[0].fill_(self.scrap)

    def _static_words(self, bucket: int) -> Tensor:
        """[2 + fields, bucket]: what `_static_parts` lists, as staging lays it out; adapters come last, since steps
        without them do not send any."""
        fields = self.fields
        count, wide = 2 + fields.channels + fields.encoders + fields.adapters, align(bucket)
        return self.staging.device_words[: count * wide].view(count, wide)[:, :bucket]

    def gather(self, rows: Tensor, positions: Tensor) -> StepBuffers:
        """Token ids, contexts and slots of these places, in static buffers."""
        out = self.buffers.first(len(rows))
        filled = out
        if len(self._placed) < len(out.slots):
            filled = out._replace(slots=tuple(out.slots[i] for i in self._placed))
        self._gather(rows, positions, self.rows.tokens, self._tables, self._block_sizes, filled)
        return out

    def _send(self, parts: list[np.ndarray]) -> list[Tensor]:
        """One copy for the step and what changed in the block tables; then the tables on the device are up to date."""
        places, values = self.mirror.take_changes()
        if len(places) > CHANGES:
            self.mirror.flat.scatter_(0, upload(places, self.device), upload(values, self.device))
            places = values = places[:0]
        if not len(places):
            return self.staging.pack(parts)
        *views, index, written = self.staging.pack([*parts, places, values])
        self.mirror.flat.scatter_(0, index, written)
        return views

    def _check_blocks(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """RuntimeError if a plan computes a position for which its row has no block."""
        for table in self.rows.tables:
            if table.group.kind not in (KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK):
                continue
            blocks = table.host[rows, positions // table.group.block_size]
            if blocks.min() < 0:
                wrong = int(blocks.argmin())
                raise RuntimeError(f"row {rows[wrong]} has no block for position {positions[wrong]}")
