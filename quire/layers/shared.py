"""A transformer block that several layers of a model share, each with keys, values and small adapters of its own.

It reads the stream beside the embedding of the same tokens, twice the model's width, and what it gives is added to the
input of the layer that uses it. The matrices exist once, or once on every stage of a pipeline that has users; `link`
gives later users those of the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.layers.attention import KVLayer
from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import Norm, NormKind
from quire.layers.rope import Rope, RotaryTables
from quire.ops.act import gated_on
from quire.quant.scheme import Storage
from quire.quant.shard import ShardGroup, Span


@dataclass(frozen=True)
class SharedKind:
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    scale: float
    users: tuple[int, ...]  # indices of the layers that use a shared block
    blocks: int = 1  # how many there are; users take them in turn
    act: str = "gelu"
    bias: bool = False  # of the mlp
    rank: int = 0  # of the adapters on the mlp's up projection; 0: none
    attn_adapters: bool = False  # adapters on queries, keys and values too

    def on(self, group: ShardGroup) -> OwnShares:
        heads = group.span("heads", self.heads)
        keys = group.keys_span(self.kv_heads)
        ffn = group.span("entries of an mlp", self.ffn)
        return OwnShares(heads.times(self.head_dim), keys.times(self.head_dim), ffn)


class OwnShares(NamedTuple):
    """What of a shared block is on this rank."""

    queries: Span
    keys: Span
    ffn: Span


class SharedWeights(nn.Module):
    """The matrices."""

    def __init__(self, prefix: str, width: int, kind: SharedKind, norm: NormKind, storage: Storage) -> None:
        super().__init__()
        own, mlp = kind.on(storage.group), f"{prefix}mlp."
        parts = {"q_proj": own.queries, "k_proj": own.keys, "v_proj": own.keys}
        self.norm = Norm(f"{prefix}input_layernorm", (2 * width,), norm, storage)
        self.qkv = Linear(f"{prefix}self_attn.", 2 * width, parts, storage, fused="qkv_proj")
        self.o = Linear(f"{prefix}self_attn.", own.queries, {"o_proj": width}, storage)
        self.mlp_norm = Norm(f"{prefix}post_attention_layernorm", (width,), norm, storage)
        up = {"gate_proj": own.ffn, "up_proj": own.ffn}
        self.up = Linear(mlp, width, up, storage, bias=kind.bias, fused="gate_up_proj")
        self.down = Linear(mlp, own.ffn, {"down_proj": width}, storage, bias=kind.bias)


class Adapter(nn.Module):
    """A matmul of low rank, beside a shared one."""

    def __init__(self, prefix: str, name: str, width: int, rank: int, out: Span, storage: Storage, *,
                 parts: int = 1) -> None:  # fmt: skip
        """`parts`: how many such shares lie one after another in its output."""
        super().__init__()
        self.narrow = Linear(prefix, width, {f"{name}_narrow": rank}, storage)
        wide = f"{name}_widen"
        rows = {wide: out} if parts == 1 else {f"{wide}.{part}": out for part in range(parts)}
        self.widen = Linear(prefix, rank, rows, storage, fused="" if parts == 1 else wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(self.narrow(x))


class SharedUse(KVLayer):
    """One layer's use of a shared block."""

    def __init__(
        self, index: int, width: int, kind: SharedKind, norm: NormKind, rope: Rope | None, storage: Storage,
        *, begin: int = 0,  # the first layer of this stage
    ) -> None:  # fmt: skip
        prefix, self_index = f"model.layers.{index}.", kind.users.index(index)
        super().__init__(f"{prefix}self_attn.attn", 0, 0)
        own = kind.on(storage.group)
        self.rope, self.block = rope, self_index % kind.blocks
        earlier = kind.users[:self_index]
        first = not any(turn % kind.blocks == self.block for turn, user in enumerate(earlier) if user >= begin)
        self.shared = SharedWeights(f"model.shared.{self.block}.", width, kind, norm, storage) if first else None
        self.out = Linear(prefix, width, {"linear": width}, storage)
        self.mlp_adapter = (
            Adapter(f"{prefix}adapter.", "mlp", width, kind.rank, own.ffn, storage, parts=2) if kind.rank else None
        )
        sizes = {"q": own.queries, "k": own.keys, "v": own.keys} if kind.attn_adapters else {}
        self.adapters = nn.ModuleList(
            Adapter(f"{prefix}adapter.", name, 2 * width, kind.rank, rows, storage) for name, rows in sizes.items()
        )
        size = kind.head_dim
        self.kind = replace(kind, heads=own.queries.count // size, kv_heads=own.keys.count // size)  # of this rank
        self._act = gated_on(kind.act, storage.kernels)

    def link(self, uses: list[SharedUse]) -> None:
        """uses: of all layers of this stage, in order."""
        self.shared = next(use.shared for use in uses if use.block == self.block)

    def sizes(self) -> tuple[int, int, int]:
        return self.kind.kv_heads, self.kind.head_dim, -1

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        """What is added to the layer's input."""
        shared, kind, tokens = self.shared, self.kind, x.shape[0]
        assert shared is not None and batch.embedded is not None
        h = shared.norm(torch.cat((x, batch.embedded), -1))
        qkv = shared.qkv(h)
        if len(self.adapters):
            qkv = qkv + torch.cat([adapter(h) for adapter in self.adapters], -1)
        q, k, v = qkv.view(tokens, -1, kind.head_dim).split([kind.heads, kind.kv_heads, kind.kv_heads], 1)
        if self.rope is not None and turn is not None:
            q, k = self.rope.turn(q, turn), self.rope.turn(k, turn)
        y = batch.plans[self.group].run(q, k, v, self.cache, scale=kind.scale)
        h = shared.mlp_norm(shared.o(y.reshape(tokens, -1)))
        up = shared.up(h)
        if self.mlp_adapter is not None:
            up = up + self.mlp_adapter(h)
        return self.out(shared.down(self._act(up)))
