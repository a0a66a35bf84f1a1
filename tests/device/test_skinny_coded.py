"""Codes times some rows by Hopper's tensor cores: against their references, and in a chain of early launches."""

import itertools
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

from quire.ops import few as few_ops
from quire.ops.act import GATED
from quire.ops.coded import coded_linear
from quire.ops.triton import act, norm
from tests import coded_cases as cases

pytestmark = pytest.mark.gpu
skinny = pytest.importorskip("quire.ops.triton.skinny")
skinny_coded = pytest.importorskip("quire.ops.triton.skinny_coded")
SILU = act.gated_form(act.SILU, False)
WEIGHTS = {
    "fp8-rows": cases.Made("fp8", 96, 256, 256), "fp8-blocks": cases.Made("fp8", 72, 384, 128),
    "fp8-256": cases.Made("fp8", 200, 1024, 256), "int8-rows": cases.Made("int8", 50, 256, 256),
    "int4-128": cases.Made("int4", 72, 512, 128), "int4-rows": cases.Made("int4", 130, 4096, 4096),
    "fp4-128": cases.Made("fp4", 40, 256, 128),
}  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has these instructions")


@pytest.mark.parametrize("rows", [1, 17, 64, 256])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products(name, rows):
    dtype = torch.float16 if rows == 17 else torch.bfloat16
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=132, early=rows % 2 == 0)
    weight = cases.weight_of(WEIGHTS[name], "cuda")
    x = cases.normal(rows, weight.width, seed=rows, dtype=dtype, device="cuda")
    bias = cases.normal(weight.rows, seed=1, dtype=dtype, device="cuda")
    assert skinny_coded.fits(x, weight)
    gate = GATED["silu"].reference
    for right in (weight, *cases.wrong_ones(weight)):
        with nullcontext() if right is weight else pytest.raises(AssertionError):
            parts = forms.linear_parts(x, right, bias)
            assert parts.sums.shape[1:] == (rows, weight.rows) and not parts.sums.isnan().any()
            cases.check(parts.whole(), few_ops.linear_parts(x, weight, bias).whole(), 1e-2)
        with nullcontext() if right is weight else pytest.raises(AssertionError):
            cases.check(forms.linear_act(x, right, bias, SILU), few_ops.linear_act(x, weight, bias, gate), 1e-2)
        with nullcontext() if right is weight else pytest.raises(AssertionError):
            cases.check(forms.coded_linear(x, right, bias), coded_linear.reference(x, weight, bias), 1e-2)


@pytest.mark.parametrize("rows", [2, 7, 17, 32, 64, 200])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_an_output_matrix(kind, rows):
    """In one kernel that splits no K: the dtype of the rows, and every place written. The number of its rows is odd."""
    dtype = torch.float16 if rows == 17 else torch.bfloat16
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=4, early=True)  # its tiles are enough for so many
    weight = cases.weight_of(cases.Made(kind, 1537, 4096, 4096), "cuda")
    x = cases.normal(rows, 4096, seed=rows, dtype=dtype, device="cuda")
    assert skinny_coded.fits(x, weight) and skinny_coded.is_whole(rows, weight, 4)
    assert not skinny_coded.is_whole(rows, weight, 1000)
    bias = cases.normal(weight.rows, seed=1, dtype=dtype, device="cuda")
    for right in (weight, *cases.wrong_ones(weight)):
        found = forms.coded_linear(x, right, bias)
        assert found.dtype is dtype
        with nullcontext() if right is weight else pytest.raises(AssertionError):
            cases.check(found, coded_linear.reference(x, weight, bias), 1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forms.coded_linear(x, weight, bias)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, forms.coded_linear(x, weight, bias))


@pytest.mark.parametrize(
    "made",
    [
        cases.Made("fp8", 4, 128, 128), cases.Made("int4", 4, 128, 128), cases.Made("int4", 72, 640, 128),
        cases.Made("int8", 40, 1536, 384), cases.Made("fp8", 264, 1152, 384), cases.Made("fp4", 136, 1024, 256),
    ],
)  # fmt: skip
def test_odd_shapes_in_a_graph(made):
    """One buffer of K, columns that fill no tile, groups of several pieces, rows around the borders of tiles."""
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=132, early=True)
    weight = cases.weight_of(made, "cuda")
    gate = GATED["silu"].reference
    for rows in (1, 8, 9, 16, 31, 33, 63, 65, 127, 128, 129, 255, 256):
        x = cases.normal(rows, weight.width, seed=rows, dtype=torch.bfloat16, device="cuda")
        assert skinny_coded.fits(x, weight)
        forms.linear_parts(x, weight, None), forms.linear_act(x, weight, None, SILU)  # compiled before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parts, gated = forms.linear_parts(x, weight, None), forms.linear_act(x, weight, None, SILU)
        for seed in (1, 2):
            x.copy_(cases.normal(rows, weight.width, seed=seed))
            parts.sums.fill_(torch.nan)
            gated.fill_(torch.nan)
            graph.replay()
            cases.check(parts.whole(), coded_linear.reference(x, weight), 1e-2)
            cases.check(gated, few_ops.linear_act(x, weight, None, gate), 1e-2)


def test_tiles_of_both_heights():
    """A tile of 128 has two warp groups; rings are chosen by measurement, and all must be right."""
    weight = cases.weight_of(cases.Made("int4", 48, 384, 128), "cuda")
    for rows in (5, 40):
        x = cases.normal(rows, weight.width, seed=rows, dtype=torch.bfloat16, device="cuda")
        wanted = coded_linear.reference(x, weight)
        for tile, pieces, buffers in itertools.product((64, 128), (1, 3), (2, 4)):
            if rows > 32 and (pieces, buffers) == (3, 4):
                continue  # more shared memory than a multiprocessor has
            ring = skinny_coded.CodeRing(tile, pieces, buffers, 1)
            found = skinny_coded.linear_parts(x, weight, None, processors=132, ring=ring)
            cases.check(found.whole(), wanted, 1e-2)


def test_what_does_not_fit_goes_another_way():
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=132, early=False)
    for made, rows in (
        (cases.WEIGHTS["fp8-odd"], 16),
        (cases.WEIGHTS["int4-64"], 16),
        (cases.Made("int4", 50, 256, 128), 16),
        (cases.Made("int4", 68, 256, 128), 16),
        (cases.Made("int4", 48, 384, 128, zeros=True), 16),
        (WEIGHTS["fp8-rows"], 257),
        (WEIGHTS["fp8-rows"]._replace(rounds=True), 65),
    ):
        weight = cases.weight_of(made, "cuda")
        x = cases.normal(rows, weight.width, seed=1, dtype=torch.bfloat16, device="cuda")
        assert not skinny_coded.fits(x, weight)
        assert (skinny.part_rows(1024, torch.bfloat16, [weight]) > 0) == (made.width == 256 and made.rows == 96)
        error = 4e-2 if made.rounds else 2e-2  # where inputs are rounded to 8 bits
        cases.check(forms.linear_parts(x, weight, None).whole(), coded_linear.reference(x, weight), error)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_early_launches_wait_for_what_they_read(name):
    """A long chain in a graph, each kernel reading the one before it: the same bits as without early launches."""
    rows, width, ffn, layers = 32, 1024, 3072, 12
    group = {"fp8": (width, ffn), "int4": (128, 128)}[name]
    ups = [cases.weight_of(cases.Made(name, 2 * ffn, width, group[0]), "cuda") for _ in range(layers)]
    downs = [cases.weight_of(cases.Made(name, width, ffn, group[1]), "cuda") for _ in range(layers)]
    gains = cases.normal(width, dtype=torch.bfloat16, device="cuda")
    start = cases.normal(rows, width, dtype=torch.bfloat16, device="cuda")

    def chain(early):
        forms = skinny.SkinnyForms({SILU: act.SILU}, processors=132, early=early)
        x = delta = start.clone()
        for up, down in zip(ups, downs, strict=True):
            h, x = norm.add_rms_norm(x, delta, gains, 1e-6, early=early)
            delta = forms.linear_parts(forms.linear_act(h, up, None, SILU), down, None)
        return norm.add_rms_norm(x, delta, gains, 1e-6, early=early)[0]

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for seed in range(10):
        start.copy_(cases.normal(rows, width, seed=seed, dtype=torch.bfloat16, device="cuda"))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain(False))
