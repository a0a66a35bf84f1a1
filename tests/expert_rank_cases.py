"""Mixtures whose experts ranks divide: cases that run interpreted and on a GPU.

A rank's experts lie behind one of NaN, which an index of -1 would read, and memory that nobody has written is NaN too:
so whatever is computed or added up for a pair of another rank is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from quire.ops import act as act_ops
from quire.ops import coded_experts as ops
from quire.ops import moe as moe_ops
from quire.ops.coded_experts import ExpertCodes
from quire.ops.triton import act, moe, moe_coded, moe_coded_few, moe_few
from tests.coded_expert_cases import make_codes
from tests.fused_cases import Draw

RANKS = ((0, 3, 4), (1,), (2, 5))  # which of 6 experts each has; one has a single one
EXPERTS = 6
NAN_BYTE = 0x7F  # of e4m3
SILU = act.gated_form(act.SILU)
KNOWN = {"act": SILU, "codes": {SILU: act.SILU}, "b1": None, "b2": None}


def places(index: Tensor, own: tuple[int, ...]) -> Tensor:
    """Where a rank has these experts; -1: another has them."""
    table = torch.full((EXPERTS,), -1, dtype=torch.int32)
    table[list(own)] = torch.arange(len(own), dtype=torch.int32)
    return table.to(index.device)[index.long()]


def routed(draw: Draw, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The first token has experts of the first rank only, as far as there are."""
    logits = draw.normal(tokens, EXPERTS, dtype=torch.float32)
    logits[0, list(RANKS[0])] += 100
    return moe_ops.route(logits, top_k)


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    plain = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poisoned(make):
        def empty(*args, **named):
            made = make(*args, **named)
            if made.dtype.itemsize == 1:
                made.view(torch.uint8).fill_(NAN_BYTE)
            elif made.is_floating_point():
                made.fill_(torch.nan)
            return made

        return empty

    with mock.patch.multiple(torch, **{name: poisoned(make) for name, make in plain.items()}):
        yield


def behind_nan(w: Tensor, own: tuple[int, ...]) -> Tensor:
    padded = w.new_empty((len(own) + 1, *w.shape[1:]))
    padded.view(torch.uint8).fill_(NAN_BYTE) if w.dtype.itemsize == 1 else padded.fill_(torch.nan)
    padded[1:] = w[list(own)]
    return padded[1:]


def codes_of(w: ExpertCodes, own: tuple[int, ...]) -> ExpertCodes:
    parts = {name: getattr(w, name) for name in ("scale", "zero", "row_scale")}
    some = {
        name: None if part is None else behind_nan(part, own) if part.is_floating_point() else part[list(own)]
        for name, part in parts.items()
    }
    return replace(w, codes=behind_nan(w.codes, own), **some)


def check_sort(device, tokens, top_k, bm, own, config=None, seed=0):
    """A rank's own pairs by expert, and as many tiles as these need."""
    index = places(Draw(seed, device).whole(0, EXPERTS, tokens, top_k), own)
    tiles = moe.sort_pairs(index, len(own), bm, share=True, config=config)
    flat = index.flatten().long().cpu()
    counts = torch.bincount(flat[flat >= 0], minlength=len(own))
    mine = int(counts.sum())
    assert torch.equal(tiles.order.long().cpu()[:mine], flat.argsort(stable=True)[len(flat) - mine :])
    assert tiles.end.tolist()[:-1] == counts.cumsum(0).tolist()
    firsts = (counts.cumsum(0) - counts).tolist()
    wanted = [(e, firsts[e] + at) for e, count in enumerate(counts.tolist()) for at in range(0, count, bm)]
    table = list(zip(tiles.expert.tolist(), tiles.start.tolist(), strict=True))
    assert table[: len(wanted)] == wanted and int(tiles.end[-1]) == len(wanted)
    assert all(expert == -1 for expert, _ in table[len(wanted) :])


def check_sum(run, x, weights, index, limit):
    """`run(x, weights, index, own, **rest)`: of all ranks together as of one; and tokens without an expert here."""
    whole = run(x, weights, index.int(), tuple(range(EXPERTS))).float()
    total = torch.zeros_like(whole)
    for own in RANKS:
        here = places(index, own)
        with unwritten_is_nan():
            part = run(x, weights, here, own, all_experts=EXPERTS)
            joined = run(x, weights, here, own, all_experts=EXPERTS, stream=x)
        assert not part.isnan().any()
        assert not part[(here < 0).all(1)].any()
        assert torch.equal(joined, x + part)
        total += part.float()
    assert (here < 0).all(1).any()
    error = (total - whole).norm() / whole.norm()
    assert error < limit, f"relative error {error:.2e}"


def check_plain(device, dtype, tokens, top_k, dim, ffn, limit, *, bias=False, seed=0, **rest):
    draw = Draw(seed, device, dtype)
    x = draw.normal(tokens, dim)
    w1, w2 = draw.normal(EXPERTS, 2 * ffn, dim, scale=dim**-0.5), draw.normal(EXPERTS, dim, ffn, scale=ffn**-0.5)
    b1, b2 = (draw.normal(EXPERTS, 2 * ffn), draw.normal(EXPERTS, dim)) if bias else (None, None)

    def run(x, weights, index, own, **more):
        stacks = (None if w is None else behind_nan(w, own) for w in (w1, w2, b1, b2))
        first, second, up_bias, down_bias = stacks
        known = KNOWN | {"b1": up_bias, "b2": down_bias} | rest | more
        return moe.run_experts(x, weights, index, first, second, **known)

    check_sum(run, x, *routed(draw, tokens, top_k), limit)


def check_coded(device, dtype, kind, tokens, top_k, dim, ffn, limit, *, seed=0, **rest):
    draw = Draw(seed, device, dtype)
    x = draw.normal(tokens, dim)
    w1, w2 = make_codes(kind, draw, EXPERTS, 2 * ffn, dim), make_codes(kind, draw, EXPERTS, dim, ffn)

    def run(x, weights, index, own, **more):
        return moe_coded.run_experts(x, weights, index, codes_of(w1, own), codes_of(w2, own), **KNOWN | rest | more)

    check_sum(run, x, *routed(draw, tokens, top_k), limit)


def check_few_skip(device, kind, few):
    """Programs of pairs of other ranks return at once: their places stay as they were. `kind` None: plain numbers."""
    draw, own = Draw(0, device, torch.float32), RANKS[0]
    x, (_, index) = draw.normal(2, 128), routed(draw, 2, 4)
    here = places(index, own)
    with unwritten_is_nan():
        if kind is None:
            w = behind_nan(draw.normal(EXPERTS, 64, 128), own)
            h = moe_few.up(x, here, w, None, (act.SILU, 0.0, 0.0), share=True)
        else:
            w = codes_of(make_codes(kind, draw, EXPERTS, 64, 128), own)
            h = moe_coded_few.up(x, here, w, None, (act.SILU, 0.0, 0.0), config=few, share=True)
    assert torch.equal(h.isnan().all(1), here.flatten() < 0) and (here < 0).any()
    assert not h[here.flatten() >= 0].isnan().any()


def check_reference(tokens, top_k, dim, ffn, seed=0):
    """What kernels are tested against, with -1 too."""
    draw = Draw(seed, "cpu")
    x = draw.normal(tokens, dim)
    w1, w2 = draw.normal(EXPERTS, 2 * ffn, dim, scale=dim**-0.5), draw.normal(EXPERTS, dim, ffn, scale=ffn**-0.5)
    silu = act_ops.GATED["silu"].reference

    def run(x, weights, index, own, **more):
        stacks = behind_nan(w1, own), behind_nan(w2, own)
        return moe_ops.run_experts.reference(x, weights, index, *stacks, b1=None, b2=None, act=silu, **more)

    check_sum(run, x, *routed(draw, tokens, top_k), 1e-5)
    coded = make_codes("int4-32", draw, EXPERTS, 2 * ffn, dim), make_codes("int4-32", draw, EXPERTS, dim, ffn)

    def run_coded(x, weights, index, own, **more):
        sides = (codes_of(side, own) for side in coded)
        return ops.run_coded_experts.reference(x, weights, index, *sides, b1=None, b2=None, act=silu, **more)

    check_sum(run_coded, x, *routed(draw, tokens, top_k), 1e-5)
