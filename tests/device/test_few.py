"""Products of a few rows on CUDA: against their references, and launched early one after another."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quire.ops.few import NormRule
from quire.ops.triton import act, few, moe, norm
from tests import fused_cases as cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (768, 3072), (100, 576), (2048, 4096), (6, 2880)])
def test_products(n, k, rows, dtype):
    for early in (False, True):
        cases.check_few("cuda", dtype, rows, n, k, early=early)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("parts", "rows", "width"), [(1, 1, 1024), (4, 32, 1024), (7, 17, 2880), (8, 5, 5120)])
def test_parts_added_up(parts, rows, width, dtype):
    for early in (False, True):
        cases.check_sum_parts("cuda", dtype, parts, rows, width, early=early)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_alone(rows):
    draw = cases.Draw(0, "cuda", torch.bfloat16)
    x, weight, bias = draw.normal(rows, 512), draw.normal(70000, 512, scale=0.05), draw.normal(70000)
    cases.close(few.linear(x, weight, bias, early=True), torch.nn.functional.linear(x, weight, bias), torch.bfloat16)


def test_early_launches_wait_for_what_they_read():
    """A long chain in a graph, each product reading the one before it: the same bits as without early launches."""
    draw = cases.Draw(0, "cuda", torch.bfloat16)
    width, ffn, layers = 1024, 3072, 24
    rule = NormRule(draw.normal(width), 1e-6, 0.0, False)
    ups = [draw.normal(2 * ffn, width, scale=width**-0.5) for _ in range(layers)]
    downs = [draw.normal(width, ffn, scale=ffn**-0.5) for _ in range(layers)]
    start = draw.normal(1, width)

    def chain(early):
        x = start
        for up, down in zip(ups, downs, strict=True):
            h = few.few_linear(x, up, norm=rule, act=(act.SILU, 0.0, 0.0), early=early)
            x = few.few_linear(h, down, stream=x, early=early)
        return x

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for seed in range(20):
        start.copy_(cases.Draw(seed, "cuda", torch.bfloat16).normal(1, width))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain(False))


def test_early_launches_between_library_products():
    """Norm, activation, routing and experts, launched early after kernels that know nothing of it."""
    draw = cases.Draw(1, "cuda", torch.bfloat16)
    width, ffn, experts, rows = 512, 1024, 16, 3
    gains, up, down = draw.normal(width), draw.normal(2 * ffn, width, scale=0.05), draw.normal(width, ffn, scale=0.05)
    router = draw.normal(experts, width)
    w1, w2 = draw.normal(experts, 2 * ffn, width, scale=0.05), draw.normal(experts, width, ffn, scale=0.05)
    start, silu = draw.normal(rows, width), act.gated_form(act.SILU)

    def chain(early):
        x, delta = start.clone(), torch.zeros_like(start)
        for _ in range(8):
            h, x = norm.add_rms_norm(x, delta, gains, 1e-6, early=early)
            delta = F.linear(act.gated(F.linear(h, up), act.SILU, early=early), down)
            h, x = norm.add_rms_norm(x, delta, gains, 1e-6, early=early)
            weights, index = moe.route(F.linear(h, router).float(), 4, early=early)
            codes = {silu: act.SILU}
            delta = moe.run_experts(h, weights, index, w1, w2, b1=None, b2=None, act=silu, codes=codes, early=early)
        return x + delta

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for seed in range(20):
        start.copy_(cases.Draw(seed, "cuda", torch.bfloat16).normal(rows, width))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain(False))
