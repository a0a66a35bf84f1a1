"""Attention: project, normalise, rotate, attend through the batch's plan, project back. Owns one layer's KVSpec.

It knows its KV group's index and its cache only from `bind`; how keys are stored and read is the plan's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quire.layers.batch import Batch, LayerCache, LentKV
from quire.layers.linear import Linear
from quire.layers.norm import RMS, Norm, NormKind, norm_of
from quire.layers.rope import Rope, RotaryTables
from quire.ops.act import logarithm, sigmoid
from quire.ops.attention import alibi_slopes
from quire.ops.parts import PartialSums
from quire.ops.qkv import QkvPrep
from quire.quant.scheme import Slot, Storage
from quire.quant.shard import ShardGroup, Span, cut_to
from quire.schema.kv import KVKind, KVSpec


@dataclass(frozen=True)
class AttentionKind:
    """What one attention layer computes."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # last tokens seen, the current one included; 0: all
    chunk: int = 0  # only tokens of the same chunk of this length; 0: all
    softcap: float = 0.0
    sinks: bool = False
    alibi: float = 0.0  # factor on the slopes; 0: none
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""  # head (one weight for all heads) | each (one per head) | full (over all heads at once)
    qk_norm_kind: NormKind = RMS
    qk_norm_late: bool = False  # queries and keys are normalised once rotated
    v_norm: bool = False  # values are normalised per head, without a weight
    lends: bool = False  # later layers read its keys and values: see BorrowingAttention
    qkv_clip: float = 0.0
    gated: bool = False  # the output is multiplied by sigmoid(gate), one gate per entry; q_proj is [gate | q]
    gate_name: str = ""  # the gate is a projection of this name instead
    out_norm: str = ""  # name of a norm over all heads before the output projection
    grow: tuple[float, int, int] = (0.0, 1, 0)  # (beta, length, shift): queries grow by
    # 1 + beta * log(1 + floor((position + shift) / length))


class KVLayer(nn.Module):
    """What attention layers of any kind share: a name, a spec, and the cache they are bound to."""

    def __init__(self, layer: str, window: int, chunk: int) -> None:
        super().__init__()
        self.layer, self.window, self.chunk = layer, window, chunk
        self.cache: LayerCache | None = None
        self.group = 0

    def bind(self, cache: LayerCache, group: int) -> None:
        self.cache, self.group = cache, group

    def sizes(self) -> tuple[int, int, int]:
        """(kv heads, key size, value size), as KVSpec counts them."""
        raise NotImplementedError

    def kv_spec(self, block_size: int, kv_dtype: str) -> KVSpec:
        heads, key, value = self.sizes()
        kind = KVKind.WINDOW if self.window else KVKind.CHUNK if self.chunk else KVKind.FULL
        return KVSpec(
            layer=self.layer, kind=kind, block_size=block_size, num_kv_heads=heads, head_size=key, v_head_size=value,
            dtype=kv_dtype, window=self.window or self.chunk,
        )  # fmt: skip


class Attention(KVLayer):
    def __init__(
        self,
        prefix: str,
        width: int,
        kind: AttentionKind,
        rope: Rope | None,
        storage: Storage,
        *,
        out_width: int = 0,  # of what it adds to the stream; 0: as wide as what it reads
    ) -> None:
        super().__init__(f"{prefix}attn", kind.window, kind.chunk)
        own, own_kv = own_heads(kind, storage.group)
        slopes = alibi_slopes(kind.heads)[own.start : own.start + own.count]
        kind = replace(kind, heads=own.count, kv_heads=own_kv.count)  # from here on those of this rank
        self.prefix, self.kind, self.rope, self._own = prefix, kind, rope, own
        size, heads = kind.head_dim, kind.heads
        parts = {"q_proj": own.times(size), "k_proj": own_kv.times(size), "v_proj": own_kv.times(size)}
        runs: dict[str, tuple[str, ...]] = {}
        if kind.gate_name:
            parts = {kind.gate_name: own.times(size)} | parts
        elif kind.gated:  # two parts, which a checkpoint has in one
            queries = {"q_proj.gate": parts["q_proj"], "q_proj.query": parts.pop("q_proj")}
            parts, runs = queries | parts, {"q_proj": tuple(queries)}
        self.qkv = Linear(prefix, width, parts, storage, bias=kind.qkv_bias, fused="qkv_proj", runs=runs)
        self.o = Linear(prefix, own.times(size), {"o_proj": out_width or width}, storage, bias=kind.o_bias)
        self.q_norm = self._norm("q_norm", own, storage)
        self.k_norm = self._norm("k_norm", own_kv, storage)
        bare = replace(kind.qk_norm_kind, weight=False, bias=False, plus_one=False)
        self.v_norm = Norm(f"{prefix}v_norm", (size,), bare, storage) if kind.v_norm else None
        plain_norms = not kind.qk_norm or (
            kind.qk_norm != "full" and kind.qk_norm_kind.kind == "rms" and not kind.qk_norm_kind.bias
        )
        apart = kind.v_norm or kind.lends
        self.fusable = plain_norms and not (apart or kind.qkv_clip or kind.grow[0] or kind.qk_norm_late)  # see `prep`
        norm = replace(kind.qk_norm_kind, bias=False)
        self.out_norm = norm_of(prefix + kind.out_norm, own.times(size), norm, storage) if kind.out_norm else None
        self._logarithm, self._sigmoid = storage.of(logarithm), storage.of(sigmoid)
        self.sinks = storage.parameter(heads) if kind.sinks else None
        self.alibi = slopes.to(storage.device) * kind.alibi if kind.alibi else None

    def _norm(self, name: str, heads: Span, storage: Storage) -> Norm | None:
        size, kind, name = self.kind.head_dim, self.kind.qk_norm_kind, self.prefix + name
        match self.kind.qk_norm:
            case "head":
                return Norm(name, (size,), kind, storage)
            case "each":
                return Norm(name, (heads.count, size), kind, storage, heads)
            case "full":
                copies = heads.count * storage.group.size // heads.whole
                return norm_of(name, heads.times(size), kind, storage, copies=copies)
        return None

    def sizes(self) -> tuple[int, int, int]:
        return self.kind.kv_heads, self.kind.head_dim, -1

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        return self.o(self.attend(self.qkv(x), batch, turn))

    def attend(self, qkv: Tensor | PartialSums, batch: Batch, turn: RotaryTables | None) -> Tensor:
        """From the fused projection to the input of the output projection [T, heads * size]."""
        kind, plan, gate = self.kind, batch.plans[self.group], None
        if isinstance(qkv, PartialSums) and (kind.gated or plan.run_fused is None or not self.fusable):
            qkv = qkv.whole()
        tokens = qkv.rows if isinstance(qkv, PartialSums) else qkv.shape[0]
        if kind.gated:
            assert not isinstance(qkv, PartialSums)
            gate, qkv = qkv.split((kind.heads * kind.head_dim, qkv.shape[1] - kind.heads * kind.head_dim), 1)
        if plan.run_fused is not None and self.fusable:
            out = plan.run_fused(
                qkv, self.prep(turn), self.cache,
                scale=kind.scale, softcap=kind.softcap, sinks=self.sinks, alibi=self.alibi,
            )  # fmt: skip
        else:
            assert not isinstance(qkv, PartialSums)
            q, k, v = self._project(qkv, turn)
            v = v if self.v_norm is None else self.v_norm(v.contiguous())
            if kind.lends and batch.lent is not None:
                batch.lent[self.layer] = LentKV(k, v, self.cache, self.group)
            if kind.grow[0]:
                beta, length, shift = kind.grow
                steps = torch.floor((batch.positions + shift) / length)
                q = q * (1 + beta * self._logarithm(1 + steps))[:, None, None].to(q.dtype)
            out = plan.run(
                q, k, v, self.cache, scale=kind.scale, softcap=kind.softcap, sinks=self.sinks, alibi=self.alibi
            )
        out = out.reshape(tokens, -1)
        if gate is not None:
            out = out * self._sigmoid(gate)
        return out if self.out_norm is None else self.out_norm(out)

    def prep(self, turn: RotaryTables | None) -> QkvPrep:
        """What happens between the fused projection and attending, as data for a plan that does it in one pass."""
        kind, turn = self.kind, None if self.rope is None else turn
        norm, q_norm, k_norm = kind.qk_norm_kind, self.q_norm, self.k_norm
        return QkvPrep(
            kind.heads, kind.kv_heads, None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight, norm.eps, 1.0 if norm.plus_one else 0.0, norm.wide,
            None if turn is None else turn.cos, None if turn is None else turn.sin,
            self.rope is not None and self.rope.kind.pairs,
        )  # fmt: skip

    def _project(self, qkv: Tensor, turn: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D], normalised and rotated."""
        kind, tokens, heads, kv_heads = self.kind, qkv.shape[0], self.kind.heads, self.kind.kv_heads
        if self.q_norm is None or self.k_norm is None:
            if kind.qkv_clip:
                qkv.clamp_(-kind.qkv_clip, kind.qkv_clip)
            qkv = qkv.view(tokens, heads + 2 * kv_heads, kind.head_dim)
            if self.rope is None or turn is None:
                return qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
            qk = self.rope.turn(qkv[:, :-kv_heads], turn)  # q and k lie side by side: one rotation for both
            return qk[:, :heads], qk[:, heads:], qkv[:, -kv_heads:]
        q, k, v = qkv.split([n * kind.head_dim for n in (heads, kv_heads, kv_heads)], -1)
        if kind.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        if kind.qkv_clip:
            q, k, v = (t.clamp(-kind.qkv_clip, kind.qkv_clip) for t in (q, k, v))
        q, k, v = (t.view(tokens, -1, kind.head_dim) for t in (q, k, v))
        if kind.qk_norm != "full" and not kind.qk_norm_late:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None and turn is not None:
            q, k = self.rope.turn(q, turn), self.rope.turn(k, turn)
        return (self.q_norm(q), self.k_norm(k), v) if kind.qk_norm_late else (q, k, v)

    def slots(self) -> Iterator[Slot]:
        if self.sinks is not None:
            yield Slot(f"{self.prefix}sinks", self.sinks.data, cut=cut_to(0, [self._own]))

    def use_scores(self, scores: Tensor) -> None:
        """Learned scores by distance, of all heads."""
        self.alibi = scores[self._own.start : self._own.start + self._own.count]


class BorrowingAttention(nn.Module):
    """Queries of its own over keys and values of a layer before: it keeps none."""

    def __init__(
        self, prefix: str, width: int, kind: AttentionKind, rope: Rope | None, storage: Storage, *, lender: str
    ) -> None:
        super().__init__()
        own = storage.group.span("heads", kind.heads)
        size = kind.head_dim
        self.kind, self.rope, self.lender = replace(kind, heads=own.count), rope, f"{lender}attn"
        self.q = Linear(prefix, width, {"q_proj": own.times(size)}, storage, bias=kind.qkv_bias)
        self.o = Linear(prefix, own.times(size), {"o_proj": width}, storage, bias=kind.o_bias)
        self.q_norm = Norm(f"{prefix}q_norm", (size,), kind.qk_norm_kind, storage) if kind.qk_norm else None

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind = self.kind
        assert batch.lent is not None
        k, v, cache, group = batch.lent[self.lender]
        q = self.q(x).view(len(x), kind.heads, kind.head_dim)
        q = q if self.q_norm is None else self.q_norm(q)
        if self.rope is not None and turn is not None:
            q = self.rope.turn(q, turn)
        out = batch.plans[group].run(q, k, v, cache, scale=kind.scale, softcap=kind.softcap)
        return self.o(out.reshape(len(x), -1))


def own_heads(kind: AttentionKind, group: ShardGroup) -> tuple[Span, Span]:
    """Heads of queries, and of keys and values, on this rank."""
    return group.span("heads", kind.heads), group.keys_span(kind.kv_heads)
