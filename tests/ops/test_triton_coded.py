"""Matmuls with weights of 4 and 8 bits: the Triton kernels, interpreted on CPU, against their references."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops import coded as ops
from quire.ops.rounded import RowCode
from quire.ops.triton import coded
from tests import coded_cases as cases

TILES = [
    coded.CodedTile(16, 32, 64, 4, 2),
    coded.CodedTile(32, 16, 32, 4, 2),
    coded.CodedTile(8, 16, 32, 4, 2, 4),
    coded.CodedTile(16, 32, 16, 4, 2, 2),
]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", cases.WEIGHTS)
def test_matmul_of_codes(name, tile):
    for rows, bias in ((1, False), (5, True), (33, False)):
        x, weight, added = cases.case(name, rows, "cpu", torch.float16, bias)
        found = coded.multiply(x, weight, added, tile, asm=False)
        cases.check(found, ops.coded_linear(x, weight, added))


@pytest.mark.parametrize("name", cases.WEIGHTS)
def test_decoded_to_a_scratch_matrix(name):
    _, weight, _ = cases.case(name, 1, "cpu", torch.float16)
    found = coded.decode_weight(weight, torch.float16, asm=False)
    torch.testing.assert_close(found, ops.decode_weight(weight, torch.float16), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("group", [32, 128, 384])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_inputs_rounded_to_8_bits(dtype, group):
    x = cases.normal(7, 384, dtype=torch.float16)
    x[3] = 0
    codes, scale = coded.quantize_rows(x, dtype, group)
    wanted, by = ops.quantize_rows(x, dtype, group)
    torch.testing.assert_close(scale, by)
    # The interpreter loses the carry of what it rounds up to a power of two: half of it is left.
    carried = (wanted.float() == 2 * codes.float()) & (codes.float() != 0) & (dtype is torch.float8_e4m3fn)
    off = (codes.float() - wanted.float()).abs().masked_fill(carried, 0)
    assert off.max() <= (1.0 if dtype is torch.int8 else 32.0)  # a quotient between two codes may go to the other one
    assert (off > 0).float().mean() < 0.01 and carried.float().mean() < 0.03


def test_a_group_that_is_no_number_has_a_scale_that_is_none():
    """Whole numbers have no NaN, and zeros times a scale would be an answer."""
    x = cases.normal(4, 384, dtype=torch.float16)
    x[1, 200], x[2] = torch.nan, torch.nan
    _, scale = coded.quantize_rows(x, torch.int8, 128)
    torch.testing.assert_close(scale, ops.quantize_rows(x, torch.int8, 128)[1], equal_nan=True)
    assert scale.isnan().sum() == 1 + 3


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("width", "group"), [(384, 0), (1000, 0), (384, 128)])
def test_rounded_where_they_are_made(width, group, code):
    cases.check_rounded(width, torch.float16, RowCode(code, group), "cpu", exact=False)


@pytest.mark.parametrize("name", [name for name in cases.WEIGHTS if cases.WEIGHTS[name].rounds])
def test_matmul_of_rounded_inputs(name):
    for rows in (3, 40):
        x, weight, added = cases.case(name, rows, "cpu", torch.float16, True)
        codes, scale = ops.quantize_rows(x, weight.codes.dtype, weight.group)
        found = coded.multiply(codes, weight, added, TILES[0], x_scale=scale, dtype=x.dtype)
        rounded = (codes.float().unflatten(1, (-1, weight.group)) * scale.t()[:, :, None]).flatten(1)
        cases.check(found, ops.coded_linear(rounded, weight, added).to(x.dtype))


@pytest.mark.parametrize("name", cases.WEIGHTS)
def test_every_tensor_of_a_weight_counts(name):
    x, weight, _ = cases.case(name, 3, "cpu", torch.float16)
    right = ops.coded_linear(x, weight)
    for wrong in cases.wrong_ones(weight):
        for tile in (TILES[0], TILES[2]):
            with pytest.raises(AssertionError):
                cases.check(coded.multiply(x, wrong, None, tile, asm=False), right)


@pytest.mark.parametrize("name", ["fp8-rows", "fp8-odd"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_few_rows_with_the_ops_around_them(rows, name):
    cases.check_few(name, rows, "cpu", torch.float16)


def test_more_rows_are_the_same_bits_in_batch_invariant_mode():
    for name in ("fp8-rows", "int4-128"):
        x, weight, _ = cases.case(name, 70, "cpu", torch.float16)
        few, many = (coded.multiply(rows, weight, None, coded.FIXED, asm=False) for rows in (x[:3], x))
        assert torch.equal(few, many[:3])
