"""How many bytes a CPU worker may give to the KV cache, and what the machine (or its container) has left.

A laptop shares its memory with everything else, so a share of all of it, as on a GPU, would be wrong. In order: the
environment (QUIRE_CPU_KVCACHE_SPACE, GiB), the configuration (kv_cache_memory_bytes), else half of what is free after
the weights are loaded, at most 4 GiB; several workers share that half. No profile run: the free half covers the
activations of a step, and a run would cost more time than all the rest of the start. Must not know: models, blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

from quire.base import env
from quire.base.log import logger
from quire.schema.errors import ConfigError

GIB = 1 << 30
DEFAULT_LIMIT = 4 * GIB
_log = logger(__name__)


def kv_bytes(configured: int | None, available: int | None = None, *, num_workers: int = 1) -> int:
    """Bytes for the KV cache of one worker. `configured` is cache_config.kv_cache_memory_bytes."""
    space = env.CPU_KVCACHE_SPACE.get()
    if space < 0:
        raise ConfigError(f"QUIRE_CPU_KVCACHE_SPACE is {space}; it must be 0 (decide for me) or a number of GiB")
    if space > 0:
        chosen, why = int(space * GIB), "QUIRE_CPU_KVCACHE_SPACE"
    elif configured:
        chosen, why = configured, "kv_cache_memory_bytes"
    else:
        free = available_bytes() if available is None else available
        chosen, why = min(DEFAULT_LIMIT, free // 2) // num_workers, f"half of {free / GIB:.2f} GiB free, at most 4 GiB"
        why += f", by {num_workers} workers" if num_workers > 1 else ""
    _log.info("KV cache: %.2f GiB (%s)", chosen / GIB, why)
    return chosen


def available_bytes(root: Path = Path("/")) -> int:
    """Free memory of the machine, or of the control group this process runs in, whichever is less."""
    known = [free for free in (_machine_free(root), *_group_free(root)) if free is not None]
    if known:
        return max(0, min(known))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no /proc: take half as free


def _machine_free(root: Path) -> int | None:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _group_free(root: Path) -> list[int]:
    """Version 2, then version 1, each at the process's own path and at every level above it."""
    free = []
    for folder in group_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(limit - used + _reclaimable(folder))
    return free


def group_folders(root: Path, controller: str) -> list[Path]:
    """Where the limits of this process's control groups are written."""
    folders = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        top = root / "sys/fs/cgroup"
        if names and controller in names.split(","):
            top = top / controller
        elif names:
            continue
        below = Path(path.strip("/"))
        folders += [top / below, *(top / parent for parent in below.parents)] if below.parts else [top]
    return list(dict.fromkeys(folders))


def _reclaimable(folder: Path) -> int:
    """File pages count as used although they go when memory is needed."""
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
