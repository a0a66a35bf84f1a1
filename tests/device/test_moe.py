"""Mixture of experts on CUDA: routing, sorting and grouped products against their references; and in a graph."""

import pytest
import torch

pytest.importorskip("triton")

from quire.ops import moe as moe_ops
from quire.ops.triton import act, moe, moe_many
from tests import fused_cases as cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 37, 2000])
@pytest.mark.parametrize("rule", [("softmax", True), ("softmax", False), ("sigmoid", True), ("topk_softmax", True)])
@pytest.mark.parametrize(("experts", "top_k", "with_bias"), [(128, 8, False), (60, 4, True), (8, 2, False)])
def test_routing(experts, top_k, with_bias, rule, tokens):
    score, renorm = rule
    with_bias = with_bias and score != "topk_softmax"
    cases.check_route("cuda", tokens, experts, top_k, score=score, renorm=renorm, with_bias=with_bias)


@pytest.mark.parametrize("tokens", [2, 31, 128, 1000, 1030, 16384])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2), (256, 8)])
def test_sorting_pairs(experts, top_k, tokens):
    for bm in (16, 128):
        cases.check_sort("cuda", tokens, top_k, experts, bm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 33, 80, 200, 1500])
@pytest.mark.parametrize("shape", [(16, 4, 256, 192, False), (32, 4, 360, 200, True), (8, 2, 512, 256, True)])
def test_experts(shape, tokens, dtype):
    experts, top_k, dim, ffn, bias = shape
    for early in (False, True):
        cases.check_experts("cuda", dtype, tokens, experts, top_k, dim, ffn, bias=bias, early=early)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [5, 300, 3000])
def test_experts_before_a_norm(tokens, dtype):
    for early in (False, True):
        cases.check_experts_before_a_norm("cuda", dtype, tokens, 16, 4, 256, 192, early=early)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 4, 256, 192, False), (8, 2, 512, 320, True)])
def test_many_tokens(shape, dtype):
    experts, top_k, dim, ffn, bias = shape
    first, second = moe_many.FIRST, moe_many.SECOND
    for tokens, resident, flat in ((3000, True, True), (3000, True, False), (700, False, False)):
        ways = (config._replace(resident=resident, flat=flat) for config in (first, second))
        cases.check_many("cuda", dtype, tokens, experts, top_k, dim, ffn, *ways, bias=bias)
    cases.check_experts("cuda", dtype, 3000, experts, top_k, dim, ffn, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_few_tokens_by_other_ways(tokens, dtype):
    cases.check_experts("cuda", dtype, tokens, 16, 4, 256, 192, early=True)
    cases.check_experts("cuda", dtype, tokens, 16, 4, 256, 192, fixed=True)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tokens", [24, 160, 400])
def test_a_captured_graph_serves_any_routing(tokens, early):
    draw = cases.Draw(0, "cuda", torch.bfloat16)
    experts, top_k, dim, ffn = 32, 4, 256, 128
    w1, w2 = draw.normal(experts, 2 * ffn, dim, scale=dim**-0.5), draw.normal(experts, dim, ffn, scale=ffn**-0.5)
    x, logits = draw.normal(tokens, dim), draw.normal(tokens, experts, dtype=torch.float32)
    silu = act.gated_form(act.SILU)

    def layer():
        weights, index = moe.route(logits, top_k, early=early)
        known = {"act": silu, "codes": {silu: act.SILU}, "early": early}
        return moe.run_experts(x, weights, index, w1, w2, b1=None, b2=None, **known)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in range(3):
        again = cases.Draw(seed + 1, "cuda", torch.bfloat16)
        x.copy_(again.normal(tokens, dim))
        logits.copy_(again.normal(tokens, experts, dtype=torch.float32, scale=10.0 if seed else 0.1))
        out.fill_(torch.nan)
        graph.replay()
        weights, index = moe_ops.route(logits, top_k)
        wanted = moe_ops.run_experts(
            x.float(), weights, index, w1.float(), w2.float(), b1=None, b2=None,
            act=lambda h: torch.nn.functional.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
        )  # fmt: skip
        assert (out.float() - wanted).norm() / wanted.norm() < 1e-2
