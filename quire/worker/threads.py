"""How many threads the CPU worker's arithmetic uses, and where: as configured, else as many as the machine allows.

In: QUIRE_CPU_NUM_THREADS, OMP_NUM_THREADS, QUIRE_CPU_OMP_THREADS_BIND, QUIRE_CPU_NUM_OF_RESERVED_CPU, the processors
this process may use, its control group's share of them. Out: a number, and the processors that threads started from
here on are kept on. Several workers divide the cores among them, or have a list of processors each. One thread per
core: two on one core share its arithmetic units and only wait for each other.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from quire.base import env
from quire.schema.errors import ConfigError
from quire.worker.memory import group_folders, read_text


def num_threads(root: Path = Path("/"), *, num_workers: int = 1) -> int:
    """Of each worker."""
    for variable in (env.CPU_NUM_THREADS, env.OMP_NUM_THREADS):
        if (configured := variable.get()) is None:
            continue
        if configured < 1:
            raise ConfigError(f"{variable.spelling} is {configured}; it must be at least 1")
        return configured
    cores, reserved = _cores(root), env.CPU_NUM_OF_RESERVED_CPU.get()
    if not 0 <= reserved < cores:
        raise ConfigError(
            f"QUIRE_CPU_NUM_OF_RESERVED_CPU is {reserved}; it must be from 0 to {cores - 1}: there are {cores} cores, "
            "and the worker needs one"
        )
    sharers = 1 if _has_own_list() else num_workers
    return max(1, min([(cores - reserved) // sharers, *(math.ceil(quota) // num_workers for quota in _quotas(root))]))


def processors_of_ranks(ranks: int, root: Path = Path("/")) -> int:
    """How many processors so many ranks have together, as far as one of them can tell."""
    try:
        own = len(os.sched_getaffinity(0)) * (ranks if _has_own_list() else 1)
    except AttributeError:  # not Linux
        own = os.cpu_count() or 1
    return min([own, *map(int, _quotas(root))])


def bind(rank: int = 0, num_workers: int = 1) -> None:
    """Keep this thread, and those it starts from now on, on the configured processors."""
    configured = env.CPU_OMP_THREADS_BIND.get()
    if configured not in ("auto", "nobind"):
        os.sched_setaffinity(0, processors_of(list_of(configured, rank, num_workers), _allowed()))


def _has_own_list() -> bool:
    """Whether the processors that this process may run on are those of one worker."""
    return "|" in env.CPU_OMP_THREADS_BIND.get()


def list_of(text: str, rank: int, num_workers: int) -> str:
    """'0-3|4-7' -> the list of a rank; one list is for all workers together."""
    lists = text.split("|")
    if len(lists) not in (1, num_workers):
        raise ConfigError(
            f"QUIRE_CPU_OMP_THREADS_BIND is {text!r}: {len(lists)} lists for {num_workers} worker"
            f"{'s' if num_workers > 1 else ''}; give one list, or one for each"
        )
    return lists[rank if len(lists) > 1 else 0]


def processors_of(text: str, allowed: set[int]) -> set[int]:
    """0-3,8 -> {0, 1, 2, 3, 8}"""
    name = f"QUIRE_CPU_OMP_THREADS_BIND is {text!r}"
    processors: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{name}; it must be auto, nobind, or processors as in 0-3,8")
        processors |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if missing := sorted(processors - allowed):
        raise ConfigError(f"{name}; of these, this process may not run on {missing}, but on {sorted(allowed)}")
    return processors


def _allowed() -> set[int]:
    try:
        return set(os.sched_getaffinity(0))
    except AttributeError:
        raise ConfigError("QUIRE_CPU_OMP_THREADS_BIND works on Linux only; set it to auto") from None


def _cores(root: Path) -> int:
    """Cores (not hardware threads) among the processors this process may run on."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = {
        read_text(root / f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") or str(i) for i in allowed
    }
    return len(cores)


def _quotas(root: Path) -> list[float]:
    """Of this process's control groups."""
    return [quota for folder in group_folders(root, "cpu") if (quota := _quota(folder)) is not None]


def _quota(folder: Path) -> float | None:
    """Processors' worth of time per period; None without a limit."""
    limit, _, period = read_text(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    if not (limit.strip().isdigit() and period.strip().isdigit()):
        return None
    return int(limit) / int(period)
