"""Latent attention: keys and values are one compressed vector per token, shared by all heads.

Always in absorbed form: a query is carried into the latent space (q W_k) and attends there over a single kv head of
rank + rope entries, whose first `rank` entries are also the values; the result is carried out again by W_v. The cache
holds rank + rope numbers per token and layer, and the plan is told that values are a slice of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.attention import KVLayer
from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import Norm, NormKind
from quire.layers.rope import Rope, RotaryTables
from quire.ops.linear import heads_matmul
from quire.quant.scheme import Storage


@dataclass(frozen=True)
class MlaKind:
    """What one latent attention layer computes. Sizes per head, except the ranks."""

    heads: int
    kv_rank: int
    nope: int  # entries of a query or key without position
    rope: int  # entries with position
    value: int
    scale: float
    q_rank: int = 0  # 0: queries are not compressed
    bias: bool = False
    eps: float = 1e-6


class LatentAttention(KVLayer):
    def __init__(self, prefix: str, width: int, kind: MlaKind, rope: Rope | None, storage: Storage) -> None:
        super().__init__(f"{prefix}attn", 0, 0)
        heads = storage.group.span("heads", kind.heads)
        self.kind = kind = replace(kind, heads=heads.count)  # those of this rank
        self.rope = rope
        norm, q_size = NormKind(eps=kind.eps), heads.times(kind.nope + kind.rope)
        rank, name = kind.q_rank, "q_b_proj" if kind.q_rank else "q_proj"
        self.q_a = Linear(prefix, width, {"q_a_proj": rank}, storage, bias=kind.bias) if rank else None
        self.q_norm = Norm(f"{prefix}q_a_layernorm", (rank,), norm, storage) if rank else None
        self.q = Linear(prefix, rank or width, {name: q_size}, storage)
        latent = {"kv_a_proj_with_mqa": kind.kv_rank + kind.rope}
        self.kv_a = Linear(prefix, width, latent, storage, bias=kind.bias)
        self.kv_norm = Norm(f"{prefix}kv_a_layernorm", (kind.kv_rank,), norm, storage)
        self.kv_b = Linear(prefix, kind.kv_rank, {"kv_b_proj": heads.times(kind.nope + kind.value)}, storage)
        self.o = Linear(prefix, heads.times(kind.value), {"o_proj": width}, storage, bias=kind.bias)
        self._heads_matmul = storage.of(heads_matmul)

    def _carry(self, x: Tensor, batch: Batch) -> Tensor:
        """W_k and W_v of all heads. Where they may not be read, what the layer makes of unit vectors, which is them."""
        numbers = self.kv_b.stored.numbers
        if numbers is None or batch.through_linears:
            return self.kv_b(torch.eye(self.kind.kv_rank, dtype=x.dtype, device=x.device)).t().contiguous()
        return numbers

    def sizes(self) -> tuple[int, int, int]:
        return 1, self.kind.kv_rank + self.kind.rope, 0

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind, tokens = self.kind, x.shape[0]
        compressed = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        q_nope, q_rope = self.q(compressed).view(tokens, kind.heads, -1).split([kind.nope, kind.rope], -1)
        latent, k_rope = self.kv_a(x).split([kind.kv_rank, kind.rope], -1)
        carry = self._carry(x, batch).view(kind.heads, kind.nope + kind.value, kind.kv_rank)  # [H, nope + value, rank]
        k_rope = k_rope[:, None]
        if self.rope is not None and turn is not None:
            q_rope, k_rope = self.rope.turn(q_rope, turn), self.rope.turn(k_rope, turn)
        q = torch.cat((self._heads_matmul(q_nope, carry[:, : kind.nope]), q_rope), -1)
        k = torch.cat((self.kv_norm(latent)[:, None], k_rope), -1)  # [T, 1, rank + rope]
        out = batch.plans[self.group].run(q, k, None, self.cache, scale=kind.scale, v_size=kind.kv_rank)
        out = self._heads_matmul(out, carry[:, kind.nope :].transpose(1, 2))
        return self.o(out.reshape(tokens, -1))
