"""A weight scheme for tests: 8 bits and a scale for each row, stored the other way round, as some packed formats are.

A checkpoint in this form has `x.weight_t` [width, rows] int8 and `x.scales` [rows] in the place of `x.weight`, so what
is cut by rows elsewhere is cut along the second axis here. Norms and embeddings are as usual.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.plain import PlainChoice
from quire.quant.scheme import MatrixShape, PartSlot, Storage, StoredMatrix, WeightScheme
from quire.quant.shard import ShardGroup, cut_to

OUTER = ("embed_tokens", "lm_head", "gate")


def turned(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors in this form."""
    found = {}
    for name, tensor in weights.items():
        stem, _, leaf = name.rpartition(".")
        if leaf != "weight" or tensor.dim() != 2 or stem.rpartition(".")[2] in OUTER or ".experts." in name:
            found[name] = tensor
            continue
        scales = tensor.float().abs().amax(1) / 127
        found[f"{stem}.weight_t"] = (tensor.float() / scales[:, None]).round().to(torch.int8).t().contiguous()
        found[f"{stem}.scales"] = scales
    return found


class TurnedMatrix(StoredMatrix):
    name = "turned"

    def __init__(self, shape: MatrixShape) -> None:
        self.shape, rows = shape, shape.rows
        self._weight = nn.Parameter(torch.zeros((shape.width.count, rows), dtype=torch.int8), requires_grad=False)
        self._scales = nn.Parameter(torch.zeros(rows), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False) if shape.has_bias else None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "weight_t", self._weight
        yield "scales", self._scales
        if self.bias is not None:
            yield "bias", self.bias

    def slots(self, run: tuple[str, ...]) -> Iterator[PartSlot]:
        start, stop = self.shape.rows_of(run)
        spans = [self.shape.parts[part] for part in run]
        cut = cut_to(1, spans) or cut_to(0, [self.shape.width])
        yield PartSlot("weight_t", self._weight.data[:, start:stop], cut)
        yield PartSlot("scales", self._scales.data[start:stop], cut_to(0, spans))
        yield from self._bias_slots(run)

    def multiply(self, x: Tensor) -> Tensor:
        y = x @ self._weight.float() * self._scales
        return y if self.bias is None else y + self.bias

    def take(self, index: Tensor) -> Tensor:
        return (self._weight.float() * self._scales).t()[index]


class TurnedScheme:
    name = "turned"

    def create(self, shape: MatrixShape) -> StoredMatrix:
        return TurnedMatrix(shape)


class TurnedChoice(PlainChoice):
    def of_matrix(self, name: str) -> WeightScheme:
        return super().of_matrix(name) if name.rpartition(".")[2] in OUTER else TurnedScheme()


def turned_storage(kernels: Kernels, group: ShardGroup) -> Storage:
    arena = Arena(kernels.device)
    return Storage(torch.float32, arena, kernels, TurnedChoice(torch.float32, arena, kernels), group)
