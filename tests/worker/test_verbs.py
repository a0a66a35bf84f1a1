"""The worker's verbs, its memory and threads, with a fake model in it."""

import gc
import os
import sys
import threading
import types
import weakref
from types import SimpleNamespace

import pytest
import torch

from quire.base import env
from quire.executor.base import resolve_verb
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker import kv_memory, memory, threads
from quire.worker.main import build_worker, worker_class
from quire.worker.worker import Worker, WorkerParts
from tests.worker.fakes import FakeBackend, FakeModel, make_config, make_layout

GIB = 1 << 30


def make_worker(cls=Worker, **changes) -> Worker:
    notes = SimpleNamespace(reloaded=[])

    def update_config(config, overrides):
        return SimpleNamespace(**{**vars(config), "load_config": SimpleNamespace(**overrides["load_config"])})

    parts = WorkerParts(
        make_model=lambda config, device, group: FakeModel(),
        reload_weights=lambda model, config: notes.reloaded.append((id(model), config.load_config.load_format)),
        update_config=update_config,
        select_backend=lambda device, specs, name: FakeBackend(),
    )
    worker = cls(make_config(**changes), torch.device("cpu"), parts)
    worker.notes = notes
    return worker


def started(cls=Worker, **changes) -> Worker:
    worker = make_worker(cls, **changes)
    info = worker.load()
    worker.init_kv(make_layout(list(info.specs), 32))
    worker.warm_up()
    return worker


def test_load_reports_the_model():
    info = make_worker().load()
    assert [spec.layer for spec in info.specs] == ["full", "window"]
    assert info.vocab_size == 40 and info.max_positions == 128
    assert (info.num_parameters, info.weight_bytes) == (12, 48)  # the tied weight counts once


def test_a_whole_life():
    worker = started()
    assert worker.model_runner.rows.num_rows == 0  # the warm-up left
    assert worker.model_runner.model is worker.get_model()
    row = NewRow(
        request_id="a", epoch=0, token_ids=(5, 6), num_prompt_tokens=2, params=ResolvedParams(temperature=0.0), seed=1,
        blocks=((), ()),
    )  # fmt: skip
    worker.forward(StepPlan(step=1, grants=(Grant("a", 0, 2, True, 0, ((3,), (4,))),), joined=(row,)))
    logits = worker.get_model().logits_after([5, 6])
    assert worker.sample(1, None).result().sampled == [[logits.index(max(logits))]]
    worker.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        worker.forward(StepPlan(step=2, grants=()))


def test_shutdown_lets_go_of_model_and_cache():
    worker = started()
    model, cache = weakref.ref(worker.get_model()), weakref.ref(worker.get_model().caches["full"])
    worker.shutdown()
    gc.collect()
    assert model() is None and cache() is None


def call(worker: Worker, verb: str, *args, **kwargs):
    """As an executor does it."""
    return resolve_verb(verb)(worker, *args, **kwargs)


class Extension:
    def scale(self, by: float) -> float:
        with torch.no_grad():
            for _, weight in self.model_runner.model.named_parameters()[:1]:
                weight.mul_(by)
        return float(weight.detach().sum())

    def where(self) -> tuple:
        return self.device.type, self.model_config.dtype, self.rank, self.local_rank


class Clashing:
    def forward(self, plan):
        return None


def test_an_extension_adds_verbs(monkeypatch):
    module = types.ModuleType("some_extension")
    module.Extension, module.Clashing, module.number = Extension, Clashing, 3
    monkeypatch.setitem(sys.modules, "some_extension", module)
    worker = started(worker_class("some_extension.Extension"))
    assert isinstance(worker, Worker) and isinstance(worker, Extension)
    assert call(worker, "scale", 2.0) == 24.0
    assert call(worker, "where") == ("cpu", "float32", 0, 0)
    assert call(worker, "get_model") is worker.get_model()
    assert call(worker, "apply_model", lambda model: model.arch.vocab) == 40
    assert worker_class("") is Worker
    for path, word in (
        ("some_extension:Clashing", "forward"), ("some_extension:number", "not a class"),
        ("some_extension:Nothing", "cannot be loaded"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            worker_class(path)


def test_a_device_that_is_not_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = make_config()
    config.device_config.device = "cuda"
    with pytest.raises(ConfigError, match=r"finds no usable GPU.*device=cpu"):
        build_worker(config)
    config.device_config.device = "xpu"
    with pytest.raises(NotBuiltError, match="xpu"):
        build_worker(config)


def test_dummy_start_then_reload_in_place():
    worker = started()
    call(worker, "update_config", {"load_config": {"load_format": "auto"}})
    call(worker, "reload_weights")
    own = id(worker.get_model())
    assert worker.notes.reloaded == [(own, "safetensors"), (own, "auto")]


# --- KV memory


def test_every_layer_of_a_slot_sees_the_same_pages_and_its_own_group():
    model = FakeModel()
    layout = make_layout(model.kv_specs(4, "float32"), 7)
    kv_memory.KVMemory(layout, torch.device("cpu")).bind(FakeBackend(), model)
    assert model.groups == {"full": 0, "window": 1}
    full, window = (model.caches[name].memory for name in ("full", "window"))
    assert full.data_ptr() == window.data_ptr() and full.shape == (7, layout.page_bytes)
    assert not full.any()
    assert full.data_ptr() % 4096 == 0


def test_untouched_memory_costs_nothing():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    held = kv_memory.allocate(1 << 12, 1 << 18, torch.device("cpu"))  # 1 GiB
    assert resident() - before < 1 << 26
    held[5, :100] = 1
    assert held[5, :100].sum() == 100


def test_impossible_memory_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(kv_memory, "new_map", refuse_map)
    words = r"cannot allocate 30\.00 GiB for the KV cache \(8 blocks of 4026531840 bytes\): .*; lower kv_cache"
    with pytest.raises(ConfigError, match=words) as caught:
        kv_memory.allocate(8, 1 << 27, torch.device("cpu"), num_slots=30)
    assert "weights" not in str(caught.value)


def refuse_map(size: int) -> None:
    raise OSError(12, "Cannot allocate memory")


# --- how much memory


@pytest.fixture
def no_space(monkeypatch):
    monkeypatch.delenv("QUIRE_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    env.forget_all()


def test_kv_bytes_in_order_of_precedence(no_space, monkeypatch):
    assert memory.kv_bytes(None, available=2 * GIB) == GIB
    assert memory.kv_bytes(None, available=100 * GIB) == 4 * GIB
    assert memory.kv_bytes(12345, available=100 * GIB) == 12345
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    env.forget_all()
    assert memory.kv_bytes(12345, available=100 * GIB) == GIB // 2
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "-1")
    env.forget_all()
    with pytest.raises(ConfigError, match="-1"):
        memory.kv_bytes(None)


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal: 99 kB\nMemAvailable: 8388608 kB\n"


def test_available_memory_respects_control_groups(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert memory.available_bytes(tmp_path) == 8 * GIB
    group = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max"}
    write(tmp_path, group)
    assert memory.available_bytes(tmp_path) == 8 * GIB
    above = {
        "memory.max": str(3 * GIB),
        "memory.current": str(GIB),
        "memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
    }
    write(tmp_path, {f"sys/fs/cgroup/a/{name}": text for name, text in above.items()})
    assert memory.available_bytes(tmp_path) == 2 * GIB + GIB // 2


def test_available_memory_respects_version_1_groups(tmp_path):
    write(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "5:cpu,cpuacct:/x\n9:memory:/docker/x\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    })  # fmt: skip
    assert memory.available_bytes(tmp_path) == GIB


def test_free_bytes_of_this_machine_are_sane(no_space):
    assert 0 < make_worker().free_bytes() <= 4 * GIB


# --- threads


@pytest.fixture
def no_threads(monkeypatch):
    for name in ("QUIRE_CPU_NUM_THREADS", "VLLM_CPU_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    env.forget_all()


def test_threads_asked_for(no_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    env.forget_all()
    assert threads.num_threads() == 5
    monkeypatch.setenv("QUIRE_CPU_NUM_THREADS", "3")
    env.forget_all()
    assert threads.num_threads() == 3
    monkeypatch.setenv("QUIRE_CPU_NUM_THREADS", "-1")
    env.forget_all()
    with pytest.raises(ConfigError, match="QUIRE_CPU_NUM_THREADS is -1; it must be at least 1"):
        threads.num_threads()
    monkeypatch.delenv("QUIRE_CPU_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    env.forget_all()
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS is 0; it must be at least 1"):
        threads.num_threads()


def test_threads_by_cores_and_quota(no_threads, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8, 9}, raising=False)
    assert threads.num_threads(tmp_path) == 6
    for cpu in (0, 1, 2, 3):  # two hardware threads per core
        write(
            tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}\n"}
        )
    assert threads.num_threads(tmp_path) == 4
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert threads.num_threads(tmp_path) == 4
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert threads.num_threads(tmp_path) == 2
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "5000 100000\n"})
    assert threads.num_threads(tmp_path) == 1


def test_cores_left_to_others(no_threads, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "7")
    assert threads.num_threads(tmp_path) == 1
    for wrong in ("8", "-1"):
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", wrong)
        env.forget_all()
        with pytest.raises(ConfigError, match=f"RESERVED_CPU is {wrong}; it must be from 0 to 7"):
            threads.num_threads(tmp_path)


def test_processors_of_a_list() -> None:
    allowed = set(range(8))
    assert threads.processors_of("0-2,5, 7", allowed) == {0, 1, 2, 5, 7}
    for text, said in (
        ("3-1", "as in 0-3,8"),
        ("all", "as in 0-3,8"),
        ("", "as in 0-3,8"),
        ("0-3|4-7", "as in 0-3,8"),
        ("6-9", r"may not run on \[8, 9\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            threads.processors_of(text, allowed)


def test_several_workers_have_a_list_each_or_divide_the_cores(no_threads, monkeypatch, tmp_path) -> None:
    assert [threads.list_of("0-3|4-7", rank, 2) for rank in (0, 1)] == ["0-3", "4-7"]
    assert [threads.list_of("0-7", rank, 2) for rank in (0, 1)] == ["0-7", "0-7"]
    with pytest.raises(ConfigError, match="3 lists for 2 workers; give one list, or one for each"):
        threads.list_of("0|1|2", 0, 2)
    with pytest.raises(ConfigError, match="2 lists for 1 worker; give"):
        threads.list_of("0|1", 0, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    assert [threads.num_threads(tmp_path, num_workers=count) for count in (1, 2, 3, 8)] == [7, 3, 2, 1]
    monkeypatch.setenv("QUIRE_CPU_OMP_THREADS_BIND", "0-6|7-13")  # bound already: what is left is this worker's own
    env.forget_all()
    assert threads.num_threads(tmp_path, num_workers=2) == 7
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"})
    assert threads.num_threads(tmp_path, num_workers=2) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not Linux")
def test_threads_are_kept_where_asked(monkeypatch) -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    try:
        for text, wanted in (("nobind", before), (str(last), {last})):
            monkeypatch.setenv("QUIRE_CPU_OMP_THREADS_BIND", text)
            env.forget_all()
            threads.bind()
            assert os.sched_getaffinity(0) == wanted
        seen = []
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()
        assert seen == [{last}]
    finally:
        os.sched_setaffinity(0, before)
