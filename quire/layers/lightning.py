"""Lightning attention: linear attention whose state fades at a constant rate per head, normalised and gated.

A layer with a state like those of layers/ssm.py, without a convolution. Later heads and later layers fade more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.layers.norm import NormKind, norm_of
from quire.layers.rope import RotaryTables
from quire.layers.ssm import StateLayer
from quire.ops.act import plain_on, sigmoid
from quire.ops.ssm import ssd_scan
from quire.quant.scheme import Slot, Storage

ONE = (1.0, 1.0)  # the least and the largest step of a scan: Mamba 2's arithmetic with a constant decay


@dataclass(frozen=True)
class LightningKind:
    heads: int
    head_dim: int
    act: str = "silu"
    eps: float = 1e-6


class Lightning(StateLayer):
    def __init__(self, prefix: str, width: int, kind: LightningKind, fade: float, storage: Storage) -> None:
        own, size = storage.group.span("heads of a state", kind.heads), kind.head_dim
        heads, entries = own.count, own.times(size)
        super().__init__(f"{prefix}state", (heads, size, size), (0,), storage)  # no window of inputs
        parts = {"q_proj": entries, "k_proj": entries, "v_proj": entries}
        self.up = Linear(prefix, width, parts, storage, fused="qkv_proj")
        self.gate = Linear(prefix, width, {"output_gate": entries}, storage)
        self.down = Linear(prefix, entries, {"out_proj": width}, storage)
        self.norm = norm_of(f"{prefix}norm", entries, NormKind(eps=kind.eps), storage)
        mine = range(own.start, own.start + heads)
        rates = torch.tensor([2.0 ** (-8.0 * (head + 1) / kind.heads) for head in mine])
        self.kind = replace(kind, heads=heads)  # from here on those of this rank
        self.log_rates = (fade * rates).log().to(storage.device)  # no buffer: it is not part of a checkpoint
        self.no_bias = torch.zeros(heads, device=storage.device)
        self._act, self._scan = plain_on(kind.act, storage.kernels), storage.of(ssd_scan)
        self._sigmoid = storage.of(sigmoid)

    def forward(self, x: Tensor, batch: Batch, turn: RotaryTables | None) -> Tensor:
        kind, tokens = self.kind, x.shape[0]
        work, (states, _) = self.step(x, batch)
        q, k, v = self._act(self.up(x)).view(tokens, 3, kind.heads, kind.head_dim).unbind(1)
        steps = self.no_bias.expand(tokens, -1)  # each of them one, whatever is given: see ONE
        y = self._scan(v, steps, k, q, self.log_rates, None, self.no_bias, ONE, states, work)
        return self.down(self.norm(y.reshape(tokens, -1)) * self._sigmoid(self.gate(x)))

    def slots(self) -> Iterator[Slot]:
        """All of it lies in its parts."""
        return iter(())
