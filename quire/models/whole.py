"""Decoder blocks of the common form as one compiled call on CPU, as many of them as follow each other.

Common: norm, attention over the paged cache, norm, gated mlp, each joined to the stream as it is. A block asks
`Whole.of` once. A `Stretch` takes the addresses when a step first runs, and again after `forget`, which whoever
replaces weights or cache calls; the kernels it takes when it is built. A cache that is not the kernels' own
(NativeCache) leaves the blocks to their layers. Must not know: what else makes caches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.attention import Attention
from quire.layers.batch import Batch
from quire.layers.mlp import Mlp
from quire.layers.norm import Norm
from quire.layers.rope import Turn
from quire.models.arch import Arch
from quire.ops.act import PLAIN
from quire.ops.cpu.block import BlockParts, BlocksCall, NativeCache, NativeStep, StepTurn, Weights
from quire.ops.cpu.forms import ACTS, ALL_ROWS, few_rows
from quire.ops.few import NormRule
from quire.ops.parts import Delta, Parts
from quire.quant.scheme import Storage


class Whole:
    """What a block of the common form is made of."""

    def __init__(
        self,
        library: ctypes.CDLL,
        attn: Attention,
        mlp: Mlp,
        rules: tuple[NormRule, NormRule],
        act: int,
        storage: Storage,
    ) -> None:
        self.library, dtype = library, storage.dtype
        self.attn, self.mlp, self.rules, self.act, self.dtype = attn, mlp, rules, act, dtype
        self.linears = (attn.qkv, attn.o, mlp.up, mlp.down)
        plain = any(linear.stored.is_plain for linear in self.linears)
        self.most_rows = few_rows(storage.kernels, dtype) if plain else ALL_ROWS

    @classmethod
    def of(cls, block: Any, arch: Arch, storage: Storage) -> Whole | None:
        attn, mlp, norms = block.attn, block.mlp, (block.before_attn, block.before_mlp)
        if storage.device.type != "cpu" or (library := storage.kernels.library) is None:
            return None
        if arch.order != "pre" or block.scale != 1.0 or not arch.gated:
            return None
        if any(arch.inner_norms):
            return None
        if not isinstance(attn, Attention) or not isinstance(mlp, Mlp) or attn.kind.gated or not attn.fusable:
            return None
        if attn.o.is_summed or mlp.down.is_summed:
            return None
        rules = tuple(norm.rule() for norm in norms if isinstance(norm, Norm))
        act = ACTS.get(PLAIN[arch.act].name)
        if len(rules) != 2 or rules[0] is None or rules[1] is None or act is None:
            return None
        return cls(library, attn, mlp, (rules[0], rules[1]), act, storage)

    def parts(self) -> BlockParts | None:
        """None where there is no cache of the kernels' own, or some matrix is neither packed nor plain numbers."""
        attn, cache = self.attn, self.attn.cache
        matrices = [linear.stored for linear in self.linears]
        if not isinstance(cache, NativeCache) or any(m.packed is None and m.numbers is None for m in matrices):
            return None
        qkv, o, up, down = (Weights(matrix.whole(), matrix.bias) for matrix in matrices)
        return BlockParts(
            (qkv, o, up, down), self.rules, attn.prep(None), cache.rows, attn.kind.scale, attn.kind.softcap, attn.sinks,
            attn.alibi, self.act,
        )  # fmt: skip


class Stretch:
    """Layers that follow each other. Where all are whole, a step whose attention is compiled runs them in one call."""

    def __init__(self, layers: Sequence[nn.Module], ropes: Sequence[int | None], wholes: list[Whole]) -> None:
        """`ropes[i]` is the rotation of layer i among those of a step; None: it has none. `wholes`: all or none."""
        self._layers, self._ropes, self._wholes = layers, ropes, wholes
        self._hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        self._most = min((whole.most_rows for whole in wholes), default=0)
        self._is_made = False
        self._turns: list[tuple[int, int | None]] = []  # group and rotation
        self._call: BlocksCall | None = None

    @classmethod
    def cut(
        cls, layers: Iterable[nn.Module], ropes: Sequence[int | None], wholes: Sequence[Whole | None]
    ) -> list[Stretch]:
        """All of a decoder's layers, parted where whole blocks begin and end."""
        found = []
        for _, run in groupby(zip(layers, ropes, wholes, strict=True), key=lambda entry: entry[2] is None):
            here, turned, made = zip(*run, strict=True)
            found.append(cls(here, turned, [whole for whole in made if whole is not None]))
        return found

    def __call__(self, x: Tensor, delta: Delta, batch: Batch, turns: Sequence[Turn]) -> tuple[Tensor, Delta]:
        if self._wholes and (done := self._at_once(x, delta, batch, turns)) is not None:
            return done
        for layer, rope in zip(self._layers, self._ropes, strict=True):
            x, delta = layer(x, delta, batch, None if rope is None else turns[rope])
        return x, delta

    def forget(self) -> None:
        """Weights or caches may lie elsewhere than when a step ran last."""
        self._is_made, self._call = False, None

    def _at_once(self, x: Tensor, delta: Delta, batch: Batch, turns: Sequence[Turn]) -> tuple[Tensor, Tensor] | None:
        """None: not this step."""
        if x.shape[0] > self._most or any(self._hooks):
            return None
        if not self._is_made:
            self._make()
        if (
            self._call is None
            or not x.is_contiguous()
            or isinstance(delta, Parts)
            or (delta is not None and not delta.is_contiguous())
        ):
            return None
        work: list[StepTurn] = []
        for group, rope in self._turns:
            step, turn = batch.plans[group], None if rope is None else turns[rope]
            if not isinstance(step, NativeStep):
                return None
            if turn is not None and turn.cos.dtype is not self._wholes[0].dtype and turn.cos.dtype is not torch.float32:
                return None
            work.append(StepTurn(step, turn and turn.cos, turn and turn.sin))
        return self._call(x, delta, work)

    def _make(self) -> None:
        self._is_made = True
        parts = [made for whole in self._wholes if (made := whole.parts()) is not None]
        kinds = [
            (whole.attn.group, rope if whole.attn.rope is not None else None)
            for whole, rope in zip(self._wholes, self._ropes, strict=True)
        ]
        self._turns = list(dict.fromkeys(kinds))
        which = [self._turns.index(kind) for kind in kinds]
        first, self._call = self._wholes[0], None
        if len(parts) == len(self._wholes):
            self._call = BlocksCall(first.library, parts, which, first.dtype)
