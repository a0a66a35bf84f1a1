"""ops/sample.py against transformers' logits processors and against plain Python."""

import math
import random

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.ops import sample

INF = float("inf")


def make_logits(n: int, vocab: int, seed: int, *, coarse: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab, generator=generator) * 4
    return logits.bfloat16().float() if coarse else logits  # coarse: many equal values, as a bfloat16 head gives


def kept(logits: torch.Tensor) -> torch.Tensor:
    return logits > -INF


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("k", [1, 2, 7, 100, 1000])
def test_top_k_is_transformers_top_k(k, coarse):
    logits = make_logits(5, 1000, k, coarse=coarse)
    expected = TopKLogitsWarper(top_k=k)(None, logits.clone())
    sample.top_k_(logits, torch.full((5,), k), k)
    assert torch.equal(logits, expected)


def test_top_k_of_each_row_is_its_own():
    logits = make_logits(4, 50, 1)
    before = logits.clone()
    sample.top_k_(logits, torch.tensor([1, 3, 50, 7]), 50)
    assert kept(logits).sum(-1).tolist() == [1, 3, 50, 7]
    assert torch.equal(logits[2], before[2])


@pytest.mark.parametrize("vocab", [40, 700, 5000])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_is_transformers_top_p(p, vocab):
    logits = make_logits(6, vocab, int(p * 1000) + vocab).double().float()
    expected = TopPLogitsWarper(top_p=p)(None, logits.double())
    mine = logits.clone()
    sample.top_p_(mine, torch.full((6,), p))
    probs = logits.double().softmax(-1)
    for row in range(6):
        order = probs[row].argsort(descending=True)
        before = probs[row][order].cumsum(-1) - probs[row][order]
        close = {int(t) for t, b in zip(order, before, strict=True) if abs(float(b) - p) < 1e-5}
        differ = set((kept(mine[row]) ^ kept(expected[row])).nonzero().flatten().tolist())
        assert differ <= close
        assert kept(mine[row]).any()


@pytest.mark.parametrize("scale", [0.0, 0.05, 8.0])
def test_top_p_finds_its_edge_beyond_the_first_candidates(scale):
    """A flat row needs thousands of tokens, a peaked one a few: each is right, whatever its neighbour needs."""
    logits = make_logits(2, 4000, 3)
    logits[0] *= scale
    p = torch.tensor([0.95, 0.95])
    together = logits.clone()
    sample.top_p_(together, p)
    for row in range(2):
        alone = logits[row : row + 1].clone()
        sample.top_p_(alone, p[:1])
        assert torch.equal(alone[0], together[row])
        probs = logits[row].double().softmax(-1).sort(descending=True).values
        wanted = int((probs.cumsum(-1) - probs < 0.95).sum())
        if scale != 0.0 or row:
            assert abs(int(kept(together[row]).sum()) - wanted) <= 1
    if scale == 0.0:
        assert kept(together[0]).all()  # all equal: no token is better than another


def test_top_p_keeps_every_equal_of_the_last_kept_token():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    sample.top_p_(logits, torch.tensor([0.5]))
    assert kept(logits)[0].tolist() == [True, False, True, True, True, False]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_is_transformers_min_p(p):
    logits = make_logits(8, 500, 9)
    expected = MinPLogitsWarper(min_p=p)(None, logits.clone())
    sample.min_p_(logits, torch.full((8,), p))
    assert torch.equal(kept(logits), kept(expected))
    assert torch.equal(logits[kept(logits)], expected[kept(expected)])


def test_min_p_zero_changes_nothing_beside_a_row_that_uses_it():
    logits = make_logits(2, 50, 2)
    before = logits.clone()
    sample.min_p_(logits, torch.tensor([0.0, 0.3]))
    assert torch.equal(logits[0], before[0])
    assert not torch.equal(logits[1], before[1])


def test_temperature_is_transformers_temperature():
    logits = make_logits(3, 100, 4)
    expected = TemperatureLogitsWarper(0.7)(None, logits.clone())
    sample.scale_(logits, torch.full((3,), 0.7))
    assert torch.equal(logits, expected)


def no_penalty(n: int) -> dict[str, torch.Tensor]:
    return {"presence": torch.zeros(n), "frequency": torch.zeros(n), "repetition": torch.ones(n)}


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 4.0])
def test_repetition_penalty_is_transformers(penalty):
    logits = make_logits(4, 60, 5)
    tokens = torch.randint(0, 60, (4, 25), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    given = no_penalty(4) | {"repetition": torch.full((4,), penalty)}
    sample.penalize_(logits, tokens.int(), torch.tensor([25, 10, 1, 24]), torch.full((4,), 25), **given)
    assert torch.allclose(logits, expected)


def test_penalties_against_plain_python(monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(sample, "_COUNT_BYTES", 4 * 30 * 2)  # two rows at a time: the split must not show
    n, vocab, width = 7, 30, 40
    logits = make_logits(n, vocab, 6)
    tokens = torch.randint(0, vocab, (n, width), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    lengths = [rng.randint(1, width) for _ in range(n)]
    prompts = [rng.randint(1, length) for length in lengths]
    presence, frequency = ([rng.uniform(-2, 2) for _ in range(n)] for _ in range(2))
    repetition = [rng.choice([1.0, 0.7, 1.9]) for _ in range(n)]
    expected = logits.clone().double()
    for row in range(n):
        ids = tokens[row, : lengths[row]].tolist()
        for token in set(ids):
            value = float(expected[row, token])
            value = value / repetition[row] if value > 0 else value * repetition[row]
            count = ids[prompts[row] :].count(token)
            expected[row, token] = value - frequency[row] * count - presence[row] * (count > 0)
    sample.penalize_(
        logits,
        tokens,
        torch.tensor(prompts),
        torch.tensor(lengths),
        presence=torch.tensor(presence),
        frequency=torch.tensor(frequency),
        repetition=torch.tensor(repetition),
    )
    assert torch.allclose(logits.double(), expected, atol=1e-5)


def words_of(outputs: list[list[int]], words: list[list[list[int]]], width: int):
    rows, tails, counts, prefixes, last = [], [], [], [], []
    for row, (ids, own) in enumerate(zip(outputs, words, strict=True)):
        for word in own:
            rows.append(row)
            tails.append(([-7] * width + ids)[len(ids) :][:width] if width else [])
            counts.append(len(ids))
            prefixes.append([-1] * (width - len(word) + 1) + word[:-1])
            last.append(word[-1])
    as_ids = torch.tensor
    return as_ids(rows), as_ids(tails), as_ids(counts), as_ids(prefixes), as_ids(last)


def test_bad_words_are_transformers_bad_words():
    words = [[3], [1, 2, 3], [2, 4], [9, 9], [5, 6, 7, 8]]
    rng = random.Random(3)
    outputs = [[rng.choice([1, 2, 5, 6, 7, 9]) for _ in range(rng.randint(0, 6))] for _ in range(200)]
    outputs += [[1, 2], [5, 6, 7], [6, 7], [9], []]
    logits = make_logits(len(outputs), 12, 8)
    processor = NoBadWordsLogitsProcessor(bad_words_ids=words, eos_token_id=11)
    expected = torch.cat(
        [processor(torch.tensor([ids], dtype=torch.long), logits[i : i + 1].clone()) for i, ids in enumerate(outputs)]
    )
    sample.ban_words_(logits, *words_of(outputs, [words] * len(outputs), 3))
    assert torch.equal(kept(logits), kept(expected))
    assert (~kept(logits)).sum() > len(outputs)  # more than the one-token word was banned somewhere


def test_bad_words_do_not_match_into_the_prompt():
    logits = torch.zeros(2, 5)
    tails = torch.tensor([[1, 2], [1, 2]])
    sample.ban_words_(
        logits, torch.tensor([0, 1]), tails, torch.tensor([1, 2]), torch.tensor([[1, 2], [1, 2]]), torch.tensor([3, 3])
    )
    assert kept(logits)[:, 3].tolist() == [True, False]


def test_allow_ban_and_bias_touch_only_their_rows():
    logits = make_logits(4, 10, 1)
    before = logits.clone()
    allowed = torch.zeros(1, 10, dtype=torch.bool)
    allowed[0, [2, 5]] = True
    sample.allow_only_(logits, torch.tensor([1]), allowed)
    rows, ids = torch.tensor([2, 2, 2, 2]), torch.tensor([0, 9, 5, 9])
    sample.ban_where_(logits, rows, ids, torch.tensor([True, True, False, False]))
    sample.bias_(logits, torch.tensor([3]), torch.tensor([4]), torch.tensor([-100.0]))
    assert torch.equal(logits[0], before[0])
    assert kept(logits)[1].nonzero().flatten().tolist() == [2, 5]
    assert (~kept(logits))[2].nonzero().flatten().tolist() == [0, 9]
    assert math.isclose(float(logits[3, 4] - before[3, 4]), -100.0, rel_tol=1e-5)


@pytest.mark.parametrize("vocab", [31, 32, 33, 100])
def test_bit_masks_unpack_lowest_bit_first(vocab):
    rng = random.Random(vocab)
    wanted = [[rng.random() < 0.5 for _ in range(vocab)] for _ in range(3)]
    rows = b"".join(sum(1 << i for i, bit in enumerate(row) if bit).to_bytes(16, "little") for row in wanted)
    words = torch.frombuffer(bytearray(rows), dtype=torch.int32).view(3, 4)
    assert sample.unpack_mask(words, vocab).tolist() == wanted
    longer = sample.unpack_mask(words, 140)  # wider than the mask
    assert longer.shape == (3, 140)
    assert not longer[:, 128:].any()


def test_greedy_takes_the_lowest_of_equals_and_shows_a_nan():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [1.0, float("nan"), 9.0]])
    assert sample.greedy(logits).tolist() == [1, 0, 1]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("k", [0, 1, 5, 99, 100])
def test_top_values_settle_ties_by_index(k, coarse):
    values = sample.log_probs(make_logits(20, 100, 11, coarse=coarse))
    values[3, 10:60] = -1.5  # a crowd at the edge
    values[4] = -INF
    top, ids = sample.top_values(values, k)
    for row in range(20):
        order = sorted(range(100), key=lambda i, r=row: (-float(values[r, i]), i))[:k]
        assert ids[row].tolist() == order
        assert top[row].tolist() == values[row, order].tolist()


def test_rank_counts_strictly_greater_values():
    values = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).repeat(4, 1)
    assert sample.rank_of(values, torch.tensor([0, 1, 2, 3])).tolist() == [4, 1, 1, 3]
