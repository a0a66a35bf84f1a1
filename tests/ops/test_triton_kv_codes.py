"""Attention over caches in 8 bits, its kernels interpreted on CPU (TRITON_INTERPRET=1), against float32 arithmetic over
keys and values that the test rounds itself: the bound is that of the kernels' own precision, so that a scale that is
wrong, missing or applied twice fails."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

import triton
import triton.language as tl

import quire.attention.triton as attention
from quire.attention.library import Library
from quire.attention.triton import TritonAttention
from quire.ops import kv_codes
from quire.ops.qkv import QkvPrep, prepare_qkv
from quire.ops.triton import attention_cache, attention_plan, rope
from tests.attention_case import RULE_NAMES, RULES, CodedCase

MIX = [(12, 5), (100, 1), (9, 9), (90, 21), (60, 0), (2, 2)]
DECODES = [(n, 1) for n in (5, 90, 64, 1)]
FORMS = {
    "e4m3": {"form": "float8_e4m3fn", "scales": (0.013, 0.37)},
    "e5m2": {"form": "float8_e5m2", "scales": (0.0007, 0.02)},
    "int8": {"form": "int8"},
}


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch):
    """So that contexts of a test are cut into parts too."""
    monkeypatch.setattr(attention, "LEAST_KEYS", 32)


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def case_of(lens, form, **named):
    return CodedCase(lens, **{"heads": 4, "kv_heads": 2, "size": 32, "dtype": torch.float16, **form, **named})


def close(found, expected, limit=4e-3):
    torch.testing.assert_close(found.float(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_any_mix_under_any_rule(form, rule):
    case = case_of(MIX, form, rule=rule)
    close(case.run(TritonAttention(fixed=False))[0], case.reference())


def test_captured_decodes(form):
    rule = {"window": 9, "softcap": 2.0, "sinks": True}
    case = case_of(DECODES, form, rule=rule, seed=3)
    found, _ = case.run(TritonAttention(fixed=False), static=6)
    close(found[: len(DECODES)], case.reference())
    assert not found[len(DECODES) :].any()


def test_captured_mixes(form):
    case = case_of(MIX, form, seed=4)
    tokens = sum(case.counts)
    found, _ = case.run_refilled(TritonAttention(fixed=False), tokens + 37)
    close(found[:tokens], case.reference())
    assert not found[tokens:].any()


@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(7, 1, 80, 16), (24, 1, 16, 64), (2, 2, 128, 24)])
def test_shapes(form, heads, kv_heads, size, page):
    case = case_of(MIX, form, heads=heads, kv_heads=kv_heads, size=size, block_size=page, seed=heads)
    close(case.run(TritonAttention(fixed=False), mirror=True, spare=64)[0], case.reference())


def test_large_heads_and_values_of_another_size(form):
    for sizes in ({"size": 320}, {"size": 32, "value": 16}):
        case = case_of([(12, 5), (90, 1), (9, 9), (70, 31)], form, **sizes)
        close(case.run(TritonAttention(fixed=False))[0], case.reference())


@pytest.mark.parametrize(("heads", "size", "value"), [(20, 24, 16)])
def test_latent_values_are_a_slice_of_the_keys(form, heads, size, value):
    """One scale, or one per token, for both."""
    for lens, how in ((MIX, {}), (DECODES, {"static": 5})):
        case = case_of(lens, form, heads=heads, kv_heads=1, size=size, value=-value)
        found = case.run(TritonAttention(fixed=False), **how)[0]
        close(found[: sum(case.counts)], case.reference())


def test_rows_that_share_a_prefix(form, monkeypatch):
    monkeypatch.setattr(attention, "SHARE_ROWS", 3)
    monkeypatch.setattr(attention_plan.Sharing.__new__, "__defaults__", (32, 2, 64))  # probe, rows, saved
    lens = [(n, 1) for n in (200, 190, 90, 173, 260, 130, 70)]
    case = case_of(lens, form, shared=(128, (0, 1, 3, 4, 5)))
    backend = TritonAttention(fixed=False)
    plan = backend.plan(case.step(static=9), case.group())
    found = plan.run(*case.inputs(2), case.cache(backend), **case.options())
    close(found[: len(lens)], case.reference())
    ((work,),) = plan._made.values()
    assert work.shared.info.tolist()[:2] == [128, 5]


def test_batch_invariant_mode(form):
    """The same query, alone or in company, in any chunking. (To the bit on a GPU: tests/device.)"""
    case = case_of([(140, 40), (90, 1), (77, 77)], form, rule={"sinks": True})
    backend = TritonAttention(fixed=True)
    whole, cache = case.run(backend)
    close(whole, case.reference())
    part = CodedCase.__new__(CodedCase)
    lens = [(110, 10), (90, 1), (50, 30)]
    part.__dict__.update(case.__dict__, lens=lens, contexts=[c for c, _ in lens], counts=[n for _, n in lens])
    places = [*range(10), 40, *range(61, 91)]
    plan = backend.plan(part.step(), case.group())
    torch.testing.assert_close(plan.run(case.inputs()[0][places], None, None, cache, **case.options()), whole[places])


def prep_of(tokens, size):
    """Norm, and a rotation of half of each head."""
    angle = torch.rand((tokens, 1, size // 4), generator=torch.Generator().manual_seed(0))
    cos, sin = (torch.cat(pair, -1).half() for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))
    weight = torch.rand(size, generator=torch.Generator().manual_seed(1)).half() + 0.5
    return QkvPrep(4, 2, weight, weight, 1e-5, 0.0, False, cos, sin, False)


@pytest.mark.parametrize("library", [None, Library(least=32, worth=0)], ids=["kernels", "library"])
def test_from_the_fused_product_on(form, library):
    """Prompts that the library computes read what the cache will hold, too."""
    case = case_of([(12, 5), (60, 1), (40, 40)], form, size=16)
    backend = TritonAttention(fixed=False, library=library)
    qkv, prep, step = torch.cat(case.inputs(), 1).flatten(1), prep_of(46, 16), case.step()
    expected = case.cache(backend)
    q = prepare_qkv.reference(qkv.clone(), prep, expected.keys, expected.values, step.slots, False, expected.scales)
    exact = backend.plan(step, case.group()).run(q, None, None, expected, **case.options())
    options = {name: value for name, value in case.options().items() if name != "v_size"}
    cache = case.cache(backend)
    plan = backend.plan(step, case.group())
    found = plan.run_fused(qkv, prep, cache, **options)
    assert bool(plan.lists.prompts(next(iter(plan._made)))) == (library is not None)
    close(found, exact.float(), 2e-2 if library else 4e-3)


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_written(form, keep):
    """Codes and scales as ops/kv_codes.py makes them, up to ties: one code in fifty may differ, by one step."""
    case = case_of([(12, 12)], form, size=64)
    backend, prep, slots = TritonAttention(fixed=False), prep_of(12, 64), case.step().slots.clone()
    slots[3:5] = -1
    qkv = torch.cat(case.inputs(), 1).flatten(1)
    ours, expected, kept, kept_expected = case.cache(backend), case.cache(backend), qkv.clone(), qkv.clone()
    rope.prepare_qkv(kept, prep, ours.keys, ours.values, slots, keep, ours.scales)
    prepare_qkv.reference(kept_expected, prep, expected.keys, expected.values, slots, keep, expected.scales)
    written = slots[slots >= 0]
    at = written // case.page, written % case.page
    for pages, others in ((ours.keys, expected.keys), (ours.values, expected.values)):
        codes, reference = pages[at].float(), others[at].float()
        step = 1.0 if form["form"] == "int8" else reference.abs().clamp(min=0.02) * 0.26
        assert ((codes - reference).abs() <= step).all()
        assert (codes != reference).float().mean() < 0.02
    untouched = sorted(set(range(case.num_blocks * case.page)) - set(written.tolist()))
    rest = torch.tensor(untouched)
    assert (ours.keys[rest // case.page, rest % case.page].view(torch.uint8) == 0xFF).all()
    if form["form"] == "int8":
        for found, other in zip(ours.scales, expected.scales, strict=True):
            torch.testing.assert_close(found[at], other[at], rtol=1e-3, atol=0.0)
    torch.testing.assert_close(kept, kept_expected, rtol=0.26 if keep else 0.0, atol=2e-2 if keep else 0.0)


@triton.jit
def _meant_kernel(x, out, largest: tl.constexpr, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, attention_cache.meant(tl.load(x + at), largest))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_codes_mean_is_computed_without_them(dtype):
    """Every code, the middle between any two, what lies beside it, and zero: as torch rounds."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    middles = (codes[1:] + codes[:-1]) / 2
    tries = torch.cat([codes, middles, torch.nextafter(middles, codes[1:]), torch.nextafter(middles, codes[:-1])])
    x = torch.zeros(1 << (len(tries) - 1).bit_length())
    x[: len(tries)] = tries
    found = torch.full_like(x, torch.nan)
    _meant_kernel[(1,)](x, found, kv_codes.LARGEST[dtype], len(x))
    assert torch.equal(found, x.to(dtype).float())


@pytest.mark.parametrize("largest", [*kv_codes.LARGEST.values()])
def test_what_is_not_a_number_has_no_code_that_is_one(largest):
    """Whatever its bits: those of the NaN that a GPU makes are all set but the sign."""
    x = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    found = torch.zeros_like(x)
    _meant_kernel[(1,)](x, found, largest, len(x))
    assert found.isnan().all()


def test_numbers_beyond_the_largest_code_become_it():
    case = case_of([(4, 4)], FORMS["e4m3"] | {"scales": (0.001, 0.001)}, size=16)
    backend = TritonAttention(fixed=False)
    cache, slots = case.cache(backend), case.step().slots
    k = torch.full((4, 2, 16), 100.0, dtype=torch.float16)
    cache.write(slots, k, -k)
    k, v = cache.read(slots, 1, torch.float32)
    assert (k - 0.448).abs().max() < 1e-6 and (v + 0.448).abs().max() < 1e-6


def test_vectors_that_are_not_numbers_are_read_as_such():
    case = case_of([(4, 4)], FORMS["int8"], size=16)
    backend = TritonAttention(fixed=False)
    cache, slots = case.cache(backend), case.step().slots
    k = torch.ones((4, 2, 16), dtype=torch.float16)
    k[1, 0, 3], k[2, 1, 5] = float("nan"), float("inf")
    cache.write(slots, k, k)
    k, _ = cache.read(slots, 1, torch.float32)
    bad = ~k[0].isfinite().all(-1)  # [heads, tokens]
    assert bad.nonzero().tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("fused", [False, True])
def test_scales_measured_by_the_first_step(fused):
    """The largest key gets the code 200 and the largest value 100; later steps leave the scales as they are."""
    case = case_of([(9, 9), (5, 5)], FORMS["e4m3"], size=16)
    backend = TritonAttention(fixed=False)
    cache, plan = case.cache(backend), backend.plan(case.step(), case.group())
    cache.uncalibrated = True
    q, k, v = case.inputs()
    if fused:
        prep = QkvPrep(4, 2, None, None, 1e-5, 0.0, False, None, None, False)
        plan.run_fused(torch.cat((q, k, v), 1).flatten(1), prep, cache, scale=0.25)
    else:
        plan.run(q, k, v, cache, **case.options())
    expected = torch.stack((k.float().abs().max() / 200, v.float().abs().max() / 100))
    torch.testing.assert_close(cache.layer_scales, expected)
    assert not cache.uncalibrated
    plan.run(q, 4 * k, v, cache, **case.options())
    torch.testing.assert_close(cache.layer_scales, expected)


def test_measured_scales_of_nothing_are_one():
    zeros = torch.zeros(3, 2, 4)
    assert kv_codes.measured_scales(zeros, None).tolist() == [1.0, 1.0]
    assert kv_codes.measured_scales(torch.full((1, 1, 1), 400.0), zeros[:0]).tolist() == [2.0, 1.0]
