"""Attention on CUDA: Triton kernels over paged caches, for eager steps of any mix and for captured decode steps.

A step becomes one or two work lists (ops/triton/attention.py), made by the first layer that runs and shared by those of
the same shape; caches are views of pages (triton_cache.py):

    host lists    eager: rows of few queries ──▶ "few", small tiles; all others ──▶ "many", large tiles
    refilled      captured steps of any mix: the same two lists in fixed room, written by the host before each replay
    device list   captured decodes, and those of an eager step where they are many: cut into parts by a kernel from the
                  contexts of the moment; where many begin with the same blocks, "shared": read once for all of them
    one row       captured decodes of a single row: all from the fused projection on in one kernel, without a list
    fixed         no parts, nothing shared, keys in steps of one length: a query's arithmetic never depends on its
                  neighbours (on tensor cores the other sides of a tile do not change a bit)
    library       runs of fresh prompts of one length (attention/library.py)

Must not know: models, requests, how rows come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.attention.library import Dense, Library, dense_attention
from quire.attention.triton_cache import TritonCache, dense, write_kv
from quire.base import env
from quire.base.log import logger
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.ops.copy import upload
from quire.ops.kv_codes import rounded
from quire.ops.parts import PartialSums
from quire.ops.qkv import QkvPrep, prepare_qkv
from quire.ops.triton import attention_one
from quire.ops.triton.attention import (
    FIELDS,
    MAX_SPLITS,
    AttentionTile,
    AttentionWorkList,
    Rule,
    Shape,
    SharedPrefix,
    Space,
    attend,
    width_of,
    workspace_sizes,
)
from quire.ops.triton.attention_plan import LEAST_ROWS, PROBE, Sharing, plan_decodes, probe_column
from quire.ops.triton.launch import DESCRIPTORS
from quire.ops.triton.register import launchers
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind, KVSpec

LEAST_KEYS = 256  # of a split; half as many if tiles alone do not fill the device
SHARE_ROWS = 16  # decodes in a step from which a shared prefix is searched
MOST_ENTRIES, MOST_LATENT = 512, 1024  # of a head: with separate values; with values that are a slice of the keys
ONE_LAUNCH_ROWS = 1  # decodes in a captured step up to which one kernel does everything (ops/triton/attention_one.py)
CROWD = 64  # decodes in a step that fill the device without being split
MIXED_ROWS = 320  # most rows of few queries in the lists of a captured mixed step
MIXED_PROMPTS = 64  # and prompt chunks
_log = logger(__name__)


class Workspace:
    """Memory for partial results. It only grows, and old buffers stay alive: a captured graph may still use them."""

    def __init__(self) -> None:
        self._pieces: dict[torch.device, list[Space]] = {}

    def get(self, floats: int, counters: int, device: torch.device) -> Space:
        pieces = self._pieces.setdefault(device, [])
        if not pieces or len(pieces[-1].floats) < floats or len(pieces[-1].counters) < counters:
            last = pieces[-1] if pieces else None
            floats = max(floats, 1 << 20 if last is None else 2 * len(last.floats))
            counters = max(counters, 1 << 14 if last is None else 2 * len(last.counters))
            pieces.append(
                Space(
                    torch.empty(floats, dtype=torch.float32, device=device),
                    torch.zeros(counters, dtype=torch.int32, device=device),
                )
            )
        return pieces[-1]


ROLES, ROLES_SIZE = AttentionTile(128, 64, 12, 4, has_roles=True), 128  # attention_prompts.py; entries of a head


class TileSet(NamedTuple):
    """Tile shapes of a layer's launches."""

    few: AttentionTile  # rows of few queries
    crowd: AttentionTile  # the same, if a step has CROWD of them
    many: AttentionTile  # prompt chunks
    shared: AttentionTile  # a prefix that many rows share


class WorkListKey(NamedTuple):
    """What determines the shape of a work list: layers with equal keys share it."""

    group: int  # query heads per kv head
    kv_heads: int
    value: int  # entries of a result per head
    tiles: TileSet
    library: bool
    roles: AttentionTile | None = None  # of prompt chunks that fill the device, where warps may have roles

    @classmethod
    def of(
        cls, backend: TritonAttention, dtype: torch.dtype, heads: int, cache: TritonCache, v_size: int, plain: bool
    ) -> WorkListKey:
        """plain: causality is the only mask, scores are unmodified, and this step's keys and values are available."""
        kv_heads, dk = cache.keys.shape[2:]
        dv = v_size if cache.values is None else cache.values.shape[3]
        group = heads // kv_heads
        tiles = backend.tiles(dtype, dk, dv, cache.values is None, group)
        plain = plain and dtype != torch.float32 and dk == dv
        fits = (
            cache.values is not None
            and cache.keys.dtype is dtype
            and dk == ROLES_SIZE
            and cache.keys.stride(0) % dk == 0
        )
        roles = ROLES if backend.attend_prompts is not None and plain and fits else None
        return cls(group, kv_heads, dv, tiles, backend.library is not None and plain and dk <= 128, roles)


def choose_tiles(dtype: torch.dtype, dk: int, dv: int, *, latent: bool, group: int) -> TileSet:
    """For Hopper: the best of benchmarks/gpu/attention.py --sweep. Shared memory holds the queries of a tile and
    num_stages - 1 tiles of keys and values."""
    width = max(width_of(dv if latent else dk), width_of(dv))
    m = 64 if group > 16 else 16  # a decode's heads
    if dtype == torch.float32:  # no tensor cores: float32 is chosen for exactness
        if width > 128:
            return TileSet(*[AttentionTile(16, 16, 8, 1)] * 4)
        return TileSet(
            AttentionTile(16, 16, 4, 2),
            AttentionTile(16, 16, 4, 2),
            AttentionTile(32, 32, 8, 1),
            AttentionTile(32, 32, 8, 1),
        )
    if width > 256:
        few = AttentionTile(64, 32, 8, 2) if group > 16 else AttentionTile(16, 32, 8, 3)
        return TileSet(few, few, AttentionTile(64, 32, 8, 2), AttentionTile(64, 32, 8, 2))
    if width > 128:
        few = AttentionTile(m, 32, 4, 3)
        return TileSet(few, few, AttentionTile(128, 32, 8, 3, True), AttentionTile(64, 32, 4, 3))
    return TileSet(
        AttentionTile(m, 64, 4, 3),
        AttentionTile(m, 64, 4, 3 if group > 16 else 4),
        AttentionTile(64, 64, 4, 3, True, tma=True),
        AttentionTile(64, 64, 4, 3, tma=True),
    )


class Cutter(NamedTuple):
    """How queries are split into tiles, and the keys of a tile into splits."""

    shape: Shape
    sms: int
    fixed: bool

    def items(
        self, entries: np.ndarray, call: WorkListKey, tiles: AttentionTile
    ) -> tuple[np.ndarray, int, int, AttentionTile]:
        """(items, partials, flats in use, tiles) of entries [R, 4] (row, start, count, context), longest work first."""
        is_few = tiles is call.tiles.few
        cuts = _cdiv(entries[:, 2] * call.group, tiles.block_m)  # tiles per row
        entry = np.repeat(entries, cuts, 0)  # [tiles, 4]
        flat = (np.arange(len(entry)) - np.repeat(np.cumsum(cuts) - cuts, cuts)).astype(np.int32) * tiles.block_m
        keys = self._key_tiles(entry, flat, call.group, tiles)
        splits = np.ones(len(entry), np.int64)
        if not self.fixed and (is_few or len(entry) * call.kv_heads < 2 * self.sms):
            least = least_tiles(len(entry), call.kv_heads, self.sms, tiles)
            target = target_splits(len(entry), call.kv_heads, self.sms)
            splits = np.clip(_cdiv(keys, max(least, _cdiv(int(keys.sum()), target))), 1, MAX_SPLITS)
        is_split = splits > 1
        num_splits = np.where(is_split, splits, 0)
        record = np.zeros((len(entry), FIELDS.value), np.int32)
        record[:, :4], record[:, 4] = entry, flat
        record[:, 6], record[:, 7], record[:, 9] = (
            splits,
            np.where(is_split, np.cumsum(num_splits) - num_splits, -1),
            -1,
        )
        items = np.repeat(record, splits, 0)
        items[:, 5] = np.arange(len(items)) - np.repeat(np.cumsum(splits) - splits, splits)
        order = np.argsort(-np.repeat(keys / splits, splits), kind="stable")
        flats = min(tiles.block_m, int(entries[:, 2].max()) * call.group)
        return items[order], int(num_splits.sum()), flats, tiles

    def most_items(self, num_tiles: int, call: WorkListKey) -> int:
        """The longest possible list of this many tiles."""
        return num_tiles + target_splits(self.sms + 1, call.kv_heads, self.sms)

    def _key_tiles(self, entry: np.ndarray, flat: np.ndarray, group: int, tiles: AttentionTile) -> np.ndarray:
        """How many tiles of keys each tile of queries reads, as in _attend_kernel; 0 for padding. Of the first rank,
        where ranks divide contexts: others may have a part without keys."""
        before, count = entry[:, 3] - entry[:, 2], entry[:, 2]
        low = before + flat // group
        high = before + np.minimum((flat + tiles.block_m - 1) // group, count - 1)
        first, last = (self.shape.most_kept(n) for n in (first_key(low, self.shape), high + 1))
        return np.where(entry[:, 3] > 0, _cdiv(last, tiles.block_n) - first // tiles.block_n, 0)


def entries_of(step: GroupStep, rows: np.ndarray) -> np.ndarray:
    """[R, 4]: row | first token | tokens | context."""
    counts = np.asarray(step.query_lens, np.int32)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    return np.stack((rows.astype(np.int32), starts, counts, np.asarray(step.context_lens, np.int32)), 1)


def few_of(entries: np.ndarray, call: WorkListKey) -> np.ndarray:
    """Which entries go into small tiles."""
    return (entries[:, 2] * call.group <= call.tiles.few.block_m) | (entries[:, 2] == 1)


def may_share(ones: np.ndarray, entries: np.ndarray, step: GroupStep, shape: Shape) -> bool:
    """Whether to search for a shared prefix on the device: enough decodes, and the host knows of some that agree."""
    if ones.sum() < SHARE_ROWS or shape.window or shape.chunk:
        return False
    if step.host_tables is None or step.host_rows is None:
        return True
    column = probe_column(shape.page, PROBE)
    if column >= step.host_tables.shape[1]:
        return False  # no row can be long enough
    long = ones & (shape.most_kept(entries[:, 3]) > (column + 1) * shape.page)
    blocks = np.sort(step.host_tables[step.host_rows[long], column])
    return len(blocks) >= LEAST_ROWS and bool((blocks[LEAST_ROWS - 1 :] == blocks[: 1 - LEAST_ROWS]).any())


class HostLists:
    """Work lists of one eager step, made with numpy and copied to the device at once."""

    def __init__(self, step: GroupStep, tables: Tensor, shape: Shape, backend: TritonAttention) -> None:
        self.tables, self.shape, self.device, self.backend = tables, shape, tables.device, backend
        self.step, self.cutter, self.fixed = step, backend.cutter(shape, tables.device), backend.fixed
        self.entries = entries_of(step, np.arange(len(step.query_lens)))
        counts, contexts = self.entries[:, 2], self.entries[:, 3]
        window = shape.window or shape.chunk
        plain = (contexts <= window) if window else np.ones(len(counts), np.bool_)
        self.runs: list[Dense] = []
        if backend.library is not None:
            self.runs, self.taken = backend.library.choose(self.entries, plain & (counts == contexts), self.device)

        self.keeps = backend.library is not None and int(counts.sum()) >= backend.library.least

    def prompts(self, call: WorkListKey) -> list[Dense]:
        """What goes to the library."""
        return self.runs if call.library else []

    def _prompt_tile(self, entries: np.ndarray, call: WorkListKey) -> AttentionTile:
        """With roles if there is a tile for every multiprocessor twice, so that none has to be split."""
        shape, roles = self.shape, call.roles
        if roles is None or shape.window or shape.chunk or shape.page % roles.block_n:
            return call.tiles.many
        tiles = int(_cdiv(entries[:, 2] * call.group, roles.block_m).sum())
        return roles if tiles * call.kv_heads >= 2 * self.cutter.sms else call.tiles.many

    def make(self, call: WorkListKey) -> list[AttentionWorkList]:
        left = self.entries[:, 2] > 0
        if self.prompts(call):
            left &= ~self.taken
        few = left & few_of(self.entries, call)
        ones = left & (self.entries[:, 2] == 1)
        if self.fixed or not may_share(ones, self.entries, self.step, self.shape):
            ones[:] = False
        parts = [(few & ~ones, call.tiles.few), (left & ~few, self._prompt_tile(self.entries[left & ~few], call))]
        lists = [self.cutter.items(self.entries[which], call, tiles) for which, tiles in parts if which.any()]
        decodes = self.entries[ones].T  # row | start | count | context
        if not lists and not ones.any():
            return []
        sent = upload(
            np.concatenate([*(decodes[i] for i in (0, 3, 1)), *(part[0].ravel() for part in lists)]), self.device
        )
        count = decodes.shape[1]
        out, at = [], 3 * count
        if count:
            rows, contexts, starts = sent[: 3 * count].view(3, count)
            out.append(decode_work(self.tables, rows, contexts, starts, call, self.shape, self.backend))
        for items, partials, flats, tiles in lists:
            made = sent[at : at + items.size].view(-1, FIELDS.value)
            shared = self.backend.no_prefix(call, self.shape, self.device)
            out.append(AttentionWorkList(made, partials, flats, tiles, not self.fixed, shared))
            at += items.size
        return out


class MixedLists(NamedTuple):
    """Buffer of the items of captured mixed steps: those of few queries, then those of prompt chunks."""

    items: Tensor  # [n, FIELDS] int32
    num_few: int
    num_prompts: int


class RefilledLists:
    """The work lists of a captured step of any mix: a fixed buffer, which the host writes before every replay.

    All captured sizes of a KV group share the buffer, so it is allocated by the first step, outside of any capture.
    """

    keeps = False

    def __init__(self, step: GroupStep, tables: Tensor, shape: Shape, backend: TritonAttention, group: KVGroup) -> None:
        self.tables, self.shape, self.backend, self.group = tables, shape, backend, group
        self.tokens, self.cutter = len(step.slots), backend.cutter(shape, tables.device)

    def prompts(self, call: WorkListKey) -> list[Dense]:
        return []

    def make(self, call: WorkListKey) -> list[AttentionWorkList]:
        mixed_lists = self.backend.mixed_lists.setdefault(self.group, {})
        few, prompts = self._sizes(call)
        if call not in mixed_lists:
            items = torch.zeros((few + prompts, FIELDS.value), dtype=torch.int32, device=self.tables.device)
            mixed_lists[call] = MixedLists(items, few, prompts)
        static = mixed_lists[call]
        if few > static.num_few or prompts > static.num_prompts:
            raise RuntimeError("the largest mixed step has to run before smaller ones are captured")
        shared = self.backend.no_prefix(call, self.shape, self.tables.device)
        splittable = not self.cutter.fixed
        lists = (
            (static.items[:few], call.tiles.few),
            (static.items[static.num_few : static.num_few + prompts], call.tiles.many),
        )
        return [
            AttentionWorkList(items, len(items) if splittable else 0, tiles.block_m, tiles, splittable, shared)
            for items, tiles in lists
        ]

    def refill(self, step: GroupStep) -> bool:
        """Write this step's lists; False, and nothing is written, if they do not fit."""
        assert step.host_rows is not None
        entries = entries_of(step, step.host_rows)
        if may_share(entries[:, 2] == 1, entries, step, self.shape):
            return False  # reading a shared prefix once gains more than a graph
        used = int(entries[:, 2].sum())
        if used < self.tokens:  # context 0: zeros for padding tokens
            padding = np.array([[0, used, self.tokens - used, 0]], np.int32)
            entries = np.concatenate((entries, padding))
        sent = []
        for call, lists in self.backend.mixed_lists.get(self.group, {}).items():
            few, (num_few, num_prompts) = few_of(entries, call), self._sizes(call)
            whole = np.zeros((len(lists.items), FIELDS.value), np.int32)
            for which, tiles, start, most in (
                (few, call.tiles.few, 0, num_few), (~few, call.tiles.many, lists.num_few, num_prompts)
            ):  # fmt: skip
                if which.any():
                    items = self.cutter.items(entries[which], call, tiles)[0]
                    if len(items) > most:
                        return False
                    whole[start : start + len(items)] = items
            sent.append((lists, whole))
        for lists, whole in sent:
            lists.items.copy_(upload(whole, lists.items.device), non_blocking=True)
        return True

    def _sizes(self, call: WorkListKey) -> tuple[int, int]:
        """Capacity for items of few queries, and of prompt chunks."""
        few = min(MIXED_ROWS, self.tokens) * _cdiv(call.group, call.tiles.few.block_m)
        prompts = min(MIXED_PROMPTS, self.tokens) + _cdiv(self.tokens * call.group, call.tiles.many.block_m)
        return self.cutter.most_items(few, call), self.cutter.most_items(prompts, call)


class DeviceLists:
    """The work list of a captured decode step: a fixed buffer, filled by a kernel from the current contexts."""

    def __init__(self, step: GroupStep, tables: Tensor, shape: Shape, backend: TritonAttention) -> None:
        if step.row_index is None or step.contexts is None or not step.is_decode:
            raise ConfigError("a static attention plan needs row_index, contexts and one query per entry")
        self.rows, self.contexts, self.starts = step.row_index, step.contexts, step.query_starts
        self.tables, self.shape, self.backend, self.keeps = tables, shape, backend, False

    def prompts(self, call: WorkListKey) -> list[Dense]:
        return []

    def make(self, call: WorkListKey) -> list[AttentionWorkList]:
        starts = self.starts[: len(self.contexts)]
        return [decode_work(self.tables, self.rows, self.contexts, starts, call, self.shape, self.backend)]


def decode_work(
    tables: Tensor, rows: Tensor, contexts: Tensor, starts: Tensor, call: WorkListKey, shape: Shape,
    backend: TritonAttention,
) -> AttentionWorkList:  # fmt: skip
    """Work for entries of one query each, planned on the device."""
    fixed, sms = backend.fixed, backend.sms(tables.device)
    entries, group, kv_heads = len(contexts), call.group, call.kv_heads
    tiles = call.tiles.crowd if entries >= CROWD else call.tiles.few
    num = entries * _cdiv(group, tiles.block_m)
    # In fixed mode there is one split each: no memory for more is needed.
    target = 0 if fixed else target_splits(num, kv_heads, sms)
    sharing = None
    if entries >= SHARE_ROWS and not (fixed or shape.window or shape.chunk):
        joint = call.tiles.shared
        resident = 2 if joint.block_m < 128 else 1  # programs on a multiprocessor
        sharing = Sharing(joint, max(_cdiv(entries * group, joint.block_m), _cdiv(resident * sms, kv_heads)))
    items, shared = plan_decodes(
        tables, rows, contexts, starts, shape, group=group, tiles=tiles, target=target,
        least=least_tiles(num, kv_heads, sms, tiles), most=1 if fixed else min(MAX_SPLITS, target), sharing=sharing,
    )  # fmt: skip
    flats = min(tiles.block_m, group)
    shared = shared or backend.no_prefix(call, shape, tables.device)
    return AttentionWorkList(items, 0 if fixed else len(items), flats, tiles, not fixed, shared)


class TritonPlan:
    def __init__(self, step: GroupStep, group: KVGroup, backend: TritonAttention) -> None:
        self.shape = backend.shape_of(group)
        self.slots, self.tables, self.backend = step.slots, step.block_tables, backend
        if not step.is_static and step.row_index is not None:
            # entries are numbered by their index in the step; only the device knows their rows of the table
            self.tables = self.tables.index_select(0, step.row_index)
        self.lists: HostLists | DeviceLists | RefilledLists
        if not step.is_static:
            self.lists = HostLists(step, self.tables, self.shape, backend)
        elif step.is_decode:
            self.lists = DeviceLists(step, self.tables, self.shape, backend)
        else:
            self.lists = RefilledLists(step, self.tables, self.shape, backend, group)
        self._made: dict[WorkListKey, list[AttentionWorkList]] = {}
        self._captured = False
        self._prepare = prepare_qkv.on(step.slots.device)

    def refill(self, step: GroupStep) -> bool:
        """Of a captured mixed step: prepare the next replay for this step; False if its lists do not fit."""
        assert isinstance(self.lists, RefilledLists)
        return self.lists.refill(step)

    def run_fused(
        self,
        qkv: Tensor | PartialSums,
        prep: QkvPrep,
        cache: LayerCache | None,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """Norm, rotary embedding and cache write in one pass over the fused projection; then attention."""
        if not isinstance(cache, TritonCache) or cache.values is None:
            raise ConfigError(f"a fused run needs a cache of keys and values, not {type(cache).__name__}")
        plain = not softcap and sinks is None and alibi is None
        call = WorkListKey.of(self.backend, qkv.dtype, prep.heads, cache, 0, plain=plain)
        rule = Rule(scale, softcap, sinks, alibi)
        if cache.uncalibrated:
            self._calibrate(qkv, prep, cache)
        if plain and isinstance(qkv, Tensor) and self._fits_one_launch(qkv, prep, cache):
            return self._attend_at_once(qkv, prep, cache, scale)
        if isinstance(qkv, PartialSums):
            if not self.lists.prompts(call):
                q = self._prepare(qkv, prep, cache.keys, cache.values, self.slots, False, cache.scales)
                return self._attend(call, q, None, None, cache, rule)
            qkv = qkv.whole()
        if call.library:
            self.backend.forms.add((prep.heads, prep.kv_heads, cache.keys.shape[3], qkv.dtype, qkv.device))
        keep = (
            call.library and self.lists.keeps
        )  # by the size of the step, not its prompts: one kernel for all large ones
        q = self._prepare(qkv, prep, cache.keys, cache.values, self.slots, keep, cache.scales)
        kv = qkv.view(q.shape[0], -1, q.shape[2])[:, prep.heads :]
        return self._attend(call, q, kv[:, : prep.kv_heads], kv[:, prep.kv_heads :], cache, rule)

    def _fits_one_launch(self, qkv: Tensor, prep: QkvPrep, cache: TritonCache) -> bool:
        if not isinstance(self.lists, DeviceLists) or len(self.lists.contexts) > ONE_LAUNCH_ROWS or self.backend.fixed:
            return False
        masked = self.shape.window or self.shape.chunk
        return not masked and attention_one.fits(prep, cache.keys, cache.values, qkv.dtype)

    def _attend_at_once(self, qkv: Tensor, prep: QkvPrep, cache: TritonCache, scale: float) -> Tensor:
        lists, size = self.lists, cache.keys.shape[3]
        assert isinstance(lists, DeviceLists) and cache.values is not None
        rows = len(lists.contexts)
        most = attention_one.most_splits(rows, prep.kv_heads, self.backend.sms(qkv.device))
        needed = attention_one.workspace_sizes(rows, prep.heads, prep.kv_heads, size, most)
        out = torch.empty((rows, prep.heads, size), dtype=qkv.dtype, device=qkv.device)
        attention_one.attend_one(
            qkv, prep, cache.keys, cache.values, self.tables, lists.rows, lists.contexts, self.slots, out,
            self.backend.workspace.get(*needed, qkv.device), scale, most,
            scales=cache.scales, early=self.backend.early,
        )  # fmt: skip
        return out

    def _calibrate(self, qkv: Tensor | PartialSums, prep: QkvPrep, cache: TritonCache) -> None:
        """From the keys and values of this step, as they would be written to a cache of their own dtype."""
        page, heads, size = cache.keys.shape[1:]
        shape = (_cdiv(len(self.slots), page), page, heads, size)
        k, v = torch.zeros((2, *shape), dtype=qkv.dtype, device=self.slots.device)
        order = torch.arange(len(self.slots), device=self.slots.device)
        self._prepare(qkv, prep, k, v, torch.where(self.slots < 0, -1, order), False)
        cache.calibrate(k, v)

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
        """k None: this step's keys and values are already in the cache (written by the op that computed them)."""
        if not isinstance(cache, TritonCache):
            raise ConfigError(f"the Triton attention plan was given a cache of type {type(cache).__name__}")
        if k is not None:
            if cache.uncalibrated:
                cache.calibrate(k[self.slots >= 0], None if v is None else v[self.slots >= 0])
            write_kv(k, v, cache, self.slots)
        q = dense(q)
        plain = k is not None and v is not None and not softcap and sinks is None and alibi is None
        call = WorkListKey.of(self.backend, q.dtype, q.shape[1], cache, v_size, plain=plain)
        if k is not None and v is not None and cache.scales is not None and self.lists.prompts(call):
            k, v = (rounded(x, s, cache.keys.dtype) for x, s in zip((k, v), cache.scales, strict=True))
        return self._attend(call, q, k, v, cache, Rule(scale, softcap, sinks, alibi))

    def _attend(
        self, call: WorkListKey, q: Tensor, k: Tensor | None, v: Tensor | None, cache: TritonCache, rule: Rule
    ) -> Tensor:
        runs = self.lists.prompts(call)
        if runs and k is not None and v is not None and runs[0].rows * runs[0].length == q.shape[0]:
            return dense_attention(q, k, v, runs[0], rule.scale)  # the full step
        out = torch.empty((q.shape[0], q.shape[1], call.value), dtype=q.dtype, device=q.device)
        self._launch(call, q, cache, rule, out)
        for run in runs:
            assert k is not None and v is not None
            out[run.tokens] = dense_attention(q, k, v, run, rule.scale)
        return out

    def _launch(
        self, call: WorkListKey, q: Tensor, cache: TritonCache, rule: Rule, out: Tensor, totals: Tensor | None = None
    ) -> None:
        """Every work list of the step, into `out`; `totals` as `attend` has them."""
        for work in self._works(call):
            if work.tiles.has_roles:
                assert self.backend.attend_prompts is not None and cache.values is not None and not work.partials
                self.backend.attend_prompts(
                    q, cache.keys, cache.values, self.tables, work.items, out, rule.scale, early=self.backend.early
                )
                continue
            floats, counters = workspace_sizes(work, call.kv_heads, call.value)
            static = self.backend.workspace.get(floats, counters, q.device)
            attend(
                q, cache.keys, cache.values, self.tables, work, out, static, self.shape, rule, scales=cache.scales,
                totals=totals, early=self.backend.early,
            )  # fmt: skip

    def _works(self, call: WorkListKey) -> list[AttentionWorkList]:
        """Made once per step. A list made outside a capture is made again inside: the graph must contain the kernel."""
        self._notice_capture()
        if call not in self._made:
            self._made[call] = self.lists.make(call)
        return self._made[call]

    def _notice_capture(self) -> None:
        captured = self.slots.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured != self._captured:
            self._made.clear()
            self._captured = captured


class TritonAttention:
    name = "TRITON_ATTN"

    def __init__(self, *, fixed: bool | None = None, library: Library | None = None) -> None:
        """fixed: batch-invariant arithmetic. library: computes fresh prompts; None: on a GPU, recurring shapes."""
        self.fixed = env.BATCH_INVARIANT.get() if fixed is None else fixed
        self.library = None if self.fixed else library or (Library() if torch.cuda.is_available() else None)
        self.early = (
            env.EARLY_LAUNCH.get() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        )
        self.attend_prompts = None if self.fixed else _attend_prompts()
        if torch.cuda.is_available():
            launchers()  # of kernels that were loaded with this backend: others were loaded with the ops
        self.workspace = Workspace()
        self.forms: set[tuple[int, int, int, torch.dtype, torch.device]] = (
            set()
        )  # of fused projections: heads, kv heads, size
        self.mixed_lists: dict[KVGroup, dict[WorkListKey, MixedLists]] = {}  # of captured mixed steps
        self._sms: dict[torch.device, int] = {}
        self._nothing: dict[torch.device, Tensor] = {}
        self._tiles: dict[tuple[torch.dtype, int, int, bool, int], TileSet] = {}

    def supports(self, spec: KVSpec) -> str | None:
        if spec.kind not in (KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK):
            return f"no Triton attention for KV of kind {spec.kind.value!r}"
        if spec.dtype not in ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"):
            return f"no Triton attention over a {spec.dtype} cache"
        if spec.dtype == "float8_e4m3fn" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
            return "fp8_e4m3 needs a GPU of compute capability 8.9 or newer; fp8_e5m2 and int8_per_token_head do not"
        if spec.num_kv_heads <= 0 or spec.head_size <= 0:
            return f"{spec.num_kv_heads} kv heads of size {spec.head_size}"
        if max(spec.head_size, spec.v_head_size) > (MOST_ENTRIES if spec.v_head_size else MOST_LATENT):
            return f"heads of size {max(spec.head_size, spec.v_head_size)}"
        return None

    def reads_pages(self, spec: KVSpec) -> bool:
        return True

    def make_cache(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> LayerCache:
        return TritonCache(spec, num_blocks, memory)

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        return TritonPlan(step, group, self)

    def shape_of(self, group: KVGroup) -> Shape:
        window = group.window if group.kind is KVKind.WINDOW else 0
        chunk = group.window if group.kind is KVKind.CHUNK else 0
        return Shape(group.block_size, window, chunk)

    def prepare(self, tokens: int, longest: int) -> None:
        for heads, kv_heads, size, dtype, device in self.forms:
            if self.library is not None:
                qkv = torch.zeros((tokens, heads + 2 * kv_heads, size), dtype=dtype, device=device)
                self.library.prepare(heads, qkv, longest)

    def cutter(self, shape: Shape, device: torch.device) -> Cutter:
        return Cutter(shape, self.sms(device), self.fixed)

    def sms(self, device: torch.device) -> int:
        """Multiprocessors to fill."""
        if device not in self._sms:
            is_cuda = device.type == "cuda"
            self._sms[device] = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 8
        return self._sms[device]

    def no_prefix(self, call: WorkListKey, shape: Shape, device: torch.device) -> SharedPrefix | None:
        """For lists without a shared prefix: the same kernel runs lists with and without one."""
        if self.fixed or shape.window or shape.chunk:
            return None
        if device not in self._nothing:
            self._nothing[device] = torch.zeros(8, dtype=torch.int32, device=device)
        nothing = self._nothing[device]
        return SharedPrefix(nothing, nothing, nothing, nothing, 0, call.tiles.shared)

    def tiles(self, dtype: torch.dtype, dk: int, dv: int, latent: bool, group: int) -> TileSet:
        key = (dtype, dk, dv, latent, group)
        if key not in self._tiles:
            chosen = choose_tiles(dtype, dk, dv, latent=latent, group=group)
            self._tiles[key] = invariant(chosen) if self.fixed else chosen
        return self._tiles[key]


def _attend_prompts() -> Callable[..., None] | None:
    """Of attention_prompts.py, which needs Hopper's instructions and a part of Triton that is experimental."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from quire.ops.triton import attention_prompts  # lazy
    except ImportError as wrong:
        _log.warning("prompts use slower attention: %s", wrong)
        return None
    DESCRIPTORS.add(attention_prompts.TensorDescriptor)
    return attention_prompts.attend_prompts


def invariant(tiles: TileSet) -> TileSet:
    """The same arithmetic for a query in any tile: keys in steps of one length, from first to last."""
    prompt_tile = tiles.many._replace(ahead=False)
    few, crowd = (t if t.block_n == prompt_tile.block_n else prompt_tile for t in tiles[:2])
    return TileSet(few, crowd, prompt_tile, tiles.shared)


def first_key(position: np.ndarray, shape: Shape) -> np.ndarray:
    """The first position a query may read."""
    if shape.window:
        return np.maximum(position - shape.window + 1, 0)
    return position // shape.chunk * shape.chunk if shape.chunk else np.zeros_like(position)


def target_splits(tiles: int, kv_heads: int, sms: int) -> int:
    """Target number of splits per kv head: two programs on every multiprocessor; more if there are many tiles, so a
    split is short compared to the total."""
    waves = 2 if 2 * tiles * kv_heads <= sms else 4
    return max(1, _cdiv(waves * sms, kv_heads))


def least_tiles(tiles: int, kv_heads: int, sms: int, shape: AttentionTile) -> int:
    """Fewest key tiles of a split."""
    keys = LEAST_KEYS // 2 if tiles * kv_heads <= sms else LEAST_KEYS
    return max(1, keys // shape.block_n)


Whole = TypeVar("Whole", int, np.ndarray)


def _cdiv(a: Whole, b: int) -> Whole:
    return -(-a // b)
