"""Attention in both directions within ranges of a row, over any backend that attends causally.

In: one step whose GroupStep names such ranges (the vectors of an image, a prompt). The backend's own plan writes keys
and values and attends as always; then the queries of each range are computed once more, over what came before, the
whole range and those behind that it reads too, and take the place of what was there. A window hides what lies further
back, also within a range, unless that says otherwise: as transformers' masks do. Plain torch on any device: such steps
are prompts. Steps without ranges are the backend's own. Must not know: models, requests, what a range is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.batch import AttentionPlan, BothWays, GroupStep, LayerCache
from quire.ops.attention import padded_attention
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind, KVSpec


@runtime_checkable
class ReadableCache(Protocol):
    """A cache whose tokens can be read by slot."""

    spec: KVSpec

    def read(self, slots: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...


class _RangeQueries(NamedTuple):
    """Queries of one range."""

    tokens: slice  # of the step
    slots: Tensor  # [L] of the keys
    mask: Tensor | None  # [M, L]; None: all of them are read


class BothWaysPlan:
    run_fused = None

    def __init__(self, plan: AttentionPlan, step: GroupStep, group: KVGroup) -> None:
        self._plan = plan
        self._window = group.window if group.kind is KVKind.WINDOW else 0
        self._parts = [self._part(step, group.block_size, one) for one in step.both_ways]

    def _part(self, step: GroupStep, block_size: int, one: BothWays) -> _RangeQueries:
        start = step.context_lens[one.entry] - step.query_lens[one.entry]
        low, device, window = max(one.first, start), step.block_tables.device, self._window
        queries = torch.arange(low, one.last, device=device)
        before = max(0, low - window + 1) if window else 0
        keys = torch.arange(min(before, one.first) if one.past_window else before, one.last, device=device)
        if one.later:
            keys = torch.cat((keys, *(torch.arange(*behind, device=device) for behind in one.later)))
        row = one.entry if step.row_index is None else step.row_index[one.entry].long()
        slots = step.block_tables[row][keys // block_size].long() * block_size + keys % block_size
        mask = None
        if len(keys) > window > 0:
            hidden = queries[:, None] - keys[None] >= window
            if one.past_window:
                hidden &= (keys < one.first)[None]
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
        begin = sum(step.query_lens[: one.entry]) + low - start
        return _RangeQueries(slice(begin, begin + len(queries)), slots, mask)

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
        if not isinstance(cache, ReadableCache) or alibi is not None:
            raise ConfigError("attention in both directions needs a cache that can be read by slot, and no distances")
        out = self._plan.run(q, k, v, cache, scale=scale, v_size=v_size, softcap=softcap, sinks=sinks)
        attend = padded_attention.on(q.device)
        for tokens, slots, mask in self._parts:
            keys, values = cache.read(slots, 1, q.dtype)
            attended = attend(
                q[tokens].transpose(0, 1)[None], keys, values, mask, scale=scale, softcap=softcap,
                sinks=None if sinks is None else sinks[:, None],
            )  # fmt: skip
            out[tokens] = attended[0, ..., : out.shape[-1]].transpose(0, 1)
        return out


class WithBothWays:
    """An attention backend whose steps may have ranges that attend in both directions."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention, self.name = attention, attention.name

    @classmethod
    def over(cls, attention: AttentionBackend, specs: Sequence[KVSpec]) -> WithBothWays:
        """ConfigError for layers that it cannot serve."""
        backend = cls(attention)
        for spec in specs:
            if reason := backend.supports(spec):
                raise ConfigError(f"attention backend {backend.name} cannot serve layer {spec.layer!r}: {reason}")
        return backend

    def supports(self, spec: KVSpec) -> str | None:
        if spec.kind is KVKind.CHUNK:
            return "attention in both directions and in chunks is not built"
        if spec.dtype == "int8" and self.name == "CPU_ATTN":
            return "attention in both directions over an int8 cache is not built on CPU: choose another kv_cache_dtype"
        return self.attention.supports(spec)

    def reads_pages(self, spec: KVSpec) -> bool:
        return self.attention.reads_pages(spec)

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        return self.attention.make_cache(spec, num_blocks, memory)

    def prepare(self, tokens: int, longest: int) -> None:
        self.attention.prepare(tokens, longest)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        plan = self.attention.plan(step, group)
        if not step.both_ways or group.kind not in (KVKind.FULL, KVKind.WINDOW):
            return plan
        return BothWaysPlan(plan, step, group)
