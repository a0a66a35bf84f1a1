"""Attention on CPU: decodes of similar length in one padded call, prompt chunks row by row, all indices per step.

A layer's cache is [num_slots, row]: a token's keys of all heads, then its values. Reading a context is one gather of
rows by slot; padding repeats the row's last token under a mask, so no memory of another request, and
no uninitialized memory, is ever read.

    one step:  rows with 1 query  ──sort by length──▶ packs of similar length, each: gather, one padded call
               rows with more     ──▶ fresh (context is the chunk itself): no gather, keys as just computed
                                  ──▶ continued: gather the context once, tiles of queries over it

A cache in float8 has one scale for a layer's keys and one for its values (ops/kv_codes.py); it is always read here,
never by the compiled kernels, and keys of this step are rounded as later steps will read them.

In batch-invariant mode every row is a continued chunk, and its tiles are FIXED_TILE positions each, starting at
multiples of that and padded if the step has only some of them: the shape of a matmul depends on the position
alone, and its operands are copied to new memory, whose alignment does not depend on the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attention.cpu_native import MAX_SIZE, MakePlan, NativePlan, is_float8, serves
from quire.base import env
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.ops.alone import fresh
from quire.ops.attention import by_distance, padded_attention, write_cache
from quire.ops.cpu.block import NativeCache
from quire.ops.cpu.native import kernels
from quire.ops.kv_codes import decode, encode, measured_scales, rounded
from quire.schema.errors import ConfigError
from quire.schema.kv import DTYPE_BYTES, KVGroup, KVKind, KVSpec

TILE = 256  # queries per call if a mask is needed
FIXED_TILE = 16  # queries per call in batch-invariant mode
PACK_TOKENS = 1 << 14  # gathered tokens per call: about 25 MB at a width of 384 float32
BAND_KEYS = 1 << 13  # keys before a tile up to which its mask is a slice of a stored band


class CpuCache(NativeCache):
    """`rows[slot]` is one token: keys of all kv heads, then values (none for latent attention), then int8's scales.
    `layer_scales` [2]: float8's scales of keys and values."""

    def __init__(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> None:
        self.spec = spec
        dtype = getattr(torch, spec.dtype)
        pages = memory.view(dtype)
        if pages.shape[1] % spec.block_size or memory.shape[0] < num_blocks:
            raise ConfigError(
                f"KV memory {tuple(memory.shape)} is too small for {num_blocks} blocks of {spec.block_size} tokens"
            )
        values = spec.head_size if spec.v_head_size < 0 else spec.v_head_size
        width, stride = spec.token_bytes // DTYPE_BYTES[spec.dtype], pages.shape[1] // spec.block_size
        self.rows = pages.as_strided((num_blocks * spec.block_size, width), (stride, 1), pages.storage_offset())
        self.heads, self.key_size, self.value_size = spec.num_kv_heads, spec.head_size, values
        self.layer_scales = torch.ones(2) if is_float8(spec.dtype) else None
        self.uncalibrated = False

    def calibrate(self, k: Tensor, v: Tensor | None) -> None:
        """Let these keys and values choose the layer's scales."""
        assert self.layer_scales is not None
        self.layer_scales.copy_(measured_scales(k, v))
        self.uncalibrated = False

    def read(self, slots: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tokens at slots [batch * L] -> keys and values [batch, Hkv, L, size]; one gather, then views."""
        keys = self.heads * self.key_size
        if self.layer_scales is not None:
            codes = self.rows.view(torch.uint8).index_select(0, slots).view(self.rows.dtype)
            k, v = (decode(codes[:, part], scale, dtype) for part, scale in self._parts(self.layer_scales))
            rows = torch.cat((k, v), 1).view(batch, -1, self.rows.shape[1])
        else:
            rows = self.rows.index_select(0, slots).view(batch, -1, self.rows.shape[1])
            if rows.dtype is not dtype:
                rows = rows.to(dtype)
        k = rows[..., :keys].unflatten(-1, (self.heads, self.key_size)).transpose(1, 2)
        if not self.value_size:
            return k, k
        return k, rows[..., keys:].unflatten(-1, (self.heads, self.value_size)).transpose(1, 2)

    def _parts(self, scales: Tensor) -> list[tuple[slice, Tensor]]:
        """Where keys and values are in a row, and their scales."""
        keys = self.heads * self.key_size
        return [(slice(keys), scales[:1]), (slice(keys, None), scales[1:])]

    def write(self, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """k [T, Hkv, D] and v [T, Hkv, Dv] to slots [T]."""
        if self.layer_scales is None:
            return _write(self.rows, slots, k, v)
        both = [k] if v is None else [k, v]
        scales = self.layer_scales.split(1)
        codes = [encode(x.flatten(1), scale, self.rows.dtype) for x, scale in zip(both, scales, strict=False)]
        # torch moves bytes where it cannot move float8
        rows = torch.cat([part.view(torch.uint8) for part in codes], 1)
        self.rows.view(torch.uint8).index_copy_(0, slots, rows)

    def as_read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of any shape, rounded to what later steps read."""
        stored = self.rows.dtype
        if self.layer_scales is not None:
            k_scale, v_scale = self.layer_scales.split(1)
            return rounded(k, k_scale, stored), rounded(v, v_scale if self.value_size else k_scale, stored)
        return k.to(stored).to(k.dtype), v.to(stored).to(v.dtype)


@dataclass
class Pack:
    """Decodes of similar length. `tokens` None: every token of the step, in order."""

    tokens: Tensor | None  # [B] index into the step's tokens
    slots: Tensor  # [B * L]
    lengths: Tensor  # [B] keys of each row without padding
    width: int  # L
    ragged: bool
    masks: dict[int, Tensor] = field(default_factory=dict)  # by slopes; made by the first layer that needs one


@dataclass
class QueryTile:
    """Queries [start, stop) of a chunk row, over keys [first, last) counted from the row's first gathered key."""

    start: int
    stop: int
    first: int
    last: int


@dataclass
class PrefillChunk:
    """One row with several queries. `slots` None: fresh, its keys are those of this step."""

    begin: int  # first token in the step
    end: int
    slots: Tensor | None
    plain: bool  # fresh, with causality as the only mask: one call without a mask tensor
    tiles: list[QueryTile] = field(default_factory=list)


class AttentionCall(NamedTuple):
    """One layer's call of the plan."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    cache: CpuCache
    out_size: int
    alibi: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float


class Bands:
    """Masks of tiles, as slices of one band per window: 0 where a query attends to a key, -inf elsewhere."""

    def __init__(self) -> None:
        self._stored: dict[int, Tensor] = {}

    def get(self, queries: int, before: int, window: int) -> Tensor:
        """[queries, before + queries] for a tile with `before` keys ahead of its first query."""
        if before > BAND_KEYS:
            return self._make(queries, before, window)
        band = self._stored.get(window)
        length = 0 if band is None else band.shape[1] - TILE
        if band is None or length < before:
            length = min(BAND_KEYS, max(256, 1 << before.bit_length()))
            band = self._stored[window] = self._make(TILE, length, window)
        return band[:queries, length - before : length + queries]

    @staticmethod
    def _make(queries: int, before: int, window: int) -> Tensor:
        gap = _distances(queries, before)
        hidden = gap < 0 if not window else (gap < 0) | (gap >= window)
        return torch.zeros(gap.shape).masked_fill_(hidden, float("-inf"))


_attend, _write = padded_attention.on("cpu"), write_cache.on("cpu")


class CpuPlan:
    run_fused = None

    def __init__(self, step: GroupStep, group: KVGroup, bands: Bands, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.window = group.window if group.kind is KVKind.WINDOW else 0
        self.chunk = group.window if group.kind is KVKind.CHUNK else 0
        self.block_size, self.bands, self.slots = group.block_size, bands, step.slots
        self.num_tokens = sum(step.query_lens)
        self._tables = step.block_tables.long()
        self.packs: list[Pack] = []
        self.chunks: list[PrefillChunk] = []
        self._cut(step)

    # --- planning: once per step ---------------------------------------------------------------------------------

    def _cut(self, step: GroupStep) -> None:
        """Sort rows into packs of decodes and chunks."""
        decodes: list[tuple[int, int, int]] = []  # (keys, row, token)
        token = 0
        for row, (count, context) in enumerate(zip(step.query_lens, step.context_lens, strict=True)):
            if count == 1 and not self.fixed:
                decodes.append((context - self._first_key(context - 1), row, token))
            elif count:
                self.chunks.append(self._chunk(row, token, count, context))
            token += count
        ordered = len(decodes) == self.num_tokens
        if decodes and (not ordered or not _alike([keys for keys, _, _ in decodes])):
            decodes.sort(reverse=True)
            ordered = False
        for part in _packs(decodes):
            whole = ordered and len(part) == len(decodes)
            self.packs.append(self._pack(part, [step.context_lens[row] for _, row, _ in part], whole=whole))

    def _first_key(self, position: int) -> int:
        """The first position a query at `position` may read."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0

    def _pack(self, rows: list[tuple[int, int, int]], contexts: list[int], *, whole: bool) -> Pack:
        keys = torch.tensor([n for n, _, _ in rows])
        index = torch.tensor([row for _, row, _ in rows])
        width = int(keys.max())
        spread = torch.arange(width)[None].minimum(keys[:, None] - 1)
        positions = (torch.tensor(contexts) - keys)[:, None] + spread  # [B, L]; padding repeats the row's last token
        blocks = self._tables[index[:, None], positions // self.block_size]
        slots = blocks.mul_(self.block_size).add_(positions % self.block_size).flatten()
        tokens = None if whole else torch.tensor([token for _, _, token in rows])
        return Pack(tokens, slots, keys, width, ragged=int(keys.min()) < width)

    def _chunk(self, row: int, token: int, count: int, context: int) -> PrefillChunk:
        start = context - count
        if self.fixed:
            return self._fixed_chunk(row, token, count, context)
        base = self._first_key(start)
        fresh = start == 0
        slots = None
        if not fresh:
            positions = torch.arange(base, context)
            blocks = self._tables[row, positions // self.block_size]
            slots = blocks.mul_(self.block_size).add_(positions % self.block_size)
        open_ = not (self.window and context > self.window) and not (self.chunk and context > self.chunk)
        return PrefillChunk(token, token + count, slots, fresh and open_, list(self._tiles(start, context, base)))

    def _fixed_chunk(self, row: int, token: int, count: int, context: int) -> PrefillChunk:
        """Full tiles around the queries; missing keys repeat an existing one and are masked."""
        start = context - count
        borders = [self._border(start)]
        while borders[-1] < context:
            borders.append(self._border_after(borders[-1]))
        low, high = borders[0], borders[-1]
        base = self._first_key(low)
        positions = torch.arange(base, high).clamp_(self._first_key(start), context - 1)
        blocks = self._tables[row, positions // self.block_size]
        slots = blocks.mul_(self.block_size).add_(positions % self.block_size)
        tiles = [QueryTile(a - start, b - start, self._first_key(a) - base, b - base) for a, b in pairwise(borders)]
        return PrefillChunk(token, token + count, slots, False, tiles)

    def _border(self, position: int) -> int:
        """Start of the tile that contains `position`: a multiple of FIXED_TILE, or the start of an attention chunk."""
        tile = position // FIXED_TILE * FIXED_TILE
        return max(tile, position // self.chunk * self.chunk) if self.chunk else tile

    def _border_after(self, position: int) -> int:
        """Start of the tile after the one that contains `position`; a tile is within one attention chunk."""
        tile = (position // FIXED_TILE + 1) * FIXED_TILE
        return min(tile, (position // self.chunk + 1) * self.chunk) if self.chunk else tile

    def _tiles(self, start: int, context: int, base: int) -> Iterator[QueryTile]:
        """Tiles never cross a chunk boundary, so one band fits all queries of a tile."""
        at = start
        while at < context:
            stop = min(at + TILE, context, (at // self.chunk + 1) * self.chunk if self.chunk else context)
            yield QueryTile(at - start, stop - start, self._first_key(at) - base, stop - base)
            at = stop

    # --- running: once per layer -----------------------------------------------------------------------------------

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
            raise ConfigError(f"the CPU attention plan was given a cache of type {type(cache).__name__}")
        if cache.uncalibrated:
            cache.calibrate(k, v)
        cache.write(self.slots, k, v)
        call = AttentionCall(q, k, v, cache, v_size or cache.value_size, alibi, sinks, scale, softcap)
        if len(self.packs) == 1 and self.packs[0].tokens is None:
            return self._run_pack(self.packs[0], call, q)
        out = torch.empty((q.shape[0], q.shape[1], call.out_size), dtype=q.dtype)
        for pack in self.packs:
            assert pack.tokens is not None
            out.index_copy_(0, pack.tokens, self._run_pack(pack, call, q.index_select(0, pack.tokens)))
        for chunk in self.chunks:
            self._run_chunk(chunk, call, out)
        return out

    def _run_pack(self, pack: Pack, call: AttentionCall, q: Tensor) -> Tensor:
        """q [B, Hq, D] -> [B, Hq, Dv]. Query heads that share a kv head become its queries."""
        (batch, heads, size), kv_heads = q.shape, call.cache.heads
        per = heads // kv_heads
        keys, values = call.cache.read(pack.slots, batch, q.dtype)
        sinks = None if call.sinks is None else call.sinks.view(kv_heads, per)
        mask = self._pack_mask(pack, call.alibi, kv_heads, per)
        folded = q.reshape(batch, kv_heads, per, size)
        out = _attend(folded, keys, values, mask, sinks=sinks, scale=call.scale, softcap=call.softcap)
        return out.reshape(batch, heads, -1)[..., : call.out_size]

    @staticmethod
    def _pack_mask(pack: Pack, alibi: Tensor | None, kv_heads: int, per: int) -> Tensor | None:
        """[B, 1, per, L] (with slopes [B, Hkv, per, L]), or None if nothing is masked."""
        if not pack.ragged and alibi is None:
            return None
        key = 0 if alibi is None else alibi.data_ptr()
        if key not in pack.masks:
            columns = torch.arange(pack.width)
            hidden = (columns[None] >= pack.lengths[:, None])[:, None, None]  # [B, 1, 1, L]
            bias = torch.zeros(hidden.shape)
            if alibi is not None:
                gap = pack.lengths[:, None] - 1 - columns
                bias = by_distance(alibi, gap).transpose(0, 1).unflatten(1, (kv_heads, per))
            pack.masks[key] = bias.masked_fill(hidden, float("-inf")).expand(-1, -1, per, -1)
        return pack.masks[key]

    def _run_chunk(self, chunk: PrefillChunk, call: AttentionCall, out: Tensor) -> None:
        q = call.q[chunk.begin : chunk.end].transpose(0, 1)[None]  # [1, Hq, M, D]
        keys, values = self._chunk_keys(chunk, call)
        sinks = None if call.sinks is None else call.sinks[:, None]
        if chunk.plain and sinks is None and call.alibi is None and not call.softcap:
            attended = _attend(q, keys, values, None, causal=True, scale=call.scale)
            out[chunk.begin : chunk.end] = attended[0, ..., : call.out_size].transpose(0, 1)
            return
        for tile in chunk.tiles:
            queries, span = tile.stop - tile.start, slice(tile.first, tile.last)
            before = tile.last - tile.first - queries
            mask = self.bands.get(queries, before, self.window)
            if call.alibi is not None:
                mask = mask + by_distance(call.alibi, _distances(queries, before).clamp_(min=0))
            here = slice(max(tile.start, 0), min(tile.stop, q.shape[2]))
            part = q[:, :, here]
            if part.shape[2] < queries:
                part = F.pad(part, (0, 0, here.start - tile.start, tile.stop - here.stop))
            operands = [part, keys[:, :, span], values[:, :, span], mask]
            if self.fixed:
                operands = [fresh(tensor) for tensor in operands]
            attended = _attend(*operands, sinks=sinks, scale=call.scale, softcap=call.softcap)
            attended = attended[:, :, here.start - tile.start : here.stop - tile.start]
            tokens = slice(chunk.begin + here.start, chunk.begin + here.stop)
            out[tokens] = attended[0, ..., : call.out_size].transpose(0, 1)

    @staticmethod
    def _chunk_keys(chunk: PrefillChunk, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Keys and values [1, Hkv, L, size] of a chunk's context."""
        if chunk.slots is not None:
            return call.cache.read(chunk.slots, 1, call.q.dtype)
        k = call.k[chunk.begin : chunk.end].transpose(0, 1)[None]
        v = k if call.v is None else call.v[chunk.begin : chunk.end].transpose(0, 1)[None]
        return (k, v) if call.cache.rows.dtype is k.dtype else call.cache.as_read(k, v)


def _distances(queries: int, before: int) -> Tensor:
    """[queries, before + queries]: position of the query minus position of the key."""
    return torch.arange(queries)[:, None] + before - torch.arange(before + queries)[None]


def _alike(keys: list[int]) -> bool:
    """Little padding: at most a quarter, or a block."""
    longest = max(keys)
    return longest * len(keys) - sum(keys) <= max(sum(keys) // 4, 16 * len(keys))


def _packs(decodes: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Split decodes (sorted by length, or equally long) where padding or size gets too large."""
    part: list[tuple[int, int, int]] = []
    longest = 0
    for row in decodes:
        top = max(longest, row[0])
        if part and (top * (len(part) + 1) > PACK_TOKENS or row[0] < longest * 3 // 4 - 16):
            yield part
            part, top = [], row[0]
        part.append(row)
        longest = top
    if part:
        yield part


def _plan_by_layer(
    native: MakePlan, other: MakePlan, unserved: set[str], step: GroupStep, group: KVGroup
) -> AttentionPlan:
    return (native if unserved.isdisjoint(group.layers) else other)(step, group)


class CpuAttention:
    name = "CPU_ATTN"

    def __init__(self, *, fixed: bool | None = None, native: bool = True) -> None:
        """fixed: batch-invariant arithmetic. native: through the compiled kernels, if there are any."""
        fixed = env.BATCH_INVARIANT.get() if fixed is None else fixed
        library = kernels() if native else None
        self._torch_plan: MakePlan = partial(CpuPlan, bands=Bands(), fixed=fixed)
        self._native_plan = None if library is None else partial(NativePlan, library.qc_attend, self._torch_plan)
        self._unserved: set[str] = set()  # layers that the kernels do not support
        self.plan: MakePlan = self._native_plan or self._torch_plan

    def supports(self, spec: KVSpec) -> str | None:
        if spec.kind not in (KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK):
            return f"no CPU attention for KV of kind {spec.kind.value!r}"
        if spec.dtype == "int8" and (self._native_plan is None or not serves(spec)):
            return f"an int8 cache needs the compiled kernels, and heads of one size up to {MAX_SIZE}"
        if spec.dtype not in ("float32", "bfloat16", "float16", "int8") and not is_float8(spec.dtype):
            return f"no CPU attention over a {spec.dtype} cache"
        if DTYPE_BYTES[spec.dtype] * spec.num_kv_heads * spec.head_size <= 0:
            return f"{spec.num_kv_heads} kv heads of size {spec.head_size}"
        return None

    def reads_pages(self, spec: KVSpec) -> bool:
        return self._native_plan is not None and serves(spec)

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        if self._native_plan is not None and not serves(spec):
            self._unserved.add(spec.layer)
            self.plan = partial(_plan_by_layer, self._native_plan, self._torch_plan, self._unserved)
        return CpuCache(spec, num_blocks, memory)

    def prepare(self, tokens: int, longest: int) -> None:
        """There is nothing to prepare."""
