"""Delta attention with a decay per channel: a gated delta net whose state forgets every key entry at its own rate.

A layer with a state like those of layers/ssm.py. Forgetting and the gate on the output come from matmuls of low rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.layers.rope import RotaryTables
from quire.layers.ssm import Conv, StateLayer
from quire.ops.act import sigmoid, softplus
from quire.ops.norm import unit_rms
from quire.ops.ssm import causal_conv, channel_delta_scan
from quire.quant.scheme import Slot, Storage
from quire.quant.shard import cut_to


@dataclass(frozen=True)
class KdaKind:
    heads: int
    head_dim: int  # of keys and of values
    conv: int = 4
    act: str = "silu"
    eps: float = 1e-5


class Kda(StateLayer):
    def __init__(self, prefix: str, width: int, kind: KdaKind, storage: Storage) -> None:
        heads, size = storage.group.span("heads of a state", kind.heads), kind.head_dim
        own = heads.times(size)
        super().__init__(f"{prefix}state", (heads.count, size, size), (3 * own.count, kind.conv - 1), storage)
        self.prefix, self.inner, self._heads, self._own = prefix, own.count, heads, own
        self.kind = replace(kind, heads=heads.count)  # those of this rank
        self.up = Linear(prefix, width, {f"in_proj_{part}": own for part in "qkv"}, storage, fused="in_proj_qkv")
        self.low = Linear(prefix, width, {"f_a_proj": size, "g_a_proj": size, "b_proj": heads}, storage)
        self.forget = Linear(prefix, size, {"f_b_proj": own}, storage)
        self.gate = Linear(prefix, size, {"g_b_proj": own}, storage)
        self.down = Linear(prefix, own, {"out_proj": width}, storage)
        conv = self._conv = Conv(f"{prefix}conv1d", (own, own, own), kind.conv, False, storage)
        self.conv_weight = conv.weight
        self.a_log, self.dt_bias = (storage.parameter(n, dtype=torch.float32) for n in (heads.count, own.count))
        self.norm_weight = storage.parameter(size)
        self._convolve, self._scan = storage.of(causal_conv), storage.of(channel_delta_scan)
        self._sigmoid, self._softplus = storage.of(sigmoid), storage.of(softplus)
        self._norm = storage.of(unit_rms)

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind, tokens = self.kind, x.shape[0]
        shape = (tokens, kind.heads, kind.head_dim)
        work, (states, windows) = self.step(x, batch)
        qkv = self._convolve(self.up(x), self.conv_weight, None, windows, work, kind.act)
        q, k, v = (part.reshape(shape) for part in qkv.chunk(3, -1))
        forget, gate, beta = self.low(x).split((kind.head_dim, kind.head_dim, kind.heads), -1)
        rate = self._softplus(self.forget(forget).float() + self.dt_bias).view(shape)
        decay = -self.a_log.exp()[:, None] * rate
        y = self._scan(q, k, v, decay, self._sigmoid(beta.float()), states, work).float()
        y = self._norm(y, kind.eps) * self.norm_weight.float()
        y = y * self._sigmoid(self.gate(gate).float().view(shape))
        return self.down(y.to(x.dtype).reshape(tokens, self.inner))

    def slots(self) -> Iterator[Slot]:
        yield from self._conv.slots("qkv")
        yield Slot(f"{self.prefix}A_log", self.a_log.data.view(1, 1, -1, 1), cut=cut_to(2, [self._heads]))
        yield Slot(f"{self.prefix}dt_bias", self.dt_bias.data, cut=cut_to(0, [self._own]))
        yield Slot(f"{self.prefix}norm.weight", self.norm_weight.data)
