"""Matmuls with coded weights on a GPU, against their references: every kind and tile, in graphs, and the same bits for
any number of rows in batch-invariant mode."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quire.loader.formats.torchao import open_tiles
from quire.ops import coded as ops
from quire.ops.rounded import RoundedRows, RowCode
from tests import coded_cases as cases

pytestmark = pytest.mark.gpu
coded = pytest.importorskip("quire.ops.triton.coded", exc_type=ImportError)
DTYPES = [torch.bfloat16, torch.float16]
ROWS = (1, 5, 17, 40, 100, 300, 1100)
LARGE = {
    "fp8": cases.Made("fp8", 6144, 4096, 4096, rounds=True),
    "fp8-blocks": cases.Made("fp8", 4096, 12288, 128, rounds=True),
    "int8": cases.Made("int8", 4096, 4096, 4096, rounds=True),
    "int4": cases.Made("int4", 6144, 4096, 128),
    "int4-zeros": cases.Made("int4", 4096, 4096, 128, zeros=True),
    "int4-between": cases.Made("int4", 4096, 4096, 64, zeros=True, between=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*cases.WEIGHTS, *LARGE])
def test_matmuls_by_every_tile(name: str, dtype: torch.dtype) -> None:
    weight = cases.weight_of(cases.WEIGHTS.get(name) or LARGE[name], "cuda")
    for rows in ROWS:
        x = cases.normal(rows, weight.width, seed=rows, dtype=dtype, device="cuda")
        bias = cases.normal(weight.rows, seed=1, dtype=dtype, device="cuda") if rows % 2 else None
        wanted = ops.coded_linear(x, weight, bias)
        for asm in (True, False):
            for tile in (coded.tile_for(rows, weight), coded.FIXED):
                cases.check(coded.multiply(x, weight, bias, tile, asm=asm), wanted, 1e-2)
        found = coded.CodedLinear()(x, weight, bias)
        cases.check(found, wanted, 4e-2 if weight.rounds else 1e-2)
        if weight.rounds:
            codes = RoundedRows(*coded.quantize_rows(x, weight.codes.dtype, weight.group), dtype)
            cases.check(coded.rounded_linear(codes, weight, bias), wanted, 4e-2)
    for wrong in cases.wrong_ones(weight):
        x = cases.normal(33, weight.width, seed=2, dtype=dtype, device="cuda")
        with pytest.raises(AssertionError):
            cases.check(coded.CodedLinear()(x, wrong), ops.coded_linear(x, weight), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*cases.WEIGHTS, *LARGE])
def test_decoded_to_a_scratch_matrix(name: str, dtype: torch.dtype) -> None:
    weight = cases.weight_of(cases.WEIGHTS.get(name) or LARGE[name], "cuda")
    wanted = ops.decode_weight(weight, torch.float32)
    for asm in (True, False):
        found = coded.decode_weight(weight, dtype, asm=asm)
        torch.testing.assert_close(found.float(), wanted, rtol=8e-3, atol=1e-6)


def test_tiles_of_torchao_are_those_of_torch() -> None:
    """Its own packing for tensor cores, which a loader opens."""
    codes = torch.randint(0, 16, (64, 2048), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous().cuda()
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    assert packed.shape == (8, 16, 32, 4) and torch.equal(open_tiles(packed.cpu()), codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_small_float_is_exact(dtype: torch.dtype) -> None:
    """All 256 codes of e4m3 but its two that are not numbers."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127].repeat(64, 1)[:, :224].contiguous()
    codes = every.view(torch.float8_e4m3fn).cuda()
    one = torch.ones((1, 64), device="cuda")
    weight = ops.CodedWeight("fp8", codes, one, None, 64, 224, 224)
    x = torch.eye(224, dtype=dtype, device="cuda")[:64]
    found = coded.multiply(x, weight, None, coded.CodedTile(16, 32, 64, 2, 3))
    split = coded.multiply(x[:8], weight, None, coded.CodedTile(8, 16, 32, 4, 3, 4))
    assert torch.equal(split, found[:8])
    assert torch.equal(found.float(), codes.float().t()[:64])


@pytest.mark.parametrize("name", ["fp8-rows", "fp8-odd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_rows_with_the_ops_around_them(dtype: torch.dtype, name: str) -> None:
    for rows in (1, 2):
        for early in (False, True):
            cases.check_few(name, rows, "cuda", dtype, early=early)


@pytest.mark.parametrize("group", [128, 4096])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_inputs_rounded_to_8_bits(dtype: torch.dtype, group: int) -> None:
    x = cases.normal(300, 4096, dtype=torch.bfloat16, device="cuda") * 3
    x[7] = 0
    codes, scale = coded.quantize_rows(x, dtype, group)
    wanted, by = ops.quantize_rows(x, dtype, group)
    torch.testing.assert_close(scale, by)
    assert (codes.float() - wanted.float()).abs().max() <= (1.0 if dtype is torch.int8 else 32.0)
    assert (codes.float() != wanted.float()).float().mean() < 0.01


@pytest.mark.parametrize("name", LARGE)
def test_a_row_alone_has_the_same_bits(name: str) -> None:
    weight = cases.weight_of(LARGE[name], "cuda")
    x = cases.normal(1500, weight.width, dtype=torch.bfloat16, device="cuda")
    linear = coded.CodedLinear(fixed=True)
    whole = linear(x, weight)
    for first, count in ((0, 1), (1499, 1), (3, 64), (100, 65), (11, 300), (200, 1100)):
        assert torch.equal(linear(x[first : first + count], weight), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("name", LARGE)
def test_in_a_graph(name: str) -> None:
    weight = cases.weight_of(LARGE[name], "cuda")
    linear = coded.CodedLinear(early=True)
    for rows in (1, 32, 256):
        x = cases.normal(rows, weight.width, dtype=torch.bfloat16, device="cuda")
        linear(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x, weight)
        for seed in (1, 2):
            x.copy_(cases.normal(rows, weight.width, seed=seed))
            graph.replay()
            assert torch.equal(y, linear(x, weight))


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "group"), [(4096, 0), (1000, 0), (4096, 128), (384, 128)])
def test_rounded_where_they_are_made(width: int, group: int, dtype: torch.dtype, code: torch.dtype) -> None:
    cases.check_rounded(width, dtype, RowCode(code, group), "cuda", exact=True)


@pytest.mark.parametrize("rows", [65, 100, 2048])
def test_groups_by_the_library_or_not(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's groups, where it has them, are ours."""
    weight = cases.weight_of(cases.Made("fp8", 512, 1024, 128, rounds=True), "cuda")
    x = cases.normal(rows, 1024, seed=1, dtype=torch.bfloat16, device="cuda")
    bias = cases.normal(512, seed=2, dtype=torch.bfloat16, device="cuda")
    codes = RoundedRows(*coded.quantize_rows(x, torch.float8_e4m3fn, 128), torch.bfloat16)
    found = coded.rounded_linear(codes, weight, bias)
    monkeypatch.setattr(coded, "library_takes", lambda x, weight: False)
    cases.check(found, coded.rounded_linear(codes, weight, bias), 1e-2)
