"""Step inputs by the kernel equal those by torch, padding included."""

from __future__ import annotations

import pytest
import torch

from quire.ops.rows import gather_inputs, make_buffers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 7, 256, 5000])
@pytest.mark.parametrize("sizes", [(16,), (16, 4), (1, 32, 7)])
def test_gather_inputs(count: int, sizes: tuple[int, ...]) -> None:
    from quire.ops.triton.rows import gather_inputs_cuda

    device = torch.device("cuda")
    tokens = torch.randint(0, 1 << 20, (33, 500), dtype=torch.int32, device=device)
    tables = [torch.randint(-1, 1 << 16, (33, -(-500 // size)), dtype=torch.int32, device=device) for size in sizes]
    rows = torch.randint(0, 33, (count,), dtype=torch.int32, device=device)
    positions = torch.randint(0, 500, (count,), dtype=torch.int32, device=device)
    positions[rows == 32] = 0
    found, wanted = (make_buffers(count, len(sizes), device) for _ in range(2))
    gather_inputs_cuda(rows, positions, tokens, tables, sizes, found)
    gather_inputs.reference(rows, positions, tokens, tables, sizes, wanted)
    for mine, theirs in zip((*found[:3], *found.slots), (*wanted[:3], *wanted.slots), strict=True):
        assert torch.equal(mine, theirs)
