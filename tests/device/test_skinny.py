"""Products of some rows by Hopper's tensor cores: against their references, and in a chain of early launches."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quire.ops import act as act_ops
from quire.ops import few as few_ops
from quire.ops.triton import act, norm
from tests import fused_cases as cases

pytestmark = pytest.mark.gpu
skinny = pytest.importorskip("quire.ops.triton.skinny")
SILU = act.gated_form(act.SILU, False)
CODES = {SILU: act.SILU}


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has these instructions")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32])
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (100, 3072), (6144, 4096), (4096, 384), (72, 128)])
def test_products(n, k, rows, dtype):
    draw = cases.Draw(n + k + rows, "cuda", dtype)
    x, weight, bias = draw.normal(rows, k), draw.normal(2 * n, k, scale=k**-0.5), draw.normal(2 * n)
    for given, early in ((None, False), (bias, True)):
        parts = skinny.linear_parts(x, weight, given, processors=132, early=early)
        assert parts.sums.shape[1:] == (rows, 2 * n) and not parts.sums.isnan().any()
        cases.close(parts.whole(), few_ops.linear_parts(x, weight, given).whole(), dtype)
        found = skinny.linear_act(x, weight, given, SILU, codes=CODES, early=early)
        gate = act_ops.gated_of("silu").reference
        cases.close(found, few_ops.linear_act(x, weight, given, gate), dtype)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_parts_of_any_number(count):
    draw = cases.Draw(count, "cuda", torch.bfloat16)
    x, weight = draw.normal(9, 4096), draw.normal(320, 4096, scale=1 / 64)
    for ring in (skinny.WIDE, skinny.NARROW):
        parts = skinny.linear_parts(x, weight, None, processors=132, shape=(ring, count))
        assert len(parts.sums) == count
        cases.close(parts.whole(), F.linear(x, weight), torch.bfloat16)


def test_what_does_not_fit_goes_to_the_library():
    draw = cases.Draw(0, "cuda", torch.bfloat16)
    for rows, k, step in ((33, 1024, 1), (4, 1000, 1), (4, 1024, 2)):
        x = draw.normal(rows, k * step)[:, ::step] if step > 1 else draw.normal(rows, k)
        weight = draw.normal(256, k, scale=k**-0.5)
        assert not skinny.fits(x, weight)
        found = skinny.linear_parts(x, weight, None, processors=132)
        cases.close(found.whole(), F.linear(x, weight), torch.bfloat16)
        cases.close(skinny.linear_act(x, weight, None, SILU, codes=CODES), SILU(F.linear(x, weight)), torch.bfloat16)


def test_early_launches_wait_for_what_they_read():
    """A long chain in a graph, each kernel reading the one before it: the same bits as without early launches."""
    draw = cases.Draw(0, "cuda", torch.bfloat16)
    rows, width, ffn, layers = 16, 1024, 3072, 24
    weight = draw.normal(width)
    ups = [draw.normal(2 * ffn, width, scale=width**-0.5) for _ in range(layers)]
    downs = [draw.normal(width, ffn, scale=ffn**-0.5) for _ in range(layers)]
    start = draw.normal(rows, width)

    def chain(early):
        x = start.clone()
        delta = skinny.linear_parts(x, downs[0][:, :width], None, processors=132, early=early)
        for up, down in zip(ups, downs, strict=True):
            h, x = norm.add_rms_norm(x, delta, weight, 1e-6, early=early)
            h = skinny.linear_act(h, up, None, SILU, codes=CODES, early=early)
            delta = skinny.linear_parts(h, down, None, processors=132, early=early)
        return norm.add_rms_norm(x, delta, weight, 1e-6, early=early)[0]

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for seed in range(20):
        start.copy_(cases.Draw(seed, "cuda", torch.bfloat16).normal(rows, width))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain(False))
