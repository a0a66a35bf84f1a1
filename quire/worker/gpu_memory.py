"""How many bytes of a GPU the KV cache may have: its share of the memory, less all that is or will be used otherwise.

    total memory × gpu_memory_utilization, which is the share of this engine whatever others use
      − what this process uses now (weights, its context)
      − the most a step needs beside it (measured by running the largest one), or an encoder for the largest item
      − what decode graphs keep (measured by running the largest captured step, and a little per graph)
      − the rows' tokens and tables, vectors of media that are kept
    = KV cache, and never more than is free

In: what trial steps took (trial.py). Must not know: models, blocks, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.base.log import logger
from quire.schema.errors import ConfigError

GIB = 1 << 30
PER_GRAPH = 6 << 20  # nodes and parameters of an instantiated graph of a few hundred kernels
OWN_CONTEXT = 600 << 20  # what the driver and its libraries take of the GPU for this process at the start
MARGIN = 256 << 20  # workspaces of libraries and attention, and what the allocator cannot use
_LARGEST = "the largest step (max_num_batched_tokens, max_num_seqs)"
_log = logger(__name__)


@dataclass(frozen=True)
class Budget:
    """All in bytes."""

    total: int
    used: int  # now, by this process
    others: int  # used by others
    step: int  # beside it, at the peak of the largest step
    graphs: int
    static: int  # allocated after this measurement, beside the KV cache
    share: float  # gpu_memory_utilization

    @property
    def kv(self) -> int:
        claimed = min(int(self.total * self.share), self.total - self.others)
        return claimed - self.used - self.step - self.graphs - self.static - MARGIN

    def with_media(self, peak: int, cached: int) -> Budget:
        """With what an encoder takes at its peak, and vectors that are kept; without, where nothing would be left."""
        both = replace(self, step=max(self.step, peak), static=self.static + cached)
        if both.kv > 0 or both == self:
            return both
        _log.warning("No memory is left for the encoder of media: %s = %.2f GiB", both, both.kv / GIB)
        return self

    def _claimed(self) -> str:
        share, left = self.total * self.share, self.total - self.others
        if share <= left:
            return f"{share / GIB:.2f} GiB ({self.share:g} of {self.total / GIB:.2f})"
        return f"{left / GIB:.2f} GiB (what other programs leave of {self.total / GIB:.2f})"

    def __str__(self) -> str:
        return (
            f"{self._claimed()} minus "
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


def used_by_others(device: torch.device) -> int:
    """Bytes; to be measured before this process takes more than its context."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - OWN_CONTEXT)


def measure(device: torch.device, *, others: int, step: int, graphs: int, static: int, share: float) -> Budget:
    """`step` and `graphs` as `peak` found them; how much is in use is read from the driver now."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Budget(total, total - free - others, others, step, graphs, static, share)


def peak(device: torch.device, run: Callable[[], None], what: str = _LARGEST) -> int:
    """Bytes that running this takes for a moment."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        run()
    except torch.cuda.OutOfMemoryError as wrong:
        raise does_not_fit(device, what, wrong) from None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def does_not_fit(device: torch.device, what: str, wrong: torch.cuda.OutOfMemoryError) -> ConfigError:
    free, total = torch.cuda.mem_get_info(device)
    return ConfigError(
        f"{what} does not fit the GPU: {free / GIB:.2f} of {total / GIB:.2f} GiB are free "
        f"({str(wrong).splitlines()[0]}). Use a smaller model or a GPU with more memory, free it of other programs, or "
        "lower max_num_batched_tokens, max_num_seqs or kv_cache_memory_bytes"
    )
