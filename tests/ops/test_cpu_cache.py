"""Compiled attention over long contexts (summed up in spans) and over a cache of bytes, chunk by chunk."""

from itertools import pairwise

import pytest
import torch

from quire.attention.cpu import CpuAttention
from quire.layers.batch import GroupStep
from quire.ops.cpu.native import kernels
from quire.schema.kv import KVGroup, KVKind, KVSpec

library = kernels()
pytestmark = [pytest.mark.skipif(library is None, reason="no compiled kernels"), pytest.mark.usefixtures("isa")]
BLOCK, SIZE = 16, 32


@pytest.fixture
def threads():
    before = library.qc_threads()
    yield library.qc_set_threads
    library.qc_set_threads(before)


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Sequence:
    """One row of `length` tokens, attended in steps of any size."""

    def __init__(self, length, *, heads=6, kv_heads=2, kv_dtype="float32", window=0, dtype=torch.float32):
        kind = KVKind.WINDOW if window else KVKind.FULL
        self.group = KVGroup(kind=kind, block_size=BLOCK, window=window, layers=("x",))
        sizes = dict(block_size=BLOCK, num_kv_heads=kv_heads, head_size=SIZE)
        self.spec = KVSpec(layer="x", kind=kind, dtype=kv_dtype, window=window, **sizes)
        blocks = -(-length // BLOCK)
        self.q, self.k, self.v = (
            draw(length, n, SIZE, seed=i).to(dtype) for i, n in enumerate((heads, kv_heads, kv_heads))
        )
        self.backend = CpuAttention()
        memory = torch.full((blocks, self.spec.page_bytes), 0xFF, dtype=torch.uint8)
        assert self.backend.supports(self.spec) is None
        self.cache = self.backend.make_cache(self.spec, blocks, memory)
        self.tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).int()[None]

    def step(self, start, end):
        at = torch.arange(start, end)
        slots = self.tables[0].long()[at // BLOCK] * BLOCK + at % BLOCK
        starts = torch.tensor([0, end - start], dtype=torch.int32)
        plan = self.backend.plan(GroupStep(self.tables, starts, [end], [end - start], slots), self.group)
        return plan.run(self.q[start:end], self.k[start:end], self.v[start:end], self.cache, scale=SIZE**-0.5)

    def exact(self, position, window=0):
        first = max(0, position - window + 1) if window else 0
        per = self.q.shape[1] // self.k.shape[1]
        k, v = (t[first : position + 1].double().repeat_interleave(per, 1) for t in (self.k, self.v))
        scores = torch.einsum("hd,khd->hk", self.q[position].double(), k) * SIZE**-0.5
        return torch.einsum("hk,khd->hd", scores.softmax(-1), v).float()


@pytest.mark.parametrize("window", [0, 1500])
def test_long_contexts_by_any_number_of_threads(threads, window):
    length, found = 3100, {}
    for count in (1, 4):
        threads(count)
        row = Sequence(length, window=window)
        row.step(0, 1100)
        whole = row.step(1100, length)
        found[count] = whole[[0, 1000, -1]], row.step(length - 1, length)[0]  # the last one again, alone
    torch.testing.assert_close(found[1][1], row.exact(length - 1, window), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1][0][1], row.exact(2100, window), rtol=1e-4, atol=1e-5)
    assert torch.equal(found[1][0], found[4][0]) and torch.equal(found[1][1], found[4][1])
    assert torch.equal(found[1][0][-1], found[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40])
def test_a_cache_of_bytes(dtype, window):
    """Keys and values keep 8 bits per number with a scale for each head: results within 1% of exact ones."""
    length = 200
    row = Sequence(length, kv_dtype="int8", window=window, dtype=dtype)
    assert row.cache.rows.dtype is torch.int8 and row.spec.token_bytes == 2 * 2 * (SIZE + 4)
    whole = row.step(0, length)
    wanted = torch.stack([row.exact(i, window) for i in range(length)])
    assert (whole.float() - wanted).norm() < 0.01 * wanted.norm()
    again = Sequence(length, kv_dtype="int8", window=window, dtype=dtype)
    cuts = [0, 7, 8, 60, 61, 199, 200]
    parts = torch.cat([again.step(a, b) for a, b in pairwise(cuts)])
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (5, 5), (7, 1), (32, 2)])
def test_few_and_many_queries_give_the_same_bits(threads, kv_dtype, heads, kv_heads):
    """Many queries read keys and values widened, in tiles of rows; few read them where they lie."""
    length, sizes = 150, dict(heads=heads, kv_heads=kv_heads, kv_dtype=kv_dtype)
    whole = Sequence(length, **sizes).step(0, length)
    for count, cuts in ((1, [0, 1, 2, 4, 7, 60, 64, 65, 149, 150]), (3, [0, 13, 128, 150])):
        threads(count)
        again = Sequence(length, **sizes)
        assert torch.equal(torch.cat([again.step(a, b) for a, b in pairwise(cuts)]), whole)


def test_zeros_in_a_cache_of_bytes():
    row = Sequence(20, kv_dtype="int8")
    row.k.zero_(), row.v.zero_()
    assert torch.equal(row.step(0, 20), torch.zeros(20, 6, SIZE))


def test_where_bytes_cannot_be_kept():
    spec = KVSpec(
        layer="x", kind=KVKind.FULL, block_size=16, num_kv_heads=1, head_size=576, v_head_size=0, dtype="int8"
    )
    assert "int8" in CpuAttention().supports(spec)
    assert "compiled" in CpuAttention(native=False).supports(
        KVSpec(layer="x", kind=KVKind.FULL, block_size=16, num_kv_heads=1, head_size=64, dtype="int8")
    )
