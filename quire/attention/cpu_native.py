"""Attention on CPU through the compiled kernels: one call per layer, from the fused projection to its output.

In: a step's shape, as tensors that live as long as the plan. The kernel reads block tables itself, so planning only
collects addresses; its results do not depend on how rows are batched or chunked, so batch-invariant mode is the same
code. What it does not support (latent attention, heads wider than 256, learned distances, caches in float8) runs in
torch, through the other plan.
Must not know: models, requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.ops.cpu.block import NativeCache, NativeStep
from quire.ops.cpu.native import CACHE_DTYPES, DTYPES, AttentionWork
from quire.ops.parts import PartialSums, whole
from quire.ops.qkv import QkvPrep
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind, KVSpec

MAX_SIZE = 256
MakePlan = Callable[[GroupStep, KVGroup], AttentionPlan]


def is_float8(dtype: str) -> bool:
    return dtype.startswith("float8")


def serves(spec: KVSpec) -> bool:
    """Whether the kernel supports such a cache."""
    return spec.head_size <= MAX_SIZE and spec.v_head_size in (-1, spec.head_size) and not is_float8(spec.dtype)


class NativePlan(NativeStep):
    def __init__(self, attend: Callable[..., None], torch_plan: MakePlan, step: GroupStep, group: KVGroup) -> None:
        """`attend`: qc_attend of the library."""
        self._attend, self._torch_plan, self._step, self._group = attend, torch_plan, step, group
        self._other: AttentionPlan | None = None
        tables = step.block_tables if step.row_index is None else step.block_tables[step.row_index]
        if tables.stride(1) != 1:
            tables = tables.contiguous()
        contexts = torch.tensor(step.context_lens, dtype=torch.int32)
        self._alive = (tables, contexts, step.query_starts, step.slots)
        work = self.work = AttentionWork()
        work.tables, work.table_stride = tables.data_ptr(), tables.stride(0)
        work.contexts, work.query_starts = contexts.data_ptr(), step.query_starts.data_ptr()
        work.slots, work.tokens, work.rows = step.slots.data_ptr(), step.slots.shape[0], len(step.context_lens)
        work.block_size = group.block_size
        work.window = group.window if group.kind is KVKind.WINDOW else 0
        work.chunk = group.window if group.kind is KVKind.CHUNK else 0
        self._at = ctypes.byref(work)

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
        if not isinstance(cache, NativeCache):
            raise ConfigError(f"compiled attention was given a cache of type {type(cache).__name__}")
        qkv = whole(qkv)
        rows = cache.rows
        if qkv.dtype not in DTYPES or rows.dtype not in CACHE_DTYPES:
            raise ConfigError(f"CPU attention over {rows.dtype} with activations of {qkv.dtype} is not built")
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()
        work, heads, kv_heads = self.work, prep.heads, prep.kv_heads
        size = qkv.shape[1] // (heads + 2 * kv_heads)
        out = torch.empty((qkv.shape[0], heads, size), dtype=qkv.dtype)
        work.qkv, work.qkv_stride, work.dtype = qkv.data_ptr(), qkv.stride(0), DTYPES[qkv.dtype]
        work.out, work.heads, work.kv_heads, work.size = out.data_ptr(), heads, kv_heads, size
        work.cache, work.cache_stride, work.cache_slots = rows.data_ptr(), rows.stride(0), rows.shape[0]
        work.cache_dtype = CACHE_DTYPES[rows.dtype]
        alive = self._prepare(work, prep, qkv.dtype)
        sinks = sinks if sinks is None or sinks.dtype is torch.float32 else sinks.float()
        alibi = alibi if alibi is None or alibi.dtype is torch.float32 else alibi.float()
        work.sinks = None if sinks is None else sinks.data_ptr()
        work.alibi = None if alibi is None else alibi.data_ptr()
        work.scale, work.softcap = scale, softcap
        self._attend(self._at)
        del alive  # the kernel has read it
        return out

    @staticmethod
    def _prepare(work: AttentionWork, prep: QkvPrep, dtype: torch.dtype) -> list[Tensor]:
        """Norm and rotary embedding; returns the tensors whose addresses were taken."""
        alive = []
        weights: list[int | None] = [None, None]
        for i, weight in enumerate((prep.q_weight, prep.k_weight)):
            if weight is not None:
                alive.append(
                    weight if weight.dtype is dtype and weight.is_contiguous() else weight.to(dtype).contiguous()
                )
                weights[i] = alive[-1].data_ptr()
                work.norm_each, work.eps, work.offset = weight.dim() == 2, prep.eps, prep.offset
                work.norm_wide = prep.wide or prep.offset != 0
        work.q_weight, work.k_weight = weights
        work.cos = work.sin = None
        if prep.cos is not None and prep.sin is not None:
            cos, sin = prep.cos, prep.sin
            if cos.dtype is not torch.float32 and cos.dtype is not dtype:
                cos, sin = cos.float(), sin.float()
            alive += [cos, sin]
            work.cos, work.sin, work.turned = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
            work.turn_dtype, work.pairs = DTYPES[cos.dtype], prep.pairs
        return alive

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
        """Without k and v the queries, which have slots below 0, read what is in the cache already."""
        if k is None:
            return self._run_queries(q, cache, scale=scale, softcap=softcap, sinks=sinks)
        learned = alibi is not None and alibi.dim() == 2  # learned scores by distance: the kernel supports slopes only
        if v is None or cache is None or learned or not serves(cache.spec):
            if self._other is None:
                self._other = self._torch_plan(self._step, self._group)
            return self._other.run(
                q, k, v, cache, scale=scale, v_size=v_size, softcap=softcap, sinks=sinks, alibi=alibi
            )
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)
        prep = _plain(q.shape[1], k.shape[1])
        return self.run_fused(qkv, prep, cache, scale=scale, softcap=softcap, sinks=sinks, alibi=alibi)

    def _run_queries(
        self, q: Tensor, cache: LayerCache | None, *, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        if cache is None or not serves(cache.spec):
            raise ConfigError("attention to a cache without new keys needs a cache that the compiled kernels read")
        (tokens, heads, size), kv_heads = q.shape, cache.spec.num_kv_heads
        qkv = q.new_empty(tokens, (heads + 2 * kv_heads) * size)  # what is behind the queries is written nowhere
        qkv[:, : heads * size] = q.flatten(1)
        return self.run_fused(qkv, _plain(heads, kv_heads), cache, scale=scale, softcap=softcap, sinks=sinks)


def _plain(heads: int, kv_heads: int) -> QkvPrep:
    """Neither norm nor rotary embedding."""
    return QkvPrep(heads, kv_heads, None, None, 0.0, 0.0, False, None, None, False)
