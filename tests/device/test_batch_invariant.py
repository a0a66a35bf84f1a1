"""Batch-invariant products and attention: a row's bits do not depend on how many rows there are, or on the tile."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
fixed = pytest.importorskip("quire.ops.triton.fixed_linear", exc_type=ImportError)
PARTS = ((0, 1), (7, 1), (1499, 1), (3, 64), (100, 65), (11, 200), (11, 300), (0, 513), (200, 1100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "depth"), [(1024, 3072), (6144, 1024), (136, 100), (24576, 4096)])
def test_a_row_alone_has_the_same_bits(dtype: torch.dtype, columns: int, depth: int) -> None:
    torch.manual_seed(columns + depth)
    x = torch.randn(1500, depth, dtype=dtype, device="cuda")
    weight = torch.randn(columns, depth, dtype=dtype, device="cuda") * depth**-0.5
    bias = torch.randn(columns, dtype=dtype, device="cuda")
    linear = fixed.FixedLinear()
    whole = linear(x, weight, bias)
    for first, count in PARTS:
        part = linear(x[first : first + count].contiguous(), weight, bias)
        assert torch.equal(part, whole[first : first + count]), (first, count)


def test_the_library_is_trusted_only_where_its_bits_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that adds in another order is found out, and then never asked."""
    weight = torch.randn(1024, 3072, dtype=torch.bfloat16, device="cuda")
    assert fixed.compare(weight, None)
    x = torch.randn(700, 3072, dtype=torch.bfloat16, device="cuda")
    right = fixed.in_tiles(x, weight, None)

    def in_halves(x: torch.Tensor, weight: torch.Tensor, bias: None, out: torch.Tensor, start: int, count: int) -> None:
        part = x[start : start + count].float()
        low, high = (part[:, i::2] @ weight[:, i::2].float().t() for i in (0, 1))
        out[start : start + count] = (low + high).to(out.dtype)

    monkeypatch.setattr(fixed, "_multiply", in_halves)
    assert not fixed.compare(weight, None)
    assert torch.equal(fixed.FixedLinear()(x, weight), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, columns, depth in ((1, 40, 64), (3, 1024, 1000), (70, 257, 128), (700, 512, 2048)):
        x = torch.randn(rows, depth, dtype=dtype, device="cuda")
        weight = torch.randn(columns, depth, dtype=dtype, device="cuda") * depth**-0.5
        wanted = (x.double() @ weight.double().t()).to(dtype)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(fixed.FixedLinear()(x, weight), wanted, rtol=tolerance, atol=tolerance)
    x = torch.randn(50, 6, 96, dtype=dtype, device="cuda")
    weight = torch.randn(6, 80, 96, dtype=dtype, device="cuda").transpose(1, 2) * 0.1
    wanted = torch.einsum("tha,hab->thb", x.double(), weight.double()).to(dtype)
    torch.testing.assert_close(fixed.heads_matmul(x, weight), wanted, rtol=2e-2, atol=2e-2)
