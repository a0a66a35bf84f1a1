"""From a StepPlan and the rows to one step's Batch, and back: which sampled place belongs to which grant.

Tokens of a step lie in the order of rows, so a batch whose rows all take part needs no gathering of block tables. Input
ids come from the rows, never from the plan: a token sampled in the previous step may not have reached the host yet.
All of it is a few array operations; Python per grant is one look-up and four attribute reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.batch import AttentionPlan, Batch, BothWays, GivenVectors, GroupStep
from quire.ops.copy import upload
from quire.schema.errors import NotBuiltError
from quire.schema.kv import KVKind
from quire.schema.params import PoolingParams
from quire.schema.step import Grant, StepPlan
from quire.worker.row_extras import StepVectors
from quire.worker.rows import BlockTable, Rows


@dataclass(frozen=True)
class StepShape:
    """Whose tokens a step computes; every array is in the order of rows. `grants[i]` is the grant of entry i."""

    rows: np.ndarray  # [R] int64, rising
    starts: np.ndarray  # [R] first position computed
    counts: np.ndarray  # [R] tokens computed
    ends: np.ndarray  # [R] running sum of counts: where in the step each row's tokens stop
    samples: np.ndarray  # [R] bool
    grants: np.ndarray  # [R]
    encoder_lens: np.ndarray | None = None  # [R] tokens of an encoder's output; None: no group of cross attention
    begins: np.ndarray | None = None  # [R] bool: the encoder's output comes with this step
    encoded: Tensor | None = None  # [S, width] those outputs, row after row; None: none comes
    num_sampled: np.ndarray | None = None  # [R] how many of its last tokens; None: one of each row that samples
    adapters: np.ndarray | None = None  # [R] int32, 0: none; None: no row of the step has one
    channels: np.ndarray | None = None  # [C, T] positions; None: one channel
    vectors: StepVectors | None = None  # in place of token embeddings
    both_ways: tuple[BothWays, ...] = ()  # positions that attend to each other in both directions


def build(shape: StepShape, rows: Rows, backend: AttentionBackend) -> Batch:
    """For a worker whose rows and tables are the host's own."""
    device = rows.tokens.device
    token_rows, positions = places_of(shape)
    where = torch.from_numpy(positions).to(device)
    token_ids = rows.tokens[torch.from_numpy(token_rows).to(device), where].long()
    starts = torch.from_numpy(np.concatenate(((0,), shape.ends)).astype(np.int32)).to(device)
    contexts = shape.starts + shape.counts
    plans: list[AttentionPlan] = []
    steps: list[GroupStep] = []
    for table in rows.tables:
        if table.group.kind is KVKind.CROSS:
            step = cross_step(table, shape, starts, torch.from_numpy(table.host[shape.rows]).to(device))
        else:
            step = GroupStep(
                block_tables=_tables(table, shape, int(contexts.max()), device),
                query_starts=starts,
                context_lens=contexts.tolist(),
                query_lens=shape.counts.tolist(),
                slots=_slots(table, token_rows, positions, device),
                both_ways=shape.both_ways,
            )
            if shape.num_sampled is not None and table.spare >= 0:
                step = step._replace(num_drafts=num_drafts(shape.num_sampled).tolist(), spare=table.spare)
        plans.append(backend.plan(step, table.group))
        steps.append(step)
    return Batch(
        token_ids=token_ids,
        positions=where,
        plans=plans,
        logit_index=torch.from_numpy(sampled_places(shape).tokens).to(device),
        num_tokens=len(positions),
        steps=steps,
        **fields_of(shape, device),
    )


class BatchFields(TypedDict):
    """Fields of a Batch that most steps leave out."""

    encoded: NotRequired[Tensor]
    input_vectors: NotRequired[GivenVectors]
    adapter_index: NotRequired[Tensor]
    position_channels: NotRequired[Tensor]


def fields_of(shape: StepShape, device: torch.device) -> BatchFields:
    fields = BatchFields()
    if shape.encoded is not None:
        fields["encoded"] = shape.encoded
    if shape.vectors is not None:
        fields["input_vectors"] = GivenVectors(upload(shape.vectors.places, device), shape.vectors.vectors)
    if shape.adapters is not None:
        fields["adapter_index"] = upload(np.repeat(shape.adapters, shape.counts), device)
    if shape.channels is not None:
        fields["position_channels"] = upload(shape.channels, device)
    return fields


class Places(NamedTuple):
    """What samples in a step, [S] each, in the order of rows and of their tokens."""

    tokens: np.ndarray  # place in the step
    positions: np.ndarray  # where the new token will stand
    entries: np.ndarray  # of the shape's arrays


def sampled_places(shape: StepShape) -> Places:
    if shape.num_sampled is None:
        entries = np.flatnonzero(shape.samples)
        return Places(shape.ends[entries] - 1, shape.starts[entries] + shape.counts[entries], entries)
    entries = np.repeat(np.arange(len(shape.rows)), shape.num_sampled)
    back = np.cumsum(shape.num_sampled)[entries] - np.arange(len(entries))  # from the end of the row's tokens
    return Places(shape.ends[entries] - back, (shape.starts + shape.counts)[entries] + 1 - back, entries)


def num_drafts(num_sampled: np.ndarray) -> np.ndarray:
    """[R] of each row: what it samples, but for one."""
    counts: np.ndarray = np.maximum(num_sampled - 1, 0)
    return counts


def sampled_of(shape: StepShape, rows: Rows) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Rows that sample, where their new tokens will stand, and their grants. The rows' lengths count those tokens."""
    contexts = shape.starts + shape.counts
    rows.lengths[shape.rows] = np.maximum(rows.lengths[shape.rows], contexts + shape.samples)
    if shape.num_sampled is None:
        return shape.rows[shape.samples], contexts[shape.samples], shape.grants[shape.samples].tolist()
    places = sampled_places(shape)
    return shape.rows[places.entries], places.positions, shape.grants[places.entries].tolist()


def refuse_unbuilt(plan: StepPlan, *, drafts: bool, media: bool) -> None:
    """NotBuiltError for what a plan may ask and this worker cannot do. `drafts`: it can check those. `media`: it has an
    encoder."""
    if not media and (plan.encode or plan.free_encoded):
        raise NotBuiltError(f"a plan has {len(plan.encode)} media items to encode, and this worker has no encoder")
    if not drafts and any(grant.num_drafts for grant in plan.grants):
        raise NotBuiltError("this version cannot check drafts (speculative_config)", param="speculative_config")
    for new in plan.joined:
        if isinstance(new.params, PoolingParams):
            raise NotBuiltError(f"request {new.request_id!r} is to be pooled, and this model generates")


def shape_of(grants: Sequence[Grant], rows: Rows) -> StepShape:
    row_of = rows.row_of
    own = np.array([row_of[grant.request_id] for grant in grants], np.int64)
    starts = np.array([grant.start for grant in grants], np.int64)
    counts = np.array([grant.count for grant in grants], np.int64)
    samples = np.array([grant.samples for grant in grants], np.bool_)
    if [grant.epoch for grant in grants] != rows.epochs[own].tolist():
        raise RuntimeError("a plan grants tokens to a request that was preempted since")
    order = np.arange(len(own))
    if (own[1:] <= own[:-1]).any():
        order = np.argsort(own)
        own, starts, counts, samples = own[order], starts[order], counts[order], samples[order]
    shape = StepShape(own, starts, counts, np.cumsum(counts), samples, order)
    if rows.has_cross:
        shape = _with_encoders(shape, rows)
    return _with_extras(shape, rows) if rows.has_adapters or rows.extras is not None else shape


def shape_of_texts(grants: Sequence[Grant]) -> StepShape:
    """Of an encoder's step: its texts are in no rows of a batch, and lie in the order of the plan."""
    starts = np.array([grant.start for grant in grants], np.int64)
    counts = np.array([grant.count for grant in grants], np.int64)
    samples = np.array([grant.samples for grant in grants], np.bool_)
    order = np.arange(len(grants))
    return StepShape(order, starts, counts, np.cumsum(counts), samples, order)


def _with_extras(shape: StepShape, rows: Rows) -> StepShape:
    """What the step's own rows bring; a step of rows that bring nothing stays as it is."""
    adapters = rows.adapters[shape.rows]
    shape = replace(shape, adapters=adapters if adapters.any() else None)
    if rows.extras is None:
        return shape
    names = [rows.request_of[row] for row in shape.rows.tolist()]
    return replace(
        shape,
        channels=rows.extras.channels_of(names, shape.counts, places_of(shape)[1]),
        vectors=rows.extras.vectors_of(names, shape.starts, shape.counts),
        both_ways=rows.extras.both_ways_of(names, shape.starts, shape.counts),
    )


def _with_encoders(shape: StepShape, rows: Rows) -> StepShape:
    """Rows that were not computed before bring their encoder's output along."""
    begins = ~rows.is_encoded[shape.rows]
    rows.is_encoded[shape.rows] = True
    names = [rows.request_of[row] for row in shape.rows[begins].tolist()]
    vectors = [rows.encoded[key] for name in names for key in rows.encoder_keys[name]]
    encoded = None if not vectors else vectors[0] if len(vectors) == 1 else torch.cat(vectors)
    return replace(shape, encoder_lens=rows.encoder_lens[shape.rows], begins=begins, encoded=encoded)


def cross_step(
    table: BlockTable, shape: StepShape, starts: Tensor, block_tables: Tensor, row_index: Tensor | None = None
) -> GroupStep:
    """Of a group of cross attention: rows read all of their encoder's output, and write it in their first step."""
    assert shape.encoder_lens is not None and shape.begins is not None
    lens, size = np.where(shape.begins, shape.encoder_lens, 0), table.group.block_size
    rows = np.repeat(shape.rows, lens)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(lens) - lens, lens)
    blocks = table.host[rows, places // size].astype(np.int64)
    if len(blocks) and blocks.min() < 0:
        wrong = int(blocks.argmin())
        raise RuntimeError(f"row {rows[wrong]} has no block for position {places[wrong]} of its encoder's output")
    return GroupStep(
        block_tables=block_tables, query_starts=starts, context_lens=shape.encoder_lens.tolist(),
        query_lens=shape.counts.tolist(), slots=upload(blocks * size + places % size, block_tables.device),
        row_index=row_index,
    )  # fmt: skip


def places_of(shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
    """(row, position) of every token of the step."""
    if shape.ends[-1] == len(shape.rows):  # one token each
        return shape.rows, shape.starts
    before = shape.ends - shape.counts
    positions = np.arange(shape.ends[-1]) - np.repeat(before - shape.starts, shape.counts)
    return np.repeat(shape.rows, shape.counts), positions


def _tables(table: BlockTable, shape: StepShape, longest: int, device: torch.device) -> Tensor:
    """[R, blocks of the longest row]. Rows 0 to R-1 are a view of the table on CPU."""
    width = -(-longest // table.group.block_size)
    rows = slice(0, len(shape.rows)) if shape.rows[-1] == len(shape.rows) - 1 else shape.rows
    return torch.from_numpy(table.host[rows, :width]).to(device)


def _slots(table: BlockTable, rows: np.ndarray, positions: np.ndarray, device: torch.device) -> Tensor:
    size = table.group.block_size
    blocks, offsets = np.divmod(positions, size)
    slots = table.host[rows, blocks].astype(np.int64) * size + offsets
    if table.group.kind in (KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK) and slots.min() < 0:
        wrong = int(slots.argmin())
        raise RuntimeError(f"row {rows[wrong]} has no block for position {positions[wrong]}")
    return torch.from_numpy(slots).to(device)
