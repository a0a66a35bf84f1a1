"""One row times blocks of GGUF files on Hopper, against the numbers that the gguf package reads from them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quire.ops import coded as coded_ops
from quire.ops.coded import CodedWeight
from quire.ops.few import norm_linears
from quire.ops.op import Kernels
from quire.ops.triton import register
from tests.coded_cases import check, normal
from tests.few_block_cases import FEW_BLOCKS, of_numbers, row_and_rest
from tests.gguf_blocks import numbers_of, raw_blocks, weight_of

pytestmark = pytest.mark.gpu
few_blocks = pytest.importorskip("quire.ops.triton.few_blocks")
few_forms = pytest.importorskip("quire.ops.triton.few_forms")
MODES = ("plain", "bias", "add", "norm", "wide", "gated")
EDGE = 4096  # bytes


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has these instructions")


class Fenced:
    """Tensors between bytes of 0xFF, which are no numbers where they are read as inputs, factors or sums."""

    def __init__(self) -> None:
        self._all: list[tuple[Tensor, Tensor, int]] = []

    def put(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        room = torch.full((2 * EDGE + -(-size // 16) * 16,), 0xFF, dtype=torch.uint8, device="cuda")
        inner = room[EDGE : EDGE + size].view(tensor.dtype).view(tensor.shape)
        inner.copy_(tensor)
        self._all.append((room, room.clone(), size))
        return inner

    def check(self, *, besides: Sequence[Tensor] = ()) -> None:
        """Nothing was written, but in those tensors."""
        for room, before, size in self._all:
            now = room.clone()
            if any(room.data_ptr() + EDGE == tensor.data_ptr() for tensor in besides):
                now[EDGE : EDGE + size] = before[EDGE : EDGE + size]
            assert torch.equal(now, before)


def weight_and_numbers(name: str, rows: int, width: int, fenced: Fenced) -> tuple[CodedWeight, Tensor]:
    plain = weight_of(name, rows, width)
    weight = plain._replace(**{key: fenced.put(tensor) for key, tensor in plain.tensors().items()})
    return weight, numbers_of(name, raw_blocks(name, rows, width)).cuda()


# Rows that end within a program; columns of one warp, of no whole turns, of many.
SHAPES = ((50, 256), (200, 2560), (72, 12288))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FEW_BLOCKS)
def test_products(name: str, shape: tuple[int, int]) -> None:
    """Each with two of the ways to fuse, which over the shapes are all."""
    fenced, (rows, width) = Fenced(), shape
    first = (FEW_BLOCKS.index(name) + SHAPES.index(shape)) % 3
    weight, numbers = weight_and_numbers(name, rows, width, fenced)
    results: list[Tensor] = []
    for mode in MODES[first::3]:
        half = (torch.bfloat16, torch.float16)[mode in ("norm", "add")]
        x, given = row_and_rest(rows, width, mode, half, "cuda")
        rest = {key: fenced.put(value) if isinstance(value, Tensor) else value for key, value in given.items()}
        if "norm" in rest:
            rest["norm"] = rest["norm"]._replace(weight=fenced.put(rest["norm"].weight))
        x = fenced.put(x)
        assert few_blocks.fits(x, weight)
        out = fenced.put(x.new_zeros((1, rows // 2 if mode == "gated" else rows)))
        results.append(out)
        found = []
        for early in (False, True, True):
            out.fill_(torch.nan)
            few_blocks.few_blocks_linear(x, weight, **rest, out=out, early=early)
            found.append(out.clone())
        check(found[0], of_numbers(x, numbers, **given).to(half), 1e-2 if half is torch.bfloat16 else 4e-3)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        fenced.check(besides=results)


@pytest.mark.parametrize("config", [(4, 1, 128), (2, 4, 168), (4, 2, 168), (8, 2, 128), (16, 1, 96)])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_sizes(name: str, config: tuple[int, int, int]) -> None:
    """However many warps share K, and turns are ahead."""
    fenced = Fenced()
    weight, numbers = weight_and_numbers(name, 48, 8192, fenced)
    for mode in ("add", "gated"):
        x, given = row_and_rest(48, 8192, mode, torch.bfloat16, "cuda")
        found = few_blocks.few_blocks_linear(
            fenced.put(x), weight, **given, config=few_blocks.FewBlocksConfig(*config), early=True
        )
        check(found, of_numbers(x, numbers, **given).bfloat16(), 1e-2)
        fenced.check()


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_rows_of_any_size(name: str) -> None:
    weight, numbers = weight_and_numbers(name, 64, 512, Fenced())
    x, stream = normal(1, 512, dtype=torch.bfloat16, device="cuda"), torch.ones((1, 64), device="cuda").bfloat16()
    zeros = few_blocks.few_blocks_linear(torch.zeros_like(x), weight, stream=stream, early=True)
    assert torch.equal(zeros, stream)
    for size in (1e-30, 1e-3, 3e4, 1e30):
        check(few_blocks.few_blocks_linear(x * size, weight), of_numbers(x * size, numbers).bfloat16(), 1e-2)
    for none in (torch.nan, torch.inf):
        x[0, 300] = none
        assert few_blocks.few_blocks_linear(x, weight).isnan().all()


def test_forms() -> None:
    """One row of 16 bits takes these kernels, also where types lie side by side, and numbers beside them; more rows
    and batch-invariant mode do not."""
    kinds = {"Q4_K": 20, "Q6_K": 24}
    weights = [weight_of(name, rows, 512, "cuda") for name, rows in kinds.items()]
    numbers = normal(8, 512, seed=9, dtype=torch.bfloat16, device="cuda")
    x, given = row_and_rest(52, 512, "gated", torch.bfloat16, "cuda")
    rule, parts = given["norm"], [*weights, numbers]
    kernels = Kernels(torch.device("cuda"), register.compiled()[0])
    for bias in (given["bias"], None):
        check(kernels.of(norm_linears)(x, rule, parts, bias), norm_linears(x, rule, parts, bias), 1e-2)
    assert few_forms.few_rows(512, torch.bfloat16, parts) == 1 and few_forms.few_rows(512, torch.float32, parts) == 0
    one = kernels.of(coded_ops.coded_linear)(x, weights[1])
    assert torch.equal(one, few_blocks.few_blocks_linear(x, weights[1]))
    two = kernels.of(coded_ops.coded_linear)(x.repeat(2, 1), weights[1])
    check(two, coded_ops.coded_linear.reference(x.repeat(2, 1), weights[1], None), 1e-2)
    fixed = Kernels(torch.device("cuda"), register.compiled()[0], batch_invariant=True)
    assert fixed.of(norm_linears) is norm_linears.reference
    alone, together = (fixed.of(coded_ops.coded_linear)(x.repeat(n, 1), weights[1]) for n in (1, 9))
    assert torch.equal(alone[0], together[0])
