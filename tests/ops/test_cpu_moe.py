"""A mixture of experts as one compiled call, against experts multiplied one by one in torch."""

from functools import partial

import pytest
import torch

from quire.ops.act import clamped_swiglu, gated_of
from quire.ops.cpu.native import kernels
from quire.ops.moe import Mixture, run_experts, run_mixture
from quire.ops.packed import Matrix, pack_numbers

library = kernels()
pytestmark = [pytest.mark.skipif(library is None, reason="no compiled kernels"), pytest.mark.usefixtures("isa")]
EXPERTS, WIDTH, FFN = 6, 64, 96


def draw(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(dtype, kind, act, bias):
    """(mixture, the same for the reference: its numbers and activation)."""
    w1, w2 = draw(EXPERTS, 2 * FFN, WIDTH, seed=1, dtype=dtype), draw(EXPERTS, WIDTH, FFN, seed=2, dtype=dtype)
    b1, b2 = (draw(EXPERTS, n, seed=3, dtype=dtype) if bias else None for n in (2 * FFN, WIDTH))
    fn, rule = gated_of("silu").reference, ("silu", 0.0, 0.0)
    if act == "clamped":
        fn, rule = partial(clamped_swiglu.reference, alpha=1.702, limit=7.0), ("clamped", 1.702, 7.0)

    def matrix(numbers):
        return numbers if kind is None else Matrix((pack_numbers.on("cpu")(numbers, kind),))

    none = (None,) * EXPERTS
    biases = (none if b is None else tuple(b) for b in (b1, b2))
    return Mixture(tuple(map(matrix, w1)), tuple(map(matrix, w2)), *biases, fn, rule), (w1, w2, b1, b2, fn)


def routed(tokens, seed):
    rng = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(EXPERTS, generator=rng)[:3] for _ in range(tokens)])
    return torch.rand((tokens, 3), generator=rng), index


@pytest.mark.parametrize("kind", ["Q8Z", "Q4M"])
@pytest.mark.parametrize(("act", "bias"), [("silu", False), ("clamped", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts(dtype, kind, act, bias):
    mixture, _ = made(dtype, kind, act, bias)
    run = run_mixture.on("cpu")
    for tokens in (1, 4, 33):
        x, (weights, index) = draw(tokens, WIDTH, seed=tokens, dtype=dtype), routed(tokens, tokens)
        found = run(x, weights, index, mixture)
        assert mixture.handle  # the compiled way was taken
        wanted = run_mixture.reference(x, weights, index, mixture)
        if dtype is torch.float32:
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-2)  # the same products, other code around them
        assert (found.float() - wanted.float()).norm() < 6e-3 * wanted.float().norm()
        stream = draw(tokens, WIDTH, seed=9, dtype=dtype)
        torch.testing.assert_close(run(x, weights, index, mixture, stream), stream + found)
        alone = run(x[-1:], weights[-1:], index[-1:], mixture)
        assert torch.equal(alone[0], found[-1])


@pytest.mark.parametrize(("act", "bias"), [("silu", True), ("clamped", False)])
def test_plain_experts_of_few_rows(act, bias):
    mixture, (w1, w2, b1, b2, fn) = made(torch.bfloat16, None, act, bias)
    x, (weights, index) = draw(7, WIDTH, seed=5, dtype=torch.bfloat16), routed(7, 5)
    found = run_mixture.on("cpu")(x, weights, index, mixture)
    assert mixture.handle
    wanted = run_experts.reference(x, weights, index, w1, w2, b1=b1, b2=b2, act=fn)
    assert (found.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()


def test_an_activation_without_code_goes_the_torch_way():
    mixture, _ = made(torch.float32, "Q8Z", "silu", False)
    mixture.rule = ("tanh", 0.0, 0.0)
    x, (weights, index) = draw(3, WIDTH, seed=5), routed(3, 5)
    found = run_mixture.on("cpu")(x, weights, index, mixture)
    assert mixture.handle is False
    assert torch.equal(found, run_mixture.reference(x, weights, index, mixture))
