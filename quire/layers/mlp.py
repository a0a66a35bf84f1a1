"""Mlp: up, activation, down; with or without a gate."""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.ops.act import gated_on, plain_on
from quire.ops.few import NormRule, linear_add, norm_linear
from quire.quant.scheme import Storage


class Mlp(nn.Module):
    def __init__(
        self, prefix: str, width: int, ffn: int, storage: Storage, *, act: str, gated: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        if gated:
            parts = {"gate_proj": ffn, "up_proj": ffn}
            self.up = Linear(prefix, width, parts, storage, bias=bias, fused="gate_up_proj")
        else:
            self.up = Linear(prefix, width, {"up_proj": ffn}, storage, bias=bias)
        self.down = Linear(prefix, ffn, {"down_proj": width}, storage, bias=bias)
        self._act = (gated_on if gated else plain_on)(act, storage.device)
        self._norm_linear, self._linear_add = norm_linear.on(storage.device), linear_add.on(storage.device)
        self.joins = self.up.is_plain and self.down.is_plain  # whether `join` can be called

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._act(self.up(x)))

    def join(self, x: Tensor, norm: NormRule) -> Tensor:
        """x + mlp(norm(x)), for a few rows: see ops/few.py."""
        h = self._norm_linear(x, norm, self.up.weight, self.up.bias, self._act)
        return self._linear_add(h, self.down.weight, self.down.bias, x)
