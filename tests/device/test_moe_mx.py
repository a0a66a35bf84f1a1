"""Experts in MXFP4 by the kernel for Hopper, against their reference, with and without early launches."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from quire.ops import act as act_ops
from quire.ops import coded_experts as ops
from quire.ops import moe as moe_ops
from quire.ops.triton import act
from tests.coded_expert_cases import as_mx, make_codes
from tests.fused_cases import Draw

pytestmark = pytest.mark.gpu
moe_mx = pytest.importorskip("quire.ops.triton.moe_mx")
LIMIT = 1.5e-2
CLAMPS = {"alpha": 1.702, "limit": 2.0}


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("compiled for Hopper alone")


@pytest.mark.parametrize(("experts", "top_k", "dim", "ffn"), [(5, 2, 320, 192), (8, 4, 192, 448), (16, 4, 2880, 320)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 130, 900])
def test_experts(tokens, experts, top_k, dim, ffn):
    draw = Draw(tokens, "cuda", torch.bfloat16)
    w1, w2 = make_codes("mxfp4", draw, experts, 2 * ffn, dim), make_codes("mxfp4", draw, experts, dim, ffn)
    x, stream = draw.normal(tokens, dim), draw.normal(tokens, dim)
    b1, b2 = draw.normal(experts, 2 * ffn), draw.normal(experts, dim)
    weights, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32), top_k)
    first, second = as_mx(w1, gated=True), as_mx(w2, gated=False)
    wanted = ops.run_coded_experts.reference(
        x.float(), weights, index, w1, w2, b1=b1.float(), b2=b2.float(), stream=stream.float(),
        act=partial(act_ops.clamped_swiglu.reference, **CLAMPS),
    )  # fmt: skip
    found = [
        moe_mx.run_experts(
            x, weights, index.int(), first, second, b1=b1, b2=b2, stream=stream, act=(act.CLAMPED, *CLAMPS.values()),
            early=early,
        )
        for early in (False, True, True)
    ]  # fmt: skip
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0].float() - wanted).norm() / (wanted - stream.float()).norm() < LIMIT
