"""Matmuls of fp8 codes on both sides (ops/triton/skinny_rounded.py) as numpy runs them: every kind of tile, with splits
of K, rows and columns past the end, and biases."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from quire.ops.act import GATED
from quire.ops.coded import quantize_rows
from quire.ops.rounded import RoundedRows, RowCode, rounded_linear
from quire.ops.triton import skinny_rounded
from quire.ops.triton.skinny_rounded import RoundedRing
from tests import coded_cases as cases
from tests import gluon_on_numpy

ERROR = 1e-2
CODED_ERROR = 6e-2  # half a step of the largest codes is 3.6e-2


class Launched:
    """Takes a kernel's place: kernel[grid](..)."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        def launch(*given, num_warps, **constants):
            self.run(grid, *given, **constants)

        return launch


@pytest.fixture(autouse=True)
def by_numpy(monkeypatch):
    for name in ("_parts_kernel", "_silu_kernel"):
        monkeypatch.setattr(skinny_rounded, name, Launched(gluon_on_numpy.runner(skinny_rounded, name)))
    monkeypatch.setattr(skinny_rounded, "describe", lambda tensor, box: gluon_on_numpy.Descriptor(tensor))


def made(rows, columns, width):
    weight = cases.weight_of(cases.Made("fp8", columns, width, width, rounds=True), "cpu")
    x = cases.normal(rows, width, seed=rows, dtype=torch.bfloat16, device="cpu")
    codes = RoundedRows(*quantize_rows.reference(x, torch.float8_e4m3fn, width), torch.bfloat16)
    return codes, weight, cases.normal(columns, seed=1, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("tile", [64, 128, 192])
@pytest.mark.parametrize(("rows", "held"), [(40, 64), (100, 64), (130, 128), (192, 192), (200, 192), (250, 256)])
def test_products(tile, rows, held):
    x, weight, bias = made(rows, 472, 768)
    wanted = rounded_linear.reference(x, weight, bias)
    for pieces, buffers, parts in ((1, 2, 1), (2, 2, 1), (1, 3, 2)):
        ring = RoundedRing(tile, held, pieces, buffers, 1)
        for right in (weight, *cases.wrong_ones(weight)):
            found = skinny_rounded.linear_parts(x, right, bias, processors=132, ring=ring, parts=parts)
            assert found.sums.dtype is torch.bfloat16 and found.sums.shape == (parts, rows, 472)
            gated = skinny_rounded.linear_silu(x, right, bias, processors=132, ring=ring)
            for result, meant in ((found.whole(), wanted), (gated, GATED["silu"].reference(wanted))):
                if right is weight:
                    cases.check(result, meant, ERROR)
                else:
                    with pytest.raises(AssertionError):
                        cases.check(result, meant, ERROR)


@pytest.mark.parametrize("rows", [33, 64])
def test_gated_results_are_rounded_and_multiplied_in_steps(rows):
    """Each right by itself, against float32; and wrong scales of either side are seen."""
    x, up, bias = made(rows, 512, 384)
    assert skinny_rounded.silu_rounds(rows, up, RowCode(torch.float8_e4m3fn), processors=2)
    between = skinny_rounded.linear_silu_rounded(x, up, bias)
    assert between.codes.dtype is torch.float8_e4m3fn and between.scale.shape == (2, rows)
    assert between.codes.float().abs().unflatten(1, (2, 128)).amax(2).eq(448).all()  # all of the range is used
    wanted = GATED["silu"].reference(rounded_linear.reference(x, up, bias))
    cases.check(numbers(between).bfloat16(), wanted, CODED_ERROR)
    for wrong in cases.wrong_ones(up):
        with pytest.raises(AssertionError):
            cases.check(numbers(skinny_rounded.linear_silu_rounded(x, wrong, bias)).bfloat16(), wanted, CODED_ERROR)
    _, down, bias = made(rows, 200, 256)
    assert skinny_rounded.fits(between, down)
    wanted = rounded_linear.reference(between, down, bias)
    for parts in (1, 2):
        found = skinny_rounded.linear_parts(between, down, bias, processors=132, parts=parts).whole()
        cases.check(found, wanted, ERROR)
        for scale in (between.scale.flip(0), between.scale.roll(1, 1)):
            wrong = skinny_rounded.linear_parts(
                between._replace(scale=scale.contiguous()), down, bias, processors=132, parts=parts
            )
            with pytest.raises(AssertionError):
                cases.check(wrong.whole(), wanted, ERROR)


def test_what_is_not_rounded_by_the_matmul():
    """Rows of which the tensor cores would wait, columns that are not whole groups or leave multiprocessors idle."""
    code = RowCode(torch.float8_e4m3fn)
    _, whole, _ = made(1, 24576, 128)
    assert skinny_rounded.silu_rounds(64, whole, code, 132) and not skinny_rounded.silu_rounds(65, whole, code, 132)
    assert not skinny_rounded.silu_rounds(64, whole, code._replace(group=128), 132)
    for columns in (24576 + 128, 6144):
        assert not skinny_rounded.silu_rounds(64, made(1, columns, 128)[1], code, 132)


def numbers(codes):
    return (codes.codes.float().unflatten(1, (len(codes.scale), -1)) * codes.scale.t()[:, :, None]).flatten(1)


@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [(64, 4096, 4096), (64, 4096, 12288), (128, 6144, 4096), (256, 5120, 17408), (192, 128, 512), (50, 256, 384)],
)
def test_splits_fill_the_multiprocessors_once(rows, columns, width):
    ring = skinny_rounded.ring_of(rows, columns, width, 132)
    parts = skinny_rounded._splits(ring, rows, columns, width, 132)
    programs = -(-rows // ring.rows) * -(-columns // ring.tile) * parts
    assert programs <= 132 * ring.programs or parts == 1
    assert parts * 2 * ring.pieces * 128 <= width or parts == 1
    room = (ring.tile + ring.rows) * 128 * ring.pieces * ring.buffers * ring.programs
    assert room <= 227 << 10  # bytes of shared memory
