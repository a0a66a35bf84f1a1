"""Codes times a few rows, fused with the ops around them: against their references, and in a chain of early launches."""

import pytest
import torch

pytest.importorskip("triton")

from quire.ops.few import NormRule, linear_add, norm_linear
from tests import coded_cases as cases

pytestmark = pytest.mark.gpu
few_coded = pytest.importorskip("quire.ops.triton.few_coded")
WEIGHTS = {
    "fp8-rows": cases.Made("fp8", 96, 256, 256), "fp8-blocks": cases.Made("fp8", 72, 384, 128),
    "fp8-256": cases.Made("fp8", 200, 1024, 256), "int8-rows": cases.Made("int8", 50, 256, 256),
    "int8-128": cases.Made("int8", 40, 1152, 128), "int4-128": cases.Made("int4", 72, 640, 128),
    "int4-512": cases.Made("int4", 72, 1024, 512), "int4-rows": cases.Made("int4", 130, 4096, 4096),
    "fp4-128": cases.Made("fp4", 40, 384, 128),
}  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only used on Hopper")


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products(name, rows):
    dtype, kinds = (torch.float16, torch.float16) if rows == 2 else (torch.bfloat16, torch.float32)
    weight = cases.weight_of(WEIGHTS[name], "cuda", scale_dtype=kinds)
    x = cases.normal(rows, 2 * weight.width, seed=rows, dtype=dtype, device="cuda")[:, : weight.width]
    assert few_coded.fits(x, weight)
    cases.check_few_forms(few_coded, x, weight, early=rows % 2 == 0)


def test_every_shape_of_a_layer():
    """Large enough that every program has several chunks, and loads some of them ahead."""
    for made in (
        cases.Made("fp8", 6144, 4096, 4096), cases.Made("fp8", 4096, 12288, 128), cases.Made("int4", 24576, 4096, 128),
        cases.Made("int4", 4096, 12288, 128),
    ):  # fmt: skip
        weight = cases.weight_of(made, "cuda")
        x = cases.normal(1, weight.width, dtype=torch.bfloat16, device="cuda")
        cases.check_few_forms(few_coded, x, weight, early=True)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_early_launches_wait_for_what_they_read(kind):
    """A long chain in a graph, each product reading the one before it: the same bits as without early launches."""
    width, ffn, layers, group = 1024, 3072, 24, 128 if kind == "int4" else 0
    rule = NormRule(cases.normal(width, dtype=torch.bfloat16, device="cuda"), 1e-6, 0.0, False)
    ups = [cases.weight_of(cases.Made(kind, 2 * ffn, width, group or width), "cuda") for _ in range(layers)]
    downs = [cases.weight_of(cases.Made(kind, width, ffn, group or ffn), "cuda") for _ in range(layers)]
    start = cases.normal(1, width, dtype=torch.bfloat16, device="cuda")

    def chain(early):
        x = start
        for up, down in zip(ups, downs, strict=True):
            h = few_coded.few_coded_linear(x, up, norm=rule, gated=True, early=early)
            x = few_coded.few_coded_linear(h, down, stream=x, early=early)
        return x

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for seed in range(20):
        start.copy_(cases.normal(1, width, seed=seed))
        out.fill_(torch.nan)
        graph.replay()
        wanted = chain(False)
        assert not wanted.isnan().any() and torch.equal(out, wanted)


def test_what_does_not_fit_goes_another_way():
    """Zero points, groups and widths that are no multiples of 128, float32 inputs."""
    for made in (
        cases.Made("int4", 40, 256, 128, zeros=True), cases.Made("int4", 40, 256, 64), cases.Made("fp8", 50, 144, 144),
    ):  # fmt: skip
        weight = cases.weight_of(made, "cuda")
        assert not few_coded.fits_weight(weight)
    weight = cases.weight_of(WEIGHTS["fp8-rows"], "cuda")
    assert few_coded.few_rows(256, torch.bfloat16, [weight]) == few_coded.FASTER
    for given in ([cases.weight_of(WEIGHTS["int4-128"], "cuda")], [weight]):
        assert few_coded.few_rows(256, torch.float32, given) == (2 if given[0] is weight else 0)
    x, stream = cases.normal(1, 256, device="cuda"), cases.normal(1, 96, device="cuda")
    cases.check(few_coded.linear_add(x, weight, None, stream), linear_add(x, weight, None, stream), 1e-2)
    rule = NormRule(cases.normal(256, device="cuda"), 1e-6, 0.0, False)
    cases.check(few_coded.norm_linear(x, rule, weight, None, codes={}), norm_linear(x, rule, weight, None), 1e-2)
