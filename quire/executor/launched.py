"""The backend `external_launcher`: torchrun, or another launcher, has started one program per rank, and each of them
has an engine of its own in its process.

All ranks are given the same requests in the same order, plan the same steps, and meet in the sums of a forward pass; so
each of them has every answer, and nothing is sent around but what the last stage of a pipeline found, which the stages
before it need to go on. What would make plans differ is agreed upon (how much KV there is) or waited for
(grammars: engine/loop.py); a program that gives its ranks different requests is told so at the step in which they join.
Must not know: tensors, or how ranks reach each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Concatenate, get_type_hints

import msgspec

from quire.base import env, registry
from quire.base.log import logger
from quire.config.engine import replace
from quire.executor.alike import difference, remarks, statement
from quire.executor.base import WORKER, Answer, Arguments, PendingResult, WorkerProtocol, resolve_verb
from quire.executor.inproc import InProcessExecutor, no_worker
from quire.schema.errors import ConfigError, EngineDeadError
from quire.schema.step import Mask, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
LAUNCHED = "env://"  # where torch.distributed finds its peers: as the launcher's variables say


@dataclass(frozen=True)
class _Known:
    known: StepResult

    def result(self) -> StepResult:
        return self.known


@dataclass(frozen=True)
class _FromLastStage:
    worker: WorkerProtocol

    def result(self) -> StepResult:
        heard: bytes = resolve_verb("hear_last_stage")(self.worker)
        return msgspec.msgpack.decode(heard, type=StepResult)


class LaunchedExecutor(InProcessExecutor):
    """This rank's worker, in step with those of the others."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel_config
        size = parallel.world_size
        config = replace(config, **{f"parallel_config.{name}": value for name, value in places(size).items()})
        self._num_ranks, self._stages = size, parallel.pipeline_parallel_size
        rank = self._rank = launched_rank(size * parallel.data_parallel_size) % size
        self._worker: WorkerProtocol | None = registry.load(WORKER)(
            config, rank=rank, num_workers=size, meeting=LAUNCHED
        )
        self._check_alike()
        self._is_last = rank >= size - size // self._stages
        self.forward = self.sample = no_worker

    def ask(
        self,
        verb: Callable[Concatenate[WorkerProtocol, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        answers = super().ask(verb, *args, **kwargs)
        if verb.__name__ == WorkerProtocol.init_kv.__name__ and self._num_ranks > 1:
            self.forward = self._forward
            if self._stages > 1:
                self.sample = self._sample
        if verb.__name__ in (WorkerProtocol.load.__name__, WorkerProtocol.free_bytes.__name__):
            return self._of_all(verb, answers[0])
        return answers

    def _of_all(self, verb: Callable[..., Answer], own: Answer) -> list[Answer]:
        """What every rank answers, by rank."""
        kind = get_type_hints(verb)["return"]
        return [msgspec.msgpack.decode(one, type=kind) for one in self.gather(msgspec.msgpack.encode(own))]

    def gather(self, data: bytes) -> list[bytes]:
        answers: list[bytes] = resolve_verb("gather_bytes")(self.worker, data)
        return answers

    def _check_alike(self) -> None:
        answers = self.gather(msgspec.msgpack.encode(statement()))
        statements = [msgspec.msgpack.decode(one, type=dict[str, str]) for one in answers]
        if why := difference(statements, lambda rank: f"rank {rank}"):
            raise ConfigError(why, param="distributed_executor_backend", value="external_launcher")
        if self._rank == 0:
            for remark in remarks(statements, lambda rank: f"rank {rank}"):
                log.warning("%s", remark)

    def _sample(self, step: int, mask: Mask | None) -> PendingResult:
        pending = self.worker.sample(step, mask)
        if not self._is_last:
            return _FromLastStage(self.worker)
        result = pending.result()  # at once: the other stages wait for it
        resolve_verb("tell_stages")(self.worker, msgspec.msgpack.encode(result))
        return _Known(result)

    def _forward(self, plan: StepPlan) -> None:
        if plan.joined:
            self._check(plan)
        self.worker.forward(plan)

    def _gather(self, number: int) -> list[int]:
        numbers: list[int] = resolve_verb("gather_number")(self.worker, number)
        return numbers

    def _check(self, plan: StepPlan) -> None:
        digest = int.from_bytes(sha256(msgspec.msgpack.encode(plan)).digest()[:7], "little")
        if len(set(digests := self._gather(digest))) > 1:
            other = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
            raise EngineDeadError(
                f"rank {other} was given other requests than rank 0: with distributed_executor_backend="
                "'external_launcher' every rank runs the same program, with the same prompts, parameters and seeds"
            )


def launched_rank(total: int) -> int:
    """Of this program among those that were launched. ConfigError: they were not, or are not so many."""
    rank, size = env.RANK.get(), env.WORLD_SIZE.get()
    if rank is None or size is None:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' needs RANK and WORLD_SIZE in the environment: start the "
            "program with torchrun",
            param="distributed_executor_backend",
            value="external_launcher",
        )
    if size % total or not 0 <= rank < size:
        raise ConfigError(
            f"WORLD_SIZE is {size} and RANK {rank}; programs are launched for {total} ranks (tensor_parallel_size x "
            "pipeline_parallel_size x data_parallel_size), or a multiple of them",
            param="distributed_executor_backend",
            value="external_launcher",
        )
    return rank


def places(size: int) -> dict[str, int]:
    """Which part of this machine a rank has, by the launcher's variables, in ParallelConfig's terms."""
    total = env.WORLD_SIZE.get() or size
    here = env.LOCAL_WORLD_SIZE.get() or total
    local = env.LOCAL_RANK.get() or 0
    if here >= size:
        return {"nnodes": 1, "data_parallel_rank_local": local // size, "num_engines_here": here // size}
    if size % here:
        raise ConfigError(f"{size} ranks cannot be shared out among machines of {here} (LOCAL_WORLD_SIZE)")
    return {"nnodes": size // here, "data_parallel_rank_local": 0, "num_engines_here": 1}
