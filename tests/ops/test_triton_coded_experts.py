"""Kernels of experts in 8 and 4 bits, interpreted on CPU, against their reference (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops.triton import moe_mx
from quire.ops.triton.moe_bytes import BytesConfig
from quire.ops.triton.moe_coded import CodedTileConfig
from quire.ops.triton.moe_coded_few import CodedFewConfig
from tests import coded_expert_cases as cases
from tests.fused_cases import Draw

SMALL = (CodedTileConfig(16, 16, 32, 4, 2), CodedTileConfig(16, 32, 64, 4, 2))
FEW = CodedFewConfig((64, 128, 4), (64, 128, 4))  # few programs: each takes long to interpret
PLAIN_SIDES = tuple(config._replace(swap=False) for config in SMALL)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_few_tokens(kind):
    cases.check_coded("cpu", torch.float32, kind, 2, 3, 2, 160, 48, bias=True, few=FEW, acts=1)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_grouped(kind):
    cases.check_coded("cpu", torch.float16, kind, 5, 2, 2, 160, 48, bias=True, configs=SMALL, acts=1)


@pytest.mark.parametrize("kind", ["fp8-blocks", "mxfp4", "int4-128-zeros"])
def test_grouped_and_not_swapped(kind):
    cases.check_coded("cpu", torch.float16, kind, 5, 2, 1, 160, 48, configs=PLAIN_SIDES, acts=1)


def test_every_activation():
    cases.check_coded("cpu", torch.float32, "fp8-rows", 5, 2, 1, 64, 32)
    cases.check_coded("cpu", torch.float16, "mxfp4", 1, 2, 1, 64, 32, few=FEW)


def test_by_the_fixed_tiles():
    cases.check_coded("cpu", torch.float16, "fp8-blocks", 1, 2, 1, 256, 128, fixed=True, acts=1)


@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks"])
def test_inputs_in_8_bits(kind):
    cases.check_coded("cpu", torch.float16, kind, 5, 2, 2, 160, 48, bias=True, configs=SMALL, round_from=0, acts=1)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks"])
def test_bytes_by_bytes(kind, rounds, swap):
    """Both matmuls read by descriptors, an expert's last tile not full; rounded by the first matmul or after it."""
    tile = BytesConfig(16, 128, 128, 4, 2, swap, steps=rounds and swap, rounds=rounds)
    both = tile, tile._replace(resident=1)
    cases.check_coded(
        "cpu", torch.float16, kind, 9, 2, 2, 256, 128, bias=True, byte_configs=both, round_from=0, acts=1
    )  # fmt: skip


def test_rounded_rows():
    cases.check_rounded("cpu", torch.float16, 1 / 2, 1 / 64)  # the interpreter loses a carry, and small codes


@pytest.mark.parametrize("add", [False, True])
def test_results_in_parts_of_k(add):
    """300 columns are more than a program has. The interpreter cuts off what bfloat16 does not hold, so bits differ."""
    draw = Draw(0, "cpu", torch.float32)
    y, weights = draw.normal(3, 10, 300), draw.normal(5, 2)
    stream = draw.normal(5, 300).bfloat16() if add else None
    wanted = (y.sum(0).view(5, 2, 300) * weights[..., None]).sum(1) + (stream.float() if add else 0.0)
    found = moe_mx.combine(y, weights, stream)
    assert found.dtype is torch.bfloat16
    assert (found.float() - wanted).norm() / wanted.norm() < 1e-2
