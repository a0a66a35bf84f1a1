"""Executor: the verbs by which an engine reaches its workers, the same for every way of reaching them.

In: StepPlan, Mask, KVLayout. Out: ModelInfo, StepResult. An executor is a wire: it must not know what a plan means,
nor import anything of the tensor side (it reaches a worker by import path).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from quire.base import registry
from quire.schema.errors import ConfigError
from quire.schema.kv import KVLayout, ModelInfo
from quire.schema.step import Mask, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.config import EngineConfig


class PendingResult(Protocol):
    """A step under way on the device."""

    def result(self) -> StepResult:
        """Wait for it."""


class Worker(Protocol):
    """One device's end of the wire. `model_runner.model` is the model itself."""

    model_runner: Any

    def load(self) -> ModelInfo: ...
    def free_bytes(self) -> int: ...
    def init_kv(self, layout: KVLayout) -> None: ...
    def warm_up(self) -> None: ...
    def forward(self, plan: StepPlan) -> None: ...
    def sample(self, mask: Mask | None) -> PendingResult: ...
    def shutdown(self) -> None: ...


class Executor(Protocol):
    def load(self) -> ModelInfo:
        """Build the model and read its weights."""

    def free_bytes(self) -> int:
        """Bytes left for KV on the tightest device, after a profile run."""

    def init_kv(self, layout: KVLayout) -> None: ...

    def warm_up(self) -> None: ...

    def forward(self, plan: StepPlan) -> None:
        """Start a step."""

    def sample(self, mask: Mask | None) -> PendingResult:
        """Sample the step that was started last."""

    def call(self, verb: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        """Run a method of every worker, or 'module:function' with the worker as first argument; one result each."""

    def call_function(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], timeout: float | None
    ) -> list[Any]:
        """The same with a callable; only where workers live in this process."""

    def shutdown(self) -> None: ...


BACKENDS = registry.Registry("distributed_executor_backend", {"uni": "quire.executor.inproc:InProcessExecutor"})


def make_executor(config: EngineConfig) -> Executor:
    """By parallel_config.distributed_executor_backend: a known name, or the import path of an Executor class."""
    name = config.parallel_config.distributed_executor_backend or "uni"
    if ":" in name or "." in name:
        backend = registry.load(name)
    elif name in BACKENDS:
        backend = BACKENDS.get(name)
    else:
        raise ConfigError(
            f"distributed_executor_backend {name!r} is unknown; this version has {', '.join(sorted(BACKENDS))}, "
            "or give the import path of an Executor class",
            param="distributed_executor_backend",
            value=name,
        )
    executor: Executor = backend(config)
    return executor


def resolve_verb(verb: str) -> Callable[..., Any]:
    """A function of the worker for a verb: 'module:function', or the worker's own method of that name."""
    if ":" in verb:
        function: Callable[..., Any] = registry.load(verb)
        return function

    def run_method(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if verb.startswith("_") or not callable(method := _attribute(worker, verb)):
            raise AttributeError(f"a worker has no method {verb!r}")
        return method(*args, **kwargs)

    return run_method


def apply_to_model(worker: Worker, path: str) -> Any:
    """Call the function at an import path with the worker's model: apply_model across processes."""
    return registry.load(path)(worker.model_runner.model)


def _attribute(worker: Any, name: str) -> Any:
    try:
        return getattr(worker, name)
    except AttributeError:
        return None
