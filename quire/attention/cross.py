"""Cross-attention: plans for KV groups of kind CROSS, and the backend that adds them to self-attention.

In: one step of one such group, where GroupStep describes two texts: `query_lens` are the row's tokens in this step,
`context_lens` the tokens of its encoder output (complete from the row's first step on), `slots` the slots of the keys
and values of encoder outputs that arrive with this step. Out: a plan that writes those, and lets every query read
all of its row's. Where the backend's own plans read pages (PagedCrossPlan), every query is an entry of its own, which
sees its whole context; so decodes can be captured. In plain torch reading a context is one gather (CrossPlan).
Must not know: models, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.cpu import CpuCache
from quire.base import env
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.ops.alone import fresh
from quire.ops.attention import ragged_attention, write_cache
from quire.ops.copy import upload
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind, KVSpec


class CrossPlan:
    run_fused = None

    def __init__(self, step: GroupStep, block_size: int) -> None:
        self.query_lens, self.key_lens, self.slots = step.query_lens, step.context_lens, step.slots
        counts = np.asarray(step.context_lens, np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        tables = step.block_tables
        index = upload(np.stack((rows, offsets // block_size, offsets % block_size)), tables.device)
        row_of_key = index[0] if step.row_index is None else step.row_index[index[0]].long()
        self.read = tables[row_of_key, index[1]].long() * block_size + index[2]  # a slot for every key of every row

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: LayerCache | None,
        *,
        scale: float,
        v_size: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """k and v [S, Hkv, D]: of the encoder outputs that arrive with this step; S may be 0."""
        if not isinstance(cache, CpuCache) or v is None or alibi is not None:
            raise ConfigError("cross attention takes keys and values, a separate cache, and no distances")
        if len(k):
            write_cache.on(q.device)(cache.rows, self.slots, k, v)
        kv = cache.read(self.read, 1, q.dtype)
        keys, values = (part[0].transpose(0, 1) for part in kv)
        attend = partial(ragged_attention.on(q.device), scale=scale, softcap=softcap, sinks=sinks)
        if q.device.type == "cpu" and env.BATCH_INVARIANT.get():
            return self._one_by_one(attend, q, keys, values)
        return attend(q, keys, values, self.query_lens, self.key_lens)

    def _one_by_one(self, attend: Callable[..., Tensor], q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A call for each query, in new memory: results must not depend on how many of a row are in one step."""
        out, at, first = [], 0, 0
        for count, length in zip(self.query_lens, self.key_lens, strict=True):
            row_kv = [fresh(part[first : first + length]) for part in (keys, values)]
            out += [attend(fresh(q[i : i + 1]), *row_kv, [1], [length]) for i in range(at, at + count)]
            at, first = at + count, first + length
        return torch.cat(out)


class PagedCrossPlan:
    run_fused = None

    def __init__(self, step: GroupStep, group: KVGroup, attention: AttentionBackend) -> None:
        self._slots = step.slots
        if not step.is_static:
            counts = np.asarray(step.query_lens)
            entries = np.repeat(np.arange(len(counts)), counts)
            rows = upload(entries, step.block_tables.device)
            if step.row_index is not None:
                rows = step.row_index[rows]
            starts = torch.arange(len(entries) + 1, dtype=torch.int32, device=rows.device)
            nowhere = torch.full((len(entries),), -1, device=rows.device)  # queries bring no keys
            step = GroupStep(
                block_tables=step.block_tables, query_starts=starts, slots=nowhere, row_index=rows,
                context_lens=np.asarray(step.context_lens)[entries].tolist(), query_lens=[1] * len(entries),
            )  # fmt: skip
        self._plan = cast(PagedPlan, attention.plan(step, group))

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: LayerCache | None,
        *,
        scale: float,
        v_size: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """As CrossPlan."""
        if not isinstance(cache, WritableCache) or v is None or alibi is not None:
            raise ConfigError("cross attention takes keys and values, a separate cache, and no distances")
        if len(k):
            cache.write(self._slots, k, v)
        return self._plan.run(q, None, None, cache, scale=scale, softcap=softcap, sinks=sinks)


class PagedPlan(Protocol):
    """A plan that can attend to what is in a cache already."""

    def run(
        self, q: Tensor, k: None, v: None, cache: LayerCache | None, *, scale: float, softcap: float,
        sinks: Tensor | None,
    ) -> Tensor: ...  # fmt: skip


@runtime_checkable
class WritableCache(Protocol):
    """A cache to which tokens can be written by slot."""

    def write(self, slots: Tensor, k: Tensor, v: Tensor | None) -> None: ...


class WithCross:
    """An attention backend, plus cross-attention for the groups that need it."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention, self.name = attention, attention.name

    def supports(self, spec: KVSpec) -> str | None:
        if spec.kind is not KVKind.CROSS:
            return self.attention.supports(spec)
        if spec.dtype == "int8" or spec.dtype.startswith("float8"):
            return f"cross attention over a cache in 8 bits ({spec.dtype}) is not built"
        if spec.num_kv_heads * spec.head_size <= 0 or not hasattr(torch, spec.dtype):
            return f"cross attention over {spec.num_kv_heads} kv heads of size {spec.head_size} in {spec.dtype}"
        return None

    def reads_pages(self, spec: KVSpec) -> bool:
        return self.attention.reads_pages(spec)

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        if spec.kind is KVKind.CROSS:
            return CpuCache(spec, num_blocks, memory)
        return self.attention.make_cache(spec, num_blocks, memory)

    def prepare(self, tokens: int, longest: int) -> None:
        self.attention.prepare(tokens, longest)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        if group.kind is KVKind.CROSS:
            return CrossPlan(step, group.block_size)
        return self.attention.plan(step, group)


class WithPagedCross(WithCross):
    """The same, where the backend's plans attend over pages whatever text those hold."""

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        return self.attention.make_cache(spec, num_blocks, memory)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        if group.kind is KVKind.CROSS:
            return PagedCrossPlan(step, group, self.attention)
        return self.attention.plan(step, group)
