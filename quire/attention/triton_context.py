"""Attention on CUDA over a context whose tokens are divided among ranks (context_ranks.py), as kernels and in graphs.

Queries of all ranks' heads are gathered, attend to what this rank keeps (ops/triton/attention.py with RANKS), and the
results are merged over ranks. Work lists are those of whole contexts, made as for one rank; which slots are this
rank's is computed on the device, so that a captured step serves any contexts. Must not know: models, how ranks talk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context_exchange import all_heads, merged, own_slots
from quire.attention.triton import TritonAttention, TritonPlan, WorkListKey
from quire.attention.triton_cache import TritonCache, write_kv
from quire.layers.batch import AttentionPlan, GroupStep, LayerCache
from quire.ops.parts import PartialSums
from quire.ops.qkv import QkvPrep
from quire.ops.triton.attention import Rule, Shape
from quire.quant.shard import ContextRanks
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup


class DividedPlan(TritonPlan):
    def __init__(self, step: GroupStep, group: KVGroup, backend: DividedTritonAttention) -> None:
        super().__init__(step, group, backend)
        self._ranks, self._block = backend.ranks, group.block_size
        self._own: Tensor | None = None

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
        if not isinstance(cache, TritonCache) or cache.values is None:
            raise ConfigError(f"a fused run needs a cache of keys and values, not {type(cache).__name__}")
        if cache.uncalibrated:
            self._calibrate(qkv, prep, cache)
        q = self._prepare(qkv, prep, cache.keys, cache.values, self._own_slots(), False, cache.scales)
        return self._attend_divided(q, cache, 0, Rule(scale, softcap, sinks, alibi))

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
        if not isinstance(cache, TritonCache):
            raise ConfigError(f"the Triton attention plan was given a cache of type {type(cache).__name__}")
        if k is not None:
            if cache.uncalibrated:
                cache.calibrate(k[self.slots >= 0], None if v is None else v[self.slots >= 0])
            write_kv(k, v, cache, self._own_slots())
        return self._attend_divided(q, cache, v_size, Rule(scale, softcap, sinks, alibi))

    def _attend_divided(self, q: Tensor, cache: TritonCache, v_size: int, rule: Rule) -> Tensor:
        tokens, heads = q.shape[:2]
        # the heads of a token side by side: kernels compute where they are in 32 bits
        queries = self._ranks.gather(q.contiguous()).transpose(0, 1).flatten(1, 2)
        call = WorkListKey.of(self.backend, q.dtype, queries.shape[1], cache, v_size, plain=False)
        out = torch.empty((tokens, queries.shape[1], call.value), dtype=torch.float32, device=q.device)
        totals = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
        alibi = None if rule.alibi is None else all_heads(rule.alibi, self._ranks)
        self._launch(call, queries, cache, rule._replace(sinks=None, alibi=alibi), out, totals)
        mine = merged(out.transpose(0, 1), totals.t(), heads, self._ranks, rule.sinks)
        return mine.transpose(0, 1).to(q.dtype)

    def _own_slots(self) -> Tensor:
        """Of each token: where this rank keeps it; -1: nowhere. Made once per step, and anew inside of a capture."""
        self._notice_capture()
        if self._own is None:
            self._own = own_slots(self.slots, self._block, self._ranks)
        return self._own

    def _notice_capture(self) -> None:
        before = self._captured
        super()._notice_capture()
        if self._captured != before:
            self._own = None


class DividedTritonAttention(TritonAttention):
    """Of groups of KV whose tokens are divided; caches are made for what one rank keeps."""

    def __init__(self, ranks: ContextRanks) -> None:
        super().__init__(fixed=False)
        self.ranks, self.library, self.attend_prompts = ranks, None, None

    def plan(self, step: GroupStep, group: KVGroup) -> AttentionPlan:
        return DividedPlan(step, group, self)

    def shape_of(self, group: KVGroup) -> Shape:
        whole, ranks = super().shape_of(group), self.ranks
        return whole._replace(
            page=whole.page // ranks.size, ranks=ranks.size, rank=ranks.rank, interleave=ranks.interleave
        )
