"""Attention within texts in compiled kernels, against float64, on every instruction set here."""

import pytest
import torch

from quire.ops.attention import ragged_attention
from quire.ops.cpu.native import kernels

library = kernels()
pytestmark = pytest.mark.skipif(library is None, reason="no compiled kernels")
LENS = (1, 40, 5, 16, 33)
HEADS = 6


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_of(size, kv_heads, tokens=sum(LENS), seed=0):
    """Queries, keys and values as they lie in a fused product."""
    fused = draw(tokens, (HEADS + 2 * kv_heads) * size, seed=seed).view(tokens, -1, size)
    return fused.split((HEADS, kv_heads, kv_heads), 1)


def softmax_of_texts(q, k, v, query_lens, key_lens, scale, window=0):
    out, per = [], q.shape[1] // k.shape[1]
    parts = zip(q.double().split(query_lens), k.double().split(key_lens), v.double().split(key_lens), strict=True)
    for queries, keys, values in parts:
        queries, keys, values = (
            t.transpose(0, 1) for t in (queries, keys.repeat_interleave(per, 1), values.repeat_interleave(per, 1))
        )
        scores = queries @ keys.transpose(1, 2) * scale
        gap = torch.arange(keys.shape[1])[None] - torch.arange(queries.shape[1])[:, None]
        if window:
            scores = scores.masked_fill(gap.abs() >= window, float("-inf"))
        out.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("size", "kv_heads", "window"), [(16, 6, 0), (32, 6, 7), (48, 2, 0), (64, 3, 12), (128, 1, 0), (256, 6, 1)]
)
def test_attention(isa, size, kv_heads, window, threads):
    library.qc_set_threads(threads)
    q, k, v = heads_of(size, kv_heads)
    attend, scale = ragged_attention.on("cpu"), size**-0.5
    found = attend(q, k, v, LENS, LENS, scale=scale, window=window)
    wanted = softmax_of_texts(q, k, v, LENS, LENS, scale, window)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=5e-6)
    for i, start in ((1, 1), (4, 62)):  # one text alone has the same bits
        part = slice(start, start + LENS[i])
        alone = attend(q[part], k[part], v[part], LENS[i : i + 1], LENS[i : i + 1], scale=scale, window=window)
        assert torch.equal(alone, found[part])
    library.qc_set_threads(1)


LONG = (64, 3, 100, 63, 129, 90)


@pytest.mark.parametrize(("size", "kv_heads", "window"), [(32, 6, 0), (64, 2, 20), (96, 3, 0), (48, 6, 0)])
def test_long_texts(isa, size, kv_heads, window):
    """Tiles take texts from some length on, whatever is beside them, and whatever part of the queries is asked for."""
    q, k, v = heads_of(size, kv_heads, tokens=sum(LONG), seed=5)
    attend, scale = ragged_attention.on("cpu"), size**-0.5
    found = attend(q, k, v, LONG, LONG, scale=scale, window=window)
    wanted = softmax_of_texts(q, k, v, LONG, LONG, scale, window)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=5e-6)
    start = 0
    for length in LONG:
        part = slice(start, start + length)
        alone = attend(q[part], k[part], v[part], (length,), (length,), scale=scale, window=window)
        assert torch.equal(alone, found[part])
        if not window:
            few = min(7, length)
            some = attend(q[start : start + few], k[part], v[part], (few,), (length,), scale=scale)
            assert torch.equal(some, found[start : start + few])
        start += length


def test_queries_and_keys_of_other_lengths(isa):
    key_lens = (9, 3, 40, 16, 17)
    q, (_, k, v) = heads_of(32, 2)[0], heads_of(32, 2, tokens=sum(key_lens), seed=4)
    found = ragged_attention.on("cpu")(q, k, v, LENS, key_lens, scale=0.2)
    torch.testing.assert_close(found.double(), softmax_of_texts(q, k, v, LENS, key_lens, 0.2), rtol=1e-5, atol=5e-6)


def test_a_long_text_and_large_scores(isa):
    """More keys than one chain of products sums up; scores far apart."""
    q, k, v = heads_of(16, 1, tokens=700, seed=2)
    found = ragged_attention.on("cpu")(q, k, v, (700,), (700,), scale=3.0)
    torch.testing.assert_close(found.double(), softmax_of_texts(q, k, v, (700,), (700,), 3.0), rtol=1e-4, atol=2e-5)


def test_a_bad_text_stays_alone(isa):
    q, k, v = (t.clone() for t in heads_of(32, 6))
    attend = ragged_attention.on("cpu")
    clean = attend(q, k, v, LENS, LENS, scale=0.2)
    k[43, 1, 3] = float("nan")  # of the third text
    found = attend(q, k, v, LENS, LENS, scale=0.2)
    assert found[41:46, 1].isnan().all() and found[41:46, 2].isfinite().all()
    rest = [*range(41), *range(46, sum(LENS))]
    assert torch.equal(found[rest], clean[rest])


def test_what_other_forms_compute(isa):
    """Capped scores, sinks and learned distances are not the kernel's."""
    q, k, v = heads_of(32, 6)
    plain = ragged_attention.on("cpu")(q, k, v, LENS, LENS, scale=0.2)
    for more in ({"softcap": 1.0}, {"sinks": draw(HEADS)}, {"near": draw(HEADS, 9)}, {"near": draw(HEADS).abs()}):
        found = ragged_attention.on("cpu")(q, k, v, LENS, LENS, scale=0.2, **more)
        torch.testing.assert_close(found, ragged_attention(q, k, v, LENS, LENS, scale=0.2, **more))
        assert not torch.allclose(found, plain, atol=1e-3)
