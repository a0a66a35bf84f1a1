"""Low-rank additions by slot: the reference, its form on CPU, and slots that are filled again."""

from __future__ import annotations

import pytest
import torch

from quire.ops.cpu.low_rank import NativeSlots
from quire.ops.lora import AdapterRows, add_low_rank
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


KERNELS = Kernels.here("cpu")
needs_kernels = pytest.mark.skipif(KERNELS.library is None, reason="no compiled kernels")
NUMBERS = [torch.float32, torch.bfloat16, torch.float16]


@needs_kernels
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("stored", NUMBERS)
def test_compiled_kernels(mix: str, dtype: torch.dtype, stored: torch.dtype) -> None:
    limit = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.03}[dtype]
    case = LowRankCase(MIXES[mix], dtype, stacked=False, stored=stored)
    result = KERNELS.of(add_low_rank)(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=limit, atol=limit)
    assert isinstance(case.low.form, NativeSlots), "the kernels did not run"
    base = case.rows.index == 0
    assert torch.equal(result[base], case.y[base])


@needs_kernels
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    """Alone, beside others of its slot, and beside others of other slots."""
    index = [1] * 9 + [slot % 5 for slot in range(40)] + [3, 3]
    case = LowRankCase(index, dtype, stacked=False)
    add = KERNELS.of(add_low_rank)
    together = add(case.y.clone(), case.x, case.rows, case.low)
    for row in range(len(index)):
        here = slice(row, row + 1)
        alone = add(case.y[here].clone(), case.x[here], AdapterRows(case.rows.index[here]), case.low)
        assert torch.equal(alone, together[here]), row


@needs_kernels
def test_rows_of_larger_tensors() -> None:
    case = LowRankCase([1, 0, 2, 3], torch.float32, stacked=False)
    x, y = torch.randn(4, 500), torch.zeros(4, 400)
    x[:, :300], y[:, 7:217] = case.x, case.y
    result = KERNELS.of(add_low_rank)(y[:, 7:217], x[:, :300], case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)
    assert not y[:, :7].any() and not y[:, 217:].any()


@needs_kernels
def test_numbers_that_fit_into_16_bits_are_stored_so() -> None:
    """And give the reference's results of the same numbers."""
    wide = LowRankCase([1, 2, 3], torch.float32, stacked=False)
    for narrow in (torch.bfloat16, torch.float16):
        case = LowRankCase([1, 2, 3], torch.float32, stacked=False)
        for slot, pieces in enumerate(case.slots, 1):
            rounded = [(piece.a.to(narrow).float(), piece.b.to(narrow).float()) for piece in pieces]
            case.low.put(slot, tuple(p._replace(a=a, b=b) for p, (a, b) in zip(pieces, rounded, strict=True)))
        result = KERNELS.of(add_low_rank)(case.y.clone(), case.x, case.rows, case.low)
        stored = {piece.a.dtype for _, pieces in case.low.form._alive for piece in pieces}  # type: ignore[union-attr]
        assert stored == {narrow}
        expected = add_low_rank.reference(case.y.clone(), case.x, case.rows, case.low)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    KERNELS.of(add_low_rank)(wide.y.clone(), wide.x, wide.rows, wide.low)
    assert {p.a.dtype for _, pieces in wide.low.form._alive for p in pieces} == {torch.float32}  # type: ignore[union-attr]


@needs_kernels
def test_kernels_forget_what_was_in_a_slot() -> None:
    case = LowRankCase([1, 2, 3], torch.float32, stacked=False)
    add = KERNELS.of(add_low_rank)
    add(case.y.clone(), case.x, case.rows, case.low)
    address = case.low.form.address  # type: ignore[union-attr]
    case.low.put(1, case.slots[1])
    case.low.put(3, ())
    case.slots[0], case.slots[2] = case.slots[1], ()
    result = add(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)
    assert case.low.form.address == address, "blocks hold it"  # type: ignore[union-attr]


def test_a_slot_that_is_filled_again_forgets() -> None:
    case = LowRankCase([1, 2, 3], torch.float32)
    case.low.put(1, case.slots[1])
    case.low.put(3, ())
    case.slots[0], case.slots[2] = case.slots[1], ()
    assert case.low.stacks is not None
    assert not case.low.stacks.b[0, :130].any() and not case.low.stacks.spans[2].any()
    result = add_low_rank.reference(case.y.clone(), case.x, case.rows, case.low)
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-4)
