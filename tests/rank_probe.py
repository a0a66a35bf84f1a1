"""What tests ask of a worker by an import path; light, because every worker process imports it."""

from __future__ import annotations

import os
import threading
from typing import Any


def pid_of(worker: Any) -> int:
    return os.getpid()


def rank_of(worker: Any) -> int:
    rank: int = worker.rank
    return rank


def processors_of(worker: Any) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def weight_bytes(worker: Any) -> int:
    return sum(parameter.nbytes for parameter in worker.get_model().parameters())


def experts_of(worker: Any) -> list[int]:
    """How many experts of each layer a worker has."""
    return [
        module.stored.shape.experts for name, module in worker.get_model().named_modules() if name.endswith("experts")
    ]


def moves_of(worker: Any) -> tuple[int, int]:
    """Steps that a worker has counted, and experts that moved."""
    balance = worker.model_runner.balance
    return (0, 0) if balance is None else (balance.num_steps, balance.num_moved)


def stall(worker: Any, rank: int) -> None:
    """From now on one rank never comes to the sums of a step."""
    if worker.rank == rank:
        worker.forward = lambda plan: threading.Event().wait()


def ray_node_of(worker: Any) -> str:
    """On which node of a Ray cluster a worker runs."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def share_of_node(worker: Any) -> tuple[int, int]:
    """Which of how many workers of this machine it is, as far as it knows."""
    parallel = worker.config.parallel_config
    return parallel.place_here, parallel.num_engines_here


def kv_bytes(worker: Any) -> int:
    """Of a worker's KV memory."""
    kv = worker.model_runner.kv
    return sum(slot.nbytes for slot in kv.slots)


def record_drafts(worker: Any) -> None:
    """From now on keep what the proposer of a worker proposes."""
    drafts = worker.model_runner.drafts
    proposer, kept = drafts._proposer, []
    drafts.recorded = kept
    propose = proposer.propose

    def recorded(names: Any, count: int) -> Any:
        made = propose(names, count)
        kept.extend([name, list(one.token_ids)] for name, one in zip(names, made, strict=True))
        return made

    proposer.propose = recorded


def recorded_drafts(worker: Any) -> list[list[Any]]:
    """Request and tokens of each proposal."""
    kept: list[list[Any]] = worker.model_runner.drafts.recorded
    return kept


def drafter_bytes(worker: Any) -> int:
    return sum(parameter.nbytes for parameter in worker._drafter.model.parameters())


def sums_of(worker: Any) -> tuple[str, int, int]:
    """The process group's backend, how many matrices are summed over ranks, and how many decode graphs there are."""
    from torch import distributed

    summed = sum(bool(getattr(module, "is_summed", False)) for module in worker.get_model().modules())
    graphs = getattr(worker.model_runner, "graphs", None)
    return distributed.get_backend(), summed, 0 if graphs is None else len(graphs._captured)


def how_summed(worker: Any) -> str:
    """The type of what sums over ranks."""
    return type(worker.group.reduce).__name__


def cuts_adapters(worker: Any) -> bool:
    """Whether ranks divide both halves of adapters."""
    return bool(worker.model_runner.adapters.step.is_sharded)


def adapter_bytes(worker: Any) -> int:
    """Of all adapters that a worker has in host memory."""
    return sum(copy.num_bytes for copy in worker.model_runner.adapters._copies.values())
