"""The kernel that makes step inputs, under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from quire.ops.rows import gather_inputs, make_buffers

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("sizes", [(16,), (4, 7)])
def test_gather_inputs(count: int, sizes: tuple[int, ...]) -> None:
    from quire.ops.triton.rows import gather_inputs_cuda

    tokens = torch.randint(0, 1 << 20, (9, 100), dtype=torch.int32)
    tables = [torch.randint(-1, 1 << 16, (9, -(-100 // size)), dtype=torch.int32) for size in sizes]
    rows, positions = (torch.randint(0, most, (count,), dtype=torch.int32) for most in (9, 100))
    found, wanted = (make_buffers(count, len(sizes), CPU) for _ in range(2))
    gather_inputs_cuda(rows, positions, tokens, tables, sizes, found)
    gather_inputs.reference(rows, positions, tokens, tables, sizes, wanted)
    for mine, theirs in zip((*found[:3], *found.slots), (*wanted[:3], *wanted.slots), strict=True):
        assert torch.equal(mine, theirs)
    assert (wanted.contexts[rows == 8] == 0).all() and (wanted.slots[0][rows == 8] == -1).all()
