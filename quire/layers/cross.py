"""Attention over an encoder's output: keys and values come from another text, once per request, and are kept.

A row's first step brings the encoder's hidden states (Batch.encoded); their keys and values go to the row's blocks of
a KV group of kind CROSS, and every later step reads them there. Must not know: who encoded, blocks, rows.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.layers.attention import AttentionKind, KVLayer, own_heads
from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.quant.scheme import Storage
from quire.schema.kv import KVKind, KVSpec


class CrossAttention(KVLayer):
    """`longest`: tokens an encoder's output has at most; 0: no such limit."""

    def __init__(self, prefix: str, width: int, kind: AttentionKind, longest: int, storage: Storage) -> None:
        super().__init__(f"{prefix}attn", 0, 0)
        own, own_kv = own_heads(kind, storage.group)
        self.kind, self.longest = replace(kind, heads=own.count, kv_heads=own_kv.count), longest  # those of this rank
        queries, keys = own.times(kind.head_dim), own_kv.times(kind.head_dim)
        self.q = Linear(prefix, width, {"q_proj": queries}, storage, bias=kind.qkv_bias)
        parts = {"k_proj": keys, "v_proj": keys}
        self.kv = Linear(prefix, width, parts, storage, bias=kind.qkv_bias, fused="kv_proj")
        self.o = Linear(prefix, queries, {"o_proj": width}, storage, bias=kind.o_bias)

    def kv_spec(self, block_size: int, kv_dtype: str) -> KVSpec:
        return KVSpec(
            layer=self.layer, kind=KVKind.CROSS, block_size=block_size, num_kv_heads=self.kind.kv_heads,
            head_size=self.kind.head_dim, dtype=kv_dtype, window=self.longest,
        )  # fmt: skip

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        kind, tokens = self.kind, x.shape[0]
        q = self.q(x).view(tokens, kind.heads, kind.head_dim)
        k = v = q[:0, : kind.kv_heads]
        if batch.encoded is not None:
            kv = self.kv(batch.encoded).view(len(batch.encoded), 2 * kind.kv_heads, kind.head_dim)
            k, v = kv[:, : kind.kv_heads], kv[:, kind.kv_heads :]
        out = batch.plans[self.group].run(q, k, v, self.cache, scale=kind.scale, softcap=kind.softcap)
        return self.o(out.reshape(tokens, -1))
