"""The counter-based noise: uniform, independent across seeds, positions and tokens, and a fair choice."""

import math

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from quire.ops import sample

VOCAB = 4096
SEEDS = [0, 1, 2, 41, 42, (1 << 63) - 1, -1, -(1 << 63), 0x9E3779B97F4A7C15 - (1 << 64)]


def bits(seed: int, position: int, ids: torch.Tensor | None = None) -> np.ndarray:
    low, high = sample.keys(torch.tensor([seed]), torch.tensor([position]))
    ids = torch.arange(VOCAB, dtype=torch.int32) if ids is None else ids
    return sample.noise_bits(low, high, ids).numpy().astype(np.int64)


def chi_square_limit(degrees: int, sigmas: float = 4.5) -> float:
    """Wilson-Hilferty: a value above this has odds of a few in a million."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + sigmas * math.sqrt(part)) ** 3


def chi_square(counts: np.ndarray) -> float:
    wanted = counts.sum() / counts.size
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("shift", [23, 11, 0])  # the highest, middle and lowest eight of the 31 bits
def test_bits_are_uniform(shift):
    counts = np.zeros(256)
    for seed in SEEDS:
        for position in range(40):
            counts += np.bincount((bits(seed, position) >> shift) & 255, minlength=256)
    assert chi_square(counts) < chi_square_limit(255)


def test_uniform_along_positions_for_one_token():
    """The stream one vocabulary entry sees as a text grows, and the stream many seeds see at one position."""
    token = torch.tensor([17], dtype=torch.int32)
    positions = torch.arange(200_000)
    for seeds, places in ((torch.zeros_like(positions) + 7, positions), (positions, torch.zeros_like(positions) + 3)):
        low, high = sample.keys(seeds, places)
        counts = np.bincount(sample.noise_bits(low, high, token).numpy() >> 23, minlength=256)
        assert chi_square(counts) < chi_square_limit(255)


def pairs_are_independent(one: np.ndarray, other: np.ndarray) -> bool:
    cells = (one >> 27) * 16 + (other >> 27)
    return chi_square(np.bincount(cells, minlength=256)) < chi_square_limit(255)


def test_neighbours_are_independent():
    """Next seed, next position, next token, swapped seed and position, seed times two: no pair shows a relation."""
    streams = {
        "seed": lambda i: (bits(i, 5), bits(i + 1, 5)),
        "position": lambda i: (bits(9, i), bits(9, i + 1)),
        "token": lambda i: (bits(i, 2)[:-1], bits(i, 2)[1:]),
        "swap": lambda i: (bits(i, i + 100), bits(i + 100, i)),
        "double": lambda i: (bits(i + 1, 4), bits(2 * (i + 1), 4)),
        "high bit": lambda i: (bits(i, 4), bits(i ^ (1 << 62), 4)),
        "power of two": lambda i: (bits(i, 4), bits(i + (1 << 32), 4)),
    }
    for name, stream in streams.items():
        both = [stream(i) for i in range(30)]
        one, other = (np.concatenate(part) for part in zip(*both, strict=True))
        assert pairs_are_independent(one, other), name


def test_one_bit_of_the_key_moves_half_the_bits():
    ids = torch.arange(512, dtype=torch.int32)
    for bit in range(64):
        seed = 1 << bit if bit < 63 else -(1 << 63)
        changed = bits(0, 1, ids) ^ bits(seed, 1, ids)
        share = sum(int(c).bit_count() for c in changed) / (512 * 31)
        assert 0.45 < share < 0.55, bit


def test_noise_is_standard_gumbel():
    """Kolmogorov-Smirnov against exp(-exp(-x)), and finite at both ends of the bits."""
    values = np.sort(sample.gumbel(torch.from_numpy(np.concatenate([bits(3, p) for p in range(50)]))).double().numpy())
    steps = np.arange(1, values.size + 1) / values.size
    distance = np.abs(np.exp(-np.exp(-values)) - steps).max()
    assert distance < 2.2 / math.sqrt(values.size)  # odds of about 1 in 8,000
    ends = sample.gumbel(torch.tensor([0, (1 << 31) - 1], dtype=torch.int32))
    assert torch.isfinite(ends).all()
    assert float(ends[0] - ends[1]) < sample.NOISE_SPAN


def logits_of(vocab: int, seed: int, scale: float) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("stream", ["positions", "seeds"])
def test_choice_follows_the_distribution(scale, stream):
    vocab, draws = 24, 60_000
    logits = logits_of(vocab, 1, scale)
    numbers, fixed = torch.arange(draws), torch.full((draws,), 123)
    seeds, positions = (fixed, numbers) if stream == "positions" else (numbers, fixed)
    chosen = sample.sample_(logits.repeat(draws, 1), seeds, positions)
    counts = np.bincount(chosen.numpy(), minlength=vocab)
    wanted = logits.double().softmax(-1).numpy() * draws
    large = wanted > 10
    observed, expected = np.append(counts[large], counts[~large].sum()), np.append(wanted[large], wanted[~large].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert ((observed - expected) ** 2 / expected).sum() < chi_square_limit(observed.size - 1)


def test_a_filtered_choice_follows_the_filtered_distribution():
    """Temperature, top-k and top-p together, against the distribution that transformers' processors leave."""
    vocab, draws = 64, 60_000
    logits = logits_of(vocab, 2, 2.0)
    expected = logits.unsqueeze(0)
    for change in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.85)):
        expected = change(None, expected)
    wanted = expected[0].double().softmax(-1).numpy() * draws
    mine = logits.repeat(draws, 1)
    sample.scale_(mine, torch.full((draws,), 0.8))
    sample.top_k_(mine, torch.full((draws,), 12), 12)
    sample.top_p_(mine, torch.full((draws,), 0.85))
    counts = np.bincount(sample.sample_(mine, torch.full((draws,), 5), torch.arange(draws)).numpy(), minlength=vocab)
    possible = wanted > 0
    assert 2 < possible.sum() < 12 and counts[~possible].sum() == 0
    deviation = ((counts[possible] - wanted[possible]) ** 2 / wanted[possible]).sum()
    assert deviation < chi_square_limit(int(possible.sum()) - 1)


@pytest.mark.parametrize("scale", [0.2, 3.0, 12.0, 60.0])
def test_left_out_noise_never_changes_the_choice(scale):
    """Both short cuts (few candidates; many) against noise on every token."""
    vocab, n = 5000, 60
    logits = torch.stack([logits_of(vocab, i, scale) for i in range(n)])
    logits[::5, 100:] = -float("inf")
    seeds, positions = torch.arange(n) * 7919, torch.arange(n) + 3
    low, high = sample.keys(seeds, positions)
    noise = sample.gumbel(
        sample.noise_bits(low.unsqueeze(1), high.unsqueeze(1), torch.arange(vocab, dtype=torch.int32))
    )
    assert torch.equal(sample.sample_(logits.clone(), seeds, positions), (logits + noise).argmax(-1))


def test_a_row_draws_the_same_alone_and_in_company():
    logits = torch.stack([logits_of(3000, i, 3.0) for i in range(40)])
    seeds, positions = torch.arange(40), torch.arange(40) * 3
    together = sample.sample_(logits.clone(), seeds, positions)
    for row in (0, 17, 39):
        cut = slice(row, row + 1)
        assert sample.sample_(logits[cut].clone(), seeds[cut], positions[cut]) == together[row]


def test_the_only_possible_token_is_chosen_and_impossible_ones_never():
    logits = torch.full((2000, 50), -float("inf"))
    logits[:, 31] = -1e4
    assert (sample.sample_(logits, torch.arange(2000), torch.zeros(2000, dtype=torch.int64)) == 31).all()


def test_a_nan_row_shows_in_its_choice_and_leaves_others_alone():
    logits = torch.stack([logits_of(100, i, 1.0) for i in range(3)])
    seeds = positions = torch.arange(3)
    healthy = sample.sample_(logits.clone(), seeds, positions)
    logits[1, 40] = float("nan")
    noised = logits.clone()
    chosen = sample.sample_(noised, seeds, positions)
    assert chosen[[0, 2]].tolist() == healthy[[0, 2]].tolist()
    assert torch.isnan(noised[1, chosen[1]])
