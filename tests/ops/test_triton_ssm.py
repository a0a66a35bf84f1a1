"""The Triton forms of the state-space ops, interpreted on CPU, against their references (TRITON_INTERPRET=1)."""

import os
from functools import partial

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops import ssm as reference
from quire.ops.triton import ssm, ssm_chunk
from tests import ssm_cases as cases

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)
BLOCKS = [4, 16, 1 << 30]


@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
def test_convolution(rows, size):
    for dtype, taps, bias, act, fixed in ((torch.float32, 4, True, "silu", False), (torch.float16, 3, False, "", True)):
        args, states, work = cases.conv_case(rows, size, "cpu", dtype, taps=taps, bias=bias)
        cases.compare(
            partial(ssm.causal_conv, fixed=fixed), reference.causal_conv, args, states, work, (act,), TOLERANCE[dtype]
        )


@pytest.mark.parametrize("size", [16, 1 << 30])
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
@pytest.mark.parametrize("fixed", [False, True])
def test_mamba2(rows, size, fixed):
    def form(*args):
        return ssm_chunk.ssd_scan(*args, fixed=fixed)

    args, states, work = cases.ssd_case(rows, size, "cpu", torch.float32, heads=4)
    cases.compare(form, reference.ssd_scan, args, states, work, (), 1e-4)


@pytest.mark.parametrize("size", [16, 1 << 30])
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
@pytest.mark.parametrize("fixed", [False, True])
def test_gated_delta(rows, size, fixed):
    def form(*args):
        return ssm_chunk.delta_scan(*args, fixed=fixed)

    args, states, work = cases.delta_case(rows, size, "cpu", torch.float32, key_heads=1, heads=2)
    cases.compare(form, reference.delta_scan, args, states, work, (), 1e-4)


def test_half_precision_inputs():
    for scan, op, case in (
        (ssm_chunk.ssd_scan, reference.ssd_scan, cases.ssd_case),
        (ssm_chunk.delta_scan, reference.delta_scan, cases.delta_case),
        (ssm.selective_scan, reference.selective_scan, cases.selective_case),
    ):
        args, states, work = case(cases.ROWS[2], 32, "cpu", torch.float16)
        cases.compare(scan, op, args, states, work, (), 4e-3)


@pytest.mark.parametrize("size", [16, 1 << 30])
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
def test_mamba1(rows, size):
    args, states, work = cases.selective_case(rows, size, "cpu", torch.float32)
    for fixed in (False, True):
        form = partial(ssm.selective_scan, fixed=fixed)
        cases.compare(form, reference.selective_scan, args, states, work, (), 1e-4)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_norm(first, shared):
    for dtype in DTYPES:
        args = cases.norm_case("cpu", dtype, shared=shared)
        cases.close(
            ssm.gated_rms_norm(*args, first), reference.gated_rms_norm.reference(*args, first), TOLERANCE[dtype]
        )


def test_places():
    cases.check_places(ssm.state_places)
