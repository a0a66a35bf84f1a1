"""Codes times one row, fused with the ops around them: against their references, and in a chain of early launches."""

import pytest
import torch

pytest.importorskip("triton")

from quire.ops.act import GATED
from quire.ops.coded import coded_linear
from quire.ops.few import NormRule, linear_add, norm_linear
from tests import coded_cases as cases

pytestmark = pytest.mark.gpu
few_coded = pytest.importorskip("quire.ops.triton.few_coded")
few_forms = pytest.importorskip("quire.ops.triton.few_forms")
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


@pytest.mark.parametrize("name", WEIGHTS)
def test_products(name):
    """Half of them in float16, with scales in float16."""
    is_half = list(WEIGHTS).index(name) % 2 == 1
    dtype, scales = (torch.float16, torch.float16) if is_half else (torch.bfloat16, torch.float32)
    weight = cases.weight_of(WEIGHTS[name], "cuda", scale_dtype=scales)
    x = cases.normal(1, weight.width, seed=3, dtype=dtype, device="cuda")
    assert few_coded.fits(x, weight)
    cases.check_few_forms(few_forms, x, weight, early=not is_half)


@pytest.mark.parametrize("made", [cases.Made("fp8", 512, 12288, 128), cases.Made("int4", 2048, 4096, 128)])
def test_rows_of_many_chunks(made):
    """Every warp has several, and loads some of them ahead."""
    weight = cases.weight_of(made, "cuda")
    cases.check_few_forms(few_forms, cases.normal(1, weight.width, dtype=torch.bfloat16, device="cuda"), weight)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_programs_of_several_tiles(kind):
    """The same bits as programs of one tile, also where their number does not divide the rows."""
    for rows in (192, 96):
        weight = cases.weight_of(cases.Made(kind, 2 * rows, 1024, 1024 if kind == "fp8" else 128), "cuda")
        x = cases.normal(1, 1024, dtype=torch.bfloat16, device="cuda")
        rule = NormRule(cases.normal(1024, seed=3, dtype=torch.bfloat16, device="cuda"), 1e-6, 0.0, False)
        stream = cases.normal(1, 2 * rows, seed=2, dtype=torch.bfloat16, device="cuda")
        for given in ({"norm": rule, "gated": True}, {"stream": stream}):
            one, two, five = (
                few_coded.few_coded_linear(
                    x, weight, config=few_coded.FewCodedConfig(4, 2, 128, repeat), early=True, **given
                )
                for repeat in (1, 2, 5)
            )
            assert torch.equal(one, two) and torch.equal(one, five)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_what_the_next_matmul_reads_changes_nothing(kind):
    """Sizes that no number of programs divides; of 4 bits nothing is fetched."""
    weight = cases.weight_of(cases.Made(kind, 96, 1024, 128 if kind == "int4" else 1024), "cuda")
    following = cases.weight_of(cases.Made(kind, 1000, 1152, 128 if kind == "int4" else 1152), "cuda")
    assert (few_coded.beginning(following) is None) == (kind == "int4") and few_coded.beginning(None) is None
    x = cases.normal(1, 1024, dtype=torch.bfloat16, device="cuda")
    stream = cases.normal(1, 96, seed=2, dtype=torch.bfloat16, device="cuda")
    before = following.codes.clone()
    for early in (False, True):
        found = few_forms.linear_add(x, weight, None, stream, following, early=early)
        assert torch.equal(found, few_forms.linear_add(x, weight, None, stream, early=early))
    assert torch.equal(before.view(torch.uint8), following.codes.view(torch.uint8))


def test_one_row_of_a_tall_matrix():
    """Of the output, say; more rows, and other matrices, go the other way."""
    calls = []
    other = few_forms.TallLinear(lambda x, weight, bias: calls.append(len(x)), None)
    tall = cases.weight_of(cases.Made("int8", few_coded.TALL + 40, 256, 256), "cuda")
    x = cases.normal(2, 256, dtype=torch.bfloat16, device="cuda")
    cases.check(other(x[:1], tall), coded_linear.reference(x[:1], tall, None), 1e-2)
    other(x, tall)
    other(x[:1], cases.weight_of(cases.Made("int8", 64, 256, 256), "cuda"))
    assert calls == [2, 1]


@pytest.mark.parametrize("warps", [4, 8, 16])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_every_number_of_warps(kind, warps):
    """What is chosen depends on the shape; results do not but for the order of sums."""
    weight = cases.weight_of(cases.Made(kind, 96, 3072, 3072 if kind == "fp8" else 128), "cuda")
    x = cases.normal(1, 3072, dtype=torch.bfloat16, device="cuda")
    stream = cases.normal(1, 96, seed=2, dtype=torch.bfloat16, device="cuda")
    rule = NormRule(cases.normal(3072, seed=3, dtype=torch.bfloat16, device="cuda"), 1e-6, 0.0, False)
    for ahead in (1, 3, 8):
        given = {"config": few_coded.FewCodedConfig(warps, ahead, 128), "early": ahead == 1}
        found = few_coded.few_coded_linear(x, weight, stream=stream, **given)
        cases.check(found, linear_add(x, weight, None, stream), 1e-2)
        found = few_coded.few_coded_linear(x, weight, norm=rule, gated=True, **given)
        cases.check(found, norm_linear(x, rule, weight, None, GATED["silu"].reference), 1e-2)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 3e4, 1e30])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_inputs_of_any_size(kind, size):
    """They are multiplied in float16, whose range they need not fit, with an outlier among them; nothing else is."""
    weight = cases.weight_of(cases.Made(kind, 64, 512, 128), "cuda")
    x = cases.normal(1, 512, dtype=torch.bfloat16, device="cuda") * size
    x[0, 7] *= 300
    stream = torch.zeros((1, 64), dtype=torch.bfloat16, device="cuda")
    wanted = linear_add(x, weight, None, stream)
    assert wanted.isfinite().all() and wanted.abs().max() > 0
    cases.check(few_forms.linear_add(x, weight, None, stream), wanted, 1e-2)
    zero = few_forms.linear_add(torch.zeros_like(x), weight, None, stream + 1)
    assert torch.equal(zero, stream + 1)
    x[0, 3] = torch.nan
    assert few_forms.linear_add(x, weight, None, stream).isnan().all()


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
    assert few_forms.few_rows(256, torch.bfloat16, [weight]) == 1
    for name, rows in (("int4-128", 1), ("fp8-blocks", 0), ("int8-rows", 0), ("int4-rows", 0), ("fp4-128", 0)):
        assert few_forms.few_rows(256, torch.bfloat16, [cases.weight_of(WEIGHTS[name], "cuda")]) == rows  # 0: not timed
    for given in ([cases.weight_of(WEIGHTS["int4-128"], "cuda")], [weight]):
        assert few_forms.few_rows(256, torch.float32, given) == (2 if given[0] is weight else 0)
    x, stream = cases.normal(1, 256, device="cuda"), cases.normal(1, 96, device="cuda")
    cases.check(few_forms.linear_add(x, weight, None, stream), linear_add(x, weight, None, stream), 1e-2)
    rule = NormRule(cases.normal(256, device="cuda"), 1e-6, 0.0, False)
    cases.check(few_forms.norm_linear(x, rule, weight, None, codes={}), norm_linear(x, rule, weight, None), 1e-2)
