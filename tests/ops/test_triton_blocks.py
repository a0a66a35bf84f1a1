"""Blocks of GGUF files: the Triton kernels, interpreted on CPU, against their references."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops import coded as ops
from quire.ops.triton import coded, coded_blocks
from tests import coded_cases as cases
from tests.gguf_blocks import TYPES, weight_of

TILES = [
    coded_blocks.BlockTile(8, 16, 4, 4, 2),
    coded_blocks.BlockTile(16, 32, 2, 4, 2),
    coded_blocks.BlockTile(16, 32, 1, 4, 2),
]
NARROW = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"]  # whose rows may be any number of 32 columns
SIZES = [(name, 24, 512) for name in TYPES] + [(name, 20, 96) for name in NARROW] + [("Q5_1", 20, 192)]
ERROR = 8e-3  # two more roundings to 16 bits of every number than other kernels have
BLOCKED = [name for name in TYPES if weight_of(name, 8, 256).is_blocked]


@pytest.mark.parametrize(("name", "rows", "width"), SIZES)
def test_matmul(name, rows, width):
    weight = weight_of(name, rows, width)
    for count, tile in zip((1, 9, 17), TILES, strict=True):
        x = cases.normal(count, width, seed=count, dtype=torch.float16)
        bias = cases.normal(rows, seed=1, dtype=torch.float16) if count == 9 else None
        if weight.is_blocked:
            found = coded_blocks.multiply_blocks(x, weight, bias, tile, asm=False)
        else:
            found = coded.multiply(x, weight, bias, coded.CodedTile(16, 32, 64, 4, 2), asm=False)
        cases.check(found, ops.coded_linear(x, weight, bias), ERROR)


@pytest.mark.parametrize(("name", "rows", "width"), SIZES)
def test_decoded(name, rows, width):
    weight = weight_of(name, rows, width)
    wanted = ops.decode_weight(weight, torch.float16)
    torch.testing.assert_close(coded.decode_weight(weight, torch.float16, asm=False), wanted, rtol=2e-3, atol=1e-5)
    index = torch.tensor([[3, rows - 1, 0], [3, 7, 5]])
    found = coded_blocks.decode_rows(weight, index, torch.float16)
    torch.testing.assert_close(found, wanted[index], rtol=2e-3, atol=1e-5)
    assert torch.equal(ops.decode_rows(weight, index, torch.float16), wanted[index])


@pytest.mark.parametrize("name", cases.WEIGHTS)
def test_rows_of_other_codes(name):
    _, weight, _ = cases.case(name, 1, "cpu", torch.float16)
    index = torch.tensor([2, 0, weight.rows - 1])
    wanted = ops.decode_weight(weight, torch.float16)[index]
    torch.testing.assert_close(coded_blocks.decode_rows(weight, index, torch.float16), wanted, rtol=2e-3, atol=1e-5)


def wrong_ones(weight):
    """One tensor of it changed at a time."""
    for name, tensor in weight.tensors().items():
        yield weight._replace(**{name: tensor.roll(1, 1)})  # rows
        if name in ("codes", "high"):
            yield weight._replace(**{name: ~tensor})
        elif name != "coarse":
            yield weight._replace(**{name: tensor.roll(1, 2)})  # groups
    if weight.least is not None:
        yield weight._replace(middle=weight.middle + 1)
        if weight.coarse is not None:
            yield weight._replace(coarse=weight.coarse.flip(2))


@pytest.mark.parametrize("name", BLOCKED)
def test_every_tensor_of_a_weight_counts(name):
    weight = weight_of(name, 16, 512)
    x = cases.normal(2, 512, dtype=torch.float16)
    right, wanted = ops.coded_linear(x, weight), ops.decode_weight(weight, torch.float16)
    for wrong in wrong_ones(weight):
        with pytest.raises(AssertionError):
            cases.check(coded_blocks.multiply_blocks(x, wrong, None, TILES[0], asm=False), right, ERROR)
        with pytest.raises(AssertionError):
            cases.check(coded_blocks.decode_rows(wrong, torch.arange(16), torch.float16), wanted, 2e-3)


def test_more_rows_are_the_same_bits_in_batch_invariant_mode():
    for name in ("Q4_K", "Q6_K"):
        weight = weight_of(name, 24, 512)
        x = cases.normal(70, 512, dtype=torch.float16)
        fixed = [coded_blocks.multiply_blocks(rows, weight, None, coded_blocks.FIXED, asm=False) for rows in (x[:3], x)]
        assert torch.equal(fixed[0], fixed[1][:3])
