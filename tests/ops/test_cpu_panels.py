"""Plain matrices of bfloat16 and float32 in panels: the order of their numbers, products and rows, on every instruction
set here."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from quire.ops import packed
from quire.ops.cpu.native import DTYPES, KINDS, Segment, kernels

library = kernels()
pytestmark = pytest.mark.skipif(library is None, reason="no compiled kernels")


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid(weight):
    mine = weight.clone()
    packed.lay_panels.on("cpu")(mine)
    return packed.Packed(mine.view(-1).view(torch.uint8), packed.panel_kind(weight.dtype), *weight.shape)


def multiply(x, parts, bias=None):
    segments = (Segment * len(parts))(*(Segment(KINDS[p.kind], p.rows, p.data.data_ptr()) for p in parts))
    out = torch.full((x.shape[0], sum(p.rows for p in parts)), float("nan"), dtype=x.dtype)
    library.qc_linear_packed(
        x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], ctypes.addressof(segments), len(parts),
        None if bias is None else bias.data_ptr(), out.data_ptr(), out.shape[1], DTYPES[x.dtype],
    )  # fmt: skip
    return out


STORED = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (160, 576)])
def test_order(isa, shape, stored):
    weight = draw(*shape, dtype=stored)
    here, there = weight.clone(), weight.clone()
    packed.lay_panels.on("cpu")(here)
    packed.lay_panels.reference(there)
    assert torch.equal(here, there) and not torch.equal(here, weight)
    first = [(0, 0), (0, 1), (1, 0), (1, 1)] if stored is torch.bfloat16 else [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert here.view(-1)[:4].tolist() == [weight[place] for place in first]
    assert torch.equal(packed.unpack(laid(weight)), weight.float())
    packed.lay_panels.on("cpu")(here, True)
    packed.lay_panels.reference(there, True)
    assert torch.equal(here, weight) and torch.equal(there, weight)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("shape", [(24, 32), (16, 48)])
def test_shapes_that_do_not_fit(isa, shape, stored):
    weight = draw(*shape, dtype=stored)
    with pytest.raises(ValueError, match=str(shape[0])):
        packed.lay_panels.on("cpu")(weight)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 576])
@pytest.mark.parametrize("threads", [1, 2])
def test_products(isa, threads, width, dtype, stored):
    library.qc_set_threads(threads)
    weight = draw(112, width, seed=1, dtype=stored)
    parts = [laid(weight[:64]), laid(weight[64:80]), laid(weight[80:])]
    assert multiply(draw(0, width, dtype=dtype), parts).shape == (0, 112)  # a step may have none for some layer
    for m in (1, 2, 3, 7, 8, 15, 17, 33, 70):
        x = draw(m, width + 8, seed=m, dtype=dtype)[:, :width]
        for bias in (None, draw(112, seed=5, dtype=dtype)):
            found = multiply(x, parts, bias)
            wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            limit = 1e-5 if dtype is torch.float32 else 0.01
            torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit * wanted.abs().max().item())
            for row in {0, m // 2, m - 1}:
                assert torch.equal(multiply(x[row : row + 1], parts, bias)[0], found[row])
    library.qc_set_threads(1)


@pytest.mark.parametrize("width", [64, 1536])
def test_float32_is_not_rounded_to_less(isa, width):
    """Numbers of very different sizes, each with all of its bits: errors are those of sums in float32."""
    x, weight = (draw(rows, width, seed=rows, dtype=torch.float32) for rows in (40, 48))
    x, weight = (t * 10 ** draw(*t.shape, seed=7, dtype=torch.float32) for t in (x, weight))
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T  # what a sum's rounding is in proportion to
    error = ((multiply(x, [laid(weight)]).double() - exact) / sizes).abs()
    cut = (x.view(torch.int32) & ~0x7F).view(torch.float32)  # without its lower 7 bits of 24
    rounded = ((cut.double() @ weight.double().T - exact) / sizes).abs()
    assert error.square().mean().sqrt() < rounded.square().mean().sqrt() / 8


@pytest.mark.parametrize("power", [-90, -104, -112, -120, -126, -130])
def test_small_float32_is_off_by_less_than_a_normal_number(isa, power):
    """Where bfloat16 has no normal numbers for its lower parts."""
    weight, x = torch.eye(32), (1 + draw(9, 32, dtype=torch.float32).abs().frac()) * 2.0**power
    for few in (x, x[:1]):
        found = multiply(few, [laid(weight)])
        assert (found.double() - few.double()).abs().max() < 2.0 ** max(power - 23, -126)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_bad_row_stays_alone(isa, stored):
    weight, x = draw(64, 96, seed=1, dtype=stored), draw(9, 96, seed=2)
    x[4, 5] = float("nan")
    found, without = multiply(x, [laid(weight)]), multiply(x[[0, 1, 2, 3, 5, 6, 7, 8]], [laid(weight)])
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], without)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(isa, dtype, stored):
    weight, index = draw(96, 64, seed=3, dtype=stored), torch.tensor([[0, 95, 17], [16, 17, 31]])
    assert torch.equal(packed.packed_rows.on("cpu")(index, laid(weight), dtype), weight[index].to(dtype))
