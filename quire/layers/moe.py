"""Moe: a router, its experts, and what every token also passes through (shared experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.stored import ExpertLayer
from quire.ops.act import PLAIN, clamped_swiglu, gated_on, plain_on, sigmoid
from quire.ops.coded import CodedWeight
from quire.ops.few import NormRule, norm_router
from quire.ops.moe import route, sum_choices
from quire.ops.parts import PartialSums
from quire.quant.experts import ExpertShape, Rule
from quire.quant.scheme import Slot, Storage

if TYPE_CHECKING:
    from quire.layers.adapters import ExpertAdapters


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
    router_wide: bool = False  # router matmul in float32
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


class Experts(ExpertLayer):
    """The experts of a mixture. Where ranks share them, each has some entries of every expert."""

    def __init__(self, prefix: str, shape: ExpertShape, storage: Storage) -> None:
        super().__init__()
        self.prefix = prefix
        self.hold(storage.schemes.of_experts(prefix).create(shape))
        self._reduce = None if shape.ffn.is_whole else storage.group.reduce
        self.adapters: ExpertAdapters | None = None  # unless the engine serves adapters

    @property
    def is_summed(self) -> bool:
        """Whether a result is added up over ranks."""
        return self._reduce is not None

    def forward(self, x: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> Tensor:
        """Sum over a token's experts of weight * expert(x); added to `stream`, which a sum over ranks does not take."""
        y = self.stored.multiply(x, weights, index, stream)
        if self.adapters is not None:
            for slot, rows in self.adapters.groups(len(x)):
                own = self.adapters.multiply(slot, x[rows], weights[rows], index[rows])
                y[rows] = own if stream is None else own + stream[rows]
        return y if self._reduce is None else self._reduce(y)

    def slots(self) -> Iterator[Slot]:
        for slot in self.stored.slots():
            fills = tuple(self.prefix + name for name in slot.fills)
            yield Slot(self.prefix + slot.name, slot.target, fills, slot.cut)


class Moe(nn.Module):
    def __init__(self, prefix: str, width: int, kind: MoeKind, storage: Storage, *, act: str) -> None:
        super().__init__()
        self.prefix, self.kind = prefix, kind
        self.router = Linear(
            prefix, width, {"gate": kind.experts}, storage, bias=kind.router_bias, wide=kind.router_wide
        )
        between: Callable[[Tensor], Tensor] = (gated_on if kind.gated else plain_on)(act, storage.kernels)
        if kind.clamp:
            between = partial(storage.of(clamped_swiglu), alpha=kind.clamp_alpha, limit=kind.clamp)
        shape = ExpertShape(
            kind.experts, kind.latent or width, storage.group.span("entries of an expert", kind.ffn), kind.gated,
            kind.expert_bias, between, _rule(kind, act),
        )  # fmt: skip
        self.experts = Experts(f"{prefix}experts.", shape, storage)
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
        self._route = storage.of(route)
        self._sum, self._sigmoid = storage.of(sum_choices), storage.of(sigmoid)
        self._norm_router = storage.of(norm_router)
        alone = self.shared is None and not kind.latent and not kind.weigh_input and not self.experts.is_summed
        self.joins = self.router.is_plain and alone  # whether `join` and `in_parts` may be called; experts may be codes

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T, k], experts [T, k])."""
        return self._weigh(self.router(x), x.dtype)

    def _weigh(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kind = self.kind
        weights, index = self._route(
            logits, kind.top_k, score=kind.score, renorm=kind.renorm, scale=kind.scale, bias=self.select_bias,
            groups=kind.groups, top_groups=kind.top_groups, group_score=kind.group_score,
            dtype=dtype if kind.round_weights else torch.float32,
        )  # fmt: skip
        return weights, index

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.choose(x)
        h = x if self.narrow is None else self.narrow(x)
        if self.kind.weigh_input:  # every pair of token and expert becomes a token of its own
            h = (h[:, None] * weights[..., None].to(h.dtype)).flatten(0, 1)
            weights, index = torch.ones_like(weights).view(-1, 1), index.view(-1, 1)
        out = self.experts(h, weights, index)
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
        logits, h = self._norm_router(x, norm, *self.router.read_plain(), self.kind.router_wide)
        weights, index = self._weigh(logits, x.dtype)
        return self.experts(h, weights, index, x)

    def few_matrices(self) -> list[Tensor | CodedWeight] | None:
        """As of an Mlp; experts are no business of ops/few.py."""
        return []

    def in_parts(self, x: Tensor) -> Tensor | PartialSums:
        """moe(x); the sum over experts leaves nothing to be added up."""
        return self(x)

    def slots(self) -> Iterator[Slot]:
        if self.select_bias is not None:
            yield Slot(f"{self.prefix}gate.e_score_correction_bias", self.select_bias.data)


def _rule(kind: MoeKind, act: str) -> Rule | None:
    """What compiled experts compute between their matmuls; None: what they have no code for."""
    if kind.clamp:
        return "clamped", kind.clamp_alpha, kind.clamp
    return (PLAIN[act].name, 0.0, 0.0) if kind.gated and act in PLAIN else None
