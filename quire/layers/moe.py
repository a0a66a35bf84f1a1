"""Moe: a router, its experts, and what every token also passes through (shared experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from quire.ops.lora import AdapterRows, SomeRows
from quire.ops.moe import route, sum_choices
from quire.ops.op import Kernels
from quire.ops.parts import PartialSums
from quire.quant.experts import ExpertShape, Rule, StoredExperts
from quire.quant.scheme import Slot, Storage
from quire.quant.shard import Cut, ExpertSpread, Span

if TYPE_CHECKING:
    from quire.layers.adapters import ExpertAdapters, ExpertPieces
    from quire.quant.placement import Placement


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
    identities: int = 0  # further choices, numbered after the experts: what goes in comes out


class Experts(ExpertLayer):
    """The experts of a mixture. Where ranks share them, each has some entries of every expert, or some experts whole
    (`own`): then it computes what tokens have chosen of these, and the sum over ranks has the rest. Ranks of several
    engines may share them: then tokens of all engines are gathered first, and each gets its own back."""

    def __init__(
        self,
        prefix: str,
        shape: ExpertShape,
        storage: Storage,
        own: tuple[int, ...] | None = None,
        rows_per_token: int = 1,
    ) -> None:
        super().__init__()
        self.prefix, self.count = prefix, shape.experts  # of all ranks
        self._spread = None if own is None else storage.group.spread
        self._rows_per_token = rows_per_token
        self._share: ExpertShare | None = None
        here = shape
        if (placed := None if own is None else storage.group.place_experts(shape.experts)) is not None:
            counts, rank = storage.group.broadcast is not None, storage.group.expert_rank
            self._share = ExpertShare(placed, rank, shape.experts, storage.kernels, counts=counts)
            here = replace(shape, experts=len(placed[rank]), all_experts=sum(map(len, placed)))
        self.hold(storage.schemes.of_experts(prefix).create(here))
        self._reduce = storage.group.sum_over(shape.ffn) if own is None else storage.group.reduce
        self._adds_stream = own is None and shape.ffn.start == 0  # of ranks whose results are added up, one does
        self.adapters: ExpertAdapters | None = None  # unless the engine serves adapters

    @property
    def share(self) -> ExpertShare | None:
        """None: all experts are here, or a part of every one."""
        return self._share

    @property
    def spread(self) -> ExpertSpread | None:
        """None: no other engine's rows come here."""
        return self._spread

    @property
    def is_summed(self) -> bool:
        """Whether a result is added up over ranks."""
        return self._reduce is not None

    def forward(self, x: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> Tensor:
        """Sum over a token's experts of weight * expert(x); added to `stream`, which whole experts of ranks do not
        take."""
        if self._share is not None:
            if self._spread is not None:
                y = self._across(self._spread, self._share, x, weights, index)
            else:
                y = self._share.multiply(self.stored, x, weights, index)
                self._adapt_own(y, x, weights, self._share.find(index) if self.adapters is not None else index)
            return y if self._reduce is None else self._reduce(y)
        stream = stream if self._adds_stream else None
        y = self.stored.multiply(x, weights, index, stream)
        self._adapt_own(y, x, weights, index, stream)
        return y if self._reduce is None else self._reduce(y)

    def _adapt_own(self, y: Tensor, x: Tensor, weights: Tensor, index: Tensor, stream: Tensor | None = None) -> None:
        """Of rows of this engine's step."""
        if self.adapters is not None:
            groups = self.adapters.groups(self.adapters.rows(len(x)))
            _adapt(self.adapters, groups, y, x, weights, index, stream)

    def place(self, placed: Placement) -> None:
        """From now on ranks have these; they are stored so already."""
        assert self._share is not None
        self._share.place(placed)
        if self.adapters is not None:
            self.adapters.moved()

    def needs_adapter_of(self, expert: int) -> bool:
        """Whether this expert is here, may come here, or is at a rank that hears from here what adapters add to it."""
        if self._share is None or self._share.moves:
            return True
        ranks = (self._share.rank,) if self._spread is None else self._spread.peers
        return any(expert in self._share.placed[rank] for rank in ranks)

    def pieces_for(self, rank: int, pieces: Mapping[int, ExpertPieces]) -> Mapping[int, ExpertPieces]:
        """Of an adapter's, by expert, what one of the ranks that share the experts needs."""
        if self._share is None or self._share.moves:
            return pieces
        return {expert: pieces[expert] for expert in self._share.placed[rank] if expert in pieces}

    def in_parts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor | PartialSums:
        """As `forward`, before a norm that may add up the results of a token's experts."""
        if self._share is not None or self.adapters is not None or self._reduce is not None:
            return self(x, weights, index)
        return self.stored.multiply_in_parts(x, weights, index)

    def _across(self, spread: ExpertSpread, share: ExpertShare, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """The sum over engines; that over the ranks of each is still to come."""
        each = self._rows_per_token
        own = () if self.adapters is None else (self.adapters.slots_of(len(x)),)
        x, weights, index, *slots = spread.gather(each, x, weights.float(), index.to(torch.int32), *own)
        index = index.to(torch.int64)
        y = share.multiply(self.stored, x, weights, index)
        if self.adapters is not None and (groups := self.adapters.groups(AdapterRows(slots[0].flatten()))):
            _adapt(self.adapters, groups, y, x, weights, share.find(index))
        return spread.scatter(each, y)

    def slots(self) -> Iterator[Slot]:
        slots = self.stored.slots()
        for slot in slots if self._share is None else self._share.slots(slots):
            fills = tuple(self.prefix + name for name in slot.fills)
            yield Slot(self.prefix + slot.name, slot.target, fills, slot.cut)


def _adapt(
    adapters: ExpertAdapters, groups: Iterable[tuple[int, SomeRows]], y: Tensor, x: Tensor, weights: Tensor,
    index: Tensor, stream: Tensor | None = None,
) -> None:  # fmt: skip
    """Replace results of rows whose adapters change experts. `index`: where their experts are stored."""
    for slot, rows in groups:
        own = adapters.multiply(slot, x[rows], weights[rows], index[rows])
        y[rows] = own if stream is None else own + stream[rows]


class ExpertShare:
    """Which experts of a mixture a rank has, and how tokens and tensors of checkpoints find them. Of an expert that
    several ranks have, each computes what every n-th row has chosen of it; all ranks see the same rows."""

    def __init__(self, placed: Placement, rank: int, count: int, kernels: Kernels, *, counts: bool = False) -> None:
        """`counts`: how often experts are chosen, by which they move between ranks."""
        self.rank, self.count, self.moves = rank, count, counts
        self._is_static = kernels.device.type != "cpu"  # shapes must not depend on what tokens choose
        self._has_copies = sum(map(len, placed)) > count
        # of each expert's copies, in the order of ranks: the place here, or -1; and how many there are
        self._places = torch.empty((count, len(placed)), dtype=torch.int32, device=kernels.device)
        self._copies = torch.empty((count,), dtype=torch.int64, device=kernels.device)
        self.loads = torch.zeros((count,), dtype=torch.int64, device=kernels.device) if counts else None
        self.place(placed)

    def place(self, placed: Placement) -> None:
        """From now on ranks have these; the tables stay where they are."""
        self.placed, self.own = placed, placed[self.rank]
        places = torch.full(self._places.shape, -1, dtype=torch.int32)
        copies = torch.zeros((self.count,), dtype=torch.int64)
        for rank, own in enumerate(placed):
            for place, expert in enumerate(own):
                if rank == self.rank:
                    places[expert, copies[expert]] = place
                copies[expert] += 1
        self._places.copy_(places)
        self._copies.copy_(copies)

    def find(self, index: Tensor) -> Tensor:
        """int32 [rows, choices]: the place here of what was chosen, or -1."""
        if not self._has_copies:
            return self._places[:, 0].index_select(0, index.flatten()).view(index.shape)
        rows = torch.arange(len(index), device=index.device)[:, None]
        return self._places[index, rows % self._copies[index]]

    def multiply(self, stored: StoredExperts, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """The part of the sum over a token's experts that this rank has."""
        if self.loads is not None:
            chosen = index.flatten().long()
            self.loads.scatter_add_(0, chosen, torch.ones_like(chosen))
        place = self.find(index)
        if self._is_static:  # kernels leave out what lies elsewhere
            return stored.multiply(x, weights, place)
        tokens, choices = (place >= 0).nonzero(as_tuple=True)
        y = torch.zeros_like(x, dtype=torch.float32)
        if len(tokens):  # every pair of token and expert is a token of its own
            pairs = stored.multiply(x[tokens], weights[tokens, choices][:, None], place[tokens, choices][:, None])
            y.index_add_(0, tokens, pairs.float())
        return y.to(x.dtype)

    def slots(self, slots: Iterable[Slot]) -> Iterator[Slot]:
        """Those of the stored experts, by the numbers that these have in a checkpoint; and those of other ranks."""
        own = list(slots)
        for slot in own:
            if not slot.fills:
                number, leaf = slot.name.split(".", 1)
                yield slot._replace(name=f"{self.own[int(number)]}.{leaf}")
                if number == "0":
                    yield from (Slot(f"{other}.{leaf}", None) for other in range(self.count) if other not in self.own)
                continue
            leaves = dict.fromkeys(name.split(".", 1)[1] for name in slot.fills)
            fills = tuple(f"{expert}.{leaf}" for expert in range(self.count) for leaf in leaves)
            yield slot._replace(fills=fills, cut=Cut(0, self.count, self._ranges()))

    def _ranges(self) -> tuple[tuple[int, int], ...]:
        """One for experts that follow each other."""
        ranges: list[tuple[int, int]] = []
        for expert in self.own:
            if ranges and ranges[-1][1] == expert:
                ranges[-1] = ranges[-1][0], expert + 1
            else:
                ranges.append((expert, expert + 1))
        return tuple(ranges)


class Moe(nn.Module):
    def __init__(self, prefix: str, width: int, kind: MoeKind, storage: Storage, *, act: str) -> None:
        super().__init__()
        self.prefix, self.kind = prefix, kind
        self.router = Linear(
            prefix,
            width,
            {"gate": kind.experts + kind.identities},
            storage,
            bias=kind.router_bias,
            wide=kind.router_wide,
        )
        between: Callable[[Tensor], Tensor] = (gated_on if kind.gated else plain_on)(act, storage.kernels)
        if kind.clamp:
            between = partial(storage.of(clamped_swiglu), alpha=kind.clamp_alpha, limit=kind.clamp)
        own = storage.group.own_experts(kind.experts)
        entries = Span.all(kind.ffn) if own is not None else storage.group.span("entries of an expert", kind.ffn)
        shape = ExpertShape(
            kind.experts, kind.latent or width, entries, kind.gated, kind.expert_bias, between, _rule(kind, act)
        )
        each = kind.top_k if kind.weigh_input else 1
        self.experts = Experts(f"{prefix}experts.", shape, storage, own, each)
        self._empty = storage.kernels.device, storage.dtype, kind.latent or width, 1 if kind.weigh_input else kind.top_k
        narrow = Linear(prefix, width, {"fc1_latent_proj": kind.latent}, storage) if kind.latent else None
        self.narrow, self.widen = narrow, None
        if kind.latent:
            self.widen = Linear(prefix, kind.latent, {"fc2_latent_proj": width}, storage)
        num_choices = kind.experts + kind.identities
        self.select_bias = storage.parameter(num_choices, dtype=torch.float32) if kind.select_bias else None
        shared = kind.shared_ffn
        self.shared = None
        if shared:
            bias, name = kind.shared_bias, f"{prefix}shared_expert."
            self.shared = Mlp(name, width, shared, storage, act=act, gated=kind.gated, bias=bias)
        self.shared_gate = Linear(prefix, width, {"shared_expert_gate": 1}, storage) if kind.shared_gate else None
        self._route = storage.of(route)
        self._sum, self._sigmoid = storage.of(sum_choices), storage.of(sigmoid)
        self._norm_router = storage.of(norm_router)
        alone = self.shared is None and not kind.latent and not kind.weigh_input and self.experts.share is None
        alone = alone and not kind.identities
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
        unchanged: Tensor | None = None
        if self.kind.identities:  # one of the token's experts is run in their place, and weighs nothing
            is_expert = index < self.kind.experts
            unchanged = x * self._sum(weights.masked_fill(is_expert, 0)[..., None]).to(x.dtype)
            own = index.amin(-1, keepdim=True).clamp_max(self.kind.experts - 1)
            weights, index = weights.masked_fill(~is_expert, 0), torch.where(is_expert, index, own)
        h = x if self.narrow is None else self.narrow(x)
        if self.kind.weigh_input:  # every pair of token and expert becomes a token of its own
            h = (h[:, None] * weights[..., None].to(h.dtype)).flatten(0, 1)
            weights, index = torch.ones_like(weights).view(-1, 1), index.view(-1, 1)
        out = self.experts(h, weights, index)
        if self.kind.weigh_input:
            out = self._sum(out.unflatten(0, (x.shape[0], -1)))
        if self.widen is not None:
            out = self.widen(out)
        if unchanged is not None:
            out = out + unchanged
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self._sigmoid(self.shared_gate(x)) * shared)

    def idle(self) -> None:
        """Compute what this rank's experts are for the tokens of other engines, having none."""
        device, dtype, width, choices = self._empty
        index = torch.empty((0, choices), dtype=torch.int64, device=device)
        self.experts(torch.empty((0, width), dtype=dtype, device=device), index.float(), index)

    def join(self, x: Tensor, norm: NormRule) -> Tensor:
        """x + moe(norm(x)), for a few rows: see ops/few.py."""
        logits, h = self._norm_router(x, norm, *self.router.read_plain(), self.kind.router_wide)
        weights, index = self._weigh(logits, x.dtype)
        return self.experts(h, weights, index, x)

    def few_matrices(self) -> list[Tensor | CodedWeight] | None:
        """As of an Mlp; experts are no business of ops/few.py."""
        return []

    def few_linears(self) -> list[Linear]:
        """As of an Mlp."""
        return []

    def in_parts(self, x: Tensor) -> Tensor | PartialSums:
        """moe(x), before a norm."""
        return self.experts.in_parts(x, *self.choose(x))

    def slots(self) -> Iterator[Slot]:
        if self.select_bias is not None:
            yield Slot(f"{self.prefix}gate.e_score_correction_bias", self.select_bias.data)


def mixtures_of(model: object) -> list[Moe]:
    """In the order in which a step comes to them."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, Moe)]


def _rule(kind: MoeKind, act: str) -> Rule | None:
    """What compiled experts compute between their matmuls; None: what they have no code for."""
    if kind.clamp:
        return "clamped", kind.clamp_alpha, kind.clamp
    return (PLAIN[act].name, 0.0, 0.0) if kind.gated and act in PLAIN else None
