"""Experts in MXFP4 (ops/triton/moe_mx.py): the form in memory, and the kernel as numpy runs it."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from dataclasses import replace
from functools import partial

import numpy as np

from quire.ops import act as act_ops
from quire.ops import coded_experts as ops
from quire.ops import moe as moe_ops
from quire.ops import mx_experts
from quire.ops.mx_experts import MxCodes, shapes_of
from quire.ops.op import FormTable, Kernels
from quire.ops.triton import act, moe, moe_mx
from quire.ops.triton.moe_mx import MxConfig
from quire.worker import trial
from tests import expert_rank_cases as rank_cases
from tests import gluon_on_numpy
from tests.coded_expert_cases import as_mx, make_codes, sorted_pairs, summed
from tests.fused_cases import Draw

LIMIT = 1.5e-2
CLAMPS = {"alpha": 1.702, "limit": 2.0}


class Launched:
    """Takes a kernel's place: kernel[grid](..)."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        def launch(*given, num_warps, maxnreg, **constants):
            assert num_warps == constants["WARPS"]
            self.run(grid, *given, **constants)

        return launch


@pytest.fixture
def by_numpy(monkeypatch):
    kernel = Launched(gluon_on_numpy.runner(moe_mx, "_mx_kernel"))
    monkeypatch.setattr(moe_mx, "_mx_kernel", kernel)


def made(experts, rows, width, seed=0):
    return make_codes("mxfp4", Draw(seed, "cpu", torch.bfloat16), experts, rows, width)


def decoded(packed, tile, unit):
    """[16, 64] of the first expert, by the kernel's own instructions."""
    words = packed.codes[0, tile, unit].view(1, 8, 4, 4).numpy()
    by = packed.scale[0, tile, unit].view(1, 8, 1, 1).numpy()
    run = gluon_on_numpy.inline_asm_elementwise
    out = run(moe_mx._decoded(), moe_mx._REGISTERS.value, [words, by], dtype=("bf16",) * 8, is_pure=True, pack=4)
    # pair, row, thread, 8 further, column of the pair -> rows, columns
    found = np.stack(out).reshape(8, 8, 4, 2, 2).transpose(3, 1, 0, 2, 4).reshape(16, 64)
    return found.astype(np.float64) * 2.0**64


@pytest.mark.parametrize("gated", [False, True])
def test_the_kernel_decodes_the_numbers_that_were_packed(gated):
    w = made(1, 64, 128)
    packed = as_mx(w, gated=gated)
    numbers = w.numbers(0)
    for tile in range(4):
        eights = (8 * tile, 32 + 8 * tile) if gated else (16 * tile, 16 * tile + 8)
        wanted = torch.cat([numbers[first : first + 8] for first in eights])
        for unit in range(2):
            np.testing.assert_array_equal(decoded(packed, tile, unit), wanted[:, 64 * unit : 64 * unit + 64].numpy())


def test_every_code_and_scale():
    """All sixteen codes times all scales that are held to be exact."""
    packed = MxCodes(*(torch.empty(shape, dtype=torch.int32) for shape in shapes_of(1, 16, 64)), 16, 64, False)
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 4)
    for exponent in range(mx_experts._LEAST, mx_experts._MOST + 1):
        scale = torch.full((16, 2), exponent, dtype=torch.uint8)
        assert packed.put(0, 0, codes, scale)
        w = ops.ExpertCodes("e2m1", ops.close_chunks(codes)[None], 64, scale.repeat(1, 2)[None], (1, 32))
        np.testing.assert_array_equal(decoded(packed, 0, 0), w.numbers(0).double().numpy())


def combined_by_torch(monkeypatch):
    monkeypatch.setattr(moe, "sort_pairs", lambda index, experts, bm, **_: sorted_pairs(index, experts, bm))
    monkeypatch.setattr(moe_mx, "combine", summed)


@pytest.mark.parametrize(
    ("tokens", "top_k", "dim", "ffn", "configs"),
    [
        (1, 2, 192, 64, (MxConfig(8, 4, 2), MxConfig(8, 4, 4))),  # tile i is pair i; fewer units than are loaded
        (1, 2, 192, 192, (MxConfig(8, 4, 4), MxConfig(8, 4, 2, parts=3))),
        (1, 2, 64, 448, (MxConfig(8, 4, 2), MxConfig(8, 4, 2, parts=3))),  # 7 units are not three equal parts
        (1, 2, 64, 320, (MxConfig(8, 4, 2), MxConfig(8, 8, 4))),  # a last turn of one unit; rows past the end
        (2, 2, 192, 64, None),  # as above: pairs of two tokens
        (7, 2, 192, 80 * 4, (MxConfig(8, 8, 2), MxConfig(8, 8, 2))),
        (21, 2, 128, 64, (MxConfig(16, 4, 1), MxConfig(16, 4, 2))),  # several tiles of an expert
        (5, 3, 320, 64, (MxConfig(32, 4, 4), MxConfig(32, 8, 1))),
    ],
)
def test_experts(by_numpy, monkeypatch, tokens, top_k, dim, ffn, configs):
    experts, draw = 3, Draw(1, "cpu", torch.bfloat16)
    w1, w2 = made(experts, 2 * ffn, dim, 2), made(experts, dim, ffn, 3)
    x, stream = draw.normal(tokens, dim), draw.normal(tokens, dim)
    b1, b2 = draw.normal(experts, 2 * ffn), draw.normal(experts, dim)
    weights, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32), top_k)
    index = index.int()
    combined_by_torch(monkeypatch)
    first, second = as_mx(w1, gated=True), as_mx(w2, gated=False)
    for code, meant in (
        ((act.CLAMPED, *CLAMPS.values()), partial(act_ops.clamped_swiglu.reference, **CLAMPS)),
        ((act.SILU, 0.0, 0.0), act_ops.GATED["silu"].reference),
    ):
        rest = {"b1": b1, "b2": b2, "stream": stream}
        found = moe_mx.run_experts(x, weights, index, first, second, act=code, configs=configs, **rest)
        wide = {name: value.float() for name, value in rest.items()}
        wanted = ops.run_coded_experts.reference(x.float(), weights, index.long(), w1, w2, act=meant, **wide)
        error = (found.float() - wanted).norm() / (wanted - stream.float()).norm()
        assert error < LIMIT
    rest |= {"b1": None, "b2": None}
    moved = moe_mx.run_experts(x, weights, index, first, second, act=code, configs=configs, **rest)
    assert (moved.float() - wanted).norm() / (wanted - stream.float()).norm() > 4 * LIMIT  # the biases count


@pytest.mark.parametrize(
    ("tokens", "configs"),
    [(2, None), (2, (MxConfig(8, 4, 2), MxConfig(8, 4, 2, parts=3))), (9, (MxConfig(8, 4, 2),) * 2)],
)
def test_experts_of_several_ranks(by_numpy, monkeypatch, tokens, configs):
    """Together as one; each computes its own pairs alone, and what nobody has written is not a number."""
    combined_by_torch(monkeypatch)
    dim, ffn, draw = 128, 192, Draw(1, "cpu", torch.bfloat16)
    w1, w2 = made(rank_cases.EXPERTS, 2 * ffn, dim, 2), made(rank_cases.EXPERTS, dim, ffn, 3)

    def run(x, weights, index, own, *, stream=None, **more):
        first, second = (rank_cases.codes_of(w, own) for w in (w1, w2))
        sides = as_mx(first, gated=True), as_mx(second, gated=False)
        stream = torch.zeros_like(x) if stream is None else stream
        known = {"b1": None, "b2": None, "act": (act.SILU, 0.0, 0.0), "configs": configs}
        return moe_mx.run_experts(x, weights, index, *sides, stream=stream, **known, **more)

    x, (weights, index) = draw.normal(tokens, dim), rank_cases.routed(draw, tokens, 3)
    whole, total = run(x, weights, index.int(), tuple(range(rank_cases.EXPERTS))).float(), 0.0
    for own in rank_cases.RANKS:
        here = rank_cases.places(index, own)
        with rank_cases.unwritten_is_nan():
            part = run(x, weights, here, own, all_experts=rank_cases.EXPERTS).float()
        assert not part.isnan().any() and not part[(here < 0).all(1)].any()
        total += part
    assert (here < 0).all(1).any()
    assert (total - whole).norm() / whole.norm() < LIMIT


def test_which_experts_are_packed():
    """bfloat16, whole units, activations that the kernel has; and none where results must not depend on the batch."""
    table, silu = FormTable("cuda"), act_ops.GATED["silu"].reference
    clamped = partial(act_ops.clamped_swiglu.reference, **CLAMPS)
    codes = {silu: act.SILU, act_ops.GATED["gelu"].reference: act.GELU, clamped.func: act.CLAMPED}
    moe_mx.add_forms(table, codes, lambda kernels: not kernels.batch_invariant, early=False)
    kernels = Kernels(torch.device("cuda"), table)
    fits, bf16 = kernels.of(mx_experts.multiplies_mx), torch.bfloat16
    assert fits(bf16, 2880, 2880, clamped) and fits(bf16, 64, 128, silu)
    assert not fits(torch.float16, 2880, 2880, clamped) and not fits(torch.float32, 2880, 2880, clamped)
    assert not fits(bf16, 2880, 1440, clamped) and not fits(bf16, 96, 128, silu)  # as two ranks cut gpt-oss
    assert not fits(bf16, 64, 128, act_ops.GATED["gelu"].reference) and not fits(bf16, 64, 128, torch.relu)
    fixed = replace(kernels, batch_invariant=True)
    assert not fixed.of(mx_experts.multiplies_mx)(bf16, 2880, 2880, clamped)
    assert fixed.of(ops.run_coded_experts) is ops.run_coded_experts.reference


def test_other_codes_take_the_form_used_otherwise(monkeypatch):
    table, silu = FormTable("cuda"), act_ops.GATED["silu"].reference
    table.form(ops.run_coded_experts)(lambda *given, **named: ("otherwise", given[3], named))
    moe_mx.add_forms(table, {silu: act.SILU}, lambda kernels: True, early=True)
    run = Kernels(torch.device("cuda"), table).of(ops.run_coded_experts)
    monkeypatch.setattr(moe_mx, "run_experts", lambda *given, **named: ("packed", given[2].dtype, named))
    w = made(1, 128, 64)
    x, one, index = torch.zeros(1, 64, dtype=torch.bfloat16), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    rest = {"b1": None, "b2": None, "act": silu, "stream": None, "all_experts": 2}
    assert run(x, one, index, w, w, **rest) == ("otherwise", w, rest)
    packed = as_mx(w, gated=True), as_mx(made(1, 64, 64), gated=False)
    name, dtype, named = run(x, one, index, *packed, **rest)
    assert name == "packed" and dtype is torch.int32 and named["early"] and named["act"] == (act.SILU, 0.0, 0.0)
    assert named["all_experts"] == 2


@pytest.mark.parametrize("experts", [8, 32, 128, 512])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_every_size_is_met_at_start(experts, top_k):
    """A start compiles what steps of `trial.TOKENS` tokens launch: any other number of tokens takes one of those."""

    def chosen(tokens):
        return moe_mx.configs_of(tokens, top_k * tokens, experts), tokens <= moe_mx.FEW_TOKENS

    largest = 8192
    met = {chosen(tokens) for tokens in (1, *trial.TOKENS, largest)}
    assert {chosen(tokens) for tokens in range(1, largest + 1)} == met
