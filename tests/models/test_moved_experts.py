"""One expert, as it is stored, in the place of another: what moves experts between ranks relies on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.experts import ExpertShape, SeparateExperts
from quire.quant.packed import PackedScheme
from quire.quant.shard import Span

WIDTH = 64
KERNELS = Kernels.here("cpu")
PARTS = ("gate_proj", "up_proj", "down_proj")


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def experts(kind: str | None, order: tuple[str, ...]) -> SeparateExperts:
    """`order`: in which the parts of an expert are read."""
    shape = ExpertShape(2, WIDTH, Span.all(WIDTH), True, False, gated, ("silu", 0.0, 0.0))
    made = SeparateExperts(shape, PackedScheme(torch.float32, Arena(torch.device("cpu")), KERNELS, kind), KERNELS)
    random = torch.Generator().manual_seed(1)
    numbers = {f"{i}.{part}.weight": torch.randn(WIDTH, WIDTH, generator=random) for i in range(2) for part in PARTS}
    targets = {slot.name: slot.target for slot in made.slots()}
    for name in (f"{i}.{part}.weight" for i in range(2) for part in order):
        targets[name].copy_(numbers[name])
    made.finish()
    return made


@pytest.mark.parametrize("order", [PARTS, ("up_proj", "gate_proj", "down_proj")])
@pytest.mark.parametrize("kind", [None, "Q8Z"])
def test_an_expert_that_moves_is_the_same_expert(kind: str | None, order: tuple[str, ...]) -> None:
    """Also where another rank read its files in another order, and where a mixture was multiplied before."""
    if kind is not None and KERNELS.table is None:
        pytest.skip("packing exists as compiled code only")
    here, there = experts(kind, order), experts(kind, PARTS)
    x, weights = torch.randn(3, WIDTH), torch.ones(3, 1)
    first, second = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.int64)
    wanted = there.multiply(x, weights, second)
    assert not torch.allclose(here.multiply(x, weights, first), wanted)
    here.replace(0, there.tensors_of(1))
    assert torch.equal(here.multiply(x, weights, first), wanted)
