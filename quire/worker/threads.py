"""How many threads the CPU worker's arithmetic uses: what was asked, else what the machine really lets us have.

In: QUIRE_CPU_NUM_THREADS, OMP_NUM_THREADS, the processors this process may use, its control group's share of them. Out:
a number. One thread per core: two on one core share its arithmetic units and only wait for each other.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from quire.base import env
from quire.schema.errors import ConfigError
from quire.worker.memory import group_folders, read_text


def num_threads(root: Path = Path("/")) -> int:
    asked = env.CPU_NUM_THREADS.get() or env.OMP_NUM_THREADS.get()
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"QUIRE_CPU_NUM_THREADS is {asked}; it must be at least 1")
        return asked
    cores = _cores(root)
    quotas = [quota for folder in group_folders(root, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


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


def _quota(folder: Path) -> float | None:
    """Processors' worth of time per period; None without a limit."""
    limit, _, period = read_text(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    if not (limit.strip().isdigit() and period.strip().isdigit()):
        return None
    return int(limit) / int(period)
