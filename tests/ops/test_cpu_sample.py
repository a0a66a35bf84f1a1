"""The compiled draw, masks and log probabilities against their meaning in torch, on every instruction set at hand."""

import pytest
import torch

from quire.ops import sample
from quire.ops.cpu.native import kernels

library = kernels()
pytestmark = [pytest.mark.skipif(library is None, reason="no compiled kernels"), pytest.mark.usefixtures("isa")]


def draw_logits(rows, width, seed, spread=2.5):
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)) * spread


def columns(rows, seed):
    """Every mix of parameters, greedy rows among them."""
    rng = torch.Generator().manual_seed(seed)

    def pick(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=rng)]

    return (
        torch.randint(-(2**62), 2**62, (rows,), generator=rng), torch.randint(0, 9000, (rows,), generator=rng),
        pick([0.0, 0.3, 0.7, 1.0, 2.0], torch.float32), pick([0.0, 0.0, 0.02, 0.3], torch.float32),
        pick([0, 0, 1, 5, 40, 10**6], torch.int64), pick([1.0, 1.0, 0.1, 0.5, 0.9, 0.999], torch.float32),
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "width", "spread"), [(240, 1003, 2.5), (60, 7001, 1.0), (40, 33, 0.01), (20, 16, 30)])
def test_draws_are_those_of_the_reference(rows, width, spread):
    logits, given = draw_logits(rows, width, rows, spread), columns(rows, width)
    logits[::7, ::3] = float("-inf")
    before = logits.clone()
    tokens, scores = sample.draw.on("cpu")(logits, *given)
    wanted, wanted_scores = sample.draw(logits, *given)
    assert torch.equal(logits, before)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(scores, wanted_scores, rtol=1e-5, atol=1e-5)
    one = sample.draw.on("cpu")(logits[5:6], *(column[5:6] for column in given))
    assert (one[0][0], one[1][0]) == (tokens[5], scores[5])


def test_draws_from_short_numbers():
    logits, given = draw_logits(50, 501, 3), columns(50, 9)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(sample.draw.on("cpu")(logits.to(dtype), *given)[0], sample.draw(logits.to(dtype), *given)[0])


def test_ties_at_the_edge_stay():
    """Equal logits: top_k keeps all ties of the last one, and the draw reaches all of them."""
    logits = torch.zeros(1, 64).expand(4000, -1).contiguous()
    logits[:, 32:] = -1.0
    n = len(logits)
    given = (torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.ones(n), torch.zeros(n))
    tokens, _ = sample.draw.on("cpu")(logits, *given, torch.full((n,), 5), torch.ones(n))
    assert sorted(set(tokens.tolist())) == list(range(32))
    tokens, _ = sample.draw.on("cpu")(logits, *given, torch.zeros(n, dtype=torch.int64), torch.full((n,), 0.1))
    assert sorted(set(tokens.tolist())) == list(range(32))


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_rows_without_a_choice_are_told(heat):
    logits = draw_logits(4, 100, 1)
    logits[0, 40] = float("nan")
    logits[1] = float("-inf")
    logits[2, [50, 60]] = float("inf")
    given = (torch.arange(4), torch.arange(4), torch.full((4,), heat), torch.zeros(4), torch.zeros(4).long())
    tokens, scores = sample.draw.on("cpu")(logits, *given, torch.full((4,), 0.9))
    assert tokens[0] == 40 and scores[0].isnan()
    assert tokens[1] == 0 and scores[1] == float("-inf")
    assert tokens[2] == 50 and scores[2] == float("inf")
    assert scores[3].isfinite()


@pytest.mark.parametrize("width", [5, 64, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs(width, dtype):
    logits = draw_logits(9, width, 2, 6.0).to(dtype)
    logits[1, : width // 2] = float("-inf")
    found = sample.log_probs.on("cpu")(logits)
    torch.testing.assert_close(found, torch.log_softmax(logits.double(), -1).float(), rtol=1e-6, atol=4e-6)
    assert torch.equal(sample.log_probs.on("cpu")(logits[4:5])[0], found[4])


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("width", "k"), [(7, 0), (7, 7), (1003, 1), (1003, 20), (3000, 400)])
def test_largest_and_rank(coarse, width, k):
    values = draw_logits(11, width, 4)
    values = values.round() if coarse else values  # many equals
    values[2, : width // 2] = float("-inf")
    chosen = torch.randint(width, (11,), generator=torch.Generator().manual_seed(1))
    for found, wanted in zip(sample.chosen_and_top.on("cpu")(values, chosen, k),
                             sample.chosen_and_top(values, chosen, k), strict=True):  # fmt: skip
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("width", "words"), [(31, 1), (64, 2), (1003, 32), (1003, 20)])
def test_masks_of_bits(width, words):
    rng = torch.Generator().manual_seed(width)
    bits = torch.randint(-(2**31), 2**31, (3, words), generator=rng).to(torch.int32)
    bits[1], bits[2, 0] = -1, 0
    rows = torch.tensor([4, 0, 2])
    found, wanted = draw_logits(5, width, 5), draw_logits(5, width, 5)
    sample.allow_words_.on("cpu")(found, rows, bits)
    sample.allow_words_(wanted, rows, bits)
    assert torch.equal(found, wanted) and bool(found.isinf().any())
