"""Low-rank additions, their kernels interpreted on CPU, against float64 (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops.triton import lora
from tests.lora_case import MIXES, LowRankCase


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.float32, 24)])
def test_any_mix_of_rows_and_ranks(mix, dtype, rank, monkeypatch):
    case = LowRankCase(MIXES[mix], dtype, rank=rank)
    monkeypatch.setattr(lora.lora.add_low_rank, "reference", None)  # the kernels take it
    expected = case.expected()
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    limit = 1e-4 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)
    base = case.rows.index == 0
    assert torch.equal(result[base], case.y[base])


def test_slots_filled_again():
    case = LowRankCase([1, 2, 3], torch.float32)
    case.low.put(1, case.slots[1])
    case.low.put(3, ())
    case.slots[0], case.slots[2] = case.slots[1], ()
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)


def test_many_rows_go_to_matmuls():
    case = LowRankCase([slot % 5 for slot in range(lora.MOST_ROWS + 1)], torch.float32)
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)
