"""The worker in this process: every verb is a method call. One device, no wire.

A step's two verbs are the worker's own functions (`forward`, `sample`), so that nothing lies between the loop and them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn

from quire.base import registry
from quire.executor.base import WORKER, Answer, Arguments, PendingResult, WorkerProtocol, resolve_verb
from quire.schema.step import Mask, StepPlan

if TYPE_CHECKING:
    from quire.config import EngineConfig


@dataclass(frozen=True)
class DriverWorker:
    """The documented attribute path to the model: model_executor.driver_worker.worker.model_runner.model."""

    worker: WorkerProtocol


class InProcessExecutor:
    def __init__(self, config: EngineConfig) -> None:
        self._worker: WorkerProtocol | None = registry.load(WORKER)(config, rank=0, num_workers=1, meeting="")
        self.forward: Callable[[StepPlan], None] = no_worker
        self.sample: Callable[[int, Mask | None], PendingResult] = no_worker

    @property
    def worker(self) -> WorkerProtocol:
        if self._worker is None:
            raise RuntimeError("the executor was shut down")
        return self._worker

    @property
    def driver_worker(self) -> DriverWorker:
        return DriverWorker(self.worker)

    def ask(
        self,
        verb: Callable[Concatenate[WorkerProtocol, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        answers = [getattr(self.worker, verb.__name__)(*args, **kwargs)]
        if verb.__name__ == WorkerProtocol.init_kv.__name__:  # from now on it can run steps
            self.forward, self.sample = self.worker.forward, self.worker.sample
        return answers

    def call(self, verb: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        return self.call_function(resolve_verb(verb), args, kwargs, timeout)

    def call_function(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], timeout: float | None
    ) -> list[Any]:
        if timeout is None:
            return [function(self.worker, *args, **kwargs)]
        return [_run_with_limit(function, [self.worker, *args], kwargs, timeout)]

    def shutdown(self) -> None:
        """Let the worker free its memory; nothing can be called afterwards."""
        worker, self._worker = self._worker, None
        self.forward = self.sample = no_worker
        if worker is not None:
            worker.shutdown()


def no_worker(*args: Any) -> NoReturn:
    raise RuntimeError("the executor's worker has no KV cache yet, or was shut down")


def _run_with_limit(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], timeout: float) -> Any:
    """Python cannot stop a function, so a late one runs on in its thread; its result is dropped."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as failed:  # noqa: BLE001  # the waiting thread raises it
            done.set_exception(failed)

    Thread(target=work, name="call with timeout", daemon=True).start()
    try:
        return done.result(timeout)
    except TimeoutError:
        if done.done():
            raise
        raise TimeoutError(f"no answer from the worker within {timeout} s") from None
