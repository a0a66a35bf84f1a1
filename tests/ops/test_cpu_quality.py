"""Products of 16-bit numbers on CPU go where they are fast."""

from __future__ import annotations

import time

import pytest
import torch

from quire.ops.linear import linear_cpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_do_not_fall_into_a_loop(dtype: torch.dtype) -> None:
    """In processor time, against float32: 3 times as much is usual for a few rows, 100 times what a loop takes."""
    x, weight = torch.randn(64, 576), torch.randn(576, 576)

    def cost(x: torch.Tensor, weight: torch.Tensor) -> float:
        found = []
        for _ in range(4):
            began = time.process_time()
            linear_cpu(x, weight)
            found.append(time.process_time() - began)
        return min(found)

    assert cost(x.to(dtype), weight.to(dtype)) < 25 * cost(x, weight)
