"""How a GPU worker measures itself before it has a KV cache, with a faked device: trial steps, the budget they make,
and what is said when something does not fit."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.schema.errors import ConfigError
from quire.schema.kv import KVKind, KVSpec
from quire.worker import gpu_memory, kv_memory
from quire.worker.capture import Capturer
from quire.worker.device_inputs import DeviceInputs
from quire.worker.early import Early
from quire.worker.gpu_memory import MARGIN, PER_GRAPH
from quire.worker.graphs import DecodeGraphs
from quire.worker.trial import Trial, scratch_layout
from quire.worker.worker import Worker, WorkerParts
from tests.worker.fakes import FakeBackend, FakeModel, make_config
from tests.worker.test_encoder_memory import Encoder, item

GIB = 1 << 30
CUDA = torch.device("cuda")
BUCKETS = (1, 2, 4, 8)


class BlindPlan:
    """Reads and writes nothing: in a trial every position lies in the same block."""

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, cache: object) -> torch.Tensor:
        return torch.zeros(len(tokens))


class BlindBackend(FakeBackend):
    def __init__(self) -> None:
        self.steps: list[tuple[list[int], bool]] = []

    def plan(self, step, group) -> BlindPlan:
        size = group.block_size
        assert step.slots.max() < size and step.block_tables.shape[0] == 9
        self.steps.append((list(step.query_lens), step.is_static))
        return BlindPlan()


class GpuWorker(Worker):
    """As on a GPU, on a CPU."""

    def _make_runner(self, layout):
        runner = super()._make_runner(layout)
        runner.inputs = DeviceInputs(runner.rows, 64)
        runner.graphs = DecodeGraphs(
            BUCKETS,
            runner.model,
            runner.backend,
            runner.inputs,
            runner.sampler.plain,
            Capturer(torch.device("cpu")),
            max_context=64,
        )
        return runner

    def _graph_sizes(self):
        return BUCKETS


def make_worker(backend: BlindBackend) -> GpuWorker:
    parts = WorkerParts(
        make_model=lambda config, device, group: FakeModel(),
        reload_weights=lambda model, config: 0,
        update_config=lambda config, changes: config,
        select_backend=lambda device, specs, name: backend,
    )
    return GpuWorker(make_config(), torch.device("cpu"), parts)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 100 GiB of which 40 are used; steps take what `peaks` says, in order."""
    fake = SimpleNamespace(free=60 * GIB, total=100 * GIB, peaks=[7 * GIB, 3 * GIB], allocated=5 * GIB)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (fake.free, fake.total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: fake.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: fake.allocated + fake.peaks.pop(0))
    return fake


def test_what_is_left_is_the_kv_cache(device: SimpleNamespace) -> None:
    backend = BlindBackend()
    worker = make_worker(backend)
    worker.load()
    static = 8 * 9 * 65  # tokens and tables of 8 rows and one for padding
    graphs = 3 * GIB + PER_GRAPH * len(BUCKETS)
    assert worker._gpu_bytes() == 90 * GIB - 40 * GIB - 7 * GIB - graphs - static - MARGIN
    largest, decode = backend.steps[0], backend.steps[-1]
    assert sum(largest[0]) == 64 and len(largest[0]) == 8 and not largest[1]  # the token budget, by all rows
    assert decode == ([1] * 8, True)
    assert [lap[0] for lap in worker.start_laps()] == ["build", "weights", "prepare", "largest step", "captured steps"]


def test_what_the_encoder_of_media_takes_is_left(device: SimpleNamespace) -> None:
    """At its peak if that is more than a step, and the vectors that are kept."""
    device.peaks = [11 * GIB, 7 * GIB, 3 * GIB]
    worker = make_worker(BlindBackend())
    worker.load()
    worker._encoder = Encoder()
    worker.measure_media((item("image", 3),))
    static, vectors = 8 * 9 * 65, 64 * 8 * 4  # as many vectors as a step has tokens, of 8 floats
    graphs = 3 * GIB + PER_GRAPH * len(BUCKETS)
    assert worker._gpu_bytes() == 90 * GIB - 40 * GIB - 11 * GIB - graphs - static - vectors - MARGIN


def test_no_start_fails_for_what_the_encoder_of_media_takes(device: SimpleNamespace) -> None:
    device.peaks = [51 * GIB, 7 * GIB, 3 * GIB]
    worker = make_worker(BlindBackend())
    worker.load()
    worker._encoder = Encoder()
    worker.measure_media((item("image", 3),))
    graphs = 3 * GIB + PER_GRAPH * len(BUCKETS)
    assert worker._gpu_bytes() == 90 * GIB - 40 * GIB - 7 * GIB - graphs - 8 * 9 * 65 - MARGIN


def test_what_others_use_is_not_of_the_share(device: SimpleNamespace) -> None:
    assert gpu_memory.used_by_others(CUDA) == 40 * GIB - gpu_memory.OWN_CONTEXT
    worker = make_worker(BlindBackend())
    worker.load()
    worker._others = 25 * GIB
    assert worker._gpu_bytes() > (75 - 15 - 7 - 3 - 1) * GIB


def test_nothing_left_says_where_it_went(device: SimpleNamespace) -> None:
    device.free, device.peaks = 20 * GIB, [9 * GIB, 3 * GIB]
    worker = make_worker(BlindBackend())
    worker.load()
    with pytest.raises(ConfigError) as told:
        worker._gpu_bytes()
    for part in ("90.00 GiB (0.9 of 100.00)", "80.00 used", "9.00 for a step", "3.02 for graphs", "= -2.27 GiB",
                 "Raise gpu_memory_utilization", "lower max_num_batched_tokens", "enforce_eager"):  # fmt: skip
        assert part in str(told.value), part


def test_asked_for_bytes_are_not_measured(device: SimpleNamespace) -> None:
    worker = make_worker(BlindBackend())
    worker.config = make_config(kv_cache_memory_bytes=123)
    worker.device = CUDA
    assert worker.free_bytes() == 123


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.\nand more")


def test_weights_that_do_not_fit(device: SimpleNamespace) -> None:
    worker = make_worker(BlindBackend())
    worker._parts = WorkerParts(**{**vars(worker._parts), "make_model": out_of_memory})
    with pytest.raises(ConfigError, match=r"the weights does not fit.*60\.00 of 100\.00 GiB are free.*5\.00 GiB"):
        worker.load()


def test_a_step_that_does_not_fit(device: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"the largest step.*max_num_batched_tokens.*60\.00 of 100\.00 GiB"):
        gpu_memory.peak(CUDA, out_of_memory)


def test_a_cache_that_does_not_fit(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", out_of_memory)
    with pytest.raises(ConfigError, match=r"a KV cache of 77 blocks.*lower.*kv_cache_memory_bytes"):
        kv_memory.allocate(77, 4096, CUDA)


def test_a_scratch_cache_has_every_group_and_one_block() -> None:
    common = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    specs = [
        KVSpec(layer="a", kind=KVKind.FULL, block_size=4, **common),
        KVSpec(layer="b", kind=KVKind.WINDOW, block_size=4, window=8, **common),
        KVSpec(layer="c", kind=KVKind.FULL, block_size=4, **common),
        KVSpec(layer="s", kind=KVKind.STATE, block_size=16, state_shapes=((64, 64),), state_dtypes=("float32",)),
    ]
    layout = scratch_layout(specs)
    assert [group.layers for group in layout.groups] == [("a", "c"), ("b",), ("s",)]
    assert (layout.num_blocks, layout.page_bytes, len(layout.slots)) == (1, 64 * 64 * 4, 4)


@pytest.mark.parametrize("tokens, rows", [(1, 1), (64, 1), (64, 8), (13, 5), (3, 8), (64, 100)])
def test_a_trial_step_has_the_tokens_it_was_asked_for(tokens: int, rows: int) -> None:
    backend = BlindBackend()
    worker = make_worker(backend)
    worker.load()
    Trial(worker._make_runner(scratch_layout(worker._specs)), 64).step(tokens, rows)
    counts, _ = backend.steps[0]
    assert sum(counts) == tokens and len(counts) == min(tokens, rows, 8) and counts[0] == max(counts)


def test_a_trial_of_everything_covers_each_kind_of_step(device: SimpleNamespace) -> None:
    backend = BlindBackend()
    worker = make_worker(backend)
    worker.load()
    with worker._trial() as trial:
        trial.all(64, BUCKETS)
    mixed = [sum(counts) for counts, static in backend.steps if not static]
    static = [len(counts) for counts, static in backend.steps if static]
    assert {16, 64} <= set(mixed) and max(mixed) == 64
    assert set(static) == set(BUCKETS)


def test_a_start_without_kernels_compiles_and_keeps_the_list(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    jobs = [{"name": "k"}]
    compilers = SimpleNamespace(
        begin=lambda job: ran.append(f"begin {job}"), wait=lambda: ran.append("wait") or [0.5],
        close=lambda: ran.append("close"),
    )  # fmt: skip
    manifest = SimpleNamespace(current=False, write=lambda given: ran.append(f"write {given}"))
    worker = make_worker(BlindBackend())
    worker._parts = WorkerParts(
        **{**vars(worker._parts), "record": lambda run, tell: run() or [tell(job) or job for job in jobs]}
    )
    early = worker._early = SimpleNamespace(manifest=manifest, compilers=compilers)
    early.close = partial(Early.close, early)
    worker.load()
    assert ran == [f"begin {jobs[0]}", "wait", f"write {jobs}", "close"]
    assert worker._early.compilers is None
    manifest.current = True
    worker.load()
    assert len(ran) == 4  # with a current list nothing is recorded


@pytest.mark.parametrize("way", ["nothing is kept between steps", "the load fails"])
def test_processes_that_compile_end_with_the_load(device: SimpleNamespace, way: str) -> None:
    ran: list[str] = []
    manifest = SimpleNamespace(current=False, write=lambda given: ran.append(f"write {given}"))
    worker = make_worker(BlindBackend())
    early = worker._early = SimpleNamespace(
        manifest=manifest, compilers=SimpleNamespace(close=lambda: ran.append("close"))
    )
    early.close = partial(Early.close, early)
    if way == "the load fails":
        worker._parts = WorkerParts(**{**vars(worker._parts), "reload_weights": lambda *_: 1 / 0})
        with pytest.raises(ZeroDivisionError):
            worker.load()
        assert ran == ["close"]
        return
    make = worker._parts.make_model

    def without_layers(*given: Any) -> Any:
        model = make(*given)
        model.kv_specs = lambda *_: []
        return model

    worker._parts = WorkerParts(**{**vars(worker._parts), "make_model": without_layers})
    assert worker.load().specs == ()
    assert ran == ["write []", "close"]  # the next start does not begin any
