"""Layers that keep a running state: Mamba 1 and 2, gated delta net, short convolution. Each owns its KVSpec (STATE).

They meet a step through StatePlan, as attention layers do through an attention plan: the plan's StateWork says which
state each token follows, the layer's StateCache holds the states. Without a cache (a memory profile, before there is
one) a layer runs the step as one fresh row and keeps nothing. Must not know: blocks, rows, requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from quire.layers.attention import KVLayer
from quire.layers.batch import Batch, LayerCache
from quire.layers.linear import Linear
from quire.layers.norm import Norm, NormKind, RankNorm
from quire.layers.rope import RotaryTables
from quire.ops.act import silu
from quire.ops.norm import unit_rms
from quire.ops.ssm import StateWork, causal_conv, delta_scan, gated_rms_norm, selective_scan, ssd_scan
from quire.quant.scheme import Slot, Storage
from quire.quant.shard import Span, cut_to
from quire.schema.errors import ConfigError
from quire.schema.kv import KVKind, KVSpec

NO_LIMIT = (0.0, float("inf"))


class StatePlan:
    """In Batch.plans, at the index of a KV group of states."""

    run_fused = None

    def __init__(self, work: StateWork) -> None:
        self.work = work

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError("an attention layer was bound to a KV group of states")


class StateCache:
    """One layer's states, as views [num_blocks, *shape] of the worker's memory, in the order of spec.state_shapes."""

    def __init__(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> None:
        self.spec, self.states = spec, []
        page, at = memory.shape[1], 0
        if memory.shape[0] < num_blocks or page < spec.page_bytes:
            raise ConfigError(
                f"KV memory {tuple(memory.shape)} does not hold {num_blocks} blocks of {spec.page_bytes} bytes"
            )
        for shape, name in zip(spec.state_shapes, spec.state_dtypes, strict=True):
            dtype = getattr(torch, name)
            size, count = dtype.itemsize, _count(shape)
            if page % size or at % size:
                raise ConfigError(
                    f"layer {spec.layer!r}: states of {size} bytes do not fit pages of {page} bytes at offset {at}"
                )
            flat = memory.view(dtype)[:, at // size : at // size + count]
            self.states.append(flat.unflatten(1, shape)[:num_blocks])
            at += count * size


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


class StateLayer(KVLayer):
    """What they share. `shapes`: of the states, the running state first (float32), then windows of inputs."""

    def __init__(
        self, layer: str, recurrent: tuple[int, ...] | None, window: tuple[int, ...], storage: Storage
    ) -> None:
        super().__init__(layer, 0, 0)
        self._shapes = (window,) if recurrent is None else (recurrent, window)
        own = str(storage.dtype).removeprefix("torch.")
        self._dtypes = (own,) if recurrent is None else ("float32", own)

    def kv_spec(self, block_size: int, kv_dtype: str) -> KVSpec:
        return KVSpec(
            layer=self.layer, kind=KVKind.STATE, block_size=block_size, state_shapes=self._shapes,
            state_dtypes=self._dtypes,
        )  # fmt: skip

    def bind(self, cache: LayerCache, group: int) -> None:
        if not isinstance(cache, StateCache):
            raise ConfigError(f"layer {self.layer!r} keeps states; it was given a cache of {type(cache).__name__}")
        super().bind(cache, group)

    def step(self, x: Tensor, batch: Batch) -> tuple[StateWork, list[Tensor]]:
        """How this step moves the states, and the states."""
        if isinstance(self.cache, StateCache):
            plan = batch.plans[self.group]
            if not isinstance(plan, StatePlan):
                raise ConfigError(f"layer {self.layer!r} keeps states; its plan is a {type(plan).__name__}")
            return plan.work, self.cache.states
        pairs = zip(self._shapes, self._dtypes, strict=True)
        states = [torch.empty((1, *shape), dtype=getattr(torch, name), device=x.device) for shape, name in pairs]
        return StateWork.fresh(x.shape[0], x.device), states


class Conv:
    """The weights of a convolution per channel, a part of a layer. `parts`: channels, one run after another."""

    def __init__(self, name: str, parts: Sequence[Span], size: int, bias: bool, storage: Storage) -> None:
        self.name, self._parts = name, parts
        channels = sum(part.count for part in parts)
        self.weight = storage.parameter(channels, size)
        self.bias = storage.parameter(channels) if bias else None

    def slots(self, names: Sequence[str] = ()) -> Iterator[Slot]:
        """names: of the parts, where a checkpoint may hold them apart, as name_part."""
        apart, at = [], 0
        for part, own in zip(names, self._parts, strict=False):
            apart.append(f"{self.name}_{part}.weight")
            yield Slot(apart[-1], self.weight.data[at : at + own.count, None], cut=cut_to(0, [own]))
            at += own.count
        cut = cut_to(0, self._parts)
        yield Slot(f"{self.name}.weight", self.weight.data[:, None], tuple(apart), cut)
        if self.bias is not None:
            yield Slot(f"{self.name}.bias", self.bias.data, cut=cut)


@dataclass(frozen=True)
class Mamba2Kind:
    """What a Mamba 2 mixer computes; see ops/ssm.py."""

    heads: int
    head_dim: int
    state: int
    groups: int = 1  # heads of a group share B and C
    conv: int = 4  # inputs a convolution sees
    conv_bias: bool = True
    bias: bool = False  # of the projection in
    out_bias: bool = False
    act: str = "silu"
    norm: bool = True  # False: the gate alone
    norm_groups: int = 1  # parts of the output, each normalised by itself
    norm_first: bool = False  # normalise, then gate
    eps: float = 1e-5
    dt_limit: tuple[float, float] = NO_LIMIT
    scales: tuple[float, ...] = ()  # of gate, x, B, C and dt; folded into the projection's rows while loading


class Mamba2(StateLayer):
    def __init__(self, prefix: str, width: int, kind: Mamba2Kind, storage: Storage) -> None:
        heads = storage.group.span("heads of a state", kind.heads)
        groups = storage.group.span("groups of heads of a state", kind.groups, repeats=True)
        own, both = heads.times(kind.head_dim), groups.times(kind.state)
        channels = own.count + 2 * both.count
        states = (heads.count, kind.head_dim, kind.state)
        super().__init__(f"{prefix}state", states, (channels, kind.conv - 1), storage)
        self.prefix, self.inner, self.shared = prefix, own.count, both.count
        self._heads, self._own, self._size = heads, own, own.whole // kind.norm_groups
        parts = {"gate": own, "x": own, "b": both, "c": both, "dt": heads}
        self.up = Linear(prefix, width, parts, storage, bias=kind.bias, fused="in_proj")
        self.down = Linear(prefix, own, {"out_proj": width}, storage, bias=kind.out_bias)
        conv = self._conv = Conv(f"{prefix}conv1d", (own, both, both), kind.conv, kind.conv_bias, storage)
        self.conv_weight, self.conv_bias = conv.weight, conv.bias
        self.a_log, self.d, self.dt_bias = (storage.parameter(heads.count, dtype=torch.float32) for _ in range(3))
        self.norm_weight, self._rank_norm = None, None
        if kind.norm and own.count % self._size == 0:
            self.norm_weight = storage.parameter(own.count)
        elif kind.norm:
            norm = NormKind(eps=kind.eps)
            self._rank_norm = RankNorm(f"{prefix}norm", own, norm, storage, groups=kind.norm_groups)
        self._convolve, self._scan = storage.of(causal_conv), storage.of(ssd_scan)
        self._norm, self._silu = storage.of(gated_rms_norm), storage.of(silu)
        self.kind = replace(kind, heads=heads.count, groups=groups.count)  # from here on those of this rank

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind, tokens = self.kind, x.shape[0]
        work, (states, windows) = self.step(x, batch)
        gate, xbc, dt = self.up(x).split((self.inner, self.inner + 2 * self.shared, kind.heads), -1)
        xbc = self._convolve(xbc, self.conv_weight, self.conv_bias, windows, work, kind.act)
        inputs, b, c = xbc.split((self.inner, self.shared, self.shared), -1)
        y = self._scan(
            inputs.unflatten(1, (kind.heads, kind.head_dim)), dt, b.unflatten(1, (kind.groups, kind.state)),
            c.unflatten(1, (kind.groups, kind.state)), self.a_log, self.d, self.dt_bias, kind.dt_limit, states, work,
        ).reshape(tokens, self.inner)  # fmt: skip
        return self.down(self._gated(y, gate))

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gated and, unless the mixer has no norm, normalised."""
        if self.norm_weight is not None:
            return self._norm(y, gate, self.norm_weight, self.kind.eps, self._size, self.kind.norm_first)
        if self._rank_norm is None:
            return y * self._silu(gate)
        wide = self._silu(gate.float())
        normed = self._rank_norm(y) * wide if self.kind.norm_first else self._rank_norm(y.float() * wide)
        return normed.to(y.dtype)

    def slots(self) -> Iterator[Slot]:
        yield from self._conv.slots()
        heads = cut_to(0, [self._heads])
        for name, target in (("A_log", self.a_log), ("D", self.d), ("dt_bias", self.dt_bias)):
            yield Slot(self.prefix + name, target.data, cut=heads)
        if self.norm_weight is not None:
            yield Slot(f"{self.prefix}norm.weight", self.norm_weight.data, cut=cut_to(0, [self._own]))


@dataclass(frozen=True)
class MambaKind:
    """What a Mamba 1 mixer computes."""

    inner: int
    state: int
    rank: int  # of the step size's projection
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    act: str = "silu"
    norm_eps: float = 0.0  # of norms over dt, B and C; 0: none
    norm_weights: bool = True  # those norms have weights


class Mamba(StateLayer):
    def __init__(self, prefix: str, width: int, kind: MambaKind, storage: Storage) -> None:
        own = storage.group.span("channels of a state", kind.inner)
        inner = own.count
        super().__init__(f"{prefix}state", (inner, kind.state), (inner, kind.conv - 1), storage)
        self.prefix, self.kind, self._own = prefix, kind, own
        self.up = Linear(prefix, width, {"x": own, "gate": own}, storage, bias=kind.bias, fused="in_proj")
        parts = {"dt": kind.rank, "b": kind.state, "c": kind.state}
        self.select = Linear(prefix, own, parts, storage, fused="x_proj")
        self.dt = Linear(prefix, kind.rank, {"dt_proj": own}, storage)
        self.down = Linear(prefix, own, {"out_proj": width}, storage, bias=kind.bias)
        conv = self._conv = Conv(f"{prefix}conv1d", (own,), kind.conv, kind.conv_bias, storage)
        self.conv_weight, self.conv_bias = conv.weight, conv.bias
        self.a_log = storage.parameter(inner, kind.state, dtype=torch.float32)
        self.d, self.dt_bias = (storage.parameter(inner, dtype=torch.float32) for _ in range(2))
        norm = NormKind(eps=kind.norm_eps)
        with_norms = kind.norm_eps and kind.norm_weights
        self.dt_norm = Norm(f"{prefix}dt_layernorm", (kind.rank,), norm, storage) if with_norms else None
        self.b_norm = Norm(f"{prefix}b_layernorm", (kind.state,), norm, storage) if with_norms else None
        self.c_norm = Norm(f"{prefix}c_layernorm", (kind.state,), norm, storage) if with_norms else None
        self._convolve, self._scan = storage.of(causal_conv), storage.of(selective_scan)
        self._silu, self._plain_norm = storage.of(silu), storage.of(unit_rms)

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind = self.kind
        work, (states, windows) = self.step(x, batch)
        inputs, gate = self.up(x).chunk(2, -1)
        inputs = self._convolve(inputs, self.conv_weight, self.conv_bias, windows, work, kind.act)
        dt, b, c = self.select(inputs).split((kind.rank, kind.state, kind.state), -1)
        if self.dt_norm is not None and self.b_norm is not None and self.c_norm is not None:
            dt, b, c = self.dt_norm(dt), self.b_norm(b), self.c_norm(c)
        elif kind.norm_eps:
            dt, b, c = (self._plain_norm(t, kind.norm_eps) for t in (dt, b, c))
        y = self._scan(inputs, self.dt(dt), b, c, self.a_log, self.d, self.dt_bias, states, work)
        return self.down(y * self._silu(gate))

    def slots(self) -> Iterator[Slot]:
        yield from self._conv.slots()
        for name, target in (("A_log", self.a_log), ("D", self.d), ("dt_proj.bias", self.dt_bias)):
            yield Slot(self.prefix + name, target.data, cut=cut_to(0, [self._own]))


@dataclass(frozen=True)
class DeltaKind:
    """What a gated delta net computes."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    act: str = "silu"
    eps: float = 1e-6
    beta_scale: float = 1.0


class DeltaNet(StateLayer):
    def __init__(self, prefix: str, width: int, kind: DeltaKind, storage: Storage) -> None:
        key_heads = storage.group.span("heads of keys", kind.key_heads, repeats=True)
        heads = storage.group.span("heads of values", kind.value_heads)
        keys, values = key_heads.times(kind.key_dim), heads.times(kind.value_dim)
        kind = replace(kind, key_heads=key_heads.count, value_heads=heads.count)  # from here on those of this rank
        channels = 2 * keys.count + values.count
        states = (kind.value_heads, kind.key_dim, kind.value_dim)
        super().__init__(f"{prefix}state", states, (channels, kind.conv - 1), storage)
        self.prefix, self.kind, self.keys, self.values = prefix, kind, keys.count, values.count
        self._heads = heads
        parts = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
        three = {"in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v")}
        self.up = Linear(prefix, width, parts, storage, fused="in_proj_qkvz", runs=three)
        gates = {"in_proj_b": heads, "in_proj_a": heads}
        self.gates = Linear(prefix, width, gates, storage, fused="in_proj_ba")
        self.down = Linear(prefix, values, {"out_proj": width}, storage)
        conv = self._conv = Conv(f"{prefix}conv1d", (keys, keys, values), kind.conv, False, storage)
        self.conv_weight = conv.weight
        self.a_log, self.dt_bias = (storage.parameter(kind.value_heads, dtype=torch.float32) for _ in range(2))
        self.norm_weight = storage.parameter(kind.value_dim)
        self._convolve, self._scan = storage.of(causal_conv), storage.of(delta_scan)
        self._norm = storage.of(gated_rms_norm)

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind, tokens = self.kind, x.shape[0]
        work, (states, windows) = self.step(x, batch)
        qkv, gate = self.up(x).split((2 * self.keys + self.values, self.values), -1)
        b, a = self.gates(x).chunk(2, -1)
        qkv = self._convolve(qkv, self.conv_weight, None, windows, work, kind.act)
        q, k, v = qkv.split((self.keys, self.keys, self.values), -1)
        heads = (kind.key_heads, kind.key_dim)
        y = self._scan(
            q.unflatten(1, heads), k.unflatten(1, heads), v.unflatten(1, (kind.value_heads, kind.value_dim)),
            a, b, self.a_log, self.dt_bias, kind.beta_scale, states, work,
        ).reshape(tokens, self.values)  # fmt: skip
        return self.down(self._norm(y, gate, self.norm_weight, kind.eps, kind.value_dim, True))

    def slots(self) -> Iterator[Slot]:
        yield from self._conv.slots("qkv")
        for name, target in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            yield Slot(self.prefix + name, target.data, cut=cut_to(0, [self._heads]))
        yield Slot(f"{self.prefix}norm.weight", self.norm_weight.data)


@dataclass(frozen=True)
class ShortConvKind:
    conv: int
    bias: bool = False


class ShortConv(StateLayer):
    """A gate before and a gate after a convolution over the last few tokens."""

    def __init__(self, prefix: str, width: int, kind: ShortConvKind, storage: Storage) -> None:
        own = storage.group.span("channels of a convolution", width)
        super().__init__(f"{prefix}state", None, (own.count, kind.conv - 1), storage)
        parts = {"b": own, "c": own, "x": own}
        self.up = Linear(prefix, width, parts, storage, bias=kind.bias, fused="in_proj")
        self.down = Linear(prefix, own, {"out_proj": width}, storage, bias=kind.bias)
        conv = self._conv = Conv(f"{prefix}conv", (own,), kind.conv, kind.bias, storage)
        self.conv_weight, self.conv_bias = conv.weight, conv.bias
        self._convolve = storage.of(causal_conv)

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        work, (windows,) = self.step(x, batch)
        before, after, inputs = self.up(x).chunk(3, -1)
        return self.down(after * self._convolve(before * inputs, self.conv_weight, self.conv_bias, windows, work, ""))

    def slots(self) -> Iterator[Slot]:
        yield from self._conv.slots()
