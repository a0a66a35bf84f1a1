"""Kernels of mixtures whose experts ranks divide, on CUDA: together as one rank; and in a graph."""

import pytest
import torch

pytest.importorskip("triton")

from quire.ops import act as act_ops
from quire.ops.triton import act, moe, moe_coded, moe_mx
from quire.ops.triton.moe_coded_few import CodedFewConfig
from tests import expert_rank_cases as cases
from tests.coded_expert_cases import KINDS, as_mx, make_codes
from tests.fused_cases import Draw

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LIMITS = {torch.float32: 1e-5, BF16: 1e-2}


@pytest.mark.parametrize("own", [*cases.RANKS, tuple(range(cases.EXPERTS))])
@pytest.mark.parametrize("tokens", [2, 31, 1030, 16384])
def test_sorting(tokens, own):
    for bm in (16, 128):
        cases.check_sort("cuda", tokens, 3, bm, own)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40, 300, 3000])
def test_experts(tokens, dtype, early):
    """Few tokens, tiles of each size, and (bf16) descriptors."""
    cases.check_plain("cuda", dtype, tokens, 3, 256, 384, LIMITS[dtype], bias=True, early=early)
    if not early:
        gelu = act_ops.GATED["gelu"].reference
        cases.check_plain("cuda", dtype, tokens, 3, 256, 384, LIMITS[dtype], act=gelu)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4, 7, 60, 400, 3000])
def test_codes(tokens, kind, early):
    """Inputs are rounded to 8 bits in one way by one rank and by several, for tiles are chosen alike."""
    cases.check_coded("cuda", BF16, kind, tokens, 3, 256, 128, 2e-2, early=early)


@pytest.mark.parametrize("kind", [None, "fp8-rows", "mxfp4", "int4-64-zeros"])
def test_programs_of_other_ranks_write_nothing(kind):
    cases.check_few_skip("cuda", kind, CodedFewConfig())


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 30, 100, 400, 2000])
def test_mxfp4(tokens, early):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has this kernel")
    draw = Draw(0, "cuda", BF16)
    x, dim, ffn = draw.normal(tokens, 256), 256, 192
    w1 = make_codes("mxfp4", draw, cases.EXPERTS, 2 * ffn, dim)
    w2 = make_codes("mxfp4", draw, cases.EXPERTS, dim, ffn)

    def run(x, weights, index, own, **more):
        first, second = as_mx(cases.codes_of(w1, own), gated=True), as_mx(cases.codes_of(w2, own), gated=False)
        known = {"b1": None, "b2": None, "act": (act.SILU, 0.0, 0.0), "early": early}
        return moe_mx.run_experts(x, weights, index, first, second, **known, **more)

    cases.check_sum(run, x, *cases.routed(draw, tokens, 3), 2e-2)


@pytest.mark.parametrize("kind", [None, "fp8-rows", "mxfp4"])
@pytest.mark.parametrize("tokens", [3, 24, 160])
def test_a_captured_graph_serves_any_number_of_own_pairs(tokens, kind):
    """From none to all."""
    draw, own = Draw(0, "cuda", BF16), tuple(range(8))
    x, here = draw.normal(tokens, 256), torch.zeros((tokens, 4), dtype=torch.int32, device="cuda")
    weights = torch.rand((tokens, 4), device="cuda")
    if kind is None:
        sides = draw.normal(8, 256, 256, scale=0.06), draw.normal(8, 256, 128, scale=0.1)
        run = moe.run_experts
    else:
        sides = make_codes(kind, draw, 8, 256, 256), make_codes(kind, draw, 8, 256, 128)
        run = moe_coded.run_experts

    def layer(weights=weights, index=here):
        return run(x, weights, index, *sides, all_experts=32, early=True, **cases.KNOWN)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for share in (0.0, 0.1, 0.5, 1.0):
        chosen = torch.rand((tokens, 4), device="cuda") < share
        index = torch.randint(len(own), (tokens, 4), device="cuda", dtype=torch.int32)
        here.copy_(torch.where(chosen, index, -1))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, layer(torch.where(chosen, weights, 0), index))
        assert not out[(~chosen).all(1)].any()
