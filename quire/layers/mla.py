"""Latent attention: keys and values are one compressed vector per token, shared by all heads.

Always in absorbed form: a query is carried into the latent space (q W_k) and attends there over a single kv head of
rank + rope entries, whose first `rank` entries are also the values; the result is carried out again by W_v. The cache
holds rank + rope numbers per token and layer, and the plan is told that values are a slice of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from quire.layers.attention import KVLayer
from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import Norm, NormKind
from quire.layers.rope import Rope, RotaryTables
from quire.ops.linear import heads_matmul
from quire.quant.scheme import Storage

if TYPE_CHECKING:
    from quire.ops.lora import SomeRows

Carries: TypeAlias = "list[tuple[SomeRows, Tensor]]"


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
    latent_scale: float = 1.0  # of the compressed vector, behind its norm


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
        self.kv_b = Linear(
            prefix, kind.kv_rank, {"kv_b_proj": heads.times(kind.nope + kind.value)}, storage, absorbed=True
        )
        self.o = Linear(prefix, heads.times(kind.value), {"o_proj": width}, storage, bias=kind.bias)
        self._heads_matmul = storage.of(heads_matmul)

    def _carry(self, x: Tensor, batch: Batch) -> Tensor:
        """W_k and W_v of all heads. Where they may not be read, what the layer makes of unit vectors, which is them."""
        numbers = self.kv_b.stored.numbers
        if numbers is None or batch.through_linears:
            return self.kv_b(torch.eye(self.kind.kv_rank, dtype=x.dtype, device=x.device)).t().contiguous()
        return numbers

    def _through(self, x: Tensor, carries: Carries, part: slice, *, out: bool) -> Tensor:
        """x [T, H, ..] by one half of its own rows' carry."""
        results = [(rows, self._heads_matmul(x[rows], _half(carry, part, out=out))) for rows, carry in carries]
        if len(results) == 1:
            return results[0][1]
        y = torch.empty((*x.shape[:2], results[0][1].shape[-1]), dtype=results[0][1].dtype, device=x.device)
        for rows, result in results:
            y[rows] = result
        return y

    def _carries(self, x: Tensor, batch: Batch) -> Carries:
        """Rows of the step, with the matrices [H, nope + value, rank] that they are carried by."""
        base, kind, adapters = self._carry(x, batch), self.kind, self.kv_b.adapters
        shape = (kind.heads, kind.nope + kind.value, kind.kv_rank)
        if adapters is None or adapters.step.by_slot is None or not adapters.is_used:
            return [(slice(None), base.view(shape))]
        rows = adapters.step.by_slot
        own = [(some, adapters.merged(base, slot).view(shape)) for slot, some in rows.groups]
        return [((rows.index == 0).nonzero().flatten(), base.view(shape)), *own]

    def sizes(self) -> tuple[int, int, int]:
        return 1, self.kind.kv_rank + self.kind.rope, 0

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind, tokens = self.kind, x.shape[0]
        compressed = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        q_nope, q_rope = self.q(compressed).view(tokens, kind.heads, -1).split([kind.nope, kind.rope], -1)
        latent, k_rope = self.kv_a(x).split([kind.kv_rank, kind.rope], -1)
        carries = self._carries(x, batch)
        k_rope = k_rope[:, None]
        if self.rope is not None and turn is not None:
            q_rope, k_rope = self.rope.turn(q_rope, turn), self.rope.turn(k_rope, turn)
        q = torch.cat((self._through(q_nope, carries, slice(0, kind.nope), out=False), q_rope), -1)
        latent = self.kv_norm(latent)
        if kind.latent_scale != 1.0:
            latent = latent * kind.latent_scale
        k = torch.cat((latent[:, None], k_rope), -1)  # [T, 1, rank + rope]
        out = batch.plans[self.group].run(q, k, None, self.cache, scale=kind.scale, v_size=kind.kv_rank)
        out = self._through(out, carries, slice(kind.nope, None), out=True)
        return self.o(out.reshape(tokens, -1))


def _half(carry: Tensor, part: slice, *, out: bool) -> Tensor:
    half = carry[:, part]
    return half.transpose(1, 2) if out else half
