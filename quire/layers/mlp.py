"""Mlp: up, activation, down; with or without a gate."""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.ops.act import gated_on, plain_on
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

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._act(self.up(x)))
