"""Pipeline stages as threads of one process: an Executor for engine tests, and models put together from their stages.

`distributed_executor_backend="tests.thread_stages:ThreadStages"` gives each stage a worker with a thread of its own;
what the stages exchange goes through queues. `watch` is told when a stage begins and ends a step.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.layers.batch import Batch
from quire.ops.cpu.forms import register
from quire.quant.shard import ShardGroup
from quire.schema.step import StepPlan, StepResult
from quire.worker.main import PARTS
from quire.worker.worker import Worker

PATIENCE = 60.0  # seconds


class Chain:
    """The stages of a model, run one after another as if they were one."""

    captures = False

    def __init__(self, stages: Sequence[Any]) -> None:
        self.stages, self.arch, self.storage = stages, stages[-1].arch, stages[0].storage
        self.logits = stages[-1].logits

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[Any]:
        return [spec for stage in self.stages for spec in stage.kv_specs(block_size, kv_dtype)]

    def bind_kv(self, caches: Any, groups: Any) -> None:
        for stage in self.stages:
            stage.bind_kv(caches, groups)

    def forward(self, batch: Batch) -> Tensor:
        stream = None
        for stage in self.stages:
            stream = stage.forward(replace(batch, stream=stream))
        assert stream is not None
        return stream


class _Arrived:
    def wait(self) -> None:
        pass


class _QueueLink:
    def __init__(self, before: queue.SimpleQueue[Tensor] | None, after: queue.SimpleQueue[Tensor] | None) -> None:
        self._before, self._after = before, after

    def receive(self, into: Tensor) -> None:
        assert self._before is not None
        into.copy_(self._before.get(timeout=PATIENCE))

    def send(self, x: Tensor) -> _Arrived:
        assert self._after is not None
        self._after.put(x.clone())
        return _Arrived()


class _Later:
    def __init__(self, started: Future[Any]) -> None:
        self._started = started

    def result(self) -> StepResult:
        result: StepResult = self._started.result(PATIENCE).result()
        return result


class ThreadStages:
    """As an Executor."""

    supports_pp = True
    watch: ClassVar[Callable[[str, int, int], None] | None] = None  # ("begin" or "end", stage, step)

    def __init__(self, config: Any) -> None:
        count = config.parallel_config.pipeline_parallel_size
        register(1)
        pipes: list[Any] = [None, *(queue.SimpleQueue() for _ in range(count - 1)), None]
        self.workers = [
            Worker(
                config, torch.device("cpu"), PARTS, group=ShardGroup(stage=i, stages=count),
                link=_QueueLink(pipes[i], pipes[i + 1]),
            )
            for i in range(count)
        ]  # fmt: skip
        self._threads = [ThreadPoolExecutor(1, f"stage {i}") for i in range(count)]
        self._started: list[Future[Any]] = []

    def ask(self, verb: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return self.call(verb.__name__, list(args), kwargs, None)

    def call(self, verb: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        """One stage after another: none waits for a later one."""
        return [
            thread.submit(getattr(worker, verb), *args, **kwargs).result(PATIENCE)
            for thread, worker in zip(self._threads, self.workers, strict=True)
        ]

    def call_function(self, function: Any, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        return [function(worker, *args, **kwargs) for worker in self.workers]

    def forward(self, plan: StepPlan) -> None:
        for stage, thread in enumerate(self._threads):
            thread.submit(self._run, stage, plan).add_done_callback(_raise)

    def _run(self, stage: int, plan: StepPlan) -> None:
        watch = type(self).watch or (lambda *event: None)
        watch("begin", stage, plan.step)
        self.workers[stage].forward(plan)
        watch("end", stage, plan.step)

    def sample(self, step: int, mask: Any) -> _Later:
        started = [
            thread.submit(worker.sample, step, mask) for thread, worker in zip(self._threads, self.workers, strict=True)
        ]
        return _Later(started[-1])

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for worker in self.workers:
            worker.shutdown()


def _raise(done: Future[Any]) -> None:
    """Seen by `sample`, which finds no step; the reason is printed."""
    if (failed := done.exception()) is not None:
        print(f"a stage failed: {failed!r}")
