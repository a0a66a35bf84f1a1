"""The fused Triton ops, interpreted on CPU, against their references (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.ops import sample as sample_ops
from quire.ops.rope import turn_heads_
from quire.ops.triton import few, mask, moe, moe_many, rope, sample
from quire.worker import trial
from tests import fused_cases as cases

triton = pytest.importorskip("triton")
tl = triton.language
DTYPES = [torch.float32, torch.float16]  # the interpreter's bfloat16 is not


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100, 1536])
def test_norms(dtype, width):
    cases.check_norms("cpu", dtype, 5, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norm_and_acts(dtype):
    cases.check_head_norm("cpu", dtype, 5, 6, 80)
    cases.check_acts("cpu", dtype, 3, 1100)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("qk_norm", ["", "head", "each"])
@pytest.mark.parametrize("shape", [(4, 2, 64, 64), (6, 1, 80, 32), (3, 3, 96, 96), (4, 4, 16, 0)])
def test_prepare_qkv(shape, qk_norm, pairs):
    for dtype in DTYPES:
        offset = 1.0 if qk_norm == "each" else 0.0
        cases.check_prepare("cpu", dtype, 7, *shape, pairs=pairs, qk_norm=qk_norm, offset=offset)


@triton.jit
def _bits_kernel(seeds, positions, out, COUNT: tl.constexpr):  # noqa: N803
    n = tl.program_id(0)
    low, high = sample.noise_keys(tl.load(seeds + n), tl.load(positions + n))
    ids = tl.arange(0, COUNT)
    tl.store(out + n * COUNT + ids, sample.noise_bits(low, high, ids))


@triton.jit
def _gumbel_kernel(bits, out, COUNT: tl.constexpr):  # noqa: N803
    ids = tl.arange(0, COUNT)
    tl.store(out + ids, sample.gumbel(tl.load(bits + ids)))


def test_noise_is_the_same_bits():
    draw = cases.Draw(0, "cpu")
    seeds, positions = draw.whole(-(2**62), 2**62, 4), torch.tensor([0, 5, 1000, 39999], dtype=torch.int32)
    out = torch.empty((4, 256), dtype=torch.int32)
    _bits_kernel[(4,)](seeds, positions, out, COUNT=256)
    low, high = (key.unsqueeze(1) for key in sample_ops.keys(seeds, positions))
    assert torch.equal(out, sample_ops.noise_bits(low, high, torch.arange(256, dtype=torch.int32)))
    ends = torch.arange(16)
    bits = torch.cat((draw.whole(0, 2**31 - 1, 992), ends, 2**31 - 1 - ends)).int()
    noise = torch.empty(1024)
    _gumbel_kernel[(1,)](bits, noise, COUNT=1024)
    torch.testing.assert_close(noise, sample_ops.gumbel(bits), rtol=2e-6, atol=2e-6)


def test_greedy_and_drawn_rows():
    logits, rows = cases.sampling_case("cpu", 5003, 4, heats=[0.0, 0.7, 1.5], top_ks=[0], top_ps=[1.0])
    cases.check_choice(logits, rows, filters=False)


@pytest.mark.parametrize("filters", [False, True])
def test_tiles_that_cannot_win_are_skipped(filters, monkeypatch):
    """Long parts, as many rows have them: the choice is that of short ones."""
    limits = {"top_ks": [0, 40], "top_ps": [1.0, 0.9]} if filters else {"top_ks": [0], "top_ps": [1.0]}
    logits, rows = cases.sampling_case("cpu", 5003, 6, heats=[0.0, 0.7, 1.5], **limits)
    logits[3, 4000], logits[4, :4500], logits[5, 2000] = torch.inf, -torch.inf, torch.nan
    wanted = sample.sample_rows(logits, *rows, filters=filters)
    monkeypatch.setattr(sample, "_PARTS", 1)
    monkeypatch.setattr(sample, "_LEAST_TILES", 1)
    for count in (len(logits), 5):  # edges are found in the same way, whatever the parts
        found = sample.sample_rows(logits[:count], rows[0][:count], rows[1][:count], *rows[2:], filters=filters)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other[:count], rtol=0, atol=0, equal_nan=True)


def test_what_is_no_number_is_reported():
    for heat in (0.0, 0.5):
        logits, rows = cases.sampling_case("cpu", 1000, 2, heats=[heat], top_ks=[0], top_ps=[1.0])
        logits[0, 5], logits[1] = torch.nan, -torch.inf
        tokens, scores = sample.sample_rows(logits, *rows, filters=False)
        assert tokens.tolist() == [5, 0] and scores[0].isnan() and scores[1] == -torch.inf


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [700, 9001])
def test_filters(vocab, ties):
    wide = {"heats": [0.6], "top_ks": [3, vocab - 1, vocab, 600, 0, 0], "top_ps": [1.0, 0.3, 1.0, 0.99, 0.999, 0.05]}
    narrow = {"heats": [0.6, 1.0, 0.0], "top_ks": [0, 20, 50, 0], "top_ps": [1.0, 0.9, 0.5, 0.95]}
    for given, scale in ((wide, 1.0), (narrow, 3.0)):
        logits, rows = cases.sampling_case("cpu", vocab, 6, ties=ties, scale=scale, **given)
        cases.check_edges(logits, rows)
        cases.check_choice(logits, rows, filters=True)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "score", "renorm", "with_bias"),
    [
        (5, 12, 3, "softmax", True, False), (7, 60, 4, "sigmoid", True, True), (3, 8, 2, "softmax", False, False),
        (600, 16, 2, "topk_softmax", True, False),
    ],
)  # fmt: skip
def test_routing(tokens, experts, top_k, score, renorm, with_bias):
    cases.check_route("cpu", tokens, experts, top_k, score=score, renorm=renorm, with_bias=with_bias)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "bm"), [(2, 3, 5, 16), (700, 2, 60, 32), (1100, 4, 128, 128), (3000, 4, 128, 128)]
)
def test_sorting_pairs(tokens, top_k, experts, bm):
    cases.check_sort("cpu", tokens, top_k, experts, bm)


@pytest.mark.parametrize("largest", [2048, 8192, 12288, 16384])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (64, 6), (32, 4), (8, 2), (160, 6), (512, 10)])
def test_every_tile_is_met_at_start(experts, top_k, largest):
    """A start compiles what steps of `trial.TOKENS` tokens launch: any other number of tokens takes one of those."""

    def chosen(numbers):
        pairs = [top_k * tokens for tokens in numbers if tokens > moe.FEW_TOKENS]
        return {moe.tma_configs_of(count, experts) for count in pairs}, {moe.sort_config_of(count) for count in pairs}

    tried = [*(count for count in trial.TOKENS if count < largest), largest]
    assert chosen(range(1, largest + 1)) == chosen(tried)


@pytest.mark.parametrize("config", [(16, 16, 16, 4), (64, 16, 32, 4)])
def test_sorting_pairs_of_many_chunks(config, monkeypatch):
    """More of them than a program of the scan adds up at once; of one piece each or of several."""
    monkeypatch.setattr(moe, "_SCAN", (4, 8))
    cases.check_sort("cpu", 101, 5, 20, 32, config=moe.SortConfig(*config))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 24, 64), (1, 10, 100), (3, 13, 72)])
def test_few_rows(rows, n, k, dtype):
    cases.check_few("cpu", dtype, rows, n, k, config=few.FewRowsConfig(4, 32, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "rows", "width"), [(1, 1, 64), (3, 5, 100), (8, 2, 1100)])
def test_parts_added_up(parts, rows, width, dtype):
    cases.check_sum_parts("cpu", dtype, parts, rows, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_experts(tokens, dtype):
    cases.check_experts("cpu", dtype, tokens, 6, 2, 48, 40, bias=True)
    small = (moe.MoeTileConfig(16, 32, 32, 4, 2), moe.MoeTileConfig(16, 64, 16, 4, 2))
    cases.check_experts("cpu", dtype, tokens, 5, 3, 64, 96, configs=small)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts_before_a_norm(dtype):
    small = moe.MoeTileConfig(16, 32, 32, 4, 2), moe.MoeTileConfig(16, 32, 32, 4, 2)
    cases.check_experts_before_a_norm("cpu", dtype, 9, 5, 3, 64, 96, configs=small)


@pytest.mark.parametrize(("resident", "flat"), [(True, True), (False, False)])
def test_grouped_products_of_many_tokens(resident, flat):
    first, second = (moe_many.MoeManyConfig(16, bn, 16, 4, 2, 8, resident, flat) for bn in (16, 32))
    cases.check_many("cpu", torch.float16, 23, 3, 2, 32, 48, first, second, bias=True)


@pytest.mark.parametrize("vocab", [1, 31, 1000, 2500])
def test_allowed_words(vocab):
    """Rows in any order, masks that are shorter or longer than the vocabulary, a part of wider logits."""
    draw = cases.Draw(vocab, "cpu")
    for num_words in (1, (vocab + 31) // 32, (vocab + 95) // 32):
        words = draw.whole(-(2**31), 2**31, 3 * num_words).to(torch.int32).reshape(3, num_words)
        rows = torch.tensor([4, 0, 2])
        found = torch.randn(5, vocab + 7, generator=torch.Generator().manual_seed(1))
        wanted = found.clone()
        mask.allow_words_cuda_(found[:, :vocab], rows, words)
        sample_ops.allow_words_.reference(wanted[:, :vocab], rows, words)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("heads, size", [(6, 20), (32, 80)])
def test_turning_heads_in_place(heads, size):
    """Of queries and keys, beside values that stay."""
    make = torch.Generator().manual_seed(1)
    qkv, (cos, sin) = torch.randn((5, heads + 3, size), generator=make), torch.randn((2, 5, size), generator=make)
    found, wanted = qkv.clone(), qkv.clone()
    rope.turn_heads_(found[:, :heads], cos, sin)
    turn_heads_.reference(wanted[:, :heads], cos, sin)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[:, heads:], qkv[:, heads:])
