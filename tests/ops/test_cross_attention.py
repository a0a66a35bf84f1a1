"""Cross-attention on CPU: plans over pages and plans that gather, against plain softmax over each encoder output."""

from __future__ import annotations

import random

import pytest
import torch

from quire.attention.cpu import CpuAttention
from quire.attention.cross import CrossPlan, PagedCrossPlan, WithCross
from quire.attention.select import select_backend
from quire.layers.batch import GroupStep
from quire.ops.cpu.native import kernels
from quire.schema.kv import KVGroup, KVKind, KVSpec

BLOCK, SIZE = 4, 16
ROWS = [(37, 1), (3, 5), (130, 2), (1, 1), (64, 1)]  # tokens of the encoder's output, queries
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
needs_kernels = pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")


class Step:
    def __init__(self, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(3)
        lens, counts = [length for length, _ in ROWS], [count for _, count in ROWS]
        self.k, self.v = (torch.randn((sum(lens), kv_heads, SIZE), generator=draw).to(dtype) for _ in range(2))
        self.q = torch.randn((sum(counts), heads, SIZE), generator=draw).to(dtype)
        self.spec = KVSpec(
            layer="x", kind=KVKind.CROSS, block_size=BLOCK, num_kv_heads=kv_heads, head_size=SIZE,
            dtype=str(dtype).removeprefix("torch."), window=130,
        )  # fmt: skip
        self.group = KVGroup(kind=KVKind.CROSS, block_size=BLOCK, window=130, layers=("x",))
        blocks = [-(-length // BLOCK) for length in lens]
        free = list(range(sum(blocks) + 2))
        random.Random(5).shuffle(free)
        tables = torch.full((len(ROWS), max(blocks)), -1, dtype=torch.int32)
        for row, count in enumerate(blocks):
            tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        places = [(row, i) for row, length in enumerate(lens) for i in range(length)]
        slots = torch.tensor([int(tables[row, i // BLOCK]) * BLOCK + i % BLOCK for row, i in places])
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
        self.step = GroupStep(tables, starts, lens, counts, slots)
        self.num_blocks = sum(blocks) + 2

    def run(self, backend, *, softcap: float = 0.0):
        memory = torch.full((self.num_blocks, self.spec.page_bytes), 0xFF, dtype=torch.uint8)  # not a number
        cache = backend.make_cache(self.spec, self.num_blocks, memory)
        first = backend.plan(self.step, self.group)
        out = first.run(self.q, self.k, self.v, cache, scale=0.3, softcap=softcap)
        again = backend.plan(self.step._replace(slots=self.step.slots[:0]), self.group)
        later = again.run(self.q, self.k[:0], self.v[:0], cache, scale=0.3, softcap=softcap)
        return first, out, later

    def wanted(self, softcap: float = 0.0):
        out, at, first = [], 0, 0
        per = self.q.shape[1] // self.k.shape[1]
        for length, count in ROWS:
            keys, values = (x[first : first + length].float().repeat_interleave(per, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", self.q[at : at + count].float(), keys) * 0.3
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
            at, first = at + count, first + length
        return torch.cat(out)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("paged", [pytest.param(True, marks=needs_kernels), False])
def test_every_query_sees_all_of_its_text(paged: bool, heads: int, kv_heads: int, dtype, softcap: float) -> None:
    step = Step(heads, kv_heads, dtype)
    backend = select_backend("cpu", [step.spec]) if paged else WithCross(CpuAttention(native=False))
    plan, out, later = step.run(backend, softcap=softcap)
    assert isinstance(plan, PagedCrossPlan if paged else CrossPlan)
    torch.testing.assert_close(out.float(), step.wanted(softcap), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(out, later)  # of a step that brings no keys


@needs_kernels
def test_a_query_does_not_depend_on_those_beside_it() -> None:
    step = Step(4, 4, torch.float32)
    _, whole, _ = step.run(select_backend("cpu", [step.spec]))
    backend = select_backend("cpu", [step.spec])
    memory = torch.zeros((step.num_blocks, step.spec.page_bytes), dtype=torch.uint8)
    cache = backend.make_cache(step.spec, step.num_blocks, memory)
    cache.write(step.step.slots, step.k, step.v)
    at = 0
    for row, (length, count) in enumerate(ROWS):
        for i in range(at, at + count):
            alone = GroupStep(
                step.step.block_tables, torch.tensor([0, 1], dtype=torch.int32), [length], [1],
                step.step.slots[:0], torch.tensor([row]),
            )  # fmt: skip
            out = backend.plan(alone, step.group).run(step.q[i : i + 1], step.k[:0], step.v[:0], cache, scale=0.3)
            assert torch.equal(out, whole[i : i + 1])
        at += count


def test_heads_that_kernels_do_not_read_are_gathered() -> None:
    wide = KVSpec(
        layer="x", kind=KVKind.CROSS, block_size=BLOCK, num_kv_heads=1, head_size=272, dtype="float32", window=9
    )
    group = KVGroup(kind=KVKind.CROSS, block_size=BLOCK, window=9, layers=("x",))
    step = GroupStep(
        torch.zeros((1, 1), dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), [2], [1], torch.arange(2)
    )
    assert isinstance(select_backend("cpu", [wide]).plan(step, group), CrossPlan)
