"""Low-rank additions, their kernels interpreted on CPU, against float64 (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops.lora import AdapterRows
from quire.ops.triton import lora
from tests.lora_case import MIXES, LowRankCase


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.float32, 24)])
def test_any_mix_of_rows_and_ranks(mix, dtype, rank, monkeypatch):
    case = LowRankCase(MIXES[mix][:32], dtype, rank=rank, as_columns=rank == 24)
    monkeypatch.setattr(lora.lora.add_low_rank, "reference", None)  # the kernels take it
    expected = case.expected()
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    limit = 1e-4 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)
    base = case.rows.index == 0
    assert torch.equal(result[base], case.y[base])


@pytest.mark.parametrize("rows", [1, 65, lora.MOST_ROWS])
def test_a_row_has_the_same_bits_in_any_step(rows, monkeypatch):
    """Up to the most rows that a graph holds; and without slots, strides of the inputs and other rows having a say."""
    monkeypatch.setattr(lora.lora.add_low_rank, "reference", None)
    case = LowRankCase([slot * 7 % 5 for slot in range(rows)], torch.float32)
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)
    apart = case.x.t().contiguous().t(), case.y.t().contiguous().t()
    if rows <= 65:
        assert torch.equal(lora.add_low_rank(apart[1], apart[0], case.rows, case.low), result)
    for row in {0, rows // 2, rows - 1}:
        alone = AdapterRows(case.rows.index[row : row + 1])
        own = lora.add_low_rank(case.y[row : row + 1].clone(), case.x[row : row + 1], alone, case.low)
        assert torch.equal(own[0], result[row])


def test_what_no_piece_covers_is_not_written():
    """Not even as the sum of it and zero, which turns -0 into 0: a graph runs these kernels in layers that an adapter
    leaves alone, and a step without a graph does not."""
    case = LowRankCase([2, 4, 0], torch.float32)
    y = torch.full_like(case.y, -0.0)
    result = lora.add_low_rank(y.clone(), case.x, case.rows, case.low)
    assert result[0, 130:170].count_nonzero() == 40
    untouched = torch.cat((result[0, :130], result[0, 170:], result[1], result[2]))
    assert torch.signbit(untouched).all() and not untouched.any()


def test_slots_filled_again():
    case = LowRankCase([1, 2, 3], torch.float32)
    case.low.put(1, case.slots[1])
    case.low.put(3, ())
    case.slots[0], case.slots[2] = case.slots[1], ()
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.bfloat16, 24)])
def test_all_slots_at_once(mix, dtype, rank, monkeypatch):
    case = LowRankCase(MIXES[mix], dtype, rank=rank, as_columns=True)
    expected = case.expected()
    monkeypatch.setattr(lora.lora.add_low_rank, "reference", None)
    monkeypatch.setattr(lora, "_shrink_kernel", None)
    monkeypatch.setattr(lora, "FEW_ROWS", 0)
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    limit = 1e-4 if dtype is torch.float32 else 0.25
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)
    base = case.rows.index == 0
    assert torch.equal(result[base], case.y[base])
    case.low.put(1, case.slots[1])
    case.low.put(3, ())
    case.slots[0], case.slots[2] = case.slots[1], ()
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=limit, atol=limit)


def test_many_rows_go_to_matmuls(monkeypatch):
    """Except where results must not depend on the number of rows."""
    case = LowRankCase([slot % 5 for slot in range(lora.MOST_ROWS + 1)], torch.float32)
    result = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(lora.lora.add_low_rank, "reference", None)
    fixed = lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low, most_rows=lora.ANY_ROWS)
    torch.testing.assert_close(fixed.double(), case.expected(), rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError):
        lora.add_low_rank(case.y.clone(), case.x, case.rows, case.low)
