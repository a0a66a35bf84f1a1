"""How many bytes of a GPU the KV cache may have: its share of the memory, less all that is or will be used otherwise.

    total memory × gpu_memory_utilization
      − what is used now (weights, this process's context, other processes)
      − the most a step needs beside it (measured by running the largest one)
      − what decode graphs keep (measured by running the largest captured step, and a little per graph)
      − the rows' tokens and tables
    = KV cache

In: what trial steps took (trial.py). Must not know: models, blocks, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.base.log import logger
from quire.schema.errors import ConfigError

GIB = 1 << 30
PER_GRAPH = 6 << 20  # nodes and parameters of an instantiated graph of a few hundred kernels
MARGIN = 256 << 20  # workspaces of libraries and attention, and what the allocator cannot use
_log = logger(__name__)


@dataclass(frozen=True)
class Budget:
    """All in bytes."""

    total: int
    used: int  # now, by everyone
    step: int  # beside it, at the peak of the largest step
    graphs: int
    static: int  # allocated after this measurement, beside the KV cache
    share: float  # gpu_memory_utilization

    @property
    def kv(self) -> int:
        return int(self.total * self.share) - self.used - self.step - self.graphs - self.static - MARGIN

    def __str__(self) -> str:
        return (
            f"{self.total * self.share / GIB:.2f} GiB ({self.share:g} of {self.total / GIB:.2f}) minus "
            f"{self.used / GIB:.2f} used, {self.step / GIB:.2f} for a step, {self.graphs / GIB:.2f} for graphs, "
            f"{(self.static + MARGIN) / GIB:.2f} for rows and workspaces"
        )


def kv_bytes_on_gpu(budget: Budget) -> int:
    """ConfigError, with the numbers and what to change, where nothing is left."""
    if budget.kv <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {budget} = {budget.kv / GIB:.2f} GiB. Raise gpu_memory_utilization, "
            "free the GPU of other programs, lower max_num_batched_tokens or max_num_seqs, set enforce_eager, or give "
            "kv_cache_memory_bytes",
            param="gpu_memory_utilization",
            value=budget.share,
        )
    _log.info("KV cache: %.2f GiB (%s)", budget.kv / GIB, budget)
    return budget.kv


def measure(device: torch.device, *, step: int, graphs: int, static: int, share: float) -> Budget:
    """`step` and `graphs` as `peak` found them; what is used is asked of the driver now."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Budget(total, total - free, step, graphs, static, share)


def peak(device: torch.device, run: Callable[[], None]) -> int:
    """Bytes that running this takes for a moment."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        run()
    except torch.cuda.OutOfMemoryError as wrong:
        raise does_not_fit(device, "the largest step (max_num_batched_tokens, max_num_seqs)", wrong) from None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def does_not_fit(device: torch.device, what: str, wrong: torch.cuda.OutOfMemoryError) -> ConfigError:
    free, total = torch.cuda.mem_get_info(device)
    return ConfigError(
        f"{what} does not fit the GPU: {free / GIB:.2f} of {total / GIB:.2f} GiB are free "
        f"({str(wrong).splitlines()[0]}). Use a smaller model or a GPU with more memory, free it of other programs, or "
        "lower max_num_batched_tokens, max_num_seqs or kv_cache_memory_bytes"
    )
