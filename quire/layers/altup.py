"""Several streams per token, of which a layer reads and writes one (AltUp), and vectors that every layer gets anew for
each token (per-layer inputs).

    start    stream 0 is the embedding, the others are projections of it, scaled to its magnitude
    a layer  predicts all streams from all, computes on one of them, corrects all by what it learned there, and adds the
             token's vector for this layer, gated, to all but the first
    end      the mean of stream 0 and projections of the others, scaled to its magnitude

A step has its streams side by side: [T, streams * width]. Must not know: attention, mlps, blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.layers.embed import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import Norm, NormKind
from quire.ops.act import plain_on, tanh
from quire.ops.streams import correct_streams, mix_streams, root, row_mean
from quire.quant.scheme import Slot, Storage

_LEAST_SQUARE = 1e-5  # below it a stream is not scaled up further


@dataclass(frozen=True)
class AltUpKind:
    streams: int
    active: int  # the stream that layers compute on
    laurel: int  # rank of the low-rank matmul beside attention
    per_layer: int  # width of the vectors that layers get for a token
    per_layer_vocab: int  # rows of their table; other tokens have those of token 0
    scaled: bool = True  # what gates a layer's vectors has a learned scale


class AltUp(nn.Module):
    """One layer's predictions and corrections of the streams."""

    def __init__(self, prefix: str, width: int, kind: AltUpKind, norm: NormKind, storage: Storage) -> None:
        super().__init__()
        self.prefix, self.kind, self.width = prefix, kind, width
        count = kind.streams
        self.router_norm = Norm(f"{prefix}router_norm", (width,), norm, storage)
        self.router = Linear(prefix, width, {"modality_router": count}, storage)
        self.prediction = Linear(prefix, count, {"prediction_coefs": count * count}, storage)
        self.correction = Linear(prefix, count, {"correction_coefs": count}, storage)
        self.scale = storage.parameter(width)
        self._tanh, self._mix, self._correct = storage.of(tanh), storage.of(mix_streams), storage.of(correct_streams)

    def _route(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, streams]"""
        return self._tanh(self.router(self.router_norm(x) * (1.0 / self.width)).float()).to(x.dtype)

    def predict(self, x: Tensor) -> Tensor:
        """[T, streams * width] -> [T, streams, width]"""
        count = self.kind.streams
        streams = x.view(len(x), count, self.width)
        coefs = self.prediction(self._route(streams[:, self.kind.active].contiguous()))
        return self._mix(streams, coefs.view(len(x), count, count))

    def correct(self, streams: Tensor, computed: Tensor) -> Tensor:
        """`computed` [T, width]: what the layer made of the active stream."""
        innovation = computed - streams[:, self.kind.active]
        return self._correct(streams, innovation, self.correction(self._route(computed)))

    def gate_input(self, streams: Tensor) -> Tensor:
        active = streams[:, self.kind.active].contiguous()
        return active * self.scale if self.kind.scaled else active

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.prefix}correct_output_scale", self.scale.data)


class Laurel(nn.Module):
    """A low-rank matmul beside attention: x + norm(right(left(x)))."""

    def __init__(self, prefix: str, width: int, rank: int, norm: NormKind, storage: Storage) -> None:
        super().__init__()
        self.left = Linear(prefix, width, {"linear_left": rank}, storage)
        self.right = Linear(prefix, rank, {"linear_right": width}, storage)
        self.norm = Norm(f"{prefix}post_laurel_norm", (width,), norm, storage)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.right(self.left(x)))


class LayerInput(nn.Module):
    """What the token's vector for one layer adds to streams: norm(up(act(gate(x)) * vector))."""

    def __init__(self, prefix: str, width: int, kind: AltUpKind, act: str, norm: NormKind, storage: Storage) -> None:
        super().__init__()
        self.gate = Linear(prefix, width, {"per_layer_input_gate": kind.per_layer}, storage)
        self.up = Linear(prefix, kind.per_layer, {"per_layer_projection": width}, storage)
        self.norm = Norm(f"{prefix}post_per_layer_input_norm", (width,), norm, storage)
        self._act = plain_on(act, storage.kernels)

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        return self.norm(self.up(self._act(self.gate(x)) * vector))


class AltUpStreams(nn.Module):
    """What stands before and behind the layers."""

    def __init__(self, width: int, num_layers: int, kind: AltUpKind, norm: NormKind, storage: Storage) -> None:
        super().__init__()
        self.kind, self.width, self.num_layers = kind, width, num_layers
        others = [str(index) for index in range(kind.streams - 1)]
        into, back = "model.altup_projections.", "model.altup_unembed_projections."
        self.into = nn.ModuleList(Linear(into, width, {name: width}, storage) for name in others)
        self.back = nn.ModuleList(Linear(back, width, {name: width}, storage) for name in others)
        inputs = num_layers * kind.per_layer
        self.table = Embedding(
            "model.embed_tokens_per_layer", kind.per_layer_vocab, inputs, storage, scale=kind.per_layer**0.5,
            is_cut=True,
        )  # fmt: skip
        self.project = Linear("model.", width, {"per_layer_model_projection": inputs}, storage)
        self.norm = Norm("model.per_layer_projection_norm", (kind.per_layer,), norm, storage)
        self._row_mean, self._root = storage.of(row_mean), storage.of(root)

    def layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """x [T, width], embedded -> [T, layers, per_layer]"""
        shape = len(x), self.num_layers, self.kind.per_layer
        is_known = (token_ids >= 0) & (token_ids < self.kind.per_layer_vocab)
        looked_up = self.table(torch.where(is_known, token_ids, 0)).view(shape)
        projected = self.norm((self.project(x) * self.width**-0.5).view(shape))
        return (projected + looked_up) * math.sqrt(0.5)

    def open(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, streams * width]"""
        size = self._size(x)
        return torch.cat([x, *(self._scaled(project(x), size) for project in self.into)], -1)

    def close(self, x: Tensor) -> Tensor:
        """[T, streams * width] -> [T, width]"""
        first, *others = x.split(self.width, -1)
        size = self._size(first)
        total = first.float()
        for project, stream in zip(self.back, others, strict=True):
            total = total + self._scaled(project(stream.contiguous()), size)
        return (total / self.kind.streams).to(x.dtype)

    def _scaled(self, x: Tensor, size: Tensor) -> Tensor:
        """So that the root of its mean square is `size`."""
        return (x.float() * size / self._size(x, _LEAST_SQUARE)).to(x.dtype)

    def _size(self, x: Tensor, least: float = 0.0) -> Tensor:
        """The root of the mean square of each row, [T, 1]; of `least` at least."""
        return self._root(self._row_mean(x.float().square()).clamp(min=least))
