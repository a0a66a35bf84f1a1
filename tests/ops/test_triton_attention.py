"""The Triton attention backend, its kernels interpreted on CPU, against the reference (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

from quire.attention.triton import TritonAttention, parts_wanted, write_kv
from quire.ops.qkv import QkvPrep, prepare_qkv
from quire.schema.errors import ConfigError
from tests.attention_case import RULE_NAMES, RULES, Case

MIXES = {
    "decodes": [(n, 1) for n in (5, 90, 173, 8, 64, 1)],
    "fresh prompts": [(40, 40), (1, 1), (75, 75)],
    "chunks": [(12, 5), (140, 70), (21, 2)],
    "everything": [(12, 5), (150, 1), (9, 9), (3, 1), (170, 31), (60, 0), (128, 1), (2, 2)],
    "one": [(17, 1)],
}


def close(found, wanted, dtype=torch.float32):
    limit = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.float().cpu(), wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_any_mix_under_any_rule(rule):
    case = Case(MIXES["everything"], heads=4, kv_heads=2, size=16, rule=rule)
    close(case.run(TritonAttention(fixed=False))[0], case.reference())


@pytest.mark.parametrize("mix", sorted(set(MIXES) - {"everything"}))
def test_one_kind_of_row(mix):
    case = Case(MIXES[mix], heads=4, kv_heads=2, size=16, dtype=torch.float16)
    close(case.run(TritonAttention(fixed=False))[0], case.reference(), torch.float16)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_captured_decodes(rule, dtype=torch.float16):
    """Padded entries write nothing and give zeros; the splits come from contexts on the device."""
    lens = MIXES["decodes"]
    case = Case(lens, heads=6, kv_heads=2, size=32, rule=rule, dtype=dtype, seed=3)
    backend = TritonAttention(fixed=False)
    found, cache = case.run(backend, static=9)
    close(found[: len(lens)], case.reference(), dtype)
    assert not found[len(lens) :].any()
    unused = set(range(case.num_blocks)) - set(case.tables.flatten().tolist())
    assert cache.keys[list(unused)].isnan().all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page"),
    [(1, 1, 64, 16), (7, 1, 80, 16), (16, 1, 96, 32), (5, 5, 112, 8), (24, 1, 16, 64), (2, 2, 128, 24)],
)
def test_shapes(heads, kv_heads, size, page):
    case = Case(MIXES["everything"], heads=heads, kv_heads=kv_heads, size=size, block_size=page, seed=heads)
    close(case.run(TritonAttention(fixed=False))[0], case.reference())
    decodes = Case([(n, 1) for n in (150, 7)], heads=heads, kv_heads=kv_heads, size=size, block_size=page, seed=size)
    close(decodes.run(TritonAttention(fixed=False), static=2)[0], decodes.reference())


@pytest.mark.parametrize(("heads", "size", "value"), [(6, 20, 12), (40, 24, 16)])
def test_latent_values_are_a_slice_of_the_keys(heads, size, value):
    case = Case(MIXES["everything"], heads=heads, kv_heads=1, size=size, value=-value)
    close(case.run(TritonAttention(fixed=False))[0], case.reference())
    case = Case([(n, 1) for n in (90, 1, 40)], heads=heads, kv_heads=1, size=size, value=-value)
    close(case.run(TritonAttention(fixed=False), static=4)[0][:3], case.reference())


def test_values_of_another_size():
    case = Case(MIXES["everything"], heads=4, kv_heads=2, size=32, value=16)
    close(case.run(TritonAttention(fixed=False))[0], case.reference())


def test_rows_of_a_larger_table():
    case = Case(MIXES["everything"], heads=4, kv_heads=2, size=16)
    close(case.run(TritonAttention(fixed=False), mirror=True, spare=64)[0], case.reference())


@pytest.mark.parametrize("lens", [[(300, 9)], [(200, 1), (30, 1), (1, 1)]], ids=["chunk", "decodes"])
@pytest.mark.parametrize("rule", [{}, {"window": 150}, {"alibi": True, "sinks": True}], ids=["plain", "window", "more"])
def test_long_contexts_are_cut_into_parts(lens, rule):
    case = Case(lens, heads=4, kv_heads=1, size=16, rule=rule)
    backend = TritonAttention(fixed=False)
    plan = backend.plan(case.step(), case.group())
    close(plan.run(*case.inputs(), case.cache(backend), **case.options()), case.reference())
    works = [work for made in plan._made.values() for work in made]
    assert works and all(work.merges is not None and work.partials > 3 for work in works)


def test_a_fixed_result_depends_on_nothing_else():
    """The same query, alone or in company, in any chunking, eager or captured. (To the bit on a GPU: tests/device.
    The interpreter's matrix product depends on where in the tile a row lies.)"""
    rule = {"sinks": True}
    case = Case([(140, 40), (90, 1), (77, 77)], heads=4, kv_heads=2, size=32, rule=rule)
    backend = TritonAttention(fixed=True)
    whole, cache = case.run(backend)
    close(whole, case.reference())
    q, options = case.inputs()[0], case.options()
    for lens, places in [
        ([(140, 1), (90, 1)], [39, 40]),
        ([(110, 10), (90, 1), (50, 30)], [*range(10), 40, *range(61, 91)]),
    ]:
        part = Case.__new__(Case)
        part.__dict__.update(case.__dict__, lens=lens, contexts=[c for c, _ in lens], counts=[n for _, n in lens])
        plan = backend.plan(part.step(), case.group())
        close(plan.run(q[places], None, None, cache, **options), whole[places])
        if all(n == 1 for _, n in lens):
            plan = backend.plan(part.step(static=2), case.group())
            close(plan.run(q[places], None, None, cache, **options), whole[places])


def test_keys_may_already_be_written():
    case = Case(MIXES["everything"], heads=4, kv_heads=2, size=16)
    backend = TritonAttention(fixed=False)
    (q, k, v), cache, step = case.inputs(), case.cache(backend), case.step()
    write_kv(k, v, cache, step.slots)
    plan = backend.plan(step, case.group())
    close(plan.run(q, None, None, cache, **case.options()), case.reference())


@pytest.mark.parametrize("library", [False, True])
def test_from_the_fused_product_on(library):
    """As preparing and running one after the other do it."""
    case = Case([(12, 5), (150, 1), (300, 300)], heads=4, kv_heads=2, size=16, dtype=torch.float16)
    backend = TritonAttention(fixed=False, library=library)
    qkv = torch.cat(case.inputs(), 1).flatten(1)
    turns = torch.randn((2, 306, 1, 8), generator=torch.Generator().manual_seed(0)).half()
    prep = QkvPrep(
        4, 2, turns[0, 0, 0].repeat(2), turns[1, 0, 0].repeat(2), 1e-5, 0.0, False, turns[0], turns[1], False
    )
    cache, step = case.cache(backend), case.step()
    q = prepare_qkv(qkv.clone(), prep, cache.keys, cache.values, step.slots)
    wanted = backend.plan(step, case.group()).run(q, None, None, cache, **case.options())
    options = {name: value for name, value in case.options().items() if name != "v_size"}
    other = case.cache(backend)
    found = backend.plan(step, case.group()).run_fused(qkv, prep, other, **options)
    close(found, wanted.float(), torch.float16)


def test_library_attention_for_fresh_prompts():
    case = Case([(300, 300), (40, 40), (280, 280), (500, 1)], heads=4, kv_heads=2, size=16, dtype=torch.float16)
    backend = TritonAttention(fixed=False, library=True)
    plan = backend.plan(case.step(), case.group())
    found = plan.run(*case.inputs(), case.cache(backend), **case.options())
    (call,) = plan._made
    assert plan.lists.prompts(call) == [(0, 300), (340, 280)]
    close(found, case.reference(), torch.float16)


def test_writing_skips_negative_slots():
    case = Case([(20, 20)], heads=2, kv_heads=2, size=16, block_size=8)
    backend = TritonAttention(fixed=False)
    _, k, v = case.inputs()
    cache, slots = case.cache(backend), case.step().slots.clone()
    slots[3:9] = -1
    write_kv(k, v, cache, slots)
    for token, slot in enumerate(case.step().slots.tolist()):
        kept = cache.keys[slot // 8, slot % 8], cache.values[slot // 8, slot % 8]
        if 3 <= token < 9:
            assert kept[0].isnan().all() and kept[1].isnan().all()
        else:
            assert torch.equal(kept[0], k[token]) and torch.equal(kept[1], v[token])


def test_parts_fill_the_device():
    assert parts_wanted(1, 8, 132) * 8 >= 264
    assert parts_wanted(256, 8, 132) < 256  # enough tiles: only rows far longer than the others are cut


def test_wrong_caches_are_refused():
    case = Case([(4, 4)], heads=1, kv_heads=1, size=16)
    backend = TritonAttention(fixed=False)
    with pytest.raises(ConfigError, match="does not hold"):
        backend.make_cache(case.spec(), 9, torch.zeros((8, case.spec().page_bytes), dtype=torch.uint8))
    with pytest.raises(ConfigError, match="NoneType"):
        backend.plan(case.step(), case.group()).run(*case.inputs(), None, **case.options())
