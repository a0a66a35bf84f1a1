"""Low-rank additions by slot: the reference, its form on CPU, and slots that are filled again."""

from __future__ import annotations

import pytest
import torch

from quire.ops.lora import add_low_rank
from quire.ops.op import Kernels
from tests.lora_case import MIXES, LowRankCase


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_mix_of_rows_and_ranks(mix: str, dtype: torch.dtype) -> None:
    limit = 1e-4 if dtype is torch.float32 else 0.25
    for function in (add_low_rank.reference, Kernels(torch.device("cpu")).of(add_low_rank)):
        case = LowRankCase(MIXES[mix], dtype)
        expected = case.expected()
        result = function(case.y.clone(), case.x, case.rows, case.low)
        torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)
        base = case.rows.index == 0
        assert torch.equal(result[base], case.y[base])


def test_a_slot_that_is_filled_again_forgets() -> None:
    case = LowRankCase([1, 2, 3], torch.float32)
    case.low.put(1, case.slots[1])
    case.low.put(3, ())
    case.slots[0], case.slots[2] = case.slots[1], ()
    assert case.low.stacks is not None
    assert not case.low.stacks.b[0, :130].any() and not case.low.stacks.spans[2].any()
    result = add_low_rank.reference(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)
