"""load_format=dummy: numbers that come from no checkpoint, in every weight of a model.

In: a model whose weights are undefined, and a seed. Out: the same numbers each time. Must not know: architectures.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from quire.layers.stored import fill_dummy_experts, matrices_of
from quire.models.build import Model
from quire.quant.coded_scheme import CodedParts

DUMMY_STD = 0.02
_DUMMY_VALUES = 1_048_573  # a prime, so that rows of a matrix do not repeat


@torch.no_grad()
def fill_dummy(model: Model, seed: int) -> None:
    """Normal numbers of standard deviation 0.02 in every weight: a pure function of seed and the weight's name.

    Every weight repeats one sequence of about a million numbers, each from a place of its own, because drawing
    billions would take minutes.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(_DUMMY_VALUES, generator=generator) * DUMMY_STD
    rings: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # the sequence twice, where and as it is needed

    def draw(name: str, flat: Tensor) -> None:
        kind = flat.device, flat.dtype
        if kind not in rings:
            rings[kind] = values.to(*kind).repeat(2)
        _fill_from(rings[kind], name, flat)

    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize == 1:
            continue  # codes of experts, which follow
        if parameter.is_floating_point():
            draw(name, parameter.data.view(-1))
        else:
            parameter.data.zero_()
    for name, matrix in matrices_of(model):
        if isinstance(matrix, CodedParts):
            matrix.fill(name, draw)
    fill_dummy_experts(model, values / DUMMY_STD)
    model.finish_weights()


def _fill_from(ring: Tensor, name: str, flat: Tensor) -> None:
    """`ring`: the sequence twice."""
    size = len(ring) // 2
    start = zlib.crc32(name.encode()) % size
    turned, whole = ring[start : start + size], flat.numel() // size * size
    flat[:whole].view(-1, size).copy_(turned.expand(whole // size, -1))
    flat[whole:].copy_(turned[: flat.numel() - whole])
