"""Attention on CUDA: Triton kernels over paged caches, for eager steps of any mix and for captured decode steps.

In memory a page is [kv heads, tokens, entries] of keys, then the same of values. One step becomes one or two work lists
(ops/triton/attention.py), made at the first layer that runs and shared by those of the same shape:

    host lists    eager: decodes and rows of few queries ──▶ "few", small tiles; all others ──▶ "many", large tiles
    device list   captured decodes: cut into parts by a kernel from the contexts of the moment, the grid is fixed
    fixed         one tile shape for everything and no parts: a query's arithmetic never depends on its neighbours

Must not know: models, requests, how rows come and go.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.base import env
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.ops.copy import upload
from quire.ops.qkv import QkvPrep, prepare_qkv
from quire.ops.triton.attention import MAX_SPLITS, Shape, Tiles, Work, attend, plan_splits, width_of, workspace_floats
from quire.ops.triton.attention_cache import write_pages
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind, KVSpec

LEAST_FEW, LEAST_MANY = 2, 4  # key tiles worth a part of their own
LIBRARY_TOKENS = 256  # fresh prompts at least this long may go to torch's own attention
LIBRARY_ROUND = 256  # and are read as if this much longer, so that few shapes are ever prepared


class TritonCache:
    """`keys` and `values` [num_blocks, block_size, kv heads, size]; values None: latent, a slice of the keys."""

    def __init__(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> None:
        self.spec = spec
        pages = memory.view(getattr(torch, spec.dtype))
        heads, page, size = spec.num_kv_heads, spec.block_size, spec.head_size
        value = size if spec.v_head_size < 0 else spec.v_head_size
        if memory.shape[0] < num_blocks or pages.shape[1] < heads * page * (size + value):
            raise ConfigError(
                f"KV memory {tuple(memory.shape)} does not hold {num_blocks} blocks of {spec.page_bytes} bytes"
            )
        at, stride = pages.storage_offset(), pages.stride(0)
        self.keys = pages.as_strided((num_blocks, page, heads, size), (stride, size, page * size, 1), at)
        self.values: Tensor | None = None
        if value:
            strides = (stride, value, page * value, 1)
            self.values = pages.as_strided((num_blocks, page, heads, value), strides, at + heads * page * size)


def write_kv(k: Tensor, v: Tensor | None, cache: TritonCache, slots: Tensor) -> None:
    """k [T, Hkv, D], v [T, Hkv, Dv] to slots [T]; -1: nowhere."""
    write_pages(_dense(k), None if v is None else _dense(v), cache.keys, cache.values, slots)


class Workspace:
    """Float32 room for partial results. It only grows, and old pieces stay: a captured graph may still point there."""

    def __init__(self) -> None:
        self._pieces: dict[torch.device, list[Tensor]] = {}

    def get(self, floats: int, device: torch.device) -> Tensor:
        pieces = self._pieces.setdefault(device, [])
        if not pieces or len(pieces[-1]) < floats:
            size = max(floats, 2 * len(pieces[-1]) if pieces else 1 << 20)
            pieces.append(torch.empty(size, dtype=torch.float32, device=device))
        return pieces[-1]


class Call(NamedTuple):
    """What decides the shape of a work list: layers that agree in these share it."""

    group: int  # query heads per kv head
    kv_heads: int
    value: int  # entries of a result per head
    few: Tiles
    many: Tiles
    library: bool

    @classmethod
    def of(cls, backend: TritonAttention, q: Tensor, heads: int, cache: TritonCache, v_size: int, plain: bool) -> Call:
        """plain: nothing but causality changes the scores, and this step's keys and values are at hand."""
        kv_heads, dk = cache.keys.shape[2:]
        dv = v_size if cache.values is None else cache.values.shape[3]
        group = heads // kv_heads
        few, many = backend.tiles(q.dtype, dk, dv, cache.values is None, group)
        library = backend.library and plain and q.dtype != torch.float32 and dk == dv and dk <= 128
        return cls(group, kv_heads, dv, few, many, library)


def choose_tiles(dtype: torch.dtype, dk: int, dv: int, *, latent: bool, group: int) -> tuple[Tiles, Tiles]:
    """(few, many): tile shapes for Hopper. Shared memory holds the queries and num_stages tiles of keys and values."""
    width = max(width_of(dv if latent else dk), width_of(dv))
    wide = group > 16  # a decode fills the larger tiles
    if dtype == torch.float32:  # no tensor cores: exactness is why one runs in float32
        if width > 128:
            return Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)
        return Tiles(16, 16, 4, 2), Tiles(32, 32, 8, 1)
    if width > 256:
        return Tiles(64, 32, 8, 2) if wide else Tiles(16, 32, 8, 3), Tiles(64, 32, 8, 2)
    if width > 128:
        return Tiles(64 if wide else 16, 32, 4, 3), Tiles(128, 32, 8, 3, True)
    return Tiles(64 if wide else 16, 64, 4, 3), Tiles(128, 64, 8, 3, True)


class HostLists:
    """Work lists of one eager step, made with numpy and sent in one copy."""

    def __init__(self, step: GroupStep, shape: Shape, sms: int, fixed: bool) -> None:
        self.shape, self.sms, self.fixed, self.device = shape, sms, fixed, step.block_tables.device
        counts = np.asarray(step.query_lens, np.int32)
        contexts = np.asarray(step.context_lens, np.int32)
        rows = np.arange(len(counts), dtype=np.int32)
        self.starts = np.cumsum(counts, dtype=np.int32) - counts
        self.entries = np.stack((rows, self.starts, counts, contexts), 1)  # [R, 4]
        window = shape.window or shape.chunk
        plain = (contexts <= window) if window else np.ones(len(counts), np.bool_)
        self.fresh = plain & (counts == contexts) & (counts >= LIBRARY_TOKENS)

    def prompts(self, call: Call) -> list[tuple[int, int]]:
        """(first token, tokens) of the rows that torch's own attention takes."""
        if not call.library:
            return []
        return [(int(start), int(count)) for _, start, count, _ in self.entries[self.fresh]]

    def make(self, call: Call) -> list[Work]:
        flats = self.entries[:, 2] * call.group
        left = flats > 0
        if call.library:
            left &= ~self.fresh
        few = left & ((flats <= call.few.block_m) | (self.entries[:, 2] == 1)) & (not self.fixed)
        parts = [(few, call.few), (left & ~few, call.many)]
        lists = [self._list(self.entries[which], call, tiles) for which, tiles in parts if which.any()]
        if not lists:
            return []
        sent = upload(np.concatenate([table for part in lists for table in part[:2]]), self.device)
        out, at = [], 0
        for items, merges, partials, held, tiles in lists:
            middle, end = at + len(items), at + len(items) + len(merges)
            split = sent[middle:end] if len(merges) else None
            out.append(Work(sent[at:middle], split, partials, held, tiles, not self.fixed))
            at = end
        return out

    def _list(self, entries: np.ndarray, call: Call, tiles: Tiles) -> tuple[np.ndarray, np.ndarray, int, int, Tiles]:
        """(items, merges, partials, flats held, tiles) of these entries, longest work first."""
        is_few = tiles is call.few
        cuts = _cdiv(entries[:, 2] * call.group, tiles.block_m)  # tiles per row
        entry = np.repeat(entries, cuts, 0)  # [tiles, 4]
        flat = (np.arange(len(entry)) - np.repeat(np.cumsum(cuts) - cuts, cuts)).astype(np.int32) * tiles.block_m
        keys = self._key_tiles(entry, flat, call.group, tiles)
        splits = np.ones(len(entry), np.int64)
        if not self.fixed and (is_few or len(entry) * call.kv_heads < 2 * self.sms):
            least = LEAST_FEW if is_few else LEAST_MANY
            target = parts_wanted(len(entry), call.kv_heads, self.sms)
            splits = np.clip(_cdiv(keys, max(least, _cdiv(int(keys.sum()), target))), 1, MAX_SPLITS)
        many = splits > 1
        kept = np.where(many, splits, 0)
        record = np.empty((len(entry), 8), np.int32)
        record[:, :4], record[:, 4], record[:, 5] = entry, flat, 0
        record[:, 6], record[:, 7] = splits, np.cumsum(kept) - kept
        items = np.repeat(record, splits, 0)
        items[:, 5] = np.arange(len(items)) - np.repeat(np.cumsum(splits) - splits, splits)
        order = np.argsort(-np.repeat(keys / splits, splits), kind="stable")
        held = min(tiles.block_m, int(entries[:, 2].max()) * call.group)
        return items[order], record[many], int(kept.sum()), held, tiles

    def _key_tiles(self, entry: np.ndarray, flat: np.ndarray, group: int, tiles: Tiles) -> np.ndarray:
        """How many tiles of keys each tile of queries reads; as _attend_kernel counts them."""
        before, count = entry[:, 3] - entry[:, 2], entry[:, 2]
        low = before + flat // group
        high = before + np.minimum((flat + tiles.block_m - 1) // group, count - 1)
        first = first_key(low, self.shape)
        return _cdiv(high + 1, tiles.block_n) - first // tiles.block_n


class DeviceLists:
    """The work list of a captured decode step: fixed room, filled by a kernel from the contexts of the moment."""

    def __init__(self, step: GroupStep, shape: Shape, sms: int, fixed: bool) -> None:
        if step.row_index is None or step.contexts is None or not step.is_decode:
            raise ConfigError("a static attention plan needs row_index, contexts and one query per entry")
        self.rows, self.contexts, self.shape, self.sms, self.fixed = step.row_index, step.contexts, shape, sms, fixed

    def prompts(self, call: Call) -> list[tuple[int, int]]:
        return []

    def make(self, call: Call) -> list[Work]:
        tiles = call.many if self.fixed else call.few
        entries, device = len(self.contexts), self.contexts.device
        num = entries * _cdiv(call.group, tiles.block_m)
        # In fixed mode one part each: no room for more is asked for, so none is made.
        target = 0 if self.fixed else parts_wanted(num, call.kv_heads, self.sms)
        most = 1 if self.fixed else min(MAX_SPLITS, target)
        lists = torch.empty((target + 2 * num, 8), dtype=torch.int32, device=device)
        items, merges = lists[: target + num], lists[target + num :]
        plan_splits(
            items, merges, self.rows, self.contexts, self.shape, count=1, group=call.group, tiles=tiles,
            target=max(1, target), least=LEAST_FEW, most=most,
        )  # fmt: skip
        held = min(tiles.block_m, call.group)
        return [Work(items, None if self.fixed else merges, len(items), held, tiles, not self.fixed)]


class TritonPlan:
    def __init__(self, step: GroupStep, group: KVGroup, backend: TritonAttention) -> None:
        window = group.window if group.kind is KVKind.WINDOW else 0
        chunk = group.window if group.kind is KVKind.CHUNK else 0
        self.shape = Shape(group.block_size, window, chunk)
        self.slots, self.tables, self.backend = step.slots, step.block_tables, backend
        sms = backend.sms(step.block_tables.device)
        self.lists = (DeviceLists if step.is_static else HostLists)(step, self.shape, sms, backend.fixed)
        if isinstance(self.lists, HostLists) and step.row_index is not None:
            # entries are numbered by their place in the step; their rows of the table are known to the device only
            self.tables = self.tables.index_select(0, step.row_index)
        self._made: dict[Call, list[Work]] = {}
        self._captured = False
        self._prepare = prepare_qkv.on(step.slots.device)

    def run_fused(
        self,
        qkv: Tensor,
        prep: QkvPrep,
        cache: LayerCache | None,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """Norm, rotation and the write to the cache in one pass over the fused product; then attend."""
        if not isinstance(cache, TritonCache) or cache.values is None:
            raise ConfigError(f"a fused run needs a cache of keys and values, not {type(cache).__name__}")
        call = Call.of(self.backend, qkv, prep.heads, cache, 0, plain=not softcap and sinks is None and alibi is None)
        fresh = self.lists.prompts(call)
        q = self._prepare(qkv, prep, cache.keys, cache.values, self.slots, bool(fresh))
        out = self._attend(call, q, cache, scale=scale, softcap=softcap, sinks=sinks, alibi=alibi)
        if fresh:
            kv = qkv.view(q.shape[0], -1, q.shape[2])[:, prep.heads :]
            self._attend_prompts(fresh, q, kv[:, : prep.kv_heads], kv[:, prep.kv_heads :], out, scale)
        return out

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache | None,
        *,
        scale: float,
        v_size: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """k None: this step's keys and values already lie in the cache (written by the op that made them)."""
        if not isinstance(cache, TritonCache):
            raise ConfigError(f"the Triton attention plan was given a cache of type {type(cache).__name__}")
        if k is not None:
            write_kv(k, v, cache, self.slots)
        q = _dense(q)
        plain = k is not None and v is not None and not softcap and sinks is None and alibi is None
        call = Call.of(self.backend, q, q.shape[1], cache, v_size, plain=plain)
        out = self._attend(call, q, cache, scale=scale, softcap=softcap, sinks=sinks, alibi=alibi)
        if plain and k is not None and v is not None:
            self._attend_prompts(self.lists.prompts(call), q, k, v, out, scale)
        return out

    def _attend(
        self, call: Call, q: Tensor, cache: TritonCache, *, scale: float, softcap: float, sinks: Tensor | None,
        alibi: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty((q.shape[0], q.shape[1], call.value), dtype=q.dtype, device=q.device)
        for work in self._works(call):
            space = self.backend.workspace.get(workspace_floats(work, call.kv_heads, call.value), q.device)
            attend(
                q, cache.keys, cache.values, self.tables, work, out, space, self.shape,
                scale=scale, softcap=softcap, sinks=sinks, alibi=alibi,
            )  # fmt: skip
        return out

    @staticmethod
    def _attend_prompts(
        prompts: list[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float
    ) -> None:
        for start, count in prompts:
            prompt_attention(q, k, v, out, start, count, scale)

    def _works(self, call: Call) -> list[Work]:
        """Made once per step. A list made outside a capture is made again inside it: the graph must hold the kernel."""
        captured = self.slots.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured != self._captured:
            self._made.clear()
            self._captured = captured
        if call not in self._made:
            self._made[call] = self.lists.make(call)
        return self._made[call]


class TritonAttention:
    name = "TRITON_ATTN"

    def __init__(self, *, fixed: bool | None = None, library: bool = False) -> None:
        """fixed: batch-invariant arithmetic. library: fresh prompts through torch's own attention."""
        self.fixed = env.BATCH_INVARIANT.get() if fixed is None else fixed
        self.library = library and not self.fixed
        self.workspace = Workspace()
        self._sms: dict[torch.device, int] = {}
        self._tiles: dict[tuple[torch.dtype, int, int, bool, int], tuple[Tiles, Tiles]] = {}

    def supports(self, spec: KVSpec) -> str | None:
        if spec.kind not in (KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK):
            return f"no Triton attention for KV of kind {spec.kind.value!r}"
        if spec.dtype not in ("float32", "bfloat16", "float16"):
            return f"no Triton attention over a {spec.dtype} cache"
        if spec.num_kv_heads <= 0 or spec.head_size <= 0:
            return f"{spec.num_kv_heads} kv heads of size {spec.head_size}"
        if spec.head_size > (256 if spec.v_head_size else 1024):
            return f"heads of size {spec.head_size}"
        return None

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        return TritonCache(spec, num_blocks, memory)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        return TritonPlan(step, group, self)

    def sms(self, device: torch.device) -> int:
        """Multiprocessors to fill."""
        if device not in self._sms:
            is_cuda = device.type == "cuda"
            self._sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 8
        return self._sms[device]

    def tiles(self, dtype: torch.dtype, dk: int, dv: int, latent: bool, group: int) -> tuple[Tiles, Tiles]:
        key = (dtype, dk, dv, latent, group)
        if key not in self._tiles:
            few, many = choose_tiles(dtype, dk, dv, latent=latent, group=group)
            if self.fixed:  # one shape and one way through the keys for all, decodes included
                many = many._replace(two_loops=False)
                many = many if many.block_m <= 64 else many._replace(block_m=64, num_warps=4)
            self._tiles[key] = few, many
        return self._tiles[key]


def first_key(position: np.ndarray, shape: Shape) -> np.ndarray:
    """The first position a query may read."""
    if shape.window:
        return np.maximum(position - shape.window + 1, 0)
    return position // shape.chunk * shape.chunk if shape.chunk else np.zeros_like(position)


def parts_wanted(tiles: int, kv_heads: int, sms: int) -> int:
    """Parts to aim for, per kv head: two programs on every multiprocessor, more where lengths may differ."""
    waves = 2 if tiles * kv_heads <= sms else 4
    return max(1, _cdiv(waves * sms, kv_heads))


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, start: int, count: int, scale: float) -> None:
    """Causal attention of one fresh prompt by torch. Tokens after it are read too, as padding that no query sees."""
    rounded = -(-count // LIBRARY_ROUND) * LIBRARY_ROUND
    parts = [t[start : start + rounded].transpose(0, 1)[None] for t in (q, k, v)]  # [1, H, L, D]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        found = F.scaled_dot_product_attention(
            parts[0], parts[1], parts[2], is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    out[start : start + count] = found[0, :, :count].transpose(0, 1)


Whole = TypeVar("Whole", int, np.ndarray)


def _cdiv(a: Whole, b: int) -> Whole:
    return -(-a // b)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
