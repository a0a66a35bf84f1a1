"""Codes of inputs times fp8 codes by Hopper's tensor cores: against float32, and in a chain of early launches."""

import itertools
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

from quire.ops.act import GATED
from quire.ops.parts import PartialSums, whole
from quire.ops.rounded import RoundedRows, RowCode, rounded_linear
from quire.ops.triton import act, coded, norm
from tests import coded_cases as cases

pytestmark = pytest.mark.gpu
skinny = pytest.importorskip("quire.ops.triton.skinny")
skinny_rounded = pytest.importorskip("quire.ops.triton.skinny_rounded")
SILU = act.gated_form(act.SILU, False)
CODE = RowCode(torch.float8_e4m3fn)
SHAPES = [(96, 256), (200, 384), (1000, 1024), (4096, 4096)]
# Sums of 8-bit products have fewer bits than float32 on Hopper, so results differ by more than their rounding.
ERROR = 2e-2
CODED_ERROR = 6e-2  # half a step of the largest codes is 3.6e-2


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has these instructions")


def made(rows, columns, width, dtype=torch.bfloat16, kind="fp8"):
    weight = cases.weight_of(cases.Made(kind, columns, width, width, rounds=True), "cuda")
    x = cases.normal(rows, width, seed=rows, dtype=dtype, device="cuda")
    return RoundedRows(*coded.quantize_rows(x, weight.codes.dtype, width), dtype), weight


def numbers(codes):
    return codes.codes.float() * codes.scale.t()


@pytest.mark.parametrize("rows", [1, 33, 64, 65, 128, 130, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_products(kind, shape, rows):
    dtype = torch.float16 if rows == 65 and shape != SHAPES[-1] else torch.bfloat16  # whose products are too large
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=132, early=rows % 2 == 0)
    x, weight = made(rows, *shape, dtype, kind)
    bias = cases.normal(weight.rows, seed=1, dtype=dtype, device="cuda")
    assert skinny_rounded.fits(x, weight)
    wanted = rounded_linear.reference(x, weight, bias)
    for right in (weight, *cases.wrong_ones(weight)):
        with nullcontext() if right is weight else pytest.raises(AssertionError):
            parts = forms.rounded_parts(x, right, bias)
            assert isinstance(parts, PartialSums) and not parts.sums.isnan().any()
            cases.check(parts.whole(), wanted, ERROR)
        with nullcontext() if right is weight else pytest.raises(AssertionError):
            found = skinny_rounded.linear_silu(x, right, bias, processors=132, early=rows % 2 == 0)
            cases.check(found, GATED["silu"].reference(wanted), ERROR)
    code = RowCode(weight.codes.dtype)
    found = forms.rounded_act(x, weight, bias, SILU, code)
    cases.check(numbers(found).to(dtype), GATED["silu"].reference(wanted), CODED_ERROR)


@pytest.mark.parametrize("rows", [33, 64, 90, 128, 150, 200, 256, 300])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_an_output_matrix(kind, rows):
    """Whose rows of inputs are rounded for it, in one kernel that splits no K: the dtype of the rows, and every place
    written, in a graph too."""
    dtype = torch.float16 if rows == 90 else torch.bfloat16
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=16, early=True)  # its tiles are enough for so many
    x, weight = made(rows, 5000, 512, dtype, kind)
    plain = cases.normal(rows, 512, seed=rows, dtype=dtype, device="cuda")
    assert skinny_rounded.takes_whole(plain, weight, 16) == (rows <= 256 or kind == "int8")
    bias = cases.normal(weight.rows, seed=1, dtype=dtype, device="cuda")
    wanted = rounded_linear.reference(x, weight, bias)
    for right in (weight, *cases.wrong_ones(weight)):
        found = forms.coded_linear(plain, right, bias)
        assert found.dtype is dtype and found.shape == wanted.shape
        with nullcontext() if right is weight else pytest.raises(AssertionError):
            cases.check(found, wanted, ERROR)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forms.coded_linear(plain, weight, bias)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, forms.coded_linear(plain, weight, bias))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_rows_of_inputs_that_are_not_numbers_stay_so(kind, wrong):
    """Else a request whose states are NaN would be answered, from 33 rows on, with logits that are all the same."""
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=16, early=True)
    _, weight = made(40, 5000, 512, kind=kind)
    plain = cases.normal(40, 512, seed=1, dtype=torch.bfloat16, device="cuda")
    right = forms.coded_linear(plain, weight, None)
    assert right.isfinite().all()
    plain[3] = wrong
    plain[17, 100] = wrong
    found = forms.coded_linear(plain, weight, None)
    others = [row for row in range(40) if row not in (3, 17)]
    assert torch.equal(found[others], right[others])
    assert found[[3, 17]].isnan().all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_ring(kind):
    """Rings are chosen by measurement, and all must be right: tiles of one, two and three times 64."""
    for rows, (tile, held, pieces) in itertools.product(
        (40, 150), itertools.product((64, 128, 192), (64, 128, 256), (1, 2))
    ):
        x, weight = made(rows, 472, 768, kind=kind)
        wanted = rounded_linear.reference(x, weight, None)
        for buffers, parts in ((2, 1), (2, 3), (3, 2)):
            if (tile + held) * pieces * buffers * 128 > 220 << 10:
                continue  # more shared memory than a multiprocessor has
            ring = skinny_rounded.RoundedRing(tile, held, pieces, buffers, 1)
            found = skinny_rounded.linear_parts(x, weight, None, processors=132, ring=ring, parts=parts)
            cases.check(found.whole(), wanted, ERROR)
            gated = skinny_rounded.linear_silu(x, weight, None, processors=132, ring=ring)
            cases.check(gated, GATED["silu"].reference(wanted), ERROR)


def test_what_does_not_fit_goes_another_way():
    forms = skinny.SkinnyForms({SILU: act.SILU}, processors=132, early=False)
    for name, rows in (("fp8-odd", 70), ("fp8-blocks", 70), ("int8-rows", 70), ("fp8-rows", 257)):
        weight = cases.weight_of(cases.WEIGHTS[name], "cuda")
        x = cases.normal(rows, weight.width, seed=1, dtype=torch.bfloat16, device="cuda")
        codes = RoundedRows(*coded.quantize_rows(x, weight.codes.dtype, weight.group), torch.bfloat16)
        assert not skinny_rounded.fits(codes, weight)
        assert skinny.rounded_rows([weight]) == (skinny_rounded.LEAST_ROWS if name == "fp8-rows" else 65)
        wanted = rounded_linear.reference(codes, weight, None)
        cases.check(whole(forms.rounded_parts(codes, weight, None)), wanted, ERROR)
        found = forms.rounded_act(codes, weight, None, SILU, CODE)
        cases.check(numbers(found).to(torch.bfloat16), GATED["silu"].reference(wanted), CODED_ERROR)


def test_which_rows_are_rounded():
    """Where inputs are rounded begins where the kernels that widen codes end."""
    fits, odd = (cases.weight_of(cases.WEIGHTS[name], "cuda") for name in ("fp8-rows", "fp8-blocks"))
    assert skinny.part_rows(256, torch.bfloat16, [fits]) == skinny.rounded_rows([fits]) - 1 < 64
    assert skinny.part_rows(256, torch.bfloat16, [odd]) == skinny.rounded_rows([odd]) - 1 == 64
    assert skinny.rounded_rows([fits, fits.codes.float()]) == skinny.rounded_rows([]) == 0


@pytest.mark.parametrize("rows", [48, 100, 256])
def test_early_launches_wait_for_what_they_read(rows):
    """A long chain in a graph, each kernel reading the one before it: the same bits as without early launches."""
    width, ffn, layers = 1024, 3072, 12
    ups = [made(1, 2 * ffn, width)[1] for _ in range(layers)]
    downs = [made(1, width, ffn)[1] for _ in range(layers)]
    gains = cases.normal(width, dtype=torch.bfloat16, device="cuda")
    rule = norm.NormRule(gains, 1e-6, 0.0, False)
    start = cases.normal(rows, width, dtype=torch.bfloat16, device="cuda")

    def chain(early):
        forms = skinny.SkinnyForms({SILU: act.SILU}, processors=132, early=early)
        x, delta = start.clone(), start.clone()
        for up, down in zip(ups, downs, strict=True):
            h, x = norm.add_norm_rounded(x, delta, rule, CODE, early=early)
            delta = forms.rounded_parts(forms.rounded_act(h, up, None, SILU, CODE), down, None)
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
