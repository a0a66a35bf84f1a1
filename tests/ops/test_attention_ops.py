"""Attention: the paged reference against a loop over single queries, then the CPU backend against the reference."""

import math
import random

import pytest
import torch

from quire.attention.backend import BACKENDS
from quire.attention.cpu import TILE, Bands, CpuAttention
from quire.attention.select import select_backend
from quire.layers.batch import GroupStep, NoAttention
from quire.ops.attention import alibi_slopes, padded_attention, paged_attention, visible
from quire.ops.cpu.native import kernels
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.kv import KVGroup, KVKind, KVSpec


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_query(q, k, v, at, *, scale, window=0, chunk=0, softcap=0.0, sink=None, slope=None):
    """q [D] at position `at`, k [L, D], v [L, Dv]: plain Python over the keys."""
    scores, used = [], []
    for j in range(at + 1):
        if (window and at - j >= window) or (chunk and at // chunk != j // chunk):
            continue
        s = scale * sum(a * b for a, b in zip(q.tolist(), k[j].tolist(), strict=True))
        s = softcap * math.tanh(s / softcap) if softcap else s
        scores.append(s - (slope * (at - j) if slope is not None else 0))
        used.append(j)
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights) + (math.exp(sink - top) if sink is not None else 0)
    return sum(w / total * v[j] for w, j in zip(weights, used, strict=True))


RULES = [
    dict(), dict(window=4), dict(chunk=5), dict(softcap=2.0), dict(sinks=True), dict(alibi=True),
    dict(window=3, softcap=1.5, sinks=True),
]  # fmt: skip
IDS = ["-".join(rule) or "plain" for rule in RULES]


class Rows:
    """Random rows over scrambled blocks: a cache [slots, width], tables, and the queries of one step."""

    def __init__(self, lens, *, heads, kv_heads, size, value, block_size, latent=False, dtype=torch.float32, seed=0):
        rng = random.Random(seed)
        self.lens, self.block_size, self.latent = lens, block_size, latent
        self.heads, self.kv_heads, self.size, self.value = heads, kv_heads, size, value
        counts = [-(-context // block_size) for context, _ in lens]
        self.num_blocks = sum(counts) + 2
        free = list(range(self.num_blocks))
        rng.shuffle(free)
        self.tables = torch.full((len(lens), max(counts)), -1, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        self.contexts, self.counts = [c for c, _ in lens], [n for _, n in lens]
        tokens = sum(self.contexts)
        self.k = draw(tokens, kv_heads, size, seed=seed + 1, dtype=dtype)
        self.v = None if latent else draw(tokens, kv_heads, value, seed=seed + 2, dtype=dtype)
        self.q = draw(sum(self.counts), heads, size, seed=seed + 3, dtype=dtype)

    def slots(self, row, start, end):
        p = torch.arange(start, end)
        return self.tables[row].long()[p // self.block_size] * self.block_size + p % self.block_size

    def pieces(self, row):
        """(k, v) of a row's whole context."""
        start = sum(self.contexts[:row])
        part = slice(start, start + self.contexts[row])
        return self.k[part], self.k[part, :, : self.value] if self.latent else self.v[part]

    def of_step(self, tensor):
        """The last `count` tokens of every row, side by side: what this step computes."""
        if tensor is None:
            return None
        starts = [sum(self.contexts[:row]) for row in range(len(self.lens))]
        ends = [(s + c - n, s + c) for s, c, n in zip(starts, self.contexts, self.counts, strict=True)]
        return torch.cat([tensor[a:b] for a, b in ends])

    def filled(self, cache, *, whole):
        """Write contexts (whole), or all but this step's tokens."""
        for row, (context, count) in enumerate(self.lens):
            k, v = self.pieces(row)
            end = context if whole else context - count
            rows = k.flatten(1) if self.latent else torch.cat((k.flatten(1), v.flatten(1)), 1)
            cache[self.slots(row, 0, end)] = rows[:end].to(cache.dtype)
        return cache

    def options(self, rule):
        rule = dict(rule, scale=self.size**-0.5)
        rule["sinks"] = draw(self.heads, seed=9) if rule.get("sinks") else None
        rule["alibi"] = alibi_slopes(self.heads) if rule.get("alibi") else None
        return rule

    def reference(self, rule):
        width = self.kv_heads * (self.size + (0 if self.latent else self.value))
        cache = self.filled(torch.full((self.num_blocks * self.block_size, width), float("nan")), whole=True)
        return paged_attention(
            self.q, cache, self.tables, self.counts, self.contexts, block_size=self.block_size,
            kv_heads=self.kv_heads, v_size=self.value if self.latent else 0, **self.options(rule),
        )  # fmt: skip

    native = False  # whether the compiled kernels attend

    def backend(self, rule, *, spare=0, kv_dtype="float32"):
        """The CPU backend: a cache with NaN where nothing is written, filled up to this step, then one run."""
        kind = KVKind.WINDOW if rule.get("window") else KVKind.CHUNK if rule.get("chunk") else KVKind.FULL
        spec = KVSpec(layer="x", kind=kind, block_size=self.block_size, num_kv_heads=self.kv_heads,
                      head_size=self.size, v_head_size=0 if self.latent else self.value, dtype=kv_dtype,
                      window=rule.get("window") or rule.get("chunk") or 0)  # fmt: skip
        backend = CpuAttention(native=self.native)
        memory = torch.full((self.num_blocks, spec.page_bytes + spare * self.block_size), 0xFF, dtype=torch.uint8)
        cache = backend.make_cache(spec, self.num_blocks, memory)
        self.filled(cache.rows, whole=False)
        tables = self.tables.clone()
        if kind is KVKind.WINDOW:  # blocks that no query of this step reads were freed
            for row, (context, count) in enumerate(self.lens):
                tables[row, : max(0, context - count - spec.window + 1) // self.block_size] = -1
        tokens = [self.slots(row, context - count, context) for row, (context, count) in enumerate(self.lens)]
        starts = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        step = GroupStep(tables, starts, self.contexts, self.counts, torch.cat(tokens))
        group = KVGroup(kind=kind, block_size=self.block_size, window=spec.window, layers=("x",))
        options = {k: v for k, v in self.options(rule).items() if k not in ("window", "chunk")}
        plan = backend.plan(step, group)
        args = (self.q, self.of_step(self.k), self.of_step(self.v), cache)
        return plan.run(*args, v_size=self.value if self.latent else 0, **options), plan, cache


@pytest.fixture(params=["torch", "compiled"])
def both(request, monkeypatch):
    """For tests of what comes out, whichever way."""
    if request.param == "compiled" and kernels() is None:
        pytest.skip("no compiled kernels")
    monkeypatch.setattr(Rows, "native", request.param == "compiled")


@pytest.mark.parametrize("rule", RULES, ids=IDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_paged_reference(rule, heads, kv_heads):
    rows = Rows([(9, 3), (1, 1), (6, 6), (7, 1)], heads=heads, kv_heads=kv_heads, size=8, value=4, block_size=4)
    found, options = rows.reference(rule), rows.options(rule)
    sinks, slopes = options.pop("sinks"), options.pop("alibi")
    token = 0
    for row, (context, count) in enumerate(rows.lens):
        k, v = rows.pieces(row)
        for at in range(context - count, context):
            for h in range(heads):
                kv = h // (heads // kv_heads)
                want = one_query(
                    rows.q[token, h], k[:, kv], v[:, kv], at, sink=None if sinks is None else sinks[h].item(),
                    slope=None if slopes is None else slopes[h].item(), **options,
                )  # fmt: skip
                torch.testing.assert_close(found[token, h], want, rtol=1e-4, atol=1e-5)
            token += 1


MIXES = {
    "decodes": [(n, 1) for n in (5, 9, 33, 8, 7, 64, 1)],
    "alike decodes": [(n, 1) for n in (30, 31, 29, 33)],
    "fresh prompts": [(12, 12), (1, 1), (30, 30)],
    "chunks": [(12, 5), (40, 17), (21, 2)],
    "everything": [(12, 5), (50, 1), (9, 9), (3, 1), (70, 31), (28, 1), (2, 2)],
    "idle rows": [(12, 0), (50, 1), (9, 0), (7, 3)],
    "one": [(17, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_cpu_backend_equals_the_reference(mix, rule, both):
    for seed, (heads, kv_heads, block_size) in enumerate([(4, 2, 4), (6, 6, 1), (4, 1, 16)]):
        rows = Rows(MIXES[mix], heads=heads, kv_heads=kv_heads, size=16, value=16, block_size=block_size, seed=seed)
        found, _, _ = rows.backend(rule)
        torch.testing.assert_close(found, rows.reference(rule), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_latent_values_are_a_slice_of_the_keys(mix, both):
    rows = Rows(MIXES[mix], heads=6, kv_heads=1, size=20, value=12, block_size=4, latent=True)
    found, _, cache = rows.backend({})
    assert cache.rows.shape[1] == 20 and found.shape[-1] == 12
    torch.testing.assert_close(found, rows.reference({}), rtol=1e-4, atol=1e-5)


def test_values_of_another_size(both):
    rows = Rows(MIXES["everything"], heads=4, kv_heads=2, size=16, value=8, block_size=4)
    torch.testing.assert_close(rows.backend({})[0], rows.reference({}), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_long_chunks_are_cut_into_tiles(rule):
    rows = Rows([(2 * TILE + 40, TILE + 90), (TILE + 3, TILE + 3), (300, 1)], heads=2, kv_heads=1, size=8, value=8,
                block_size=16)  # fmt: skip
    found, plan, _ = rows.backend(rule)
    assert len(plan.chunks[0].tiles) > 1
    torch.testing.assert_close(found, rows.reference(rule), rtol=1e-4, atol=1e-5)


def test_pages_larger_than_a_layer_needs(both):
    rows = Rows(MIXES["everything"], heads=4, kv_heads=2, size=16, value=16, block_size=4)
    torch.testing.assert_close(rows.backend({}, spare=64)[0], rows.reference({}), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", ["everything", "decodes", "fresh prompts"])
def test_half_precision(dtype, mix, both):
    """bfloat16 queries and cache, or a bfloat16 cache under float32 queries: the error stays that of rounding."""
    rows = Rows(MIXES[mix], heads=4, kv_heads=2, size=16, value=16, block_size=4, dtype=dtype)
    found, _, _ = rows.backend({}, kv_dtype="bfloat16")
    assert found.dtype is dtype
    rows.q, rows.k, rows.v = rows.q.float(), rows.k.bfloat16().float(), rows.v.bfloat16().float()
    torch.testing.assert_close(found.float(), rows.reference({}), rtol=2e-2, atol=2e-2)
    if dtype is torch.float32:  # the cache was rounded, nothing else: fresh prompts read what later steps will read
        torch.testing.assert_close(found, rows.reference({}), rtol=1e-4, atol=1e-5)


def test_decodes_share_calls():
    """64 decodes of similar length are one call, very different lengths are kept apart."""
    alike = Rows([(100 + n % 20, 1) for n in range(64)], heads=2, kv_heads=1, size=4, value=4, block_size=16)
    _, plan, _ = alike.backend({})
    assert len(plan.packs) == 1 and plan.packs[0].tokens is None and not plan.chunks
    far = Rows([(n, 1) for n in [3000, 10, 12, 2900, 11] * 4], heads=2, kv_heads=1, size=4, value=4, block_size=16)
    found, plan, _ = far.backend({})
    assert 2 <= len(plan.packs) <= 4
    places = sum(pack.width * len(pack.lengths) for pack in plan.packs)
    assert places <= 1.3 * sum(far.contexts)
    torch.testing.assert_close(found, far.reference({}), rtol=1e-4, atol=1e-5)


def test_one_pack_in_another_order():
    """Too ragged to be taken as they come, alike enough for one call: sorted, so the results must be put back."""
    rows = Rows(
        [(n, 1) for n in [290, 291, 400, *range(292, 299)]], heads=2, kv_heads=1, size=4, value=4, block_size=16
    )
    found, plan, _ = rows.backend({})
    assert len(plan.packs) == 1 and plan.packs[0].tokens is not None
    torch.testing.assert_close(found, rows.reference({}), rtol=1e-4, atol=1e-5)


def test_window_reads_only_its_blocks():
    rows = Rows([(1000, 1), (900, 40)], heads=2, kv_heads=1, size=4, value=4, block_size=16)
    _, plan, _ = rows.backend(dict(window=8))
    assert plan.packs[0].width == 8 and len(plan.chunks[0].slots) == 40 + 7


@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize(("queries", "before"), [(1, 0), (7, 3), (TILE, 500), (3, 9000)])
def test_bands(window, queries, before):
    for bands in (Bands(), Bands()):
        bands.get(1, 10, window)  # a smaller band is grown, not reused wrongly
        mask = bands.get(queries, before, window)
        seen = visible(torch.arange(before, before + queries), torch.arange(before + queries), window=window)
        assert torch.equal(mask == 0, seen) and torch.isinf(mask[~seen]).all()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_slicing_of_long_problems(softcap, monkeypatch):
    q, k, v = draw(2, 4, 9, 8), draw(2, 2, 11, 8, seed=1), draw(2, 2, 11, 6, seed=2)
    mask, sinks = draw(2, 1, 9, 11, seed=3), draw(4, 9, seed=4)
    whole = padded_attention(q, k, v, mask, scale=0.3, softcap=softcap, sinks=sinks)
    monkeypatch.setattr("quire.ops.attention.MAX_SCORES", 200)
    torch.testing.assert_close(padded_attention(q, k, v, mask, scale=0.3, softcap=softcap, sinks=sinks), whole)


@pytest.mark.parametrize("causal", [True, False])
def test_cpu_form_of_padded_attention(causal):
    q, k, v = draw(3, 6, 7, 16), draw(3, 2, 7, 16, seed=1), draw(3, 2, 7, 16, seed=2)
    mask = None if causal else draw(3, 1, 7, 7, seed=3)
    want = padded_attention(q, k, v, mask, scale=0.2, causal=causal)
    found = padded_attention.on("cpu")(q, k, v, mask, scale=0.2, causal=causal)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6).tolist() == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


def test_no_attention_has_the_shape():
    out = NoAttention().run(draw(5, 4, 8), draw(5, 2, 8), draw(5, 2, 6), None, scale=1.0)
    assert out.shape == (5, 4, 6) and not out.any()
    assert NoAttention().run(draw(5, 4, 8), draw(5, 1, 8), None, None, scale=1.0, v_size=3).shape == (5, 4, 3)


def test_selection_says_what_is_built_and_why_not():
    spec = KVSpec(layer="x", kind=KVKind.FULL, block_size=4, num_kv_heads=1, head_size=8)
    assert select_backend("cpu", [spec]).name == "CPU_ATTN" and "CPU_ATTN" in BACKENDS
    assert select_backend("cpu", [spec], "torch_sdpa").name == "CPU_ATTN"
    with pytest.raises(NotBuiltError, match="'FLASHINFER' is not built"):
        select_backend("cpu", [spec], "FLASHINFER")
    with pytest.raises(NotBuiltError, match="tpu"):
        select_backend("tpu", [spec])
    with pytest.raises(ConfigError, match="TRITON_ATTN runs on cuda, not on cpu"):
        select_backend("cpu", [spec], "triton_attn")
    with pytest.raises(ConfigError, match="CPU_ATTN runs on cpu, not on cuda"):
        select_backend("cuda:0", [spec], "CPU_ATTN")
    cross = KVSpec(layer="s", kind=KVKind.CROSS, block_size=4)
    with pytest.raises(ConfigError, match=r"'s'.*0 kv heads of size 0"):
        select_backend("cpu", [spec, cross])
    assert "kind 'cross'" in CpuAttention().supports(cross)


def test_wrong_memory_is_refused():
    spec = KVSpec(layer="x", kind=KVKind.FULL, block_size=4, num_kv_heads=1, head_size=8)
    with pytest.raises(ConfigError, match="is too small for 9 blocks"):
        CpuAttention().make_cache(spec, 9, torch.zeros((8, spec.page_bytes), dtype=torch.uint8))
    rows = Rows([(4, 4)], heads=1, kv_heads=1, size=4, value=4, block_size=4)
    _, plan, _ = rows.backend({})
    with pytest.raises(ConfigError, match="NoneType"):
        plan.run(rows.q, rows.k, rows.v, None, scale=1.0)
