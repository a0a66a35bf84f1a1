"""Moe: a router, its experts, and what every token also passes through (shared experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.packed_experts import PackedExperts, Rule
from quire.ops.act import PLAIN, clamped_swiglu, gated_on, plain_on, sigmoid
from quire.ops.few import NormRule, norm_router
from quire.ops.linear import linear
from quire.ops.moe import Mixture, route, run_experts, run_mixture, sum_choices
from quire.ops.parts import Parts
from quire.quant.scheme import Slot, Storage


@dataclass(frozen=True)
class MoeKind:
    """What a mixture computes; see ops/moe.py."""

    experts: int
    top_k: int
    ffn: int
    score: str = "softmax"  # softmax | sigmoid | topk_softmax | topk_sigmoid | mixer (scale is then its margin)
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
    weigh_input: bool = False  # weights multiply what goes into an expert, not what comes out
    shared_bias: bool = False


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
        self._mixture: Mixture | None = None

    def mixture(self, act: Callable[[Tensor], Tensor], rule: Rule | None) -> Mixture:
        """The same numbers as matrices one by one."""
        if self._mixture is None:
            none = (None,) * self.kind.experts
            b1 = none if self.b1 is None else tuple(self.b1.data)
            b2 = none if self.b2 is None else tuple(self.b2.data)
            self._mixture = Mixture(tuple(self.w1.data), tuple(self.w2.data), b1, b2, act, rule)
        return self._mixture

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
        self.experts = _experts(f"{prefix}experts.", kind.latent or width, kind, storage)
        narrow = Linear(prefix, width, {"fc1_latent_proj": kind.latent}, storage) if kind.latent else None
        self.narrow, self.widen = narrow, None
        if kind.latent:
            self.widen = Linear(prefix, kind.latent, {"fc2_latent_proj": width}, storage)
        self.select_bias = storage.parameter(kind.experts, dtype=torch.float32) if kind.select_bias else None
        shared = kind.shared_ffn
        self.shared = None
        if shared:
            bias, name = kind.shared_bias, f"{prefix}shared_expert."
            self.shared = Mlp(name, width, shared, storage, act=act, gated=kind.gated, bias=bias)
        self.shared_gate = Linear(prefix, width, {"shared_expert_gate": 1}, storage) if kind.shared_gate else None
        self._act: Callable[[Tensor], Tensor] = (gated_on if kind.gated else plain_on)(act, storage.device)
        if kind.clamp:
            self._act = partial(clamped_swiglu.on(storage.device), alpha=kind.clamp_alpha, limit=kind.clamp)
        self._rule = _rule(kind, act)
        self._route, self._run = route.on(storage.device), run_experts.on(storage.device)
        self._run_mixture = run_mixture.on(storage.device)
        self._sum, self._sigmoid = sum_choices.on(storage.device), sigmoid.on(storage.device)
        # compiled products of 16-bit numbers pay where rows are few, and torch is as good with 32 bits
        short = storage.device.type == "cpu" and storage.dtype is not torch.float32
        self._one_by_one = short or isinstance(self.experts, PackedExperts)
        self._linear, self._norm_router = linear.on(storage.device), norm_router.on(storage.device)
        alone = self.shared is None and not kind.latent and not kind.weigh_input
        self.joins = self.router.is_plain and alone  # whether `join` can be called

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
        h = x if self.narrow is None else self.narrow(x)
        if self.kind.weigh_input:  # every pair of token and expert becomes a token of its own
            h = (h[:, None] * weights[..., None].to(h.dtype)).flatten(0, 1)
            weights, index = torch.ones_like(weights).view(-1, 1), index.view(-1, 1)
        out = self._run_experts(h, weights, index)
        if self.kind.weigh_input:
            out = self._sum(out.unflatten(0, (x.shape[0], -1)))
        if self.widen is not None:
            out = self.widen(out)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self._sigmoid(self.shared_gate(x)) * shared)

    def join(self, x: Tensor, norm: NormRule) -> Tensor:
        """x + moe(norm(x)), for a few rows: see ops/few.py."""
        logits, h = self._norm_router(x, norm, self.router.weight, self.router.bias, self.kind.router_wide)
        weights, index = self._weigh(logits, x.dtype)
        return self._run_experts(h, weights, index, x)

    def in_parts(self, x: Tensor) -> Tensor | Parts:
        """moe(x); the sum over experts leaves nothing to be added up."""
        return self(x)

    def _run_experts(self, h: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> Tensor:
        own = self.experts
        if self._one_by_one or isinstance(own, PackedExperts):
            return self._run_mixture(h, weights, index, own.mixture(self._act, self._rule), stream)
        return self._run(h, weights, index, own.w1, own.w2, b1=own.b1, b2=own.b2, act=self._act, stream=stream)

    def slots(self) -> Iterator[Slot]:
        if self.select_bias is not None:
            yield Slot(f"{self.prefix}gate.e_score_correction_bias", self.select_bias.data)


def _experts(prefix: str, width: int, kind: MoeKind, storage: Storage) -> Experts | PackedExperts:
    """Packed where their scheme is; else two tensors that hold all of them."""
    if storage.scheme_of(f"{prefix}0.up_proj").name == "plain":
        return Experts(prefix, width, kind, storage)
    return PackedExperts(prefix, width, kind.ffn, kind.experts, storage, gated=kind.gated, bias=kind.expert_bias)


def _rule(kind: MoeKind, act: str) -> Rule | None:
    """What compiled experts compute between their products; None: what they have no code for."""
    if kind.clamp:
        return "clamped", kind.clamp_alpha, kind.clamp
    return (PLAIN[act].name, 0.0, 0.0) if kind.gated and act in PLAIN else None
