"""Moe: a router, its experts, and what every token also passes through (shared experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.ops.act import clamped_swiglu, gated_on, plain_on
from quire.ops.few import NormRule, norm_router
from quire.ops.linear import linear
from quire.ops.moe import route, run_experts
from quire.quant.scheme import Slot, Storage


@dataclass(frozen=True)
class MoeKind:
    """What a mixture computes; see ops/moe.py."""

    experts: int
    top_k: int
    ffn: int
    score: str = "softmax"  # softmax | sigmoid | topk_softmax
    renorm: bool = True
    scale: float = 1.0
    select_bias: bool = False  # a stored bias moves the choice of experts, not their weights
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # max | top2sum
    router_bias: bool = False
    router_wide: bool = False  # router product in float32
    round_weights: bool = False  # expert weights rounded to the model's dtype before they scale
    expert_bias: bool = False
    clamp: float = 0.0  # limit of the clamped swiglu; 0: the model's activation
    clamp_alpha: float = 1.702
    shared_ffn: int = 0
    shared_gate: bool = False
    gated: bool = True  # experts (and the shared one) have a gate
    latent: int = 0  # experts work on a projection of this width; 0: on the stream's own


class Experts(nn.Module):
    """Weights of all experts in two tensors; fills from one tensor per expert, or from fused ones."""

    def __init__(self, prefix: str, width: int, kind: MoeKind, storage: Storage) -> None:
        super().__init__()
        self.prefix, self.kind = prefix, kind
        ups = (1 + kind.gated) * kind.ffn
        self.w1 = storage.parameter(kind.experts, ups, width)
        self.w2 = storage.parameter(kind.experts, width, kind.ffn)
        self.b1 = storage.parameter(kind.experts, ups) if kind.expert_bias else None
        self.b2 = storage.parameter(kind.experts, width) if kind.expert_bias else None

    def slots(self) -> Iterator[Slot]:
        for leaf, first, second in (("weight", self.w1, self.w2), ("bias", self.b1, self.b2)):
            if first is None or second is None:
                continue
            yield from self._slots(leaf, first.data, second.data)

    def _slots(self, leaf: str, first: Tensor, second: Tensor) -> Iterator[Slot]:
        ffn, tail = self.kind.ffn, "" if leaf == "weight" else "_bias"
        up_names, down_names = [], []
        for expert in range(self.kind.experts):
            stem = f"{self.prefix}{expert}."
            parts = (("gate_proj", first[expert, :ffn]),) if self.kind.gated else ()
            for part, target in (*parts, ("up_proj", first[expert, -ffn:])):
                up_names.append(f"{stem}{part}.{leaf}")
                yield Slot(up_names[-1], target)
            down_names.append(f"{stem}down_proj.{leaf}")
            yield Slot(down_names[-1], second[expert])
        fused = "gate_up_proj" if self.kind.gated else "up_proj"
        yield Slot(f"{self.prefix}{fused}{tail}", first, tuple(up_names))
        yield Slot(f"{self.prefix}down_proj{tail}", second, tuple(down_names))


class Moe(nn.Module):
    def __init__(self, prefix: str, width: int, kind: MoeKind, storage: Storage, *, act: str) -> None:
        super().__init__()
        self.prefix, self.kind = prefix, kind
        self.router = Linear(prefix, width, {"gate": kind.experts}, storage, bias=kind.router_bias)
        self.experts = Experts(f"{prefix}experts.", kind.latent or width, kind, storage)
        narrow = Linear(prefix, width, {"fc1_latent_proj": kind.latent}, storage) if kind.latent else None
        self.narrow, self.widen = narrow, None
        if kind.latent:
            self.widen = Linear(prefix, kind.latent, {"fc2_latent_proj": width}, storage)
        self.select_bias = storage.parameter(kind.experts, dtype=torch.float32) if kind.select_bias else None
        shared = kind.shared_ffn
        self.shared = None
        if shared:
            self.shared = Mlp(f"{prefix}shared_expert.", width, shared, storage, act=act, gated=kind.gated)
        self.shared_gate = Linear(prefix, width, {"shared_expert_gate": 1}, storage) if kind.shared_gate else None
        self._act: Callable[[Tensor], Tensor] = (gated_on if kind.gated else plain_on)(act, storage.device)
        if kind.clamp:
            self._act = partial(clamped_swiglu.on(storage.device), alpha=kind.clamp_alpha, limit=kind.clamp)
        self._route, self._run = route.on(storage.device), run_experts.on(storage.device)
        self._linear, self._norm_router = linear.on(storage.device), norm_router.on(storage.device)
        self.joins = self.router.is_plain and self.shared is None and not kind.latent  # whether `join` can be called

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T, k], experts [T, k])."""
        kind = self.kind
        if kind.router_wide:
            bias = None if self.router.bias is None else self.router.bias.float()
            logits = self._linear(x.float(), self.router.weight.float(), bias)
        else:
            logits = self.router(x).float()
        return self._weigh(logits, x.dtype)

    def _weigh(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kind = self.kind
        weights, index = self._route(
            logits, kind.top_k, score=kind.score, renorm=kind.renorm, scale=kind.scale, bias=self.select_bias,
            groups=kind.groups, top_groups=kind.top_groups, group_score=kind.group_score,
        )  # fmt: skip
        return (weights.to(dtype) if kind.round_weights else weights), index

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.choose(x)
        experts, h = self.experts, x if self.narrow is None else self.narrow(x)
        out = self._run(h, weights, index, experts.w1, experts.w2, b1=experts.b1, b2=experts.b2, act=self._act)
        if self.widen is not None:
            out = self.widen(out)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def join(self, x: Tensor, norm: NormRule) -> Tensor:
        """x + moe(norm(x)), for a few rows: see ops/few.py."""
        logits, h = self._norm_router(x, norm, self.router.weight, self.router.bias, self.kind.router_wide)
        weights, index = self._weigh(logits, x.dtype)
        own = self.experts
        return self._run(h, weights, index, own.w1, own.w2, b1=own.b1, b2=own.b2, act=self._act, stream=x)

    def slots(self) -> Iterator[Slot]:
        if self.select_bias is not None:
            yield Slot(f"{self.prefix}gate.e_score_correction_bias", self.select_bias.data)
