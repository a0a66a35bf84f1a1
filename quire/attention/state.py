"""Recurrent states: plans and caches for KV groups of kind STATE, and the backend that adds them to attention.

In: one step of one KV group of kind STATE. Out: a StatePlan, whose StateWork has for every token the block of the
state before it and that of the state after it. Block i of a state covers positions [i * size, (i + 1) * size) of its
row: it holds the state after the last computed one of them, so a step reads the block of the position before its
first one and writes every block it touches. States after drafts go to spare blocks, each to one of its own, because it
is not known yet which of them will be wanted. Must not know: models, requests, the contents of a state.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.base import env
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.layers.ssm import StateCache, StatePlan
from quire.ops.copy import upload
from quire.ops.ssm import FRESH, KEPT, StateWork, state_places
from quire.schema.kv import KVGroup, KVKind, KVSpec


class WithStates:
    """An attention backend, plus recurrent states for the groups that have them."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention, self.name = attention, attention.name
        self._single = env.BATCH_INVARIANT.get() and attention.name == "CPU_ATTN"

    def supports(self, spec: KVSpec) -> str | None:
        return None if spec.kind is KVKind.STATE else self.attention.supports(spec)

    def reads_pages(self, spec: KVSpec) -> bool:
        return spec.kind is not KVKind.STATE and self.attention.reads_pages(spec)

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        if spec.kind is KVKind.STATE:
            return StateCache(spec, num_blocks, memory)
        return self.attention.make_cache(spec, num_blocks, memory)

    def prepare(self, tokens: int, longest: int) -> None:
        self.attention.prepare(tokens, longest)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        if group.kind is not KVKind.STATE:
            return self.attention.plan(step, group)
        if step.is_decode and step.contexts is not None:
            return StatePlan(decode_work(step, group.block_size))
        return StatePlan(mixed_work(step, group.block_size, single=self._single))


def decode_work(step: GroupStep, size: int) -> StateWork:
    """Every entry computes one token; everything is computed on the device, so it can be captured."""
    assert step.contexts is not None
    load, store = state_places.on(step.contexts.device)(step.block_tables, step.row_index, step.contexts, size)
    pieces = step.contexts.new_empty((0, 4))
    return StateWork(None, load, store, pieces, np.empty((0, 3), np.int32))


def mixed_work(step: GroupStep, size: int, *, single: bool = False) -> StateWork:
    """Rows of one token, and longer ones split at block boundaries. `single`: all split into single tokens, each
    from the stored state of the previous one, so nothing depends on where a step starts or what else is in it."""
    counts, contexts = np.asarray(step.query_lens, np.int64), np.asarray(step.context_lens, np.int64)
    ends = np.cumsum(counts)
    rows = np.flatnonzero((counts == 1) & (not single))
    decodes = np.stack((ends[rows] - 1, rows, contexts[rows] - 1, contexts[rows] - 1), 1)  # token, row, start, last
    cuts, spans, spares = [], [], list[tuple[int, int]]()  # spares: that a piece loads and stores, if it does
    spare = step.spare
    for row in np.flatnonzero(counts > (0 if single else 1)).tolist():
        first, end_of_row = int(contexts[row] - counts[row]), int(contexts[row])
        token = int(ends[row] - counts[row]) - first  # of position 0
        drafted = end_of_row - step.num_drafts[row] if step.num_drafts else end_of_row  # the first that may be wrong
        inner = range(first + 1, drafted) if single else range((first // size + 1) * size, drafted, size)
        edges = sorted({first, *inner, *range(drafted, end_of_row + 1)})
        for start, end in pairwise(edges):
            is_continued = int(start > first and not single)
            cuts.append((token + end - 1, row, -1 if is_continued else start, end - 1))
            spans.append((token + start, token + end, is_continued))
            is_draft = start >= drafted
            spares.append((spare - 1 if start > drafted else -1, spare if is_draft else -1))
            spare += is_draft
    positions = np.concatenate((decodes, np.array(cuts, np.int64).reshape(-1, 4)))
    load, store = _blocks(step, positions, size)
    num = len(rows)
    if step.num_drafts:
        own = upload(np.array(spares, np.int64).reshape(-1, 2), load.device)
        load[num:] = torch.where(own[:, 0] >= 0, own[:, 0], load[num:])
        store[num:] = torch.where(own[:, 1] >= 0, own[:, 1], store[num:])
    span = np.array(spans, np.int32).reshape(-1, 3)
    device = load.device
    sent = upload(np.concatenate((span.ravel(), decodes[:, 0].astype(np.int32))), device)
    bounds, tokens = sent[: span.size].view(-1, 3), sent[span.size :].long()
    loads = torch.where(bounds[:, 2] > 0, KEPT, load[num:])
    pieces = torch.cat((bounds[:, :2], torch.stack((loads, store[num:]), 1).int()), 1)
    whole = num == int(ends[-1]) if len(ends) else True
    return StateWork(None if whole else tokens, load[:num], store[:num], pieces, span)


def _blocks(step: GroupStep, positions: np.ndarray, size: int) -> tuple[Tensor, Tensor]:
    """Blocks read and written by [n, 4] (token, row, start or -1, last position): int64 [n], FRESH at a start."""
    start, last = positions[:, 2], positions[:, 3]
    before = np.where(start > 0, (start - 1) // size, 0)
    tables = step.block_tables
    index = upload(np.stack((positions[:, 1], before, last // size, start > 0)), tables.device)
    rows = index[0] if step.row_index is None else step.row_index[index[0]].long()
    load = torch.where(index[3] > 0, tables[rows, index[1]].long(), FRESH)
    return load, tables[rows, index[2]].long()
