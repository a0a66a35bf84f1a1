"""Whole: a decoder block as one compiled call on CPU, where the block has the common form and kernels are there.

Common: norm, attention over the paged cache, norm, gated mlp, each joined to the stream as it is. A block asks `of`
once; the addresses are taken when a step first runs, and again when weights or cache were replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.base import env
from quire.layers.attention import Attention
from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.norm import Norm
from quire.layers.rope import Turn
from quire.models.arch import Arch
from quire.ops.act import PLAIN
from quire.ops.cpu.block import BlockCall, BlockParts, NativeStep, Weights
from quire.ops.cpu.forms import ACTS, few_rows
from quire.ops.few import NormRule
from quire.quant.scheme import Storage


class Whole:
    def __init__(
        self, attn: Attention, mlp: Mlp, rules: tuple[NormRule, NormRule], act: int, dtype: torch.dtype
    ) -> None:
        self.attn, self.mlp, self.rules, self.act, self.dtype = attn, mlp, rules, act, dtype
        self.few = not env.BATCH_INVARIANT.get()  # plain products of many rows are left to torch
        self.few_rows = few_rows()
        self._linears = (attn.qkv, attn.o, mlp.up, mlp.down)
        self._seen: tuple[Any, ...] = ()
        self._call: BlockCall | None = None

    @classmethod
    def of(cls, block: Any, arch: Arch, storage: Storage) -> Whole | None:
        attn, mlp, norms = block.attn, block.mlp, (block.before_attn, block.before_mlp)
        if storage.device.type != "cpu" or arch.order != "pre" or block.scale != 1.0 or not arch.gated:
            return None
        if any(arch.inner_norms):
            return None
        if not isinstance(attn, Attention) or not isinstance(mlp, Mlp) or attn.kind.gated or not attn.fusable:
            return None
        rules = tuple(norm.rule() for norm in norms if isinstance(norm, Norm))
        act = ACTS.get(PLAIN[arch.act].name)
        if len(rules) != 2 or rules[0] is None or rules[1] is None or act is None:
            return None
        return cls(attn, mlp, (rules[0], rules[1]), act, storage.dtype)

    def __call__(
        self, x: Tensor, delta: Tensor | None, batch: Batch, turn: Turn | None
    ) -> tuple[Tensor, Tensor] | None:
        """None: not this step."""
        step = batch.plans[self.attn.group]
        if not isinstance(step, NativeStep):
            return None
        seen = (self.attn.cache, *(_stored(linear) for linear in self._linears))
        if len(seen) != len(self._seen) or any(a is not b for a, b in zip(seen, self._seen, strict=True)):
            self._call, self._seen = self._made(seen[1:]), seen
        if self._call is None or (delta is not None and not delta.is_contiguous()) or not x.is_contiguous():
            return None
        if self.few and x.shape[0] > self.few_rows and any(linear.is_plain for linear in self._linears):
            return None
        if self.attn.rope is None or turn is None:
            return self._call(x, delta, step, None, None)
        if turn.cos.dtype is not self.dtype and turn.cos.dtype is not torch.float32:
            return None
        return self._call(x, delta, step, turn.cos, turn.sin)

    def _made(self, stored: tuple[Any, ...]) -> BlockCall | None:
        """None where some product is neither packed nor plain numbers that the kernels multiply."""
        plain = [matrix for matrix in stored if isinstance(matrix, Tensor)]
        if any(matrix is None for matrix in stored) or (plain and self.dtype is torch.float32):
            return None
        attn = self.attn
        weights = tuple(Weights(matrix, linear.bias) for matrix, linear in zip(stored, self._linears, strict=True))
        cache: Any = attn.cache
        parts = BlockParts(
            weights, self.rules, attn.prep(None), cache.rows, attn.kind.scale, attn.kind.softcap, attn.sinks,  # type: ignore[arg-type]
            attn.alibi, self.act,
        )  # fmt: skip
        return BlockCall(parts, self.dtype)


def _stored(linear: Linear) -> Any:
    """The object that is replaced when the numbers are."""
    return linear.weight if linear.is_plain else linear.matrix
