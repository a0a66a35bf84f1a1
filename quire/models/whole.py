"""Consecutive decoder blocks of the common form, run through the op `join_blocks`.

`Whole.of` decides once whether a block has that form. A `Stretch` joins its blocks in the first step, and again
after `forget`: whoever replaces weights or caches calls it, because a joined call holds their addresses. Nothing is
compared in a step. Must not know: devices, kernels, who makes caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.attention import Attention
from quire.layers.batch import Batch
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.norm import Norm
from quire.layers.rope import RotaryTables
from quire.models.arch import Arch
from quire.ops.act import PLAIN
from quire.ops.blocks import BlockParts, BlocksRun, StepTurn, Weights, join_blocks
from quire.ops.few import NormRule
from quire.ops.parts import Delta
from quire.quant.scheme import Storage


class Whole:
    """The parts of a block of the common form."""

    def __init__(self, attn: Attention, mlp: Mlp, rules: tuple[NormRule, NormRule], act: str) -> None:
        self.attn, self.mlp, self.rules, self.act = attn, mlp, rules, act

    @classmethod
    def of(cls, block: Any, arch: Arch) -> Whole | None:
        attn, mlp, norms = block.attn, block.mlp, (block.before_attn, block.before_mlp)
        if arch.order != "pre" or block.scale != 1.0 or not arch.gated or any(arch.inner_norms):
            return None
        if not isinstance(attn, Attention) or not isinstance(mlp, Mlp) or attn.kind.gated or not attn.fusable:
            return None
        if attn.o.is_summed or mlp.down.is_summed:
            return None
        rules = tuple(norm.rule() for norm in norms if isinstance(norm, Norm))
        if len(rules) != 2 or rules[0] is None or rules[1] is None:
            return None
        return cls(attn, mlp, (rules[0], rules[1]), PLAIN[arch.act].name)

    def parts(self) -> BlockParts | None:
        """None if there is no cache yet, or some matrix is neither packed nor plain."""
        attn, mlp = self.attn, self.mlp
        qkv, o, up, down = (_weights(linear) for linear in (attn.qkv, attn.o, mlp.up, mlp.down))
        if attn.cache is None or qkv is None or o is None or up is None or down is None:
            return None
        return BlockParts(
            (qkv, o, up, down), self.rules, attn.prep(None), attn.cache, attn.kind.scale, attn.kind.softcap, attn.sinks,
            attn.alibi, self.act,
        )  # fmt: skip


def _weights(linear: Linear) -> Weights | None:
    stored = linear.stored
    return None if stored.packed is None and stored.numbers is None else Weights(stored.whole(), stored.bias)


class Stretch:
    """Consecutive layers. If all have the common form, a step whose attention supports it runs them in one call."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        ropes: Sequence[int | None],
        wholes: list[Whole],
        join: Callable[..., BlocksRun | None],
        dtype: torch.dtype,
    ) -> None:
        """`ropes[i]` is the index of layer i's rotary embedding in a step; None: it has none. `wholes`: all or none."""
        self._layers, self._ropes, self._wholes = layers, ropes, wholes
        self._join, self._dtype = join, dtype
        self._turn_keys: list[tuple[int, int | None]] = []  # group and rotary embedding
        self._call: BlocksRun | None = None
        self._is_stale = bool(wholes)

    @classmethod
    def cut(
        cls,
        layers: Iterable[nn.Module],
        ropes: Sequence[int | None],
        wholes: Sequence[Whole | None],
        storage: Storage,
    ) -> list[Stretch]:
        """All of a decoder's layers, split where runs of the common form start and end."""
        join = storage.of(join_blocks)
        if join is join_blocks.reference:
            wholes = [None] * len(wholes)
        stretches = []
        for _, run in groupby(zip(layers, ropes, wholes, strict=True), key=lambda entry: entry[2] is None):
            here, turned, made = zip(*run, strict=True)
            stretches.append(cls(here, turned, [whole for whole in made if whole is not None], join, storage.dtype))
        return stretches

    def forget(self) -> None:
        """Weights or caches were replaced."""
        self._call, self._is_stale = None, bool(self._wholes)

    def __call__(self, x: Tensor, delta: Delta, batch: Batch, rotaries: Sequence[RotaryTables]) -> tuple[Tensor, Delta]:
        if self._is_stale:
            self._make()
        if self._call is not None and not batch.through_linears:
            shared = []
            for group, rope in self._turn_keys:
                rotary = (None, None) if rope is None else rotaries[rope]
                shared.append(StepTurn(batch.plans[group], *rotary))
            if (done := self._call(x, delta, shared)) is not None:
                return done
        for layer, rope in zip(self._layers, self._ropes, strict=True):
            x, delta = layer(x, delta, batch, None if rope is None else rotaries[rope])
        return x, delta

    def _make(self) -> None:
        self._is_stale = False
        parts = [made for whole in self._wholes if (made := whole.parts()) is not None]
        if len(parts) < len(self._wholes):
            return
        kinds = [
            (whole.attn.group, rope if whole.attn.rope is not None else None)
            for whole, rope in zip(self._wholes, self._ropes, strict=True)
        ]
        self._turn_keys = list(dict.fromkeys(kinds))
        self._call = self._join(parts, [self._turn_keys.index(kind) for kind in kinds], self._dtype)
