"""Executor: the way by which an engine reaches its workers, the same for every kind of worker.

`WorkerProtocol` declares what can be asked of a worker, once: an executor asks for a verb by naming it
(`ask(WorkerProtocol.load)`), and a wire reads the types of its arguments and of its answer from there (remote.py). An
executor must not know what a plan means, nor import anything of the tensor side (it reaches a worker by import path).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from quire.base import registry
from quire.config.local import describe, object_of
from quire.schema.adapters import AdapterRead, AdapterSource
from quire.schema.errors import ConfigError, EngineDeadError
from quire.schema.kv import KVLayout, ModelInfo
from quire.schema.media import MediaItem
from quire.schema.step import Mask, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.config import EngineConfig

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
WORKER = "quire.worker.early:build_worker"  # called with a configuration, `rank`, `num_workers` and `meeting`


class PendingResult(Protocol):
    """A step under way on the device."""

    def result(self) -> StepResult:
        """Wait for it."""


class WorkerProtocol(Protocol):
    """One rank. The verbs of a start come in the order of this list; `model_runner.model` is the model itself."""

    model_runner: Any

    def load(self) -> ModelInfo:
        """Build the model and read this rank's weights."""

    def measure_media(self, items: tuple[MediaItem, ...]) -> None:
        """Encode the largest items: what that takes is not left for KV. Only of models with an encoder, on a GPU."""

    def free_bytes(self) -> int:
        """Bytes left for KV on this rank's device, after a profile run."""

    def init_kv(self, layout: KVLayout) -> None:
        """Allocate the KV cache."""

    def warm_up(self) -> None:
        """Pay for what only a first step pays."""

    def forward(self, plan: StepPlan) -> None:
        """Start a step; returns at once where the device works by itself."""

    def sample(self, step: int, mask: Mask | None) -> PendingResult:
        """Choose the tokens of a step that was started."""

    def idle_step(self) -> bool:
        """Take part in a step of other engines that share experts with this one, without tokens; whether any had
        some."""

    def prepare_idle(self) -> bool:
        """While no step is under way, do one short thing that the start had no time for; whether more is left."""

    def read_adapter(self, source: AdapterSource) -> None:
        """Begin to read an adapter into host memory; returns at once."""

    def poll_adapters(self, timeout: float) -> list[AdapterRead]:
        """What was read since the last call; waits so many seconds for the first."""

    def drop_adapter(self, serial: int) -> None:
        """Forget the copy in host memory, read or not. A slot keeps what is in it."""

    def shutdown(self) -> None:
        """Let go of the device's memory."""


class Executor(Protocol):
    """All workers of an engine, by rank."""

    def ask(
        self,
        verb: Callable[Concatenate[WorkerProtocol, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        """Run a verb of `WorkerProtocol` on every rank; their answers by rank."""

    def forward(self, plan: StepPlan) -> None:
        """Start a step on every rank."""

    def sample(self, step: int, mask: Mask | None) -> PendingResult:
        """Choose the tokens of a step; the result is that of the first rank which has the model's last layers."""

    def call(self, verb: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        """Run a method of every worker, or 'module:function' with the worker as first argument; one result each."""

    def call_function(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], timeout: float | None
    ) -> list[Any]:
        """The same with a callable; only where workers live in this process."""

    def shutdown(self) -> None: ...


@runtime_checkable
class WatchedExecutor(Protocol):
    """An executor whose workers may die while nobody asks them for anything."""

    def when_dead(self, tell: Callable[[EngineDeadError], None]) -> None:
        """Call this once a worker is gone, in some thread; at once if one is already."""


@runtime_checkable
class StepwiseExecutor(Protocol):
    """An executor whose ranks have a loop each, all of which must plan the same steps."""

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank says, by rank; all have to say something at the same point."""


BACKENDS = registry.Registry(
    "distributed_executor_backend",
    {
        "uni": "quire.executor.inproc:InProcessExecutor",
        "mp": "quire.executor.processes:one_per_rank",
        "ray": "quire.executor.ray_actors:on_ray",
        "external_launcher": "quire.executor.launched:LaunchedExecutor",
    },
)


def make_executor(config: EngineConfig) -> Executor:
    """By parallel_config.distributed_executor_backend: a known name, or the import path of an Executor class."""
    name = config.parallel_config.distributed_executor_backend or "uni"
    if ":" in name or "." in name:
        try:
            backend = object_of(name)
        except ImportError as wrong:
            raise ConfigError(
                f"distributed_executor_backend {describe(name)!r} cannot be imported: {wrong}",
                param="distributed_executor_backend",
                value=name,
            ) from None
        _check_own(backend, describe(name), config.parallel_config.pipeline_parallel_size)
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


def _check_own(backend: Any, name: str, stages: int) -> None:
    """Of a class that is not Quire's."""
    if not callable(backend):
        raise ConfigError(
            f"distributed_executor_backend {name!r} is not a class of executors, but {backend!r:.100}",
            param="distributed_executor_backend",
            value=name,
        )
    if stages > 1 and not (hasattr(backend, "supports_pp") and backend.supports_pp):
        raise ConfigError(
            f"pipeline_parallel_size={stages}: the executor {name!r} does not say that it has stages "
            "(supports_pp = True)",
            param="distributed_executor_backend",
            value=name,
        )


def one_model(infos: Sequence[ModelInfo]) -> ModelInfo:
    """What all ranks have loaded, together: stages have layers each, the ranks of a stage a share of every one."""
    first, of_stage = infos[0], {info.stage: info for info in reversed(infos)}
    for rank, info in enumerate(infos):
        if (info.vocab_size, info.max_positions) != (first.vocab_size, first.max_positions):
            raise RuntimeError(
                f"rank {rank} loaded a model of {info.vocab_size} tokens and {info.max_positions} positions, rank 0 "
                f"one of {first.vocab_size} and {first.max_positions}"
            )
        if info.specs != of_stage[info.stage].specs:
            raise RuntimeError(f"rank {rank} keeps other KV than the first rank of its stage ({info.stage})")
    if len(infos) == 1:
        return first
    by_stage = [of_stage[stage].specs for stage in sorted(of_stage)]
    return ModelInfo(
        specs=tuple(spec for specs in by_stage for spec in specs),
        vocab_size=first.vocab_size,
        max_positions=first.max_positions,
        num_parameters=sum(info.num_parameters for info in infos),
        weight_bytes=sum(info.weight_bytes for info in infos),
        load_seconds=max(info.load_seconds for info in infos),
        stages=tuple(tuple(spec.layer for spec in specs) for specs in by_stage) if len(by_stage) > 1 else (),
    )


def least_by_stage(infos: Sequence[ModelInfo], num_bytes: Sequence[int]) -> list[int]:
    """Of what each rank has, the least within each stage: all ranks of a stage hold the same blocks."""
    least: dict[int, int] = {}
    for info, own in zip(infos, num_bytes, strict=True):
        least[info.stage] = min(own, least.get(info.stage, own))
    return [least[stage] for stage in sorted(least)]


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


def apply_to_model(worker: WorkerProtocol, path: str) -> Any:
    """Call the function at an import path with the worker's model: apply_model across processes."""
    return registry.load(path)(worker.model_runner.model)


def _attribute(worker: Any, name: str) -> Any:
    try:
        return getattr(worker, name)
    except AttributeError:
        return None
