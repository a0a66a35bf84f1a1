"""Routing and expert products against plain loops over tokens and experts."""

import math

import pytest
import torch

from quire.ops.act import gated_on
from quire.ops.linear import heads_matmul, linear
from quire.ops.moe import route, run_experts
from quire.ops.op import Kernels


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def choose_by_hand(logits, top_k, *, score, renorm, scale, bias, groups, top_groups, group_score):
    """One token, plain Python."""
    if score == "softmax":
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    cut = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
    rank = [c[0] if group_score == "max" else sum(c[:2]) for c in cut]
    best = sorted(range(groups), key=lambda g: -rank[g])[:top_groups]
    allowed = [e for e in range(len(logits)) if e // size in best]
    picked = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    weights = [scores[e] for e in picked]
    if renorm:
        weights = [w / sum(weights) for w in weights]
    return {e: w * scale for e, w in zip(picked, weights, strict=True)}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("groups", "top_groups", "group_score"), [(1, 1, "max"), (4, 2, "max"), (4, 2, "top2sum")])
def test_routing(score, renorm, with_bias, groups, top_groups, group_score):
    logits, bias = draw(13, 12), draw(12, seed=1) - 2 if with_bias else None  # biased choices may be negative
    rule = dict(score=score, renorm=renorm, scale=1.5, groups=groups, top_groups=top_groups, group_score=group_score)
    weights, index = route(logits, 3, bias=bias, **rule)
    for row in range(len(logits)):
        want = choose_by_hand(logits[row].tolist(), 3, bias=bias.tolist() if with_bias else [0.0] * 12, **rule)
        found = dict(zip(index[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(want, rel=1e-5)


def test_softmax_over_the_chosen_only():
    weights, index = route(torch.tensor([[1.0, 3.0, 2.0, -1.0]]), 2, score="topk_softmax")
    assert index.tolist() == [[1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 17])
def test_experts(with_bias, tokens):
    experts, width, ffn, top_k = 5, 8, 6, 2
    x, w1, w2 = draw(tokens, width), draw(experts, 2 * ffn, width, seed=1), draw(experts, width, ffn, seed=2)
    b1, b2 = (draw(experts, 2 * ffn, seed=3), draw(experts, width, seed=4)) if with_bias else (None, None)
    weights, index = route(draw(tokens, experts, seed=5), top_k)
    found = run_experts(x, weights, index, w1, w2, b1=b1, b2=b2, act=gated_on("silu", Kernels.here("cpu")))
    for t in range(tokens):
        want = torch.zeros(width)
        for e, weight in zip(index[t].tolist(), weights[t], strict=True):
            h = w1[e] @ x[t] + (b1[e] if with_bias else 0)
            h = h[:ffn] * torch.sigmoid(h[:ffn]) * h[ffn:]
            want += weight * (w2[e] @ h + (b2[e] if with_bias else 0))
        torch.testing.assert_close(found[t], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("native", [True, False])
def test_products_on_cpu(dtype, native, monkeypatch):
    """With and without matrix units for the dtype: the exact product, rounded."""
    found = frozenset({torch.float32, dtype} if native else {torch.float32})
    monkeypatch.setattr("quire.ops.linear.cpu_dtypes", lambda: found)
    x, w, b = draw(5, 16, dtype=dtype), draw(7, 16, seed=1, dtype=dtype), draw(7, seed=2, dtype=dtype)
    close = dict(rtol=1e-5, atol=1e-5) if dtype is torch.float32 else dict(rtol=1e-2, atol=1e-2)
    exact = (x.double() @ w.double().T + b.double()).to(dtype)
    torch.testing.assert_close(linear.on("cpu")(x, w, b), exact, **close)
    heads, m = draw(5, 3, 4, dtype=dtype), draw(3, 4, 6, seed=1, dtype=dtype)
    each = torch.stack([heads[:, h].double() @ m[h].double() for h in range(3)], 1).to(dtype)
    torch.testing.assert_close(heads_matmul.on("cpu")(heads, m), each, **close)
