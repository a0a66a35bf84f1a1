"""What the fused Triton ops must do, as checks that run on any device: used on CUDA, and interpreted on CPU.

Each draws fresh inputs, poisons what a kernel must write, and compares with the op's reference.
"""

from functools import partial

import torch

from quire.ops import act as act_ops
from quire.ops import few as few_ops
from quire.ops import moe as moe_ops
from quire.ops import norm as norm_ops
from quire.ops import rope as rope_ops
from quire.ops import sample as sample_ops
from quire.ops.parts import PartialSums
from quire.ops.qkv import QkvPrep
from quire.ops.qkv import prepare_qkv as prepare_reference
from quire.ops.triton import act, few, moe, moe_many, norm, rope, sample
from quire.ops.triton import parts as sum_parts

EXACT = {"rtol": 2e-5, "atol": 2e-5}
LIMITS = {torch.float16: (2e-3, 8e-3), torch.bfloat16: (1e-2, 4e-2)}  # of the norm; of the worst, by the largest
AVERAGED = 64  # entries: the norm of fewer may be one or two of them, and several roundings of these add up
DUST = 5e-6


class Draw:
    """Random tensors of one device and dtype."""

    def __init__(self, seed, device, dtype=torch.float32):
        self.dice, self.device, self.dtype = torch.Generator().manual_seed(seed), device, dtype

    def normal(self, *shape, scale=1.0, dtype=None):
        return (torch.randn(shape, generator=self.dice) * scale).to(dtype or self.dtype).to(self.device)

    def whole(self, low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=self.dice).to(dtype).to(self.device)


def close(found, wanted, dtype):
    """In float32 each entry; else the whole, and the worst entry by the largest (a rotation may cancel)."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if dtype is torch.float32:
        torch.testing.assert_close(found, wanted, **EXACT)
        return
    found, wanted = found.float(), wanted.float()
    whole, worst = LIMITS[dtype]
    if found.numel() >= AVERAGED:
        assert (found - wanted).norm() / wanted.norm() < whole
    assert (found - wanted).abs().max() <= worst * wanted.abs().max()


def check_norms(device, dtype, tokens, width, seed=0):
    draw = Draw(seed, device, dtype)
    x, delta, weight, bias = (draw.normal(*shape) for shape in ((tokens, width), (tokens, width), (width,), (width,)))
    for offset in (0.0, 1.0):
        wide = norm_ops.rms_norm_wide(x, weight, 1e-6, offset)
        close(norm.rms_norm_wide(x, weight, 1e-6, offset), wide, dtype)
        close(norm.layer_norm(x, weight, bias, 1e-5, offset), norm_ops.layer_norm(x, weight, bias, 1e-5, offset), dtype)
        found, total = norm.add_rms_norm_wide(x.clone(), delta, weight, 1e-6, offset)
        wanted, sums = norm_ops.add_rms_norm_wide(x, delta, weight, 1e-6, offset)
        close(found, wanted, dtype)
        assert torch.equal(total, sums)
    close(norm.rms_norm(x, weight, 1e-6), norm_ops.rms_norm(x, weight, 1e-6), dtype)
    close(norm.layer_norm(x, None, None, 1e-5), norm_ops.layer_norm(x, None, None, 1e-5), dtype)
    stream = x.clone()
    found, total = norm.add_rms_norm(stream, delta, weight, 1e-6)
    wanted, sums = norm_ops.add_rms_norm(x, delta, weight, 1e-6)
    close(found, wanted, dtype)
    assert torch.equal(total, sums) and total.data_ptr() == stream.data_ptr()
    for count in (1, 3):
        parts = PartialSums(draw.normal(count, tokens, width, dtype=torch.float32), dtype)
        found, total = norm.add_rms_norm(x.clone(), parts, weight, 1e-6)
        wanted, sums = norm_ops.add_rms_norm(x, parts, weight, 1e-6)
        close(found, wanted, dtype)
        close(total, sums, dtype)


def check_head_norm(device, dtype, tokens, heads, size, seed=0):
    """Heads lie apart, as a slice of a wider product."""
    draw = Draw(seed, device, dtype)
    x = draw.normal(tokens, 2 * heads * size)[:, : heads * size].view(tokens, heads, size)
    for weight in (draw.normal(size), draw.normal(heads, size)):
        close(norm.rms_norm(x, weight, 1e-6), norm_ops.rms_norm(x, weight, 1e-6), dtype)


def check_acts(device, dtype, rows, width, seed=0):
    x = Draw(seed, device, dtype).normal(rows, 2 * width, scale=2.0)
    for name, code in act.CODES.items():
        close(act.gated_form(code)(x), act_ops.gated_of(name).reference(x), dtype)
    close(act.clamped_swiglu(x, 1.702, 1.5), act_ops.clamped_swiglu(x, 1.702, 1.5), dtype)


def check_prepare(device, dtype, tokens, heads, kv_heads, size, dim, *, pairs, qk_norm, offset, seed=0):
    """Queries, cache and kept keys; every fourth token has no slot, and what is not written stays as it was."""
    draw = Draw(seed, device, dtype)
    qkv = draw.normal(tokens, (heads + 2 * kv_heads) * size)
    cos = sin = None
    if dim:
        positions = draw.whole(0, 40000, tokens)
        inverse = (1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)).to(device)
        cos, sin = rope.rope_tables(positions, inverse, 1.25, pairs, dtype)
        for found, wanted in zip((cos, sin), rope_ops.rope_tables(positions, inverse, 1.25, pairs, dtype), strict=True):
            assert found.shape == (tokens, 1, dim)
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-2 if dtype is torch.bfloat16 else 2e-3)
    shapes = {"": None, "head": ((size,), (size,)), "each": ((heads, size), (kv_heads, size))}[qk_norm]
    weights = (None, None) if shapes is None else tuple(draw.normal(*shape) for shape in shapes)
    prep = QkvPrep(heads, kv_heads, *weights, 1e-6, offset, False, cos, sin, pairs)
    blocks = tokens // 16 + 3
    memory = draw.normal(2, blocks, kv_heads, 16, size)  # heads before places, as the Triton backend stores them
    slots = torch.randperm(blocks * 16, generator=draw.dice)[:tokens].to(device)
    slots[3::4] = -1
    other = memory.clone()
    keys, values = (part.transpose(1, 2) for part in memory)
    kept, wanted_kept = qkv.clone(), qkv.clone()
    found = rope.prepare_qkv(kept, prep, keys, values, slots, True)
    wanted = prepare_reference(wanted_kept, prep, *(part.transpose(1, 2) for part in other), slots, True)
    close(found, wanted, dtype)
    close(memory, other, dtype)
    close(kept, wanted_kept, dtype)
    untouched = qkv.clone()
    close(rope.prepare_qkv(untouched, prep, keys, values, slots), wanted, dtype)
    assert torch.equal(untouched, qkv)
    share = torch.rand(qkv.shape, generator=draw.dice).to(device)
    parts = PartialSums(torch.stack((qkv.float() * share, qkv.float() * (1 - share))), dtype)
    memory.fill_(torch.nan)
    close(rope.prepare_qkv(parts, prep, keys, values, slots), wanted, dtype)
    written = ~memory[:, :, :, :, 0].isnan()
    close(memory[written], other[written], dtype)


def check_route(device, tokens, experts, top_k, *, score, renorm, with_bias, seed=0):
    for shift in (0.0, -9.0):  # all far below zero, too
        _check_route(Draw(seed, device), shift, tokens, experts, top_k, score, renorm, with_bias)


def _check_route(draw, shift, tokens, experts, top_k, score, renorm, with_bias):
    logits, bias = draw.normal(tokens, experts) + shift, draw.normal(experts) if with_bias else None
    rule = {"score": score, "renorm": renorm, "scale": 1.5, "bias": bias}
    weights, index = moe.route(logits, top_k, **rule)
    wanted, chosen = moe_ops.route(logits, top_k, **rule)
    scores = logits if score == "topk_softmax" else logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    ranks = scores if bias is None else scores + bias
    apart = (index.long() != chosen).any(-1)
    assert int(apart.sum()) <= 2  # where two experts are as good as equal
    torch.testing.assert_close(ranks.gather(1, index.long()), ranks.gather(1, chosen), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights[~apart], wanted[~apart], **EXACT)
    rounded, again = moe.route(logits, top_k, **rule, dtype=torch.float16)
    assert torch.equal(rounded, weights.to(torch.float16)) and torch.equal(again, index)
    narrow = logits.to(torch.bfloat16)
    for mine, its in zip(moe.route(narrow, top_k, **rule), moe.route(narrow.float(), top_k, **rule), strict=True):
        assert torch.equal(mine, its)


def check_sort(device, tokens, top_k, experts, bm, seed=0, config=None):
    index = Draw(seed, device).whole(0, experts, tokens, top_k, dtype=torch.int32)
    tiles = moe.sort_pairs(index, experts, bm, config=config)
    flat = index.flatten().long().cpu()
    assert torch.equal(tiles.order.long().cpu(), flat.argsort(stable=True))
    counts = torch.bincount(flat, minlength=experts)
    assert torch.equal(tiles.end.long().cpu()[:-1], counts.cumsum(0))
    firsts = (counts.cumsum(0) - counts).tolist()
    wanted = [(e, firsts[e] + at) for e, count in enumerate(counts.tolist()) for at in range(0, count, bm)]
    found = list(zip(tiles.expert.tolist(), tiles.start.tolist(), strict=True))
    assert found[: len(wanted)] == wanted and int(tiles.end[-1]) == len(wanted)
    assert all(expert == -1 for expert, _ in found[len(wanted) :])


def check_experts(
    device, dtype, tokens, experts, top_k, dim, ffn, *, bias=False, configs=None, fixed=False, early=False, seed=0
):
    """Three activations: one that joins the product, one with numbers of its own, one that runs between products."""
    draw = Draw(seed, device, dtype)
    x, stream = draw.normal(tokens, dim), draw.normal(tokens, dim)
    w1, w2 = draw.normal(experts, 2 * ffn, dim, scale=dim**-0.5), draw.normal(experts, dim, ffn, scale=ffn**-0.5)
    b1, b2 = (draw.normal(experts, 2 * ffn), draw.normal(experts, dim)) if bias else (None, None)
    weights, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32), top_k)
    silu, gelu = act.gated_form(act.SILU), act_ops.GATED["gelu"].reference
    codes = {silu: act.SILU, act.clamped_swiglu: act.CLAMPED}
    clamps = {"alpha": 1.702, "limit": 2.0}
    for given, meant in (
        (silu, act_ops.GATED["silu"].reference),
        (partial(act.clamped_swiglu, **clamps), partial(act_ops.clamped_swiglu.reference, **clamps)),
        (gelu, gelu),
    ):
        rest = {"b1": b1, "b2": b2, "act": given, "codes": codes, "configs": configs, "fixed": fixed, "early": early}
        found = moe.run_experts(x, weights, index, w1, w2, **rest)
        wide = [None if t is None else t.float() for t in (x, w1, w2, b1, b2)]
        wanted = moe_ops.run_experts(wide[0], weights, index, *wide[1:3], b1=wide[3], b2=wide[4], act=meant)
        error = (found.float() - wanted).norm() / wanted.norm()
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert error < limit, f"relative error {error:.2e}"
        joined = moe.run_experts(x, weights, index, w1, w2, stream=stream, **rest)
        assert torch.equal(joined, stream + found)


def check_experts_before_a_norm(device, dtype, tokens, experts, top_k, dim, ffn, *, early=False, seed=0, **more):
    """A norm that adds up a token's experts gives the same bits as the sum, then the norm."""
    draw = Draw(seed, device, dtype)
    x, stream, gains = draw.normal(tokens, dim), draw.normal(tokens, dim), draw.normal(dim)
    w1, w2 = draw.normal(experts, 2 * ffn, dim, scale=dim**-0.5), draw.normal(experts, dim, ffn, scale=ffn**-0.5)
    silu = act.gated_form(act.SILU)
    known = {"b1": None, "b2": None, "act": silu, "codes": {silu: act.SILU}, "early": early, **more}
    for kind in (torch.float32, dtype):
        weights, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32), top_k, dtype=kind)
        total = moe.run_experts(x, weights, index, w1, w2, **known)
        parts = moe.run_experts(x, weights, index, w1, w2, in_parts=True, **known)
        assert isinstance(parts, PartialSums) and not isinstance(total, PartialSums)
        close(parts.whole(), total, dtype)
        for form in (norm.add_rms_norm, norm.add_rms_norm_wide):
            assert norm.fits(stream, gains, parts)
            wanted = form(stream.clone(), total, gains, 1e-6, early=early)
            found = form(stream.clone(), parts, gains, 1e-6, early=early)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def check_many(device, dtype, tokens, experts, top_k, dim, ffn, first, second, *, bias=False, seed=0):
    """Both products by way of descriptors, against those of moe.py."""
    draw = Draw(seed, device, dtype)
    x = draw.normal(tokens, dim)
    w1, w2 = draw.normal(experts, 2 * ffn, dim, scale=dim**-0.5), draw.normal(experts, dim, ffn, scale=ffn**-0.5)
    b1, b2 = (draw.normal(experts, 2 * ffn), draw.normal(experts, dim)) if bias else (None, None)
    _, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32, scale=2.0), top_k)
    tiles, pairs, silu = moe.sort_pairs(index, experts, first.bm), tokens * top_k, (act.SILU, 0.0, 0.0)
    plain = moe.MoeTileConfig(first.bm, 32, 32, 4, 2)
    h = moe_many.product(x, w1, b1, tiles[:4], top_k, pairs=pairs, act=silu, config=first)
    close(h, moe.product(x, w1, b1, tiles, top_k, plain, pairs=pairs, first=True, act=silu), dtype)
    y = moe_many.product(h, w2, b2, tiles[:4], top_k, pairs=pairs, act=None, config=second)
    close(y, moe.product(h, w2, b2, tiles, top_k, plain, pairs=pairs, first=False), dtype)


def check_few(device, dtype, rows, n, k, *, config=None, early=False, seed=0):
    """Products of a few rows with every norm before them, and an activation or an addition after them."""
    draw = Draw(seed, device, dtype)
    x, stream, scale = draw.normal(rows, 2 * k)[:, :k], draw.normal(rows, n), k**-0.5
    weight, both = draw.normal(n, k, scale=scale), draw.normal(2 * n, k, scale=scale)
    bias, both_bias = draw.normal(n), draw.normal(2 * n)
    gains = draw.normal(k)
    silu, plain = act.gated_form(act.SILU), act_ops.GATED["silu"].reference
    given = {"config": config, "early": early}
    for rule in (
        few_ops.NormRule(gains, 1e-6, offset, wide) for offset, wide in ((0.0, False), (1.0, False), (0.0, True))
    ):
        found = few.few_linear(x, weight, bias, norm=rule, **given)
        close(found, few_ops.norm_linear(x, rule, weight, bias), dtype)
        found = few.few_linear(x, both, both_bias, norm=rule, act=(act.SILU, 0.0, 0.0), **given)
        close(found, few_ops.norm_linear(x, rule, both, both_bias, plain), dtype)
        for wide in (False, True):
            logits, normed = few.norm_router(x, rule, weight, bias, wide, early=early)
            wanted, wanted_normed = few_ops.norm_router(x, rule, weight, bias, wide)
            assert logits.dtype is torch.float32
            close(logits.to(dtype), wanted.to(dtype), dtype)
            close(normed, wanted_normed, dtype)
    rule = few_ops.NormRule(gains, 1e-6, 0.0, False)
    for given_act, meant in ((silu, plain), (plain, plain), (None, None)):
        found = few.norm_linear(x, rule, both, None, given_act, codes={silu: act.SILU}, early=early)
        close(found, few_ops.norm_linear(x, rule, both, None, meant), dtype)
    close(few.linear_add(x, weight, None, stream, early=early), few_ops.linear_add(x, weight, None, stream), dtype)
    for given_stream in (stream, None):
        found = few.linear_add(x, weight, bias, given_stream, early=early)
        close(found, few_ops.linear_add(x, weight, bias, given_stream), dtype)


def check_sum_parts(device, dtype, parts, rows, width, *, early=False, seed=0):
    """The bits that a norm adds to a stream, which adds parts up in their order."""
    draw = Draw(seed, device)
    product = PartialSums(draw.normal(parts, rows, width), dtype)
    total = product.sums[0].clone()
    for part in product.sums[1:]:
        total += part
    found = sum_parts.sum_parts(product, early=early)
    assert found.dtype is dtype and torch.equal(found, total.to(dtype))
    stream = torch.zeros(rows, width, dtype=dtype, device=device)
    _, added = norm.add_rms_norm(stream, product, draw.normal(width).to(dtype), 1e-6, early=early)
    assert torch.equal(found, added)


class Rows(tuple):
    """Arguments of sample_rows after the logits."""


def sampling_case(device, vocab, count, *, heats, top_ks, top_ps, dtype=torch.float32, scale=3.0, ties=False, seed=0):
    """(logits, the other arguments); rows take the listed parameters in turn."""
    draw = Draw(seed, device, dtype)
    logits = draw.normal(count, vocab, scale=scale, dtype=torch.float32)
    if ties:
        logits = (2 * logits).round() / 2
    row_index = torch.randperm(count + 2, generator=draw.dice)[:count].int().to(device)

    def column(values, kind):
        return torch.tensor([values[i % len(values)] for i in range(count + 2)], dtype=kind, device=device)

    return logits.to(dtype), Rows((
        row_index, draw.whole(0, 5000, count, dtype=torch.int32), draw.whole(-(2**62), 2**62, count + 2),
        column(heats, torch.float32), column(top_ks, torch.int32), column(top_ps, torch.float32),
    ))  # fmt: skip


def check_edges(logits, rows):
    """What top_k keeps, exactly; what top_p keeps, but for mass that sums in float32 cannot tell."""
    row_index, _, _, heat, top_k, top_p = rows
    index = row_index.long()
    edges = sample.find_edges(logits, row_index, heat, top_k, top_p)
    for i, row in enumerate(index.tolist()):
        if heat[row] <= 0:
            continue
        scaled = logits[i].float() / heat[row]
        ordered = scaled.sort(descending=True).values
        k, p = int(top_k[row]), float(top_p[row])
        kth = ordered[k - 1] if 0 < k < len(ordered) else ordered[-1]
        kept = scaled >= edges[i]
        if p >= 1:
            assert torch.equal(kept, scaled >= kth)
            continue
        shares = scaled.double().masked_fill(scaled < kth, -torch.inf).softmax(-1)
        assert not kept[scaled < kth].any()
        assert shares[kept].sum() >= p - DUST, (i, k, p)  # enough
        assert shares[scaled > edges[i]].sum() < p + DUST, (i, k, p)  # and no more than that, but for ties
        assert (scaled == edges[i]).any()


def check_choice(logits, rows, *, filters):
    """The same tokens as the reference (given the same edges), written to their rows, and nothing else written."""
    row_index, positions, _, heat, top_k, top_p = rows
    tokens = torch.full((len(heat), 5001), -7, dtype=torch.int32, device=logits.device)
    found, scores = sample.sample_rows(logits, *rows, filters=filters, tokens=tokens)
    wide = logits.float()
    if filters:
        edges = sample.find_edges(logits, row_index, heat, top_k, top_p).unsqueeze(1)
        heats = heat[row_index.long()].unsqueeze(1)
        wide = wide.masked_fill(wide / torch.where(heats > 0, heats, 1.0) < edges, -torch.inf)
    wanted, wanted_scores = sample_ops.sample_rows(wide, *rows, filters=False)
    torch.testing.assert_close(scores, wanted_scores, rtol=1e-5, atol=2e-5)
    assert (found != wanted).sum() == 0
    assert torch.equal(tokens[row_index.long(), positions.long()].long(), found)
    assert int((tokens != -7).sum()) == len(found)
