"""Matmuls of 8-bit codes on both sides (ops/triton/skinny_rounded.py) as numpy runs them: every kind of tile, with
splits of K, rows and columns past the end, and biases."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from quire.ops.act import GATED
from quire.ops.coded import quantize_rows
from quire.ops.rounded import RoundedRows, rounded_linear
from quire.ops.triton import skinny_rounded
from quire.ops.triton.skinny_rounded import RoundedRing
from tests import coded_cases as cases
from tests import gluon_on_numpy
from tests.products import spread

ERROR = 1e-2


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


def made(rows, columns, width, kind="fp8"):
    weight = cases.weight_of(cases.Made(kind, columns, width, width, rounds=True), "cpu")
    x = cases.normal(rows, width, seed=rows, dtype=torch.bfloat16, device="cpu")
    codes = RoundedRows(*quantize_rows.reference(x, weight.codes.dtype, width), torch.bfloat16)
    return codes, weight, cases.normal(columns, seed=1, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize(
    ("tile", "rows_held"),
    spread([64, 128, 192], [(40, 64), (100, 64), (130, 128), (192, 192), (200, 192), (250, 256)]),
)
def test_products(tile, rows_held):
    rows, held = rows_held
    x, weight, bias = made(rows, 472, 768, "int8" if rows % 100 else "fp8")
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


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [33, 96, 200, 300])
def test_a_matrix_that_needs_no_splits(kind, rows):
    """In one kernel, in the dtype of the rows."""
    x, weight, bias = made(rows, 1000, 768, kind)
    numbers = torch.zeros(rows, 768, dtype=torch.bfloat16)
    assert skinny_rounded.takes_whole(numbers, weight, 1) == (rows <= 256 or kind == "int8")
    assert not skinny_rounded.takes_whole(numbers, weight._replace(rounds=False), 1)
    assert not skinny_rounded.takes_whole(numbers, weight, 1000)  # so many multiprocessors want splits
    for right in (weight, *cases.wrong_ones(weight)):
        found = skinny_rounded.linear(x, right, bias, processors=1)
        assert found.dtype is torch.bfloat16 and found.shape == (rows, 1000)
        wanted = rounded_linear.reference(x, weight, bias)
        if right is weight:
            cases.check(found, wanted, ERROR)
        else:
            with pytest.raises(AssertionError):
                cases.check(found, wanted, ERROR)
