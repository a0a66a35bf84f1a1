"""The Triton attention backend on a GPU against the reference in float32 on CPU: shapes, dtypes, rules, graphs."""

import random
from functools import partial

import pytest
import torch

from tests.attention_case import RULE_NAMES, RULES, Case, CodedCase

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
MIX = [(12, 5), (1500, 1), (90, 90), (3, 1), (1700, 310), (60, 0), (128, 1), (2, 2), (700, 64)]


def backend(**options):
    from quire.attention.triton import TritonAttention

    return TritonAttention(**{"fixed": False, **options})


def close(found, wanted, dtype):
    limit = LIMITS[dtype]
    found = found.float().cpu()
    assert (found - wanted).norm() <= limit * wanted.norm()
    torch.testing.assert_close(found, wanted, rtol=4 * limit, atol=4 * limit)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_any_mix_under_any_rule(rule, dtype):
    case = Case(MIX, heads=8, kv_heads=2, size=128, rule=rule, dtype=dtype, device="cuda")
    close(case.run(backend())[0], case.reference(), dtype)
    close(case.run(backend(), mirror=True)[0], case.reference(), dtype)


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256, 320, 512])
@pytest.mark.parametrize("group", [1, 2, 5, 8, 16, 24])
def test_sizes_and_groups(size, group):
    rng = random.Random(size * group)
    dtype, page = rng.choice(HALVES), rng.choice([16, 32, 64, 48])
    lens = [(c := rng.randint(1, 900), rng.choice([1, 1, c, rng.randint(1, c)])) for _ in range(7)]
    case = Case(lens, heads=2 * group, kv_heads=2, size=size, block_size=page, dtype=dtype, device="cuda", seed=size)
    close(case.run(backend())[0], case.reference(), dtype)
    decodes = Case([(c, 1) for c, _ in lens], heads=2 * group, kv_heads=2, size=size, block_size=page, dtype=dtype,
                   device="cuda", seed=group)  # fmt: skip
    found, _ = decodes.run(backend(), static=16)
    close(found[:7], decodes.reference(), dtype)
    assert not found[7:].any()


@pytest.mark.parametrize(
    ("page", "group", "dtype", "early"),
    [(64, 8, torch.bfloat16, True), (128, 5, torch.float16, False), (64, 1, torch.bfloat16, False)],
)
def test_prompts_by_warps_with_roles(page, group, dtype, early, monkeypatch):
    from quire.attention.triton import TritonAttention
    from quire.ops.triton import attention_prompts

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper's instructions")
    ran, plain = [], attention_prompts.attend_prompts
    monkeypatch.setattr(attention_prompts, "attend_prompts", lambda *a, **k: (ran.append(len(a[4])), plain(*a, **k)))
    monkeypatch.setattr(TritonAttention, "sms", lambda self, device: 1)  # any two tiles fill the device
    mixes = [MIX, [(64, 64), (63, 63), (65, 65), (127, 127), (129, 129), (1000, 1000)], [(900, 700), (512, 512)]]
    for seed, lens in enumerate(mixes):
        case = Case(lens, heads=2 * group, kv_heads=2, size=128, block_size=page, dtype=dtype, device="cuda", seed=seed)
        engine = backend()
        engine.early = early
        close(case.run(engine)[0], case.reference(), dtype)
    assert len(ran) == len(mixes)
    case = Case(MIX, heads=4, kv_heads=2, size=128, block_size=page, rule={"window": 40}, dtype=dtype, device="cuda")
    close(case.run(backend())[0], case.reference(), dtype)
    assert len(ran) == len(mixes)  # a window is not for these


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fixed", [False, True])
def test_large_heads(rule, dtype, fixed):
    case = Case(MIX, heads=8, kv_heads=2, size=512, rule=rule, dtype=dtype, device="cuda")
    close(case.run(backend(fixed=fixed))[0], case.reference(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_latent(heads, dtype):
    case = Case(MIX, heads=heads, kv_heads=1, size=576, value=-512, dtype=dtype, device="cuda")
    close(case.run(backend())[0], case.reference(), dtype)
    decodes = Case([(700, 1), (33, 1), (5000, 1)], heads=heads, kv_heads=1, size=576, value=-512, dtype=dtype,
                   device="cuda")  # fmt: skip
    close(decodes.run(backend(), static=4)[0][:3], decodes.reference(), dtype)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rule", [{}, {"window": 100, "sinks": True}], ids=["plain", "window"])
def test_a_graph_serves_any_contexts(rule, fixed):
    """Captured once with a warm-up in other contexts, replayed for two more steps: each as if run alone."""
    attention, dtype, bucket = backend(fixed=fixed), torch.bfloat16, 8
    longest = Case([(3000, 1)] * bucket, heads=16, kv_heads=8, size=128, rule=rule, dtype=dtype, device="cuda")
    step, (q, k, v), cache = longest.step(static=bucket), longest.inputs(), longest.cache(attention)
    q, k, v = q.clone(), k.clone(), v.clone()
    options = longest.options()
    attention.plan(step, longest.group()).run(q, k, v, cache, **options)
    plan, graph = attention.plan(step, longest.group()), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = plan.run(q, k, v, cache, **options)
    for seed, lens in enumerate([[2999, 17, 1, 640], [5, 1300, 64, 65, 2048, 900, 128]]):
        case = Case([(n, 1) for n in lens], heads=16, kv_heads=8, size=128, rule=rule, dtype=dtype, device="cuda",
                    seed=seed + 1)  # fmt: skip
        case.sinks = longest.sinks
        other, source = case.step(static=bucket), case.cache(attention)
        cache.keys[: case.num_blocks] = source.keys
        cache.values[: case.num_blocks] = source.values
        step.block_tables[: other.block_tables.shape[0], : other.block_tables.shape[1]] = other.block_tables
        step.block_tables[other.row_index[-1].item(), :] = -1
        for target, value in zip(
            (step.row_index, step.contexts, step.slots), (other.row_index, other.contexts, other.slots), strict=True
        ):
            target.copy_(value)
        for target, value in zip((q, k, v), case.inputs(bucket - len(lens)), strict=True):
            target.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        close(out[: len(lens)], case.reference(), dtype)
        assert not out[len(lens) :].any()


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_fixed_results_depend_on_nothing_else(size):
    """The same query, alone or in company, in any chunking, eager or captured: the same bits."""
    case = Case(
        [(1200, 340), (890, 1), (277, 277)], heads=8, kv_heads=2, size=size, dtype=torch.bfloat16, device="cuda"
    )
    attention = backend(fixed=True)
    whole, cache = case.run(attention)
    close(whole, case.reference(), torch.bfloat16)
    q, options = case.inputs()[0], case.options()
    for lens, places in [
        ([(1200, 1), (890, 1)], [339, 340]),
        ([(1160, 300), (890, 1), (250, 130)], [*range(300), 340, *range(461, 591)]),
        ([(1, 0), (890, 1), (1, 1)], [340, 341]),
    ]:
        part = Case.__new__(Case)
        part.__dict__.update(case.__dict__, lens=lens, contexts=[c for c, _ in lens], counts=[n for _, n in lens])
        plan = attention.plan(part.step(), case.group())
        assert torch.equal(plan.run(q[places], None, None, cache, **options), whole[places])
        if all(n == 1 for _, n in lens):
            plan = attention.plan(part.step(static=2), case.group())
            assert torch.equal(plan.run(q[places], None, None, cache, **options), whole[places])


@pytest.mark.parametrize("size", [64, 128])
def test_library_attention_for_fresh_prompts(size):
    """Runs among other rows, and a step that is one run."""
    from quire.attention.library import Library

    for lens in ([(600, 600), (600, 600), (40, 40), (1, 1), (1000, 1), (300, 300)], [(512, 512)] * 3):
        case = Case(lens, heads=8, kv_heads=2, size=size, dtype=torch.bfloat16, device="cuda")
        attention = backend(library=Library(least=256, worth=0))
        assert attention.library.usable(torch.device("cuda"))
        close(case.run(attention)[0], case.reference(), torch.bfloat16)


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("form", [{}, {"tma": True}, {"ahead": True}, {"ahead": True, "tma": True}], ids=str)
def test_forms_of_the_prompt_kernel(form, page):
    from quire.attention.triton import TileSet
    from quire.ops.triton.attention import AttentionTile

    lens = [(3000, 9), (64, 64), (65, 33), (1280, 640), (333, 333), (1, 1), (2000, 150), (700, 700)]
    for shape in [(64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3)]:
        case = Case(lens, heads=16, kv_heads=4, size=128, block_size=page, dtype=torch.bfloat16, device="cuda")
        attention, few, tiles = backend(), AttentionTile(16, 64, 4, 3), AttentionTile(*shape, True, **form)
        attention.tiles = lambda *key, few=few, tiles=tiles: TileSet(few, few, tiles, tiles)
        close(case.run(attention)[0], case.reference(), torch.bfloat16)


class TestSharedPrefix:
    """Many rows that begin with the same blocks, among some that do not."""

    LENS = [(n, 1) for n in (2100, 1900, 2900, 700, 1730, 2600, 1300, 70, *range(2000, 2040))]
    SHARING = tuple(row for row, (n, _) in enumerate(LENS) if n > 1500)

    def run(self, case, attention, static=0):
        plan = attention.plan(case.step(static=static), case.group())
        pad = static - len(case.lens) if static else 0
        out = plan.run(*case.inputs(pad), case.cache(attention), **case.options())
        (shared,) = [
            w.shared for made in plan._made.values() for w in made if w.shared is not None and w.shared.programs
        ]
        return out, shared.info.tolist()

    @pytest.mark.parametrize("rule", [{}, {"softcap": 3.0}, {"sinks": True}, {"alibi": True}], ids=str)
    @pytest.mark.parametrize("static", [0, 64])
    @pytest.mark.parametrize("page", [16, 64])
    def test_rules(self, page, static, rule):
        case = Case(self.LENS, heads=16, kv_heads=4, size=128, rule=rule, block_size=page, dtype=torch.bfloat16,
                    device="cuda", shared=(1472, self.SHARING))  # fmt: skip
        found, info = self.run(case, backend(), static)
        close(found[: len(self.LENS)], case.reference(), torch.bfloat16)
        assert info[:2] == [1472, len(self.SHARING)] and info[4] > 1

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "size", "value"), [(16, 8, 64, 0), (8, 1, 256, 0), (8, 2, 512, 0), (16, 1, 576, -512)]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_sizes(self, heads, kv_heads, size, value, dtype):
        case = Case(self.LENS, heads=heads, kv_heads=kv_heads, size=size, value=value, dtype=dtype, device="cuda",
                    shared=(1472, self.SHARING))  # fmt: skip
        found, info = self.run(case, backend(), 64)
        close(found[: len(self.LENS)], case.reference(), dtype)
        assert info[:2] == [1472, len(self.SHARING)]

    def test_a_graph_that_saw_none(self):
        """Captured where nothing is shared, replayed where much is."""
        attention, dtype, bucket = backend(), torch.bfloat16, 64
        alone = Case([(3000, 1)] * bucket, heads=16, kv_heads=8, size=128, dtype=dtype, device="cuda", block_size=64)
        step, inputs, cache = alone.step(static=bucket), [t.clone() for t in alone.inputs()], alone.cache(attention)
        attention.plan(step, alone.group()).run(*inputs, cache, **alone.options())
        plan, graph = attention.plan(step, alone.group()), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = plan.run(*inputs, cache, **alone.options())
        case = Case(self.LENS, heads=16, kv_heads=8, size=128, dtype=dtype, device="cuda", block_size=64,
                    shared=(1472, self.SHARING))  # fmt: skip
        other, source = case.step(static=bucket), case.cache(attention)
        cache.keys[: case.num_blocks], cache.values[: case.num_blocks] = source.keys, source.values
        rows, width = other.block_tables.shape
        step.block_tables[:rows, :width] = other.block_tables
        for target, value in zip(
            (step.row_index, step.contexts, step.slots), (other.row_index, other.contexts, other.slots), strict=True
        ):
            target.copy_(value)
        for target, value in zip(inputs, case.inputs(bucket - len(self.LENS)), strict=True):
            target.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        close(out[: len(self.LENS)], case.reference(), dtype)
        assert not out[len(self.LENS) :].any()


@pytest.mark.parametrize("with_library", [False, True])
def test_from_the_fused_product_on(with_library):
    """Whatever form `prepare_qkv` has on the device: as its reference and a run, one after the other."""
    from quire.attention.library import Library
    from quire.ops.qkv import QkvPrep, prepare_qkv

    case = Case([(12, 5), (1500, 1), (600, 600)], heads=16, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda")
    attention, tokens = backend(library=Library(least=256, worth=0) if with_library else None), 606
    qkv = torch.cat(case.inputs(), 1).flatten(1)
    weight, angle = torch.rand(128, device="cuda").bfloat16(), torch.rand(tokens, 1, 64, device="cuda")
    cos, sin = (torch.cat(pair, -1).bfloat16() for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))
    prep = QkvPrep(16, 8, weight, weight, 1e-6, 0.0, False, cos, sin, False)
    cache, other, step = case.cache(attention), case.cache(attention), case.step()
    q = prepare_qkv.reference(qkv.clone(), prep, cache.keys, cache.values, step.slots)
    wanted = attention.plan(step, case.group()).run(q, None, None, cache, **case.options())
    options = {name: value for name, value in case.options().items() if name != "v_size"}
    found = attention.plan(step, case.group()).run_fused(qkv, prep, other, **options)
    close(found, wanted.float().cpu(), torch.bfloat16)


class TestOneLaunch:
    """A captured decode of one row: norms, rotary embedding, cache write and attention in one kernel."""

    def captured(self, case, attention, norm=True):
        """(graph, its step, projection, cache, result, what is applied) of a step that another case may replace."""
        from quire.ops.qkv import QkvPrep

        make = torch.Generator().manual_seed(1)
        weights = (torch.rand((2, case.size), generator=make) + 0.5).to(case.dtype).cuda()
        angle = torch.rand((1, 1, case.size // 2), generator=make)
        turns = ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin()))
        cos, sin = (torch.cat(pair, -1).to(case.dtype).cuda() for pair in turns)
        q_weight, k_weight = weights if norm else (None, None)
        prep = QkvPrep(case.heads, case.kv_heads, q_weight, k_weight, 1e-6, 0.0, False, cos, sin, False)
        step, cache, qkv = case.step(static=1), case.cache(attention), torch.cat(case.inputs(), 1).flatten(1)
        plan = attention.plan(step, case.group())
        plan.run_fused(qkv, prep, cache, scale=case.scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plan.run_fused(qkv, prep, cache, scale=case.scale)
        return graph, step, qkv, cache, out, prep

    @pytest.mark.parametrize(
        ("group", "size", "page", "dtype", "norm", "form"),
        [
            (4, 128, 64, torch.bfloat16, True, None), (1, 64, 16, torch.float16, False, None),
            (8, 128, 48, torch.bfloat16, True, None), (16, 64, 128, torch.float16, True, None),
            (3, 256, 64, torch.bfloat16, False, None), (4, 128, 64, torch.bfloat16, True, "float8_e4m3fn"),
            (16, 64, 48, torch.float16, True, "float8_e4m3fn"), (2, 256, 64, torch.bfloat16, False, "float8_e5m2"),
            (1, 64, 16, torch.bfloat16, False, "float8_e5m2"),
        ],
    )  # fmt: skip
    def test_a_graph_for_any_context(self, group, size, page, dtype, norm, form, monkeypatch):
        """Over a cache in 16 bits, or of codes (form)."""
        from quire.attention import triton as plans
        from quire.ops.qkv import prepare_qkv

        launched, attend_one = [], plans.attention_one.attend_one
        monkeypatch.setattr(
            plans.attention_one, "attend_one", lambda *a, **b: (launched.append(1), attend_one(*a, **b))
        )
        shape = {"heads": 2 * group, "kv_heads": 2, "size": size, "block_size": page, "dtype": dtype, "device": "cuda"}
        made = partial(CodedCase, form=form, scales=(0.02, 0.3)) if form else Case
        attention = backend()
        longest = made([(5000, 1)], **shape)
        graph, step, qkv, cache, out, prep = self.captured(longest, attention, norm)
        assert launched
        for context in (1, 2, page, page + 1, 65, 66, 700, 2113, 2114, 5000):
            case = made([(context, 1)], **shape, seed=context)
            other, source = case.step(static=1), case.cache(attention)
            cache.keys.view(torch.uint8).fill_(0xFF)  # NaN in every form
            cache.values.view(torch.uint8).fill_(0xFF)
            cache.keys[: case.num_blocks], cache.values[: case.num_blocks] = source.keys, source.values
            rows, width = other.block_tables.shape
            step.block_tables[:rows, :width] = other.block_tables
            for name in ("row_index", "contexts", "slots"):
                getattr(step, name).copy_(getattr(other, name))
            qkv.copy_(torch.cat(case.inputs(), 1).flatten(1))
            q = prepare_qkv.reference(qkv.clone(), prep, source.keys, source.values, other.slots, False, source.scales)
            wanted = attention.plan(other, case.group()).run(q, None, None, source, **case.options())
            for _ in range(3):  # the counters of merged splits are ready for the next launch
                out.fill_(float("nan"))
                graph.replay()
                close(out, wanted.float().cpu(), dtype)
            written = (other.slots // page, other.slots % page)
            keys, values, keys_before, values_before = (
                pages.view(torch.uint8)[written].view(pages.dtype).float()
                for pages in (cache.keys, cache.values, source.keys, source.values)
            )
            bound = 0.25 * keys_before.abs() + 2**-6 if form else 2e-2 * (keys_before.abs() + 1)
            assert ((keys - keys_before).abs() <= bound).all()
            assert not form or (keys != keys_before).sum() <= 0.1 * keys.numel()  # a rounding before the code's
            assert values.equal(values_before)

    def test_a_padded_entry_gives_zeros(self):
        case = Case([(300, 1)], heads=8, kv_heads=2, size=128, dtype=torch.bfloat16, device="cuda")
        graph, step, _, cache, out, _ = self.captured(case, backend())
        before = cache.keys.clone()
        step.contexts.zero_()
        step.slots.fill_(-1)
        out.fill_(float("nan"))
        graph.replay()
        assert not out.any()
        assert cache.keys.view(torch.int16).equal(before.view(torch.int16))


def test_pages_at_the_far_end_of_a_large_cache():
    """Offsets past 2**31 elements: a cache of 6 GB, its last blocks used."""
    from quire.attention.triton import write_kv
    from quire.schema.kv import KVGroup

    case = Case([(300, 1), (90, 90)], heads=4, kv_heads=2, size=128, dtype=torch.bfloat16, device="cuda")
    attention, spec = backend(), case.spec()
    blocks = (6 << 30) // spec.page_bytes
    memory = torch.empty((blocks, spec.page_bytes), dtype=torch.uint8, device="cuda")
    cache = attention.make_cache(spec, blocks, memory)
    far = blocks - case.num_blocks
    near, step = case.cache(attention), case.step()
    cache.keys[far:], cache.values[far:] = near.keys, near.values
    step = step._replace(block_tables=step.block_tables + far, slots=step.slots + far * case.page)
    q, k, v = case.inputs()
    write_kv(k, v, cache, step.slots)
    group = KVGroup(kind=spec.kind, block_size=case.page, window=0, layers=("x",))
    close(attention.plan(step, group).run(q, k, v, cache, **case.options()), case.reference(), torch.bfloat16)
