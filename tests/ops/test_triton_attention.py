"""The Triton attention backend, its kernels interpreted on CPU, against the reference (TRITON_INTERPRET=1)."""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

import quire.attention.library as library_room
import quire.attention.triton as attention
from quire.attention.library import Dense, Library, shape_of
from quire.attention.triton import TileSet, TritonAttention, target_splits, write_kv
from quire.ops.qkv import QkvPrep, prepare_qkv
from quire.ops.triton import attention_plan, rope
from quire.ops.triton.attention import AttentionTile
from quire.schema.errors import ConfigError
from tests.attention_case import RULE_NAMES, RULES, Case, CodedCase

MIXES = {
    "decodes": [(n, 1) for n in (5, 90, 173, 8, 64, 1)],
    "fresh prompts": [(40, 40), (1, 1), (75, 75)],
    "chunks": [(12, 5), (140, 70), (21, 2)],
    "everything": [(12, 5), (150, 1), (9, 9), (3, 1), (170, 31), (60, 0), (128, 1), (2, 2)],
    "one": [(17, 1)],
}


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch):
    """So that contexts of a test are cut into parts too."""
    monkeypatch.setattr(attention, "LEAST_KEYS", 32)


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


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_captured_mixes(rule, dtype=torch.float16):
    """Lists written before a replay; tokens of nobody give zeros and write nothing."""
    case = Case(MIXES["everything"], heads=6, kv_heads=2, size=32, rule=rule, dtype=dtype, seed=3)
    tokens = sum(case.counts)
    found, cache = case.run_refilled(TritonAttention(fixed=False), tokens + 37)
    close(found[:tokens], case.reference(), dtype)
    assert not found[tokens:].any()
    unused = set(range(case.num_blocks)) - set(case.tables.flatten().tolist())
    assert cache.keys[list(unused)].isnan().all()


def test_a_mix_that_has_no_room_is_refused():
    case = Case([(3, 1)] * (attention.MIXED_ROWS + 200), heads=2, kv_heads=2, size=16)
    backend = TritonAttention(fixed=False)
    with pytest.raises(AssertionError):
        case.run_refilled(backend, sum(case.counts))
    (room,) = backend.mixed_lists[case.group()].values()
    assert not room.items.any()  # nothing was written


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page"),
    [(1, 1, 64, 16), (7, 1, 80, 16), (16, 1, 96, 32), (5, 5, 112, 8), (24, 1, 16, 64), (2, 2, 128, 24)],
)
def test_shapes(heads, kv_heads, size, page):
    case = Case(MIXES["everything"], heads=heads, kv_heads=kv_heads, size=size, block_size=page, seed=heads)
    close(case.run(TritonAttention(fixed=False))[0], case.reference())
    decodes = Case([(n, 1) for n in (150, 7)], heads=heads, kv_heads=kv_heads, size=size, block_size=page, seed=size)
    close(decodes.run(TritonAttention(fixed=False), static=2)[0], decodes.reference())


@pytest.mark.parametrize("size", [320, 512])
@pytest.mark.parametrize("rule", [{}, {"window": 40}, {"softcap": 3.0}], ids=["plain", "window", "softcap"])
def test_large_heads(size, rule):
    """Whole steps and captured decodes, with fewer kv heads than heads, in both kinds of arithmetic."""
    lens = [(12, 5), (90, 1), (9, 9), (70, 31)]
    for dtype in (torch.float32, torch.float16):
        case = Case(lens, heads=4, kv_heads=2, size=size, rule=rule, dtype=dtype, seed=size)
        assert TritonAttention(fixed=False).supports(case.spec()) is None
        close(case.run(TritonAttention(fixed=False))[0], case.reference(), dtype)
    decodes = Case([(n, 1) for n in (90, 1, 40)], heads=6, kv_heads=2, size=size, rule=rule, dtype=torch.float16)
    close(decodes.run(TritonAttention(fixed=True), static=4)[0][:3], decodes.reference(), torch.float16)


def test_large_heads_from_the_fused_product_on():
    """Norm, rotation of a quarter of each head and the write, as the reference does them."""
    heads, kv_heads, size, tokens = 4, 2, 512, 9
    case = Case([(tokens, tokens)], heads=heads, kv_heads=kv_heads, size=size)
    qkv = torch.cat(case.inputs(), 1).flatten(1)
    angle = torch.rand((tokens, 1, size // 8), generator=torch.Generator().manual_seed(0))
    cos, sin = (torch.cat(pair, -1) for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))
    weight = torch.rand(size, generator=torch.Generator().manual_seed(1))
    prep = QkvPrep(heads, kv_heads, weight, weight, 1e-6, 0.0, False, cos, sin, False)
    backend, slots = TritonAttention(fixed=False), case.step().slots
    ours, wanted = case.cache(backend), case.cache(backend)
    found = rope.prepare_qkv(qkv.clone(), prep, ours.keys, ours.values, slots)
    close(found, prepare_qkv.reference(qkv.clone(), prep, wanted.keys, wanted.values, slots))
    written = slots // case.page, slots % case.page
    close(ours.keys[written], wanted.keys[written])
    close(ours.values[written], wanted.values[written])


def test_heads_that_are_too_large_are_refused():
    backend = TritonAttention(fixed=False)
    for size, value in [(513, 0), (64, 513)]:
        why = backend.supports(Case([(4, 4)], heads=1, kv_heads=1, size=size, value=value).spec())
        assert why == "heads of size 513"
    assert backend.supports(Case([(4, 4)], heads=1, kv_heads=1, size=576, value=-512).spec()) is None


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
    assert works and all(work.partials > 3 and (work.items[:, 6] > 1).any() for work in works)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("rule", [{}, {"sinks": True}, {"softcap": 3.0}], ids=["plain", "sinks", "softcap"])
@pytest.mark.parametrize(
    "tiles", [AttentionTile(32, 32, 4, 3, True, True), AttentionTile(32, 32, 4, 3, True, True, True)], ids=str
)
def test_forms_of_the_prompt_kernel(tiles, page, rule):
    """Multiplying ahead, and whole pages by the copy engine: for chunks that end anywhere, cut into parts or not."""
    lens = [(300, 9), (64, 64), (65, 33), (128, 64), (33, 33), (1, 1), (200, 150)]
    case = Case(lens, heads=4, kv_heads=2, size=32, block_size=page, rule=rule, dtype=torch.float16)
    backend, few = TritonAttention(fixed=False), AttentionTile(16, 32, 4, 3)
    backend.tiles = lambda *shape: TileSet(few, few, tiles, tiles)
    close(case.run(backend)[0], case.reference(), torch.float16)
    one = Case([(400, 30)], heads=4, kv_heads=1, size=32, block_size=page, rule=rule, dtype=torch.float16)
    close(one.run(backend)[0], one.reference(), torch.float16)


class TestSharedPrefix:
    """Rows that begin with the same blocks read them together."""

    LENS = [(n, 1) for n in (200, 190, 90, 173, 260, 130, 70)]
    MEMBERS = (0, 1, 3, 4, 5)

    @pytest.fixture(autouse=True)
    def _few_rows_are_enough(self, monkeypatch):
        monkeypatch.setattr(attention, "SHARE_ROWS", 3)
        monkeypatch.setattr(attention_plan.Sharing.__new__, "__defaults__", (32, 2, 64))  # probe, rows, saved

    def run(self, case, backend=None, static=0, **how):
        """(result, what was found to be shared)."""
        backend = backend or TritonAttention(fixed=False)
        plan = backend.plan(case.step(static=static, **how), case.group())
        pad = static - len(case.lens) if static else 0
        out = plan.run(*case.inputs(pad), case.cache(backend), **case.options())
        return out, [
            w.shared for made in plan._made.values() for w in made if w.shared is not None and w.shared.programs
        ]

    @pytest.mark.parametrize("how", [{"static": 9}, {}, {"mirror": True}], ids=["captured", "eager", "mirror"])
    @pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
    def test_any_rule(self, rule, how):
        case = Case(self.LENS, heads=4, kv_heads=2, size=32, rule=rule, shared=(128, self.MEMBERS))
        found, shared = self.run(case, **how)
        close(found[: len(self.LENS)], case.reference())
        assert not found[len(self.LENS) :].any()
        if case.window or case.chunk:
            assert not shared
        else:
            tokens, queries, *_ = shared[0].info.tolist()
            assert (tokens, queries) == (128, 5)
            assert tuple(shared[0].members[:5].tolist()) == self.MEMBERS

    def test_among_chunks(self):
        lens = [(140, 20), *self.LENS, (9, 9), (150, 2)]
        case = Case(lens, heads=4, kv_heads=2, size=32, shared=(128, (0, 1, 2, 4, 5, 6)))
        found, shared = self.run(case)
        close(found, case.reference())
        assert shared[0].info.tolist()[:2] == [128, 5]

    @pytest.mark.parametrize("page", [8, 24, 64])
    def test_pages_and_the_common_part_of_different_lengths(self, page):
        """Rows 3 and 4 share more with each other than with the rest; tokens are a whole number of tiles and pages."""
        case = Case(self.LENS, heads=4, kv_heads=2, size=16, block_size=page, shared=(page * (120 // page), (0, 1, 3)))
        found, shared = self.run(case, static=8)
        close(found[:7], case.reference())
        tokens, queries, *_ = shared[0].info.tolist()
        assert queries == 3 and tokens <= 120 and tokens % page == 0 and (tokens > 0 or page == 24 or page == 64)

    def test_latent_heads_in_many_tiles(self):
        case = Case(self.LENS, heads=40, kv_heads=1, size=24, value=-16, shared=(112, self.MEMBERS))
        found, shared = self.run(case, static=8)
        close(found[:7], case.reference())
        tokens, queries, _, tiles, parts, *_ = shared[0].info.tolist()
        assert tokens == 96 and queries == 5 and tiles >= 200 // 32 and tiles * parts <= shared[0].programs

    def test_nothing_shared_or_not_worth_it(self):
        alone = Case(self.LENS, heads=4, kv_heads=2, size=16)
        found, shared = self.run(alone, static=8)
        close(found[:7], alone.reference())
        assert shared[0].info.tolist()[0] == 0 and shared[0].info.tolist()[4] == 0
        little = Case(self.LENS, heads=4, kv_heads=2, size=16, shared=(16, self.MEMBERS))
        found, shared = self.run(little, static=8)
        close(found[:7], little.reference())
        assert shared[0].info.tolist()[0] == 0

    def test_forms(self):
        """The shared kernel multiplying ahead, over whole pages by the copy engine."""
        case = Case(self.LENS, heads=4, kv_heads=2, size=32, block_size=32, dtype=torch.float16,
                    shared=(128, self.MEMBERS))  # fmt: skip
        backend, few = TritonAttention(fixed=False), AttentionTile(16, 32, 4, 3)
        tiles = AttentionTile(16, 32, 4, 3, True, True, True)
        backend.tiles = lambda *shape: TileSet(few, few, tiles, tiles)
        found, shared = self.run(case, backend, static=8)
        close(found[:7], case.reference(), torch.float16)
        assert shared[0].info.tolist()[0] == 128

    @pytest.mark.parametrize("sharing", [False, True])
    def test_an_eager_step_asks_the_host_first(self, sharing):
        """Where no block comes often enough the device does not look."""
        case = Case(self.LENS, heads=4, kv_heads=2, size=16, shared=(128, self.MEMBERS) if sharing else ())
        backend, step = TritonAttention(fixed=False), case.step()
        rows = np.arange(len(self.LENS))
        monkey = pytest.MonkeyPatch()
        monkey.setattr(attention, "PROBE", 32)
        step = step._replace(host_tables=case.tables.numpy()[::-1], host_rows=rows[::-1].copy())
        plan = backend.plan(step, case.group())
        close(plan.run(*case.inputs(), case.cache(backend), **case.options()), case.reference())
        monkey.undo()
        (work,) = next(iter(plan._made.values()))
        assert bool(work.shared.programs) == sharing

    @pytest.mark.parametrize("page", [16, 512])
    def test_tables_that_end_before_the_probe(self, page):
        """The host's table has no such column where no row can be that long; it is the first of longer pages."""
        lens = [(n, 1) for n in (40, 38, 50, 46, 33, 41)]
        case = Case(lens, heads=4, kv_heads=2, size=16, block_size=page)
        backend, step = TritonAttention(fixed=False), case.step()
        step = step._replace(host_tables=case.tables.numpy(), host_rows=np.arange(len(lens)))
        plan = backend.plan(step, case.group())
        close(plan.run(*case.inputs(), case.cache(backend), **case.options()), case.reference())
        (work,) = next(iter(plan._made.values()))
        assert not work.shared.programs

    def test_fixed_results_share_nothing(self):
        case = Case(self.LENS, heads=4, kv_heads=2, size=16, shared=(128, self.MEMBERS))
        found, shared = self.run(case, TritonAttention(fixed=True), static=8)
        close(found[:7], case.reference())
        assert not shared


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


@pytest.mark.parametrize("library", [None, Library(least=256, worth=0)], ids=["kernels", "library"])
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


def of_heads(case, norm=True, wide=False, offset=0.0):
    """(fused projection, what is applied to it) of a step whose every entry has one token."""
    make = torch.Generator().manual_seed(1)
    tokens, size = len(case.lens), case.size
    weights = torch.rand((2, size), generator=make).to(case.dtype) + 0.5
    angle = torch.rand((tokens, 1, size // 2), generator=make)
    cos, sin = (torch.cat(pair, -1).to(case.dtype) for pair in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    q_weight, k_weight = weights if norm else (None, None)
    prep = QkvPrep(case.heads, case.kv_heads, q_weight, k_weight, 1e-5, offset, wide, cos, sin, False)
    return torch.cat(case.inputs(), 1).flatten(1), prep


class TestOneLaunch:
    """Captured decodes of a row: norms, rotary embedding, cache write and attention in one kernel, as one by one."""

    @pytest.fixture(autouse=True)
    def _several_rows(self, monkeypatch):
        monkeypatch.setattr(attention, "ONE_LAUNCH_ROWS", 4)

    def check(self, case, monkeypatch, **kinds):
        backend = TritonAttention(fixed=False)
        qkv, prep = of_heads(case, **kinds)
        before, step = case.cache(backend), case.step(static=len(case.lens))
        q = prepare_qkv.reference(qkv.clone(), prep, before.keys, before.values, step.slots, False, before.scales)
        wanted = backend.plan(step, case.group()).run(q, None, None, before, **case.options())
        launched, attend_one = [], attention.attention_one.attend_one
        monkeypatch.setattr(
            attention.attention_one, "attend_one", lambda *a, **b: (launched.append(1), attend_one(*a, **b))
        )
        cache = case.cache(backend)
        found = backend.plan(step, case.group()).run_fused(qkv, prep, cache, scale=case.scale)
        assert launched
        close(found, wanted.float(), torch.float16)
        keys, values, keys_before, values_before = (
            pages.float().nan_to_num(7.0) for pages in (cache.keys, cache.values, before.keys, before.values)
        )
        if cache.scales is None:
            close(keys, keys_before, torch.float16)
        else:  # a rotation that is rounded otherwise may fall to a neighbouring code
            assert ((keys - keys_before).abs() <= 0.25 * keys_before.abs() + 2**-6).all()
            assert (keys != keys_before).sum() <= max(4, 0.03 * case.size * len(case.lens) * case.kv_heads)
        assert values.equal(values_before)
        assert not backend.workspace.get(1, 1, qkv.device).counters.any()

    @pytest.mark.parametrize("context", [1, 2, 65, 66, 140])
    def test_contexts(self, context, monkeypatch):
        case = Case([(context, 1)], heads=4, kv_heads=1, size=64, dtype=torch.float16, seed=context)
        self.check(case, monkeypatch)

    @pytest.mark.parametrize(("group", "page"), [(1, 16), (3, 48), (8, 64), (16, 128)])
    def test_groups_and_pages(self, group, page, monkeypatch):
        case = Case([(133, 1)], heads=group, kv_heads=1, size=64, block_size=page, dtype=torch.float16)
        self.check(case, monkeypatch)

    @pytest.mark.parametrize("kinds", [{"norm": False}, {"wide": True}, {"offset": 1.0}])
    def test_norms(self, kinds, monkeypatch):
        self.check(Case([(70, 1)], heads=2, kv_heads=1, size=128, dtype=torch.float16), monkeypatch, **kinds)

    @pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize("context", [1, 66, 140])
    def test_a_cache_in_8_bits(self, context, form, monkeypatch):
        """The scales of keys and of values are used once each; the new token counts as its code."""
        case = CodedCase([(context, 1), (3, 1)], heads=8, kv_heads=2, size=64, dtype=torch.float16, form=form,
                         scales=(0.02, 0.3), seed=context)  # fmt: skip
        monkeypatch.setattr(attention.attention_one, "most_splits", lambda *_: 2)
        self.check(case, monkeypatch)

    def test_several_rows(self, monkeypatch):
        lens = [(70, 1), (1, 1), (140, 1)]
        self.check(Case(lens, heads=8, kv_heads=2, size=64, dtype=torch.float16), monkeypatch)

    def test_more_tiles_than_splits(self, monkeypatch):
        monkeypatch.setattr(attention.attention_one, "most_splits", lambda *_: 2)
        self.check(Case([(300, 1)], heads=4, kv_heads=1, size=64, dtype=torch.float16), monkeypatch)

    def test_a_padded_entry_gives_zeros_and_writes_nothing(self):
        case, backend = Case([(70, 1)], heads=4, kv_heads=2, size=64, dtype=torch.float16), TritonAttention(fixed=False)
        qkv, prep = of_heads(case)
        step, cache = case.step(static=2), case.cache(backend)
        prep = prep._replace(cos=prep.cos.repeat(2, 1, 1), sin=prep.sin.repeat(2, 1, 1))
        found = backend.plan(step, case.group()).run_fused(qkv.repeat(2, 1), prep, cache, scale=case.scale)
        assert found[0].any() and not found[1].any()
        unused = set(range(case.num_blocks)) - set(case.tables.flatten().tolist())
        assert cache.keys[list(unused)].isnan().all()

    @pytest.mark.parametrize(
        ("changes", "fits"),
        [
            ({}, True), ({"pairs": True}, False), ({"cos": None}, False), ({"k_weight": None}, False),
            ({"q_weight": torch.ones(4, 64)}, False), ({"heads": 34}, False),
        ],
    )  # fmt: skip
    def test_what_goes_another_way(self, changes, fits):
        case = Case([(70, 1)], heads=4, kv_heads=2, size=64, dtype=torch.float16)
        coded = CodedCase([(70, 1)], heads=4, kv_heads=2, size=64, dtype=torch.float16, form="int8")
        pages = coded.cache(TritonAttention(fixed=False))
        assert not attention.attention_one.fits(of_heads(case)[1], pages.keys, pages.values, torch.float16)
        cache, prep = case.cache(TritonAttention(fixed=False)), of_heads(case)[1]._replace(**changes)
        assert attention.attention_one.fits(prep, cache.keys, cache.values, torch.float16) is fits


def test_library_attention_for_fresh_prompts():
    """Adjacent prompts of one length in one run; short ones, continued ones and windows stay with the kernels."""
    lens = [(300, 300), (300, 300), (40, 40), (280, 280), (500, 300)]
    case = Case(lens, heads=4, kv_heads=2, size=16, dtype=torch.float16)
    backend = TritonAttention(fixed=False, library=Library(least=256, worth=0))
    plan = backend.plan(case.step(), case.group())
    found = plan.run(*case.inputs(), case.cache(backend), **case.options())
    (call,) = plan._made
    assert plan.lists.prompts(call) == [Dense(0, 2, 300, 300), Dense(640, 1, 280, 280)]
    close(found, case.reference(), torch.float16)
    whole = Case([(256, 256)] * 2, heads=4, kv_heads=2, size=16, dtype=torch.float16)
    plan = backend.plan(whole.step(), whole.group())
    close(plan.run(*whole.inputs(), whole.cache(backend), **whole.options()), whole.reference(), torch.float16)
    assert not plan._made  # nothing was left for the kernels
    windowed = Case(lens[:2], heads=4, kv_heads=2, size=16, dtype=torch.float16, rule={"window": 100})
    assert not backend.plan(windowed.step(), windowed.group()).lists.runs


def test_a_shape_goes_to_the_library_once_it_has_returned():
    library = Library(least=4, worth=2 * 2 * 8**2)
    entries = np.array([[0, 0, 8, 8], [1, 8, 8, 8], [2, 16, 3, 3]], np.int32)
    fresh = entries[:, 2] == entries[:, 3]
    found = [library.choose(entries, fresh, torch.device("cpu"))[0] for _ in range(3)]
    assert found == [[], [], [Dense(0, 2, 8, 8)]]
    longer = np.array([[0, 0, 9, 9]], np.int32)
    assert library.choose(longer, np.ones(1, np.bool_), torch.device("cpu"))[0] == []  # another shape


@pytest.mark.parametrize("length", [33, 65, 100, 127, 128, 1000, 1025, 8000, 8192, 8193, 100_000])
def test_a_shape_is_little_longer_than_the_prompt(length):
    shape = shape_of(length)
    assert length <= shape <= length * (1 + 1 / 16)
    assert shape_of(shape) == shape


def test_prompts_are_padded_to_a_shape_that_is_ready():
    """In the middle of a step by what follows, at its end by zeros."""
    case = Case([(280, 280), (295, 295), (300, 300)], heads=4, kv_heads=2, size=16, dtype=torch.float16)
    library = Library(least=256, worth=1)
    backend = TritonAttention(fixed=False, library=library)
    library._seen[1, 304] = 1
    found = backend.plan(case.step(), case.group())
    out = found.run(*case.inputs(), case.cache(backend), **case.options())
    assert found.lists.runs == [Dense(280, 1, 295, 304), Dense(575, 1, 300, 304)]
    close(out, case.reference(), torch.float16)


def test_some_shapes_are_prepared(monkeypatch):
    monkeypatch.setattr(library_room, "PREPARED_RUN", 8)
    monkeypatch.setattr(library_room, "PREPARED", (16, 64))
    case = Case([(32, 32)], heads=4, kv_heads=2, size=16, dtype=torch.float16)
    library = Library(least=4, worth=1 << 40)
    backend = TritonAttention(fixed=False, library=library)
    plan, cache = backend.plan(case.step(), case.group()), case.cache(backend)
    prep = QkvPrep(4, 2, None, None, 1e-5, 0.0, False, None, None, False)
    plan.run_fused(torch.cat(case.inputs(), 1).flatten(1), prep, cache, scale=0.25)
    backend.prepare(32, 40)

    def choose(length: int, rows: int) -> list[Dense]:
        entries = np.array([[row, length * row, length, length] for row in range(rows)], np.int32)
        return library.choose(entries, np.ones(rows, np.bool_), torch.device("cpu"))[0]

    assert choose(8, 4) == [Dense(0, 4, 8, 8)]
    assert choose(16, 2) == [Dense(0, 1, 16, 16), Dense(16, 1, 16, 16)]
    assert choose(8, 3) == choose(12, 1) == choose(64, 1) == []


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
    assert target_splits(1, 8, 132) * 8 >= 264
    assert target_splits(256, 8, 132) < 256  # enough tiles: only rows far longer than the others are cut


def test_wrong_caches_are_refused():
    case = Case([(4, 4)], heads=1, kv_heads=1, size=16)
    backend = TritonAttention(fixed=False)
    with pytest.raises(ConfigError, match="is too small"):
        backend.make_cache(case.spec(), 9, torch.zeros((8, case.spec().page_bytes), dtype=torch.uint8))
    with pytest.raises(ConfigError, match="NoneType"):
        backend.plan(case.step(), case.group()).run(*case.inputs(), None, **case.options())
