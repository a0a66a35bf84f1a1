"""Choosing tokens on CUDA: the noise, greedy and drawn rows, filters, and all of it in a graph."""

import pytest
import torch

pytest.importorskip("triton")

from quire.ops import sample as sample_ops
from quire.ops.triton import sample
from tests import fused_cases as cases

pytestmark = pytest.mark.gpu
VOCAB = 151936


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 256])
def test_greedy_and_drawn_rows(count, dtype):
    logits, rows = cases.sampling_case(
        "cuda", VOCAB, count, heats=[0.0, 0.6, 1.3], top_ks=[0], top_ps=[1.0], dtype=dtype
    )
    cases.check_choice(logits, rows, filters=False)


def test_ties_go_to_the_lowest_id():
    logits, rows = cases.sampling_case("cuda", 50001, 5, heats=[0.0], top_ks=[0], top_ps=[1.0], ties=True, scale=0.5)
    tokens, _ = sample.sample_rows(logits, *rows, filters=False)
    best = logits.amax(-1, keepdim=True)
    assert tokens.tolist() == [int((row == top).nonzero()[0]) for row, top in zip(logits, best, strict=True)]


def test_a_drawn_token_does_not_depend_on_its_neighbours():
    logits, rows = cases.sampling_case("cuda", VOCAB, 64, heats=[0.8], top_ks=[0, 50], top_ps=[0.9, 1.0])
    together, _ = sample.sample_rows(logits, *rows, filters=True)
    for i in (0, 17, 63):
        alone, _ = sample.sample_rows(
            logits[i : i + 1], rows[0][i : i + 1], rows[1][i : i + 1], *rows[2:], filters=True
        )
        assert int(alone) == int(together[i])


def test_what_is_no_number_is_reported():
    for heat in (0.0, 0.5):
        logits, rows = cases.sampling_case("cuda", VOCAB, 2, heats=[heat], top_ks=[0], top_ps=[1.0])
        logits[0, 5], logits[1] = torch.nan, -torch.inf
        tokens, scores = sample.sample_rows(logits, *rows, filters=False)
        assert tokens.tolist() == [5, 0] and scores[0].isnan() and scores[1] == -torch.inf


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scale", [0.3, 3.0, 8.0])
@pytest.mark.parametrize("vocab", [1000, 32000, VOCAB])
def test_filters(vocab, scale, ties):
    given = {
        "heats": [0.6, 1.0, 0.0, 1.7],
        "top_ks": [0, 20, 50, 0, 1, 900, 5000, 0, vocab],
        "top_ps": [0.9, 0.95, 1.0, 0.3, 0.999, 0.01, 0.8],
    }
    logits, rows = cases.sampling_case("cuda", vocab, 24, scale=scale, ties=ties, **given)
    cases.check_edges(logits, rows)
    cases.check_choice(logits, rows, filters=True)


def test_in_a_graph():
    logits, rows = cases.sampling_case("cuda", VOCAB, 16, heats=[0.0, 0.7], top_ks=[0, 40], top_ps=[1.0, 0.9])
    sample.sample_rows(logits, *rows, filters=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = sample.sample_rows(logits, *rows, filters=True)
    for seed in range(3):
        logits.copy_(cases.Draw(seed + 9, "cuda").normal(16, VOCAB, scale=3.0))
        out.fill_(-1)
        graph.replay()
        wanted, _ = sample_ops.sample_rows(logits, *rows, filters=True)
        assert int((out != wanted).sum()) <= 1  # the reference's float32 sums may move an edge by a token
