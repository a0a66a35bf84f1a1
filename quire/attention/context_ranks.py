"""Attention over a context whose tokens are divided among ranks (context parallelism for decode).

Ranks with the same heads of keys keep `interleave` tokens in a row each, in turn, so a block of the scheduler's has an
equal number of tokens on each of them, and what a rank keeps of a row is a context of its own: its token j is in block
j // share of the row's table, at offset j % share. All of them need the result of each other's queries:

    gather queries ──▶ attend over own keys ──▶ partial results, with the logarithm of their weight ──▶ merge per rank

Partial results are weighed and summed where their heads are (all-gather of weights, reduce-scatter), or exchanged
(all-to-all) and merged there. On CPU: plain torch over the caches of CpuAttention; a step's indices are made once, as
there. On GPUs: triton_context.py. Both: context_exchange.py. Must not know: models, requests, how ranks talk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.context_exchange import all_heads, merged, own_slots
from quire.attention.cpu import CpuAttention, CpuCache
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.ops.attention import by_distance, partial_attention
from quire.quant.shard import ContextRanks
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.kv import KVGroup, KVKind, KVSpec

DIVIDED = (KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK)  # kinds of KV whose tokens are divided
TILE = 256  # queries of a prompt per call
PACK_TOKENS = 1 << 14  # keys of decodes that are gathered for one call


class _Queries(NamedTuple):
    """Queries that are computed in one call, over what this rank keeps of their contexts."""

    tokens: Tensor  # [B * M] of the step, M of each row
    slots: Tensor  # [B * L]
    batch: int  # B
    positions: Tensor  # [B, M] of the queries
    keys: Tensor  # [B, L] positions of the keys; padding repeats a row's last one
    padding: Tensor | None  # bool [B, L]; None: there is none


class SharedContextPlan:
    run_fused = None

    def __init__(self, step: GroupStep, group: KVGroup, ranks: ContextRanks) -> None:
        self._ranks, self._share = ranks, group.block_size // ranks.size
        self._window = group.window if group.kind is KVKind.WINDOW else 0
        self._chunk = group.window if group.kind is KVKind.CHUNK else 0
        self._tables = step.block_tables.long()
        own = own_slots(step.slots, group.block_size, ranks)
        self._written = (own >= 0).nonzero().flatten()
        self._slots = own[self._written]
        self._parts = self._cut(step)

    # --- planning: once per step

    def _cut(self, step: GroupStep) -> list[_Queries]:
        """Decodes in packs, other rows by themselves; none of rows of which this rank keeps nothing that is read."""
        parts: list[_Queries] = []
        decodes: list[tuple[int, int, int, int]] = []  # row, token, keys before the first one, keys up to the last one
        token = 0
        for row, (count, context) in enumerate(zip(step.query_lens, step.context_lens, strict=True)):
            first, last = self._kept(self._first_key(context - count)), self._kept(context)
            if count == 1 and last > first:
                decodes.append((row, token, first, last))
            elif count and last > first:
                parts += self._tiles(row, token, context - count, context)
            token += count
        decodes.sort(key=lambda one: one[3] - one[2], reverse=True)
        while decodes:  # padded to the longest, which is the first
            most = max(1, PACK_TOKENS // (decodes[0][3] - decodes[0][2]))
            pack, decodes = decodes[:most], decodes[most:]
            positions = torch.tensor([[step.context_lens[row] - 1] for row, *_ in pack])
            parts.append(self._queries(pack, positions))
        return parts

    def _tiles(self, row: int, token: int, start: int, context: int) -> Iterator[_Queries]:
        """Some queries of a row at a time, each over no more keys than they may read."""
        for begin in range(start, context, TILE):
            end = min(begin + TILE, context)
            first, last = self._kept(self._first_key(begin)), self._kept(end)
            if last > first:
                yield self._queries([(row, token + begin - start, first, last)], torch.arange(begin, end)[None])

    def _queries(self, rows: list[tuple[int, int, int, int]], positions: Tensor) -> _Queries:
        """positions [B, M] of the queries."""
        index, tokens, first, last = torch.tensor(rows).t()
        width, ranks = int((last - first).max()), self._ranks
        places = first[:, None] + torch.arange(width)  # [B, L] among what this rank keeps of the row
        padding = places >= last[:, None]
        places = places.minimum(last[:, None] - 1)  # padding repeats the row's last key
        slots = self._tables[index[:, None], places // self._share] * self._share + places % self._share
        turns = places // ranks.interleave * ranks.size + ranks.rank
        keys = turns * ranks.interleave + places % ranks.interleave
        where = tokens[:, None] + torch.arange(positions.shape[1])
        has_padding = bool(padding.any())
        return _Queries(where.flatten(), slots.flatten(), len(rows), positions, keys, padding if has_padding else None)

    def _kept(self, length: int) -> int:
        """How many of a row's first tokens this rank keeps."""
        ranks = self._ranks
        turns, rest = divmod(length, ranks.interleave * ranks.size)
        return turns * ranks.interleave + min(max(rest - ranks.rank * ranks.interleave, 0), ranks.interleave)

    def _first_key(self, position: int) -> int:
        """The first position that a query at `position` may read."""
        if self._window:
            return max(0, position - self._window + 1)
        return position // self._chunk * self._chunk if self._chunk else 0

    # --- running: once per layer

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
        if not isinstance(cache, CpuCache):
            raise ConfigError(f"a context divided among ranks was given a cache of type {type(cache).__name__}")
        if cache.uncalibrated:
            cache.calibrate(k, v)
        cache.write(self._slots, k[self._written], None if v is None else v[self._written])
        queries = all_heads(q.transpose(0, 1), self._ranks)
        slopes = None if alibi is None else all_heads(alibi, self._ranks)
        size = v_size or cache.value_size
        out = queries.new_zeros((*queries.shape[:2], size), dtype=torch.float32)  # [Hq of all ranks, T, Dv]
        totals = queries.new_full(queries.shape[:2], float("-inf"), dtype=torch.float32)
        for part in self._parts:
            keys, values = cache.read(part.slots, part.batch, q.dtype)
            mine = queries[:, part.tokens].unflatten(1, (part.batch, -1)).transpose(0, 1)
            attended, total = partial_attention(
                mine, keys, values[..., :size], self._mask(part, slopes), scale=scale, softcap=softcap
            )
            out[:, part.tokens] = attended.transpose(0, 1).flatten(1, 2)
            totals[:, part.tokens] = total.transpose(0, 1).flatten(1, 2)
        return merged(out, totals, q.shape[1], self._ranks, sinks).transpose(0, 1).to(q.dtype)

    def _mask(self, part: _Queries, slopes: Tensor | None) -> Tensor | None:
        """[B, 1 or Hq, M, L]; None: every key is read."""
        one_each = part.positions.shape[1] == 1  # its keys were chosen for this query
        if slopes is None and part.padding is None and one_each:
            return None
        positions, keys = part.positions[..., None], part.keys[:, None]
        gap = positions - keys
        hidden = gap < 0
        if self._window:
            hidden |= gap >= self._window
        if self._chunk:
            hidden |= positions // self._chunk != keys // self._chunk
        if part.padding is not None:
            hidden |= part.padding[:, None]
        bias = torch.zeros(gap.shape)[:, None] if slopes is None else by_distance(slopes, gap).transpose(0, 1)
        return bias.masked_fill(hidden[:, None], float("-inf"))


class DividedCpuAttention:
    """Of groups of KV whose tokens are divided; caches are made for what one rank keeps."""

    name = CpuAttention.name

    def __init__(self, ranks: ContextRanks) -> None:
        self._ranks, self._own = ranks, CpuAttention()

    def supports(self, spec: KVSpec) -> str | None:
        return self._own.supports(spec)

    def reads_pages(self, spec: KVSpec) -> bool:
        return self._own.reads_pages(spec)

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        return self._own.make_cache(spec, num_blocks, memory)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        return SharedContextPlan(step, group, self._ranks)

    def prepare(self, tokens: int, longest: int) -> None:
        """Every shape of a step runs the same code."""


class WithContextRanks:
    """An attention backend of workers that keep a share of every context each."""

    def __init__(self, attention: AttentionBackend, divided: AttentionBackend) -> None:
        """`divided` has the groups whose tokens are divided, `attention` all others."""
        self.name, self._attention, self._divided = attention.name, attention, divided

    @classmethod
    def over(cls, attention: AttentionBackend, ranks: ContextRanks, specs: Sequence[KVSpec]) -> WithContextRanks:
        """NotBuiltError for layers that it cannot serve."""
        divided: AttentionBackend = DividedCpuAttention(ranks)
        if attention.name == "TRITON_ATTN":
            from quire.attention.triton_context import DividedTritonAttention  # lazy

            divided = DividedTritonAttention(ranks)
        backend = cls(attention, divided)
        for spec in specs:
            if reason := backend.supports(spec):
                raise NotBuiltError(
                    f"decode_context_parallel_size={ranks.size} cannot serve layer {spec.layer!r}: {reason}",
                    param="decode_context_parallel_size",
                )
        return backend

    def supports(self, spec: KVSpec) -> str | None:
        if spec.kind not in (*DIVIDED, KVKind.STATE):
            return f"KV of kind {spec.kind.value!r} is not divided among ranks"
        return self._of(spec).supports(spec)

    def reads_pages(self, spec: KVSpec) -> bool:
        return self._of(spec).reads_pages(spec)

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        return self._of(spec).make_cache(own_part(spec), num_blocks, memory)

    def prepare(self, tokens: int, longest: int) -> None:
        self._attention.prepare(tokens, longest)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        return self._of(group).plan(step, group)

    def _of(self, layers: KVSpec | KVGroup) -> AttentionBackend:
        return self._divided if layers.kind in DIVIDED else self._attention


def divide(specs: Sequence[KVSpec], ranks: ContextRanks) -> tuple[KVSpec, ...]:
    """Blocks of as many bytes as before, and of as many times more tokens as there are ranks."""
    return tuple(
        msgspec.structs.replace(spec, block_size=spec.block_size * ranks.size, context_ranks=ranks.size)
        if spec.kind in DIVIDED
        else spec
        for spec in specs
    )


def own_part(spec: KVSpec) -> KVSpec:
    """What one rank keeps."""
    return msgspec.structs.replace(spec, block_size=spec.block_size // spec.context_ranks, context_ranks=1)
