"""The compiled CPU kernels against their references, on every instruction set that this machine runs.

Products with packed weights round their input to 8 bits; the reference for them is the same rounding in torch, so that
what is left is the order of sums. Every result of a row must not depend on the rows beside it, bit for bit.
"""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire.base import native as installed
from quire.loader.gguf_types import dequantize, tensor_type
from quire.ops import packed
from quire.ops.act import gated_of
from quire.ops.cpu import forms, native
from quire.ops.cpu.native import DTYPES, KINDS, Segment, kernels, usable
from quire.ops.norm import rms_norm, rms_norm_wide

library = kernels()
pytestmark = pytest.mark.skipif(library is None, reason="no compiled kernels")
GGUF = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}  # fmt: skip
DTYPE_NAMES = ["float32", "bfloat16", "float16"]


@pytest.fixture(params=[1, 3])
def threads(request):
    before = library.qc_threads()
    library.qc_set_threads(request.param)
    yield request.param
    library.qc_set_threads(before)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(name, rows, width, seed=0):
    """Random blocks whose scales are sane numbers, and what they mean."""
    kind, rng = tensor_type(GGUF[name]), np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, width // kind.elements, kind.num_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        scale = rng.uniform(0.001, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    flat = torch.from_numpy(raw.reshape(-1).copy())
    return flat, dequantize(flat, GGUF[name], (rows, width), torch.float32)


def pack(name, rows, width, seed=0):
    flat, numbers = stored(name, rows, width, seed)
    kind = library.qc_kind_of(GGUF[name])
    data = torch.empty(library.qc_packed_bytes(kind, rows, width), dtype=torch.uint8)
    assert library.qc_pack(GGUF[name], flat.data_ptr(), rows, width, data.data_ptr()) == 0
    names = {number: kind_name for kind_name, number in KINDS.items()}
    return packed.Packed(data, names[kind], rows, width), numbers


def multiply(x, parts, bias=None):
    segments = (Segment * len(parts))(*(Segment(KINDS[p.kind], p.rows, p.data.data_ptr()) for p in parts))
    rows = sum(p.rows for p in parts)
    out = torch.full((x.shape[0], rows), float("nan"), dtype=x.dtype)
    library.qc_linear_packed(
        x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], ctypes.addressof(segments), len(parts),
        None if bias is None else bias.data_ptr(), out.data_ptr(), rows, DTYPES[x.dtype],
    )  # fmt: skip
    return out


def rounded(x):
    """As the kernels round a row: 32 numbers share a scale, the largest becomes 127."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(scale > 0, blocks * (127 / blocks.abs().amax(-1, keepdim=True)), 0).round()
    return (whole * scale).flatten(-2)


@pytest.mark.parametrize("name", GGUF)
def test_packing_keeps_the_numbers(name):
    matrix, numbers = pack(name, 37, 512)
    assert matrix.data.numel() == FORM_BYTES[matrix.kind] * 3 * 16
    exact = not name.endswith("_K")  # those multiply two scales, and the product is rounded to float16
    bound = 0 if exact else 1e-3 * float(numbers.abs().max())
    torch.testing.assert_close(packed.unpack(matrix), numbers, rtol=0, atol=bound)
    index, found = torch.tensor([0, 36, 15, 16]), torch.empty(4, 512)
    library.qc_unpack_rows(
        KINDS[matrix.kind],
        matrix.data.data_ptr(),
        37,
        512,
        index.data_ptr(),
        4,
        found.data_ptr(),
        DTYPES[torch.float32],
    )
    assert torch.equal(found, packed.unpack(matrix)[index])


FORM_BYTES = {name: form.num_bytes for name, form in packed.FORMS.items()}


@pytest.mark.parametrize("name", GGUF)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_packed_products(isa, threads, name, dtype):
    matrix, _ = pack(name, 53, 512)
    other, _ = pack("Q8_0", 16, 512, seed=1)
    weight = torch.cat((packed.unpack(matrix), packed.unpack(other)))
    for m in (1, 2, 3, 9, 33):
        x = draw(m, 512, seed=m, dtype=getattr(torch, dtype))
        bias = draw(69, seed=2, dtype=x.dtype)
        wanted = F.linear(x.bfloat16().float() if isa == "amx" else rounded(x), weight) + bias.float()
        found = multiply(x, [matrix, other], bias)
        if dtype == "float32" and isa != "amx":  # whose weights are cut to bfloat16: test_cpu_tiles.py has them exactly
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
        else:  # short numbers often lie halfway between two steps, where one more rounding in between decides
            assert (found.float() - wanted).norm() < 5e-3 * wanted.norm()
        for row in range(0, m, 4):
            assert torch.equal(multiply(x[row : row + 1], [matrix, other], bias)[0], found[row])
            assert torch.equal(multiply(x[row : row + 2], [matrix, other], bias)[0], found[row])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_1", "Q6_K", "Q8_0"])
def test_every_number_of_rows_gives_the_same_bits(isa, threads, name):
    """Tiles of 8, 4, 2 and 1 rows, panels as packed and opened, rows beyond one floor of the second cache."""
    matrix, _ = pack(name, 21, 512)
    x = draw(600, 512, seed=3)
    alone = torch.cat([multiply(x[row : row + 1], [matrix]) for row in range(40)])
    for m in (*range(1, 41), 600):
        assert torch.equal(multiply(x[:m], [matrix])[:40], alone[:m]), m


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_rows_that_are_not_numbers_stay_alone(isa, name):
    matrix, _ = pack(name, 20, 256)
    x = draw(35, 256)
    wanted = multiply(x, [matrix])
    odd = x.clone()
    odd[3, 17], odd[9, 250] = float("nan"), float("inf")
    found = multiply(odd, [matrix])
    others = [row for row in range(35) if row not in (3, 9)]
    assert torch.equal(found[others], wanted[others])
    assert not found[[3, 9]].isfinite().any()


@pytest.mark.parametrize(("kind", "error"), [("Q8Z", 0.008), ("Q4M", 0.12)])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_numbers_rounded_to_blocks(kind, error, dtype):
    given = draw(40, 96, dtype=getattr(torch, dtype))
    data = torch.empty(library.qc_packed_bytes(KINDS[kind], 40, 96), dtype=torch.uint8)
    assert library.qc_pack_float(KINDS[kind], given.data_ptr(), DTYPES[given.dtype], 40, 96, data.data_ptr()) == 0
    found = packed.unpack(packed.Packed(data, kind, 40, 96))
    assert (found - given.float()).norm() < error * given.float().norm()
    steps = given.float().unflatten(1, (3, 32))
    span = steps.abs().amax(-1) / 127 if kind == "Q8Z" else (steps.amax(-1) - steps.amin(-1)) / 15
    assert ((found - given.float()).abs().unflatten(1, (3, 32)).amax(-1) <= 0.52 * span + 0.01 * span).all()


def test_zeros_and_wrong_sizes():
    matrix, _ = pack("Q4_1", 16, 64)
    assert torch.equal(multiply(torch.zeros(2, 64), [matrix]), torch.zeros(2, 16))
    assert library.qc_packed_bytes(0, 16, 40) < 0
    for type_id, width in ((12, 64), (10, 256)):  # 64 is no multiple of 256; Q2_K has no kernel
        with pytest.raises(
            ValueError, match=f"a matrix with an invalid number of rows, width or kind .{type_id}, 16, {width}"
        ):
            library.qc_pack(type_id, matrix.data.data_ptr(), 16, width, matrix.data.data_ptr())


def multiply_plain(x, weight, bias):
    out = torch.full((len(x), len(weight)), float("nan"), dtype=x.dtype)
    library.qc_linear(
        x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), None if bias is None else bias.data_ptr(),
        out.data_ptr(), len(weight), len(x), len(weight), x.shape[1], DTYPES[x.dtype],
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(("n", "k"), [(1, 7), (19, 64), (70, 129), (150, 640), (18, 1300)])
def test_plain_products(isa, threads, dtype, n, k):
    weight = draw(n, k + 3, seed=1, dtype=getattr(torch, dtype))[:, :k]
    bias = draw(n, seed=2, dtype=weight.dtype)
    close = dict(rtol=1e-4, atol=2e-4) if dtype == "float32" else dict(rtol=1e-2, atol=1e-2)
    for m in (1, 2, 3, 7, 8, 37):
        x = draw(m, k + 5, seed=m, dtype=weight.dtype)[:, 2 : k + 2]
        for added in (None, bias):
            found = multiply_plain(x, weight, added)
            wanted = F.linear(x.float(), weight.float(), None if added is None else added.float())
            torch.testing.assert_close(found, wanted.to(x.dtype), **close)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("k", [71, 576, 1300])
def test_every_number_of_plain_rows_gives_the_same_bits(isa, threads, dtype, k):
    """Rows as stored and put together, tiles that are not full, rows beyond one floor of the second cache."""
    weight = draw(21, k, seed=1, dtype=getattr(torch, dtype))
    x = draw(700, k, seed=3, dtype=weight.dtype)
    alone = torch.cat([multiply_plain(x[row : row + 1], weight, None) for row in range(20)])
    for m in (*range(1, 21), 33, 700):
        assert torch.equal(multiply_plain(x[:m], weight, None)[:20], alone[:m]), m
    assert torch.equal(multiply_plain(x[680:], weight, None), multiply_plain(x, weight, None)[680:])


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 71), (40, 576)])
@pytest.mark.parametrize(("offset", "wide"), [(0.0, False), (0.0, True), (1.0, True)])
def test_norms(isa, threads, dtype, rows, width, offset, wide):
    x, delta, weight = (draw(*shape, seed=i, dtype=getattr(torch, dtype))
                        for i, shape in enumerate([(rows, width), (rows, width), (width,)]))  # fmt: skip
    out, total = torch.empty_like(x), torch.empty_like(x)
    library.qc_rms_norm(
        x.data_ptr(), width, delta.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(), rows, width, 1e-5,
        offset, wide, DTYPES[x.dtype],
    )  # fmt: skip
    assert torch.equal(total, x + delta)
    wanted = rms_norm_wide(total, weight, 1e-5, offset) if wide else rms_norm(total, weight, 1e-5)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == "float32" else dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out, wanted, **close)
    library.qc_rms_norm(total.data_ptr(), width, None, weight.data_ptr(), None, x.data_ptr(), rows, width, 1e-5, offset,
                        wide, DTYPES[x.dtype])  # fmt: skip
    assert torch.equal(x, out)


@pytest.mark.parametrize("name", forms.ACTS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_gated_activations(isa, name, dtype):
    x = (draw(7, 2 * 45) * 6).to(getattr(torch, dtype))
    x[0, :6] = torch.tensor([-200.0, 200.0, 0.0, -88.0, -1e-4, 30.0])
    out = torch.empty(7, 45, dtype=x.dtype)
    library.qc_gated(forms.ACTS[name], x.data_ptr(), 90, out.data_ptr(), 7, 45, DTYPES[x.dtype])
    close = dict(rtol=2e-5, atol=2e-6) if dtype == "float32" else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out, gated_of(name)(x), **close)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_argmax(isa, dtype):
    x = draw(5, 1003).to(getattr(torch, dtype))
    x[1, 7] = x[1, 900] = 50  # the first of equals
    x[2, 1002] = 60
    x[3, 400] = float("nan")
    x[4] = float("-inf")
    found = torch.empty(5, dtype=torch.int64)
    library.qc_argmax(x.data_ptr(), 1003, 5, 1003, found.data_ptr(), DTYPES[x.dtype])
    assert found.tolist() == [int(x[0].argmax()), 7, 1002, 400, 0]


def test_an_unknown_instruction_set_is_refused():
    before = library.qc_isa().decode()
    assert library.qc_use_isa(b"abacus") == -1
    assert library.qc_isa().decode() == before


def test_the_best_proven_instruction_set_is_taken(monkeypatch):
    before, every = library.qc_isa(), usable(library)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "auto")
    path, load = installed.library(), native._loaded.__wrapped__
    try:
        assert load(path).qc_isa().decode() == [name for name in every if name not in native.BY_NAME][-1]
        monkeypatch.setattr(native, "BY_NAME", frozenset(every[1:]))
        assert load(path).qc_isa().decode() == every[0]
        monkeypatch.setattr(native, "BY_NAME", frozenset(every))
        assert load(path) is None
    finally:
        assert library.qc_use_isa(before) == 0


def with_outliers(rows, width):
    """Rows of which some have a number or two that are far larger than all others."""
    x = draw(rows, width, seed=4)
    for row in range(rows):
        for i in range(row % 4):
            x[row, (37 * row + 101 * i) % width] = 60.0 + row
    return x


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q6_K", "Q8_0"])
def test_rows_with_outliers(isa, threads, name):
    """Fine blocks err by 254 times less, so that a row errs little more; rows beside it keep their bits."""
    matrix, _ = pack(name, 53, 512)
    x, weight = with_outliers(48, 512), packed.unpack(matrix)
    found = multiply(x, [matrix])
    exact = x.double() @ weight.double().T
    coarse = (rounded(x).double() @ weight.double().T - exact).norm(dim=1)
    error = (found.double() - exact).norm(dim=1)
    if isa != "amx":  # which rounds every number by itself
        hit = torch.arange(48) % 4 > 0
        assert (error[hit] < 0.5 * coarse[hit]).all()
    for count in (1, 2, 5, 9):
        for first in (0, 3, 17, 48 - count):
            assert torch.equal(multiply(x[first : first + count], [matrix]), found[first : first + count])
