"""From a StepPlan and the rows to one step's Batch, and back: which sampled place belongs to which grant.

Tokens of a step lie in the order of rows, so a batch whose rows all take part needs no gathering of block tables. Input
ids come from the rows, never from the plan: a token sampled in the previous step may not have reached the host yet.
All of it is a few array operations; Python per grant is one look-up and four attribute reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.batch import AttentionPlan, Batch, GroupStep
from quire.schema.errors import NotBuiltError
from quire.schema.kv import KVKind
from quire.schema.params import PoolingParams
from quire.schema.step import Grant, StepPlan
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
        step = GroupStep(
            block_tables=_tables(table, shape, int(contexts.max()), device),
            query_starts=starts,
            context_lens=contexts.tolist(),
            query_lens=shape.counts.tolist(),
            slots=_slots(table, token_rows, positions, device),
        )
        plans.append(backend.plan(step, table.group))
        steps.append(step)
    return Batch(
        token_ids=token_ids,
        positions=where,
        plans=plans,
        logit_index=torch.from_numpy(shape.ends[shape.samples] - 1).to(device),
        num_tokens=len(positions),
        steps=steps,
    )


def sampled_of(shape: StepShape, rows: Rows) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Rows that sample, where their new tokens will stand, and their grants. The rows' lengths count those tokens."""
    contexts = shape.starts + shape.counts
    rows.lengths[shape.rows] = np.maximum(rows.lengths[shape.rows], contexts + shape.samples)
    return shape.rows[shape.samples], contexts[shape.samples], shape.grants[shape.samples].tolist()


def refuse_unbuilt(plan: StepPlan, *, drafts: bool) -> None:
    """NotBuiltError for what a plan may ask and this worker cannot do. `drafts`: it can check those."""
    if plan.moves:
        raise NotBuiltError(f"a plan moves {len(plan.moves)} KV blocks, and this version cannot")
    if plan.encode or plan.free_encoded:
        raise NotBuiltError(f"a plan has {len(plan.encode)} media items to encode, and this version cannot")
    if not drafts and any(grant.num_drafts for grant in plan.grants):
        raise NotBuiltError("this version cannot check drafts (speculative_config)", param="speculative_config")
    for new in plan.joined:
        if isinstance(new.params, PoolingParams):
            raise NotBuiltError(f"request {new.request_id!r} is to be pooled, and this version cannot")


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
    return StepShape(own, starts, counts, np.cumsum(counts), samples, order)


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
