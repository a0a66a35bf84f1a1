"""Inputs for a device of its own, run on CPU: what is packed arrives, tables follow by difference, padding harms
nobody, the captured step computes the same, and rows that need only the plain choice get the pipeline's token."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from quire.ops import sample
from quire.ops.rows import gather_inputs, make_buffers
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind
from quire.schema.step import Grant, Mask, NewRow, StepPlan
from quire.worker.capture import Capturer
from quire.worker.device_inputs import CHANGES, DeviceInputs, GraphFields
from quire.worker.gpu_memory import MARGIN, Budget, kv_bytes_on_gpu
from quire.worker.graphs import LATE_AFTER, DecodeGraphs, GraphTimes, capture_order, useful_sizes
from quire.worker.inputs import shape_of
from quire.worker.mixed_graphs import SIZES, MixedGraphs, _Captured, mixed_sizes
from quire.worker.rows import Mirror, Rows
from quire.worker.staging import DEPTH, Staging
from tests.sampling.oracle import resolved
from tests.worker.driver import Asked, Driver
from tests.worker.fakes import FakeBackend, FakeModel, FakePlan, make_runner
from tests.worker.test_steps import alone, make_requests

CPU = torch.device("cpu")
GROUPS = [
    KVGroup(kind=KVKind.FULL, block_size=4, window=0, layers=("a",)),
    KVGroup(kind=KVKind.WINDOW, block_size=2, window=3, layers=("b",)),
]


def test_staging_keeps_every_part_apart():
    staging = Staging(64, CPU)
    for turn in range(2 * DEPTH):
        parts = [np.arange(3, dtype=np.int32) + turn, np.array([1 << 40, -turn], np.int64), np.array([7], np.int32)]
        views = staging.pack(parts)
        assert [view.tolist() for view in views] == [part.tolist() for part in parts]
        assert [view.dtype for view in views] == [torch.int32, torch.int64, torch.int32]
        assert views[0].data_ptr() == staging.device_words.data_ptr()
    with pytest.raises(RuntimeError, match="64"):
        staging.pack([np.zeros(65, np.int32)])


@pytest.mark.parametrize("seed", range(10))
def test_the_mirror_follows_the_tables(seed):
    rng = random.Random(seed)
    rows = Rows(GROUPS, 6, 31, CPU)
    mirror = Mirror(rows.tables, CPU)
    live: dict[str, int] = {}
    for step in range(80):
        left = [name for name in live if rng.random() < 0.2]
        for name in left:
            del live[name]
        joined = []
        while len(live) < 6 and rng.random() < 0.5:
            name = f"r{step}.{len(live)}"
            live[name] = 2
            blocks = tuple(tuple(rng.randrange(-1, 99) for _ in range(2)) for _ in GROUPS)
            joined.append(
                NewRow(
                    request_id=name, epoch=0, token_ids=(1, 2), num_prompt_tokens=2, params=resolved(), seed=0,
                    blocks=blocks,
                )
            )  # fmt: skip
        grants = []
        for name in rng.sample(sorted(live), len(live) // 2):
            if live[name] < 7:
                live[name] += 1
                grants.append(Grant(name, 0, 1, False, 0, tuple((rng.randrange(99),) for _ in GROUPS)))
        rows.apply(StepPlan(step=step, grants=tuple(grants), left=tuple(left), joined=tuple(joined)))
        if rng.random() < 0.7:  # a plan without grants sends nothing: the next one must
            places, values = mirror.take_changes()
            mirror.flat.scatter_(0, torch.from_numpy(places), torch.from_numpy(values))
            for table, device in zip(rows.tables, mirror.tables, strict=True):
                for name, row in rows.row_of.items():
                    count = live[name]
                    assert device[row, :count].tolist() == table.host[row, :count].tolist()
                assert (device[6] == -1).all()
    assert mirror.take_changes()[0].dtype == np.int64


def grown(count: int) -> tuple[Rows, DeviceInputs]:
    """`count` rows of 5 tokens, with blocks for 8."""
    rows = Rows(GROUPS, 8, 63, CPU)
    inputs = DeviceInputs(rows, 64)
    joined = tuple(
        NewRow(
            request_id=f"r{i}", epoch=0, token_ids=tuple(range(10 * i, 10 * i + 5)), num_prompt_tokens=5, seed=0,
            params=resolved(), blocks=((2 * i, 2 * i + 1), tuple(range(4 * i, 4 * i + 4))),
        )
        for i in range(count)
    )  # fmt: skip
    rows.apply(StepPlan(step=1, grants=(), joined=joined))
    return rows, inputs


@pytest.mark.parametrize("bucket", [3, 8])
def test_decode_inputs_and_their_padding(bucket):
    rows, inputs = grown(3)
    grants = tuple(Grant(f"r{i}", 4 - i, 1, True, 0) for i in (2, 0, 1))
    inputs.send_decode(shape_of(grants, rows), bucket)
    buffers = inputs.gather(*inputs.static_inputs(bucket))
    pad = bucket - 3
    assert inputs.static_inputs(bucket)[0].tolist() == [0, 1, 2] + [8] * pad
    assert buffers.token_ids.tolist() == [4, 13, 22] + [0] * pad
    assert buffers.positions.tolist() == [4, 3, 2] + [0] * pad
    assert buffers.contexts.tolist() == [5, 4, 3] + [0] * pad
    assert buffers.slots[0].tolist() == [4, 2 * 4 + 3, 4 * 4 + 2] + [-1] * pad
    assert buffers.slots[1].tolist() == [2 * 2, 5 * 2 + 1, 9 * 2] + [-1] * pad


def test_more_changes_than_travel_with_a_step():
    groups = [KVGroup(kind=KVKind.FULL, block_size=1, window=0, layers=("a",))]
    rows = Rows(groups, 4, 2 * CHANGES, CPU)
    inputs = DeviceInputs(rows, 8)
    blocks = tuple(range(CHANGES + 5))
    row = NewRow(
        request_id="a", epoch=0, token_ids=(3,), num_prompt_tokens=1, params=resolved(), seed=0, blocks=(blocks,)
    )
    grant = Grant("a", 0, 1, True, 0)
    rows.apply(StepPlan(step=1, grants=(grant,), joined=(row,)))
    inputs.send_decode(shape_of((grant,), rows), 2)
    assert inputs.mirror.tables[0][0, : len(blocks)].tolist() == list(blocks)
    assert inputs.gather(*inputs.static_inputs(2)).token_ids.tolist() == [3, 0]


def test_a_freed_block_gives_no_slot():
    tokens, table = torch.zeros((3, 8), dtype=torch.int32), torch.full((3, 4), -1, dtype=torch.int32)
    table[1, 1] = 5
    out = make_buffers(2, 1, CPU)
    rows, positions = torch.tensor([1, 1], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    gather_inputs(rows, positions, tokens, [table], [2], out)
    assert out.slots[0].tolist() == [-1, 11]


class StaticPlan(FakePlan):
    """Knows nothing but what is on the device: a captured plan is made before the step it serves."""

    def run(self, tokens, positions, cache):
        given = self.step
        assert given.is_static and given.is_decode and given.query_starts.tolist() == list(range(len(given.slots) + 1))
        real = [i for i, context in enumerate(given.contexts.tolist()) if context]
        assert real == list(range(len(real))) and (given.slots[len(real) :] == -1).all()
        step = given._replace(
            slots=given.slots[: len(real)], contexts=given.contexts[: len(real)],
            context_lens=given.contexts[: len(real)].tolist(), query_lens=[1] * len(real),
        )  # fmt: skip
        out = FakePlan(step, self.group).run(tokens[: len(real)], positions[: len(real)], cache)
        return torch.cat((out, torch.zeros(len(given.slots) - len(real), dtype=out.dtype)))


class RefilledFake(FakePlan):
    """A captured plan of any mix: what it was refilled with, and padding behind it."""

    most = 5  # rows that its lists have room for

    def refill(self, step):
        if len(step.query_lens) > self.most:
            return False
        self.given = step
        return True

    def run(self, tokens, positions, cache):
        given, real = self.given, int(sum(self.given.query_lens))
        assert (self.step.slots[real:] == -1).all() and (self.step.slots[:real] >= 0).all()
        starts = torch.tensor(np.concatenate(((0,), np.cumsum(given.query_lens))))
        step = given._replace(
            slots=self.step.slots[:real], query_starts=starts, row_index=torch.from_numpy(given.host_rows),
            context_lens=given.context_lens.tolist(), query_lens=given.query_lens.tolist(),
        )  # fmt: skip
        out = FakePlan(step, self.group).run(tokens[:real], positions[:real], cache)
        return torch.cat((out, torch.zeros(len(tokens) - real, dtype=out.dtype)))


class StaticBackend(FakeBackend):
    def plan(self, step, group):
        if not step.is_static:
            return FakePlan(step, group)
        return (StaticPlan if step.is_decode else RefilledFake)(step, group)


class UncapturedGraphs(DecodeGraphs):
    """Runs the step a graph would hold."""

    def capture(self, seconds=0.0):
        pass

    def prepare(self, bucket):
        rows, positions = self._inputs.static_inputs(bucket)
        rows.fill_(self._inputs.scrap)  # as a capture leaves them
        positions.zero_()
        return bucket

    def replay(self, bucket):
        self.used = getattr(self, "used", 0) + 1
        replayed = self._step(bucket)
        return replayed._replace(result=replayed.result.clone())  # a device's results are copied to the host at once


class UncapturedMixed(MixedGraphs):
    """Runs the step a graph would hold."""

    used = 0

    def capture(self):
        for size in self.sizes:
            self._captured[size] = _Captured(None, self._plans(size), None)
        self._ready = list(self.sizes)

    def replay(self, bucket):
        self.used += 1
        return self._run(bucket, self._captured[bucket].plans)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_captured_mixed_step_gives_every_request_its_text(seed, ahead, plain):
    """Through graphs of three sizes; steps of more tokens or more rows than they hold run without one."""
    rng = random.Random(300 * seed + ahead)
    model = FakeModel()
    runner = make_runner(model, staged=True)
    runner.backend = StaticBackend()
    runner.mixed = UncapturedMixed((3, 8, 14), model, runner.backend, runner.inputs, Capturer(CPU))
    runner.mixed.capture()
    built = 0

    def build(*args):
        nonlocal built
        built += 1
        return plain_build(*args)

    plain_build, runner.inputs.build = runner.inputs.build, build
    asked = make_requests(rng, 20, plain=plain)
    Driver(runner, rng, ahead=ahead).run(asked, preempt=0.02)
    assert runner.mixed.used > 5 and built
    for request in asked:
        assert request.failed is None and request.outputs == alone(model, request), request


def test_sizes_of_mixed_graphs():
    assert mixed_sizes(GROUPS, 100) == (16, 32, 64, 96)
    assert mixed_sizes(GROUPS, 1 << 20) == SIZES
    state = KVGroup(kind=KVKind.STATE, block_size=4, window=0, layers=("c",))
    assert mixed_sizes([*GROUPS, state], 100) == ()


def test_a_bucket_left_out_is_captured_once_it_is_worth_it(monkeypatch):
    model = FakeModel()
    runner = make_runner(model, staged=True)
    graphs = DecodeGraphs(
        (1, 2, 4, 6),
        model,
        StaticBackend(),
        runner.inputs,
        runner.sampler.plain,
        Capturer(torch.device("cpu")),
        max_context=64,
    )
    captured = graphs._captured
    monkeypatch.setattr(graphs, "_capture", lambda bucket: captured.update({bucket: None}))
    captured.update({1: None, 4: None})
    assert [graphs.prepare(bucket) for bucket in (1, 4, 2)] == [1, 4, 4]
    assert [graphs.prepare(2) for _ in range(LATE_AFTER)] == [4] * (LATE_AFTER - 2) + [2, 2]
    assert graphs.prepare(6) == 6  # none larger could serve
    assert sorted(captured) == [1, 2, 4, 6]


class CountedCapturer(Capturer):
    """Remembers what was captured, and whether its step ran before; from some number on there is no memory."""

    def __init__(self, room: int = 100) -> None:
        super().__init__(CPU)
        self.seen: list[tuple[int, bool]] = []
        self.room = room

    def capture(self, step, first=None):
        if first is not None:
            first()
        if len(self.seen) == self.room:
            raise torch.cuda.OutOfMemoryError("no memory is left")
        (bucket,) = step.args
        self.seen.append((bucket, first is not None))
        return None, torch.zeros(1)


class ListedGraphs(DecodeGraphs):
    """Which buckets are there, and nothing in them."""

    def __init__(self, sizes, capturer, times=None, **more) -> None:
        runner = make_runner(FakeModel(), staged=True, fields=GraphFields(adapters="adapters" in more))
        super().__init__(
            sizes, runner.model, StaticBackend(), runner.inputs, runner.sampler.plain, capturer, max_context=64,
            times=times, **more,
        )  # fmt: skip

    def run_uncaptured(self, bucket) -> None:
        """The step of all ranks, as far as others see it."""
        self._ranks.reduce(torch.zeros(bucket))

    def _keep(self, bucket, graph, replayed) -> None:
        self._captured[bucket] = None


def test_a_bucket_is_captured_late_when_padding_took_as_long():
    capturer = CountedCapturer()
    graphs = ListedGraphs((8, 16, 24, 32, 64), capturer, GraphTimes(capture=1.0, row=0.01))
    for size in (64, 32, 16, 8):
        graphs._capture(size)
    assert [tried for _, tried in capturer.seen] == [True] * 4
    # 8 rows of padding take 0.08 s: the 13th time makes more than a second of it
    assert [graphs.prepare(24) for _ in range(14)] == [32] * 12 + [24] * 2
    assert capturer.seen[4:] == [(24, False)]  # what lies between two that ran needs no trial
    idle = ListedGraphs((8, 16, 24, 32, 64), CountedCapturer(), GraphTimes(capture=1.0, row=0.0))
    idle._capture(64)
    idle._capture(32)
    assert {idle.prepare(24) for _ in range(1000)} == {32}  # padding is free: it stays as it is
    assert [idle.prepare(16) for _ in range(LATE_AFTER)][-1] == 16  # which may have kernels of its own


def test_buckets_left_out_are_captured_one_after_another_at_rest():
    capturer = CountedCapturer()
    graphs = ListedGraphs((1, 2, 4, 6, 8, 10, 12, 14, 16), capturer)
    for size in (16, 8, 4, 2, 1):
        graphs._capture(size)
    assert [graphs.capture_next() for _ in range(5)] == [True, True, True, False, False]
    assert [bucket for bucket, _ in capturer.seen[5:]] == [6, 12, 10, 14]
    assert all(graphs.prepare(size) == size for size in graphs.sizes)


def test_a_bucket_that_cannot_be_captured_at_rest_is_left_to_a_larger_one():
    graphs = ListedGraphs((2, 4, 6, 8), CountedCapturer(room=3), GraphTimes(capture=0.0, row=1.0))
    for size in (8, 4, 2):
        graphs._capture(size)
    assert graphs.capture_next() is False
    assert [graphs.prepare(6) for _ in range(2)] == [8, 8] and graphs.capture_next() is False
    late = ListedGraphs((2, 4, 6, 8), CountedCapturer(room=3), GraphTimes(capture=0.0, row=1.0))
    for size in (8, 4, 2):
        late._capture(size)
    assert [late.prepare(6) for _ in range(2)] == [8, 8]  # the capture failed, the step did not


def test_sizes_are_captured_in_an_order_that_leaves_little_padding():
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16)]
    order = capture_order(sizes)
    assert sorted(order) == sizes
    assert order[:11] == [1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert order[11:17] == [24, 48, 96, 192, 384, 768]
    there = sorted(order[:32])
    assert max(high / low for low, high in pairwise(there) if low >= 16) <= 1.5
    assert max(high / low for low, high in pairwise(there) if low >= 64) < 1.26
    assert capture_order([3, 5, 6]) == [6, 3, 5] and capture_order([7]) == [7]


def test_the_time_of_a_row_is_measured_between_two_sizes(monkeypatch):
    graphs = ListedGraphs((8, 96, 128, 256, 512), CountedCapturer())
    monkeypatch.setattr(graphs, "_seconds_of", {128: 0.002, 256: 0.003}.__getitem__)
    assert graphs._row_seconds() == pytest.approx(0.001 / 128)
    monkeypatch.setattr(graphs, "_seconds_of", {128: 0.003, 256: 0.002}.__getitem__)
    assert graphs._row_seconds() == 0
    assert ListedGraphs((8,), CountedCapturer())._row_seconds() == 0


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_captured_step_gives_every_request_its_text(seed, ahead, plain):
    rng = random.Random(100 * seed + ahead)
    model = FakeModel()
    runner = make_runner(model, staged=True)
    runner.backend = StaticBackend()
    runner.graphs = UncapturedGraphs(
        (1, 2, 4, 6),
        model,
        runner.backend,
        runner.inputs,
        runner.sampler.plain,
        Capturer(torch.device("cpu")),
        max_context=64,
    )
    asked = make_requests(rng, 10, plain=plain)
    asked += [Asked(f"d{i}", [i, 2], resolved(temperature=1.0, max_tokens=None), i, 12) for i in range(4)]
    Driver(runner, rng, ahead=ahead).run(asked, preempt=0.02)
    assert runner.graphs.used > 5
    for request in asked:
        assert request.failed is None and request.outputs == alone(model, request), request


@pytest.mark.parametrize("filters", [False, True])
def test_plain_choice_is_the_pipelines(filters):
    """Every mix of greedy and drawing rows, through both ways, in any order of rows."""
    rng = random.Random(int(filters))
    for _ in range(6):
        model, asked = FakeModel(vocab=40), []
        for i in range(8):
            params = resolved(
                temperature=rng.choice([0.0, 0.7, 1.6]), max_tokens=None,
                top_k=rng.choice([0, 1, 7, 40]) if filters else 0, top_p=rng.choice([1.0, 0.7]) if filters else 1.0,
            )  # fmt: skip
            asked.append(Asked(f"r{i}", [rng.randrange(40) for _ in range(5)], params, rng.getrandbits(64), 12))
        runner = make_runner(model, staged=True)
        runner.sampler._pipeline = None  # the whole pipeline must not be needed
        Driver(runner, rng, ahead=1).run(asked)
        for request in asked:
            assert request.failed is None and request.outputs == alone(model, request), request.params


def test_sample_rows_leaves_the_logits_alone_and_picks_columns_by_row():
    logits = torch.randn(3, 50)
    before = logits.clone()
    seeds = torch.arange(9)
    heat = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    rows, positions = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([3, 1, 7], dtype=torch.int32)
    columns = (seeds, heat, torch.zeros(9, dtype=torch.int32), torch.ones(9))
    ids, scores = sample.sample_rows(logits, rows, positions, *columns, filters=False)
    assert torch.equal(logits, before)
    assert ids[1] == logits[1].argmax() and scores[1] == logits[1].max()
    drawn = [int(sample.sample_(logits[i : i + 1].clone(), seeds[[row]], torch.tensor([at]))) for i, row, at in
             ((0, 4, 3), (2, 2, 7))]  # fmt: skip
    assert [int(ids[0]), int(ids[2])] == drawn


def test_a_mask_without_anyone_who_asked_for_it_is_an_error():
    runner = make_runner(staged=True)
    row = NewRow(
        request_id="a", epoch=0, token_ids=(1, 2), num_prompt_tokens=2, params=resolved(temperature=0.0), seed=0,
        blocks=((0,), (1,)),
    )  # fmt: skip
    runner.forward(StepPlan(step=1, grants=(Grant("a", 0, 2, True, 0),), joined=(row,)))
    with pytest.raises(RuntimeError, match="structured outputs"):
        runner.sample(1, Mask(index=(0,), rows=bytes(8), words=2))


def test_only_useful_buckets():
    assert useful_sizes((1, 2, 4, 8, 16), 5) == (1, 2, 4, 8)
    assert useful_sizes((4, 2, 2), 100) == (2, 4)
    assert useful_sizes((), 5) == ()


def test_gpu_memory_budget():
    gib = 1 << 30
    budget = Budget(total=100 * gib, used=20 * gib, others=0, step=5 * gib, graphs=gib, static=gib, share=0.9)
    assert kv_bytes_on_gpu(budget) == 63 * gib - MARGIN
    beside = Budget(total=100 * gib, used=20 * gib, others=45 * gib, step=0, graphs=0, static=0, share=0.5)
    assert beside.kv == 30 * gib - MARGIN  # the share is its own, whatever others use
    crowded = Budget(total=100 * gib, used=20 * gib, others=60 * gib, step=0, graphs=0, static=0, share=0.9)
    assert crowded.kv == 20 * gib - MARGIN and "what other programs leave of 100.00" in str(crowded)
    tight = Budget(total=24 * gib, used=20 * gib, others=0, step=5 * gib, graphs=gib, static=0, share=0.9)
    with pytest.raises(ConfigError, match=r"21\.60 GiB \(0\.9 of 24\.00\) minus 20\.00 used, 5\.00 for a step"):
        kv_bytes_on_gpu(tight)
