"""executor/: the verbs reach a worker in this process, and a backend is found by name or path."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from quire.executor.base import WorkerProtocol, make_executor
from quire.executor.inproc import InProcessExecutor
from quire.schema.errors import ConfigError
from tests.fake_engine import FakeExecutor, FakeWorker


class Worker(FakeWorker):
    def __init__(self, config, *, rank, num_workers, meeting) -> None:
        super().__init__()
        assert (rank, num_workers, meeting) == (0, 1, "")
        self.config = config
        self.ended = False

    def shutdown(self) -> None:
        self.ended = True


def config(backend, stages=1):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=backend, pipeline_parallel_size=stages)
    )


class Staged(FakeExecutor):
    supports_pp = True


@pytest.fixture
def executor(monkeypatch):
    monkeypatch.setattr("quire.executor.inproc.WORKER", f"{__name__}:Worker")
    return make_executor(config(None))


def test_the_default_runs_in_this_process(executor):
    assert type(executor) is InProcessExecutor
    assert executor.driver_worker.worker is executor.worker
    assert executor.driver_worker.worker.model_runner.model.name == "repeats its prompt"


def test_backends_by_name_and_by_path():
    assert type(make_executor(config("tests.fake_engine:FakeExecutor"))) is FakeExecutor
    with pytest.raises(ConfigError, match=r"'no\.such:Executor' cannot be imported"):
        make_executor(config("no.such:Executor"))
    with pytest.raises(ConfigError, match="'carrier_pigeon'"):
        make_executor(config("carrier_pigeon"))
    with pytest.raises(ConfigError, match=r"'tests\.fake_engine:VOCAB' is not a class of executors, but"):
        make_executor(config("tests.fake_engine:VOCAB"))


def test_a_class_of_ones_own_says_whether_it_has_stages():
    assert type(make_executor(config(f"{__name__}:Staged", 2))) is Staged
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2: the executor .*FakeExecutor' does not say"):
        make_executor(config("tests.fake_engine:FakeExecutor", 2))


def test_calls(executor):
    assert executor.call("num_rows", [], {}, None) == [0]
    assert executor.call("tests.fake_engine:double", [3], {}, None) == [6]
    assert executor.call_function(lambda worker, n: worker.num_rows() + n, [1], {}, None) == [1]
    assert executor.call("nap", [0.0], {}, 5.0) == ["awake"]
    with pytest.raises(LookupError, match="words"):
        executor.call("fail", ["words"], {}, 5.0)


def test_a_late_answer_is_a_timeout(executor):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        executor.call("nap", [60.0], {}, 0.05)
    assert time.monotonic() - began < 50


def test_a_timeout_of_the_function_itself_is_its_own(executor):
    def late(worker) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        executor.call_function(late, [], {}, 5.0)


def test_shutdown_lets_go_of_the_worker(executor):
    worker = executor.worker
    executor.shutdown()
    executor.shutdown()
    assert worker.ended
    with pytest.raises(RuntimeError, match="shut down"):
        executor.call("num_rows", [], {}, None)


def test_a_step_goes_straight_to_the_worker(executor):
    with pytest.raises(RuntimeError, match="no KV cache yet"):
        executor.forward(None)
    steps = []
    executor.worker.init_kv = lambda layout: vars(executor.worker).update(forward=steps.append, sample=divmod)
    executor.ask(WorkerProtocol.init_kv, None)
    executor.forward("a plan")
    assert steps == ["a plan"] and executor.sample is divmod
    executor.shutdown()
    for verb in (executor.forward, executor.sample):
        with pytest.raises(RuntimeError, match="shut down"):
            verb("a plan", None)
