"""KV memory as an object: its blocks are copied within it, out to the host and back, whatever layers keep in them;
tables are as wide as their group's text; a layout may have no blocks at all."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.select import select_backend
from quire.layers.packed import Texts
from quire.models.seq2seq import build_seq2seq
from quire.sched.kv_layout import place
from quire.schema.kv import KVGroup, KVKind, KVLayout, KVSpec
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker import kv_memory
from quire.worker.device_inputs import DeviceInputs
from quire.worker.inputs import build, shape_of
from quire.worker.kv_memory import KVMemory
from quire.worker.rows import Rows
from quire.worker.trial import scratch_layout
from tests.worker.fakes import FakeBackend, make_runner
from tests.worker.test_verbs import started

CPU = torch.device("cpu")


def blank(num_blocks: int, page_bytes: int, num_slots: int) -> KVMemory:
    slots = tuple((f"layer{i}",) for i in range(num_slots))
    return KVMemory(KVLayout(num_blocks=num_blocks, page_bytes=page_bytes, groups=(), slots=slots, specs=()), CPU)


# --- copies


@pytest.mark.parametrize("page_bytes", [64, 12, 7])
@pytest.mark.parametrize("limit", [1 << 26, 100])
def test_copies_as_a_model_of_bytes(page_bytes: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "_COPY_BYTES", limit)  # pieces of one block, or all at once
    rng, memory = random.Random(page_bytes), blank(9, page_bytes, 3)
    draw = np.random.default_rng(0)
    expected = draw.integers(0, 256, (9, 3, page_bytes), np.uint8)
    for slot, pages in enumerate(memory.slots):
        pages.copy_(torch.from_numpy(expected[:, slot]))
    for _ in range(60):
        count = rng.randrange(0, 9)
        sources, targets = rng.choices(range(9), k=count), rng.sample(range(9), count)
        match rng.randrange(3):
            case 0:
                memory.copy_within(sources, targets)
                expected[targets] = expected[sources]
            case 1:
                host = memory.on_host(count)
                memory.copy_out(sources, host)
                assert host.numpy().reshape(count, 3, page_bytes).tolist() == expected[sources].tolist()
            case 2:
                given = draw.integers(0, 256, (count, 3, page_bytes), np.uint8)
                memory.copy_in(targets, torch.from_numpy(given.reshape(count, memory.block_bytes)))
                expected[targets] = given
        assert np.array_equal(torch.stack(memory.slots, 1).numpy(), expected)


def test_copies_of_what_is_not_there() -> None:
    memory = blank(4, 8, 2)
    with pytest.raises(RuntimeError, match="block 4 is not among the 4"):
        memory.copy_within([4], [0])
    with pytest.raises(RuntimeError, match="block -1 is not among"):
        memory.copy_in([-1], memory.on_host(1))
    with pytest.raises(RuntimeError, match="written twice"):
        memory.copy_within([0, 1], [2, 2])
    with pytest.raises(RuntimeError, match="2 blocks cannot be copied to 1"):
        memory.copy_within([0, 1], [2])
    with pytest.raises(RuntimeError, match=r"\[1, 16\] does not hold 2 blocks of 16 bytes"):
        memory.copy_out([0, 1], memory.on_host(1))
    with pytest.raises(RuntimeError, match="float32"):
        memory.copy_out([0], torch.zeros((1, 16)))
    assert not any(pages.any() for pages in memory.slots)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_real_cache_holds_moves_with_its_block(dtype: str) -> None:
    """Two groups of layers of different size in the same slots: the smaller ones leave room in their pages."""
    common: dict[str, Any] = dict(block_size=4, num_kv_heads=2, dtype=dtype)
    specs = [
        KVSpec(layer="a", kind=KVKind.FULL, head_size=8, **common),
        KVSpec(layer="b", kind=KVKind.WINDOW, window=6, head_size=6, **common),
    ]
    layout = place(specs, 1 << 14, num_blocks=12, max_model_len=16, max_num_seqs=1)
    memory, bound = KVMemory(layout, CPU), {}
    memory.bind(select_backend("cpu", layout.specs), Names(bound))
    for spec in layout.specs:
        cache, size = bound[spec.layer], spec.block_size
        k, v = (torch.randn(size, 2, spec.head_size).to(getattr(torch, dtype)) for _ in range(2))

        def slots(block: int, size: int = size) -> torch.Tensor:
            return torch.arange(size) + block * size

        cache.write(slots(3), k, v)
        memory.copy_within([3], [7])
        host = memory.on_host(1)
        memory.copy_out([7], host)
        memory.copy_in([1], host)
        for block in (3, 7, 1):
            found = cache.read(slots(block), 1, getattr(torch, dtype))
            assert torch.equal(found[0][0].transpose(0, 1), k) and torch.equal(found[1][0].transpose(0, 1), v)


class Names:
    """A model that only remembers what it was bound to."""

    def __init__(self, bound: dict[str, Any]) -> None:
        self._bound = bound

    def bind_kv(self, caches: dict[str, Any], groups: dict[str, int]) -> None:
        self._bound |= caches


def test_a_request_goes_on_from_copied_blocks() -> None:
    """The fake model reads every token back through its blocks, so it answers only if they hold what they should."""
    runner = make_runner()
    tokens = (5, 6, 7, 8, 9, 10)

    def step(name: str, start: int, count: int, blocks: tuple[int, ...] = (), new: tuple[int, ...] = ()) -> int:
        joined = NewRow(
            request_id=name, epoch=0, token_ids=tokens, num_prompt_tokens=6, params=ResolvedParams(temperature=0),
            seed=0, blocks=(blocks, blocks),
        )  # fmt: skip
        runner.forward(StepPlan(step=1, grants=(Grant(name, start, count, True, 0, (new, new)),), joined=(joined,)))
        return runner.sample(1, None).result().sampled[0][0]

    wanted = step("a", 0, 6, new=(3, 4))
    host = runner.kv.on_host(1)
    runner.kv.copy_out([3], host)
    runner.kv.copy_in([10], host)
    runner.kv.copy_within([4], [11])
    assert step("b", 5, 1, blocks=(10, 11)) == wanted
    with pytest.raises(AssertionError, match="another position"):
        step("c", 5, 1, blocks=(12, 11))


# --- who owns it


def test_the_worker_owns_the_memory_and_lets_go_of_it() -> None:
    worker = started()
    memory = worker.kv_memory
    cache = next(iter(worker.get_model().caches.values()))
    assert cache.memory.data_ptr() == memory.slots[0].data_ptr()
    seen = weakref.ref(memory)
    del memory, cache
    worker.shutdown()
    gc.collect()
    assert seen() is None


# --- tables by group


CROSS = KVGroup(kind=KVKind.CROSS, block_size=4, window=26, layers=("c",))
FULL = KVGroup(kind=KVKind.FULL, block_size=4, window=0, layers=("f",))


def test_tables_are_as_wide_as_their_group_s_text() -> None:
    endless = KVGroup(kind=KVKind.CROSS, block_size=4, window=0, layers=("e",))
    rows = Rows([FULL, CROSS, endless], 2, 9, CPU)
    assert [table.host.shape[1] for table in rows.tables] == [3, 7, 3]
    row = NewRow(
        request_id="a", epoch=0, token_ids=(1,), num_prompt_tokens=1, params=ResolvedParams(), seed=0,
        blocks=((), tuple(range(8)), ()),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="row 0 gets 8 blocks of a cross group, 7 at most"):
        rows.apply(StepPlan(step=1, grants=(), joined=(row,)))


T5 = dict(
    architectures=["T5ForConditionalGeneration"], d_model=32, d_kv=12, d_ff=48, num_layers=2, num_decoder_layers=2,
    num_heads=4, vocab_size=96, decoder_start_token_id=0, relative_attention_num_buckets=8,
    relative_attention_max_distance=16, layer_norm_epsilon=1e-6, feed_forward_proj="relu", is_encoder_decoder=True,
)  # fmt: skip


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("longest", "lengths", "more"), [(26, (26, 3, 11), 0), (5, (5, 3, 4), 15)])
def test_an_encoder_s_output_longer_or_shorter_than_any_text(
    longest: int, lengths: tuple[int, ...], more: int, staged: bool
) -> None:
    """Rows of an encoder-decoder model: the output is written in a row's first step and read ever after, however long
    the decoder's texts are. Compared with every row alone, in one step."""
    torch.manual_seed(0)
    model = build_seq2seq(T5, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.finish_weights()
    rng = random.Random(1)
    texts = [[rng.randrange(96) for _ in range(n)] for n in lengths]
    written = [[rng.randrange(96) for _ in range(n)] for n in (7 + more, 4, 6)]
    alone = []
    for text, own in zip(texts, written, strict=True):
        alone += Decoding(model, [text], [own], longest, staged).step([(0, len(own))])
    together = Decoding(model, texts, written, longest, staged)
    found: list[list[torch.Tensor]] = [[], [], []]
    for grants in ([(1, 2), (0, 3)], [(2, 6), (0, 1), (1, 1)], [(0, 3 + more), (1, 1)]):
        for (row, _), logits in zip(grants, together.step(grants), strict=True):
            found[row].append(logits)
    for pieces, wanted in zip(found, alone, strict=True):
        torch.testing.assert_close(torch.cat(pieces), wanted, rtol=1e-4, atol=1e-4)


class Decoding:
    """Steps of an encoder-decoder model through the worker's rows and inputs."""

    def __init__(
        self, model: Any, texts: list[list[int]], written: list[list[int]], longest: int, staged: bool
    ) -> None:
        self.model, self.texts, self.written = model, texts, written
        specs = model.kv_specs(4, "float32")
        self.backend = select_backend("cpu", specs)
        layers = {
            kind: tuple(spec.layer for spec in specs if spec.kind is kind) for kind in (KVKind.FULL, KVKind.CROSS)
        }
        self.groups = tuple(
            KVGroup(kind=kind, block_size=4, window=longest * (kind is KVKind.CROSS), layers=names)
            for kind, names in layers.items()
        )
        page = max(spec.page_bytes for spec in specs)
        slots = tuple((spec.layer,) for spec in specs)
        layout = KVLayout(num_blocks=64, page_bytes=page, groups=self.groups, slots=slots, specs=tuple(specs))
        KVMemory(layout, CPU).bind(self.backend, model)
        self.rows = Rows(self.groups, 4, 24, CPU)
        self.inputs = DeviceInputs(self.rows, 64) if staged else None
        self.blocks = iter(random.Random(2).sample(range(64), 64))
        self.done: dict[int, int] = {}

    def step(self, grants: list[tuple[int, int]]) -> list[torch.Tensor]:
        joined, made, order = [], [], []
        for row, count in grants:
            name = f"r{row}"
            new: tuple[tuple[int, ...], ...] = ()
            if row not in self.done:
                self.done[row] = 0
                joined.append(
                    NewRow(
                        request_id=name, epoch=0, token_ids=tuple(self.written[row]), num_prompt_tokens=1,
                        params=ResolvedParams(), seed=0, num_encoder_tokens=len(self.texts[row]),
                    )
                )  # fmt: skip
                lengths = (len(self.written[row]), len(self.texts[row]))
                new = tuple(tuple(next(self.blocks) for _ in range(-(-n // 4))) for n in lengths)
                order.append(row)
            made.append(Grant(name, self.done[row], count, True, 0, new))
            self.done[row] += count
        self.rows.apply(StepPlan(step=1, grants=tuple(made), joined=tuple(joined)))
        shape = shape_of(made, self.rows)
        assert shape.begins is not None
        begins = [int(self.rows.request_of[row][1:]) for row in shape.rows[shape.begins]]
        assert sorted(begins) == sorted(order)
        batch = build(shape, self.rows, self.backend) if self.inputs is None else None
        batch = batch or self.inputs.build(shape, self.backend).batch
        with torch.inference_mode():
            if begins:
                batch.encoded = self.model.encode(Texts.of([self.texts[row] for row in begins]))
            logits = self.model.logits(self.model.forward(batch))
        by_row = dict(zip(shape.grants.tolist(), logits.split(shape.counts.tolist()), strict=True))
        return [by_row[i] for i in range(len(grants))]


def test_an_encoder_s_output_without_blocks() -> None:
    rows = Rows([CROSS], 2, 9, CPU)
    row = NewRow(
        request_id="a", epoch=0, token_ids=(1,), num_prompt_tokens=1, params=ResolvedParams(), seed=0,
        num_encoder_tokens=9,
    )  # fmt: skip
    grant = Grant("a", 0, 1, True, 0, ((3, 4),))
    rows.apply(StepPlan(step=1, grants=(grant,), joined=(row,)))
    with pytest.raises(RuntimeError, match="row 0 has no block for position 8 of its encoder's output"):
        build(shape_of([grant], rows), rows, FakeBackend())


# --- no blocks at all


@pytest.mark.parametrize("staged", [False, True])
def test_a_layout_without_blocks(staged: bool) -> None:
    layout = place([], 0, max_model_len=16, max_num_seqs=2)
    assert (layout.num_blocks, layout.total_bytes, layout.groups, layout.slots) == (0, 0, (), ())
    assert scratch_layout([]).slots == ()
    memory, bound = KVMemory(layout, CPU), {"left": 1}
    memory.bind(select_backend("cpu", layout.specs), Names(bound))
    assert bound == {"left": 1} and memory.block_bytes == 0
    memory.copy_within([], [])
    memory.copy_out([], memory.on_host(0))
    rows = Rows(layout.groups, 2, 16, CPU)
    inputs = DeviceInputs(rows, 16) if staged else None
    row = NewRow(
        request_id="a", epoch=0, token_ids=(7, 8, 9), num_prompt_tokens=3, params=ResolvedParams(), seed=0, blocks=()
    )
    grant = Grant("a", 0, 3, False, 0)
    rows.apply(StepPlan(step=1, grants=(grant,), joined=(row,)))
    shape = shape_of([grant], rows)
    backend = FakeBackend()
    batch = build(shape, rows, backend) if inputs is None else inputs.build(shape, backend).batch
    assert batch.token_ids.tolist() == [7, 8, 9] and batch.positions.tolist() == [0, 1, 2] and batch.plans == []
