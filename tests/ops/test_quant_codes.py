"""Coded matrices by themselves: what codes mean, where they can be cut, and which packed kind holds them."""

import pytest
import torch

from quire.ops.cpu.native import kernels
from quire.ops.op import Kernels
from quire.ops.packed import pack_codes, packed_rows, unpack
from quire.quant.block_codes import block_codes
from quire.quant.coded import (
    AffineCodes,
    FloatCodes,
    Grid,
    InputCoding,
    TableCodes,
    open_halves,
    open_words,
    power_of_two,
)  # fmt: skip
from quire.quant.shard import Cut

ROWS, WIDTH = 24, 96


def rand(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def codes(high, *shape, low=0, seed=0):
    return torch.randint(low, high, shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


def affine(bits=4, group=32, low=0, zero=8, scale=None):
    high = 1 << bits
    values = rand(ROWS, WIDTH // group).half() if scale is None else scale
    return AffineCodes(codes(high, low=low).to(torch.uint8), bits, Grid(values, 1, group), zero)


def forms():
    groups = codes(3, WIDTH)
    fp8 = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    fp4 = codes(256, ROWS, WIDTH // 2).to(torch.uint8)
    return {
        "rows": affine(group=WIDTH),
        "groups": affine(zero=Grid(codes(16, ROWS, 3), 1, 32)),
        "ordered": AffineCodes(
            codes(16).to(torch.uint8), 4, Grid(rand(ROWS, 3), 1, 32), Grid(codes(9, ROWS, 3), 1, 32), groups),
        "whole": FloatCodes(fp8, "e4m3", Grid(rand(1, 1), ROWS, WIDTH)),
        "blocks": FloatCodes(fp8, "e4m3", Grid(rand(3, 3), 8, 32)),
        "short blocks": FloatCodes(fp8, "e4m3", Grid(rand(2, 3), 16, 40)),
        "fp4": FloatCodes(fp4, "e2m1", Grid(codes(130, ROWS, 3, low=120).to(torch.uint8), 1, 32)),
        "table": TableCodes(codes(16).to(torch.uint8), rand(16), rand(ROWS * 3), 32),
        "long runs": TableCodes(codes(16).to(torch.uint8), rand(16), rand(ROWS * WIDTH // 64), 64),
    }  # fmt: skip


CUTS = [
    Cut(0, ROWS, ((8, 16),)), Cut(0, ROWS, ((0, 8), (16, 24))), Cut(0, ROWS, ((5, 7),)), Cut(1, WIDTH, ((32, 96),)),
    Cut(1, WIDTH, ((0, 32), (64, 96))), Cut(1, WIDTH, ((3, 11),)), Cut(1, WIDTH, ((40, 96),)),
]  # fmt: skip


@pytest.mark.parametrize("name", forms())
def test_a_cut_of_codes_is_a_cut_of_numbers(name):
    coded, cuts = forms()[name], 0
    for cut in CUTS:
        kept = coded.cut(cut)
        if kept is not None:
            cuts += 1
            assert torch.equal(kept.numbers(), cut.of(coded.numbers())), cut
            assert kept.shape == tuple(kept.numbers().shape)
    assert cuts >= {"long runs": 0, "short blocks": 1}.get(name, 4), name
    moved = coded.to(torch.device("cpu"))
    assert type(moved) is type(coded) and torch.equal(moved.numbers(), coded.numbers())


def test_what_codes_mean():
    scale = Grid(torch.tensor([[2.0, 10.0]]), 1, 2)
    q = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert AffineCodes(q, 4, scale, 1).numbers().tolist() == [[0, 2, 20, 30]]
    zero = Grid(torch.tensor([[1, 3]]), 1, 2)
    assert AffineCodes(q, 4, scale, zero).numbers().tolist() == [[0, 2, 0, 10]]
    assert AffineCodes(q, 4, scale, zero, torch.tensor([1, 0, 1, 0])).numbers().tolist() == [[-20, 2, 0, 6]]
    powers = Grid(torch.tensor([[128, 126]], dtype=torch.uint8), 1, 2)
    half = FloatCodes(torch.tensor([[0x42, 0xF7]], dtype=torch.uint8), "e2m1", powers)
    assert half.numbers().tolist() == [[2, 4, 3, -3]]
    assert power_of_two(torch.tensor([127, 130, 0], dtype=torch.uint8)).tolist() == [1, 8, 2**-127]
    assert power_of_two(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert TableCodes(q, torch.arange(5.0) * 2, torch.tensor([1.0, 0.5]), 2).numbers().tolist() == [[2, 4, 3, 4]]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_words_of_codes(bits):
    """Bits that follow each other over words, as one long number."""
    given = codes(1 << bits, 3, 64)
    long = [sum(int(code) << bits * at for at, code in enumerate(row)) for row in given]
    split = [[(number >> 32 * at) % 2**32 for at in range(2 * bits)] for number in long]
    words = torch.tensor(split)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    assert torch.equal(open_words(words, bits).long(), given)


def test_halves_of_bytes():
    packed = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    assert open_halves(packed).tolist() == [[1, 2, 3, 4]]
    assert open_halves(packed, high_first=True).tolist() == [[2, 1, 4, 3]]


KINDS = [
    ("Q4Z", affine(4, 32, zero=8)),
    ("Q4Z", affine(4, WIDTH, zero=8)),
    ("Q4Z", affine(2, 32, zero=Grid(codes(4, ROWS, 3), 1, 32))),
    ("Q4Z", affine(3, 32, zero=Grid(codes(8, ROWS, 3), 1, 32))),
    ("Q4M", affine(4, 32, zero=Grid(codes(16, ROWS, 3), 1, 32))),
    ("Q8Z", affine(8, 32, zero=128)),
    ("Q6Z", affine(5, 16, zero=16)),
    ("Q5Z", forms()["fp4"]),
    ("Q6Z", FloatCodes(codes(256, ROWS, WIDTH // 2).to(torch.uint8), "e2m1", Grid(rand(ROWS, 6).half(), 1, 16))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "coded"), KINDS, ids=[f"{at}-{kind}" for at, (kind, _) in enumerate(KINDS)])
def test_packed_codes_mean_the_same(kind, coded):
    found = block_codes(coded)
    assert found is not None and found.kind == kind
    packed, wanted = pack_codes.reference(*found), coded.numbers()
    limit = 0 if found.added is None else 2**-11 * wanted.abs().max() * 2
    assert ((unpack.reference(packed) - wanted).abs() <= limit).all()
    if kernels() is not None:
        read = Kernels.here("cpu").of(packed_rows)(torch.arange(ROWS), packed, torch.float32)
        assert torch.equal(read, unpack.reference(packed))


@pytest.mark.parametrize(
    "coded",
    [
        affine(8, 32, zero=Grid(codes(256, ROWS, 3), 1, 32)),  # from -255 to 255
        affine(4, 8, zero=8),
        affine(4, 48, zero=8),
        affine(4, 32, scale=torch.full((ROWS, 3), 1e6)),
        affine(4, 32, scale=torch.full((ROWS, 3), 1e-7)),
        affine(4, 32, scale=torch.full((ROWS, 3), float("nan"))),
        forms()["ordered"],
        forms()["blocks"],
        forms()["table"],
        AffineCodes(codes(16, ROWS, 40).to(torch.uint8), 4, Grid(rand(ROWS, 1), 1, 40), 8),
    ],
    ids=["wide", "groups of 8", "groups of 48", "large", "small", "nan", "ordered", "fp8", "table", "40 columns"],
)
def test_what_no_kind_holds(coded):
    assert block_codes(coded) is None


def test_how_inputs_were_meant_to_be_rounded():
    coding = InputCoding("fp8", "static", torch.tensor(0.5)).to(torch.device("cpu"))
    assert (coding.form, coding.scaled_by, coding.scale.item(), coding.zero) == ("fp8", "static", 0.5, None)
