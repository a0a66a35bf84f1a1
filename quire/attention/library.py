"""Fresh prompts through the attention of cuDNN, as dense batches.

A prompt whose context is the chunk itself needs no cache, so the library's dense attention can take it. In: a step's
entries. Out: the runs of adjacent prompts of one length that go there, and their attention. cuDNN prepares a plan of
its own for every shape, which takes tens of milliseconds. Full steps of PREPARED lengths have theirs from the start;
any other shape gets one only after SEEN steps with it, so lengths that come once never pay. Must not know: caches,
blocks, rows.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base.log import logger

LEAST_TOKENS = 1024  # of a prompt: shorter ones are no faster there
PREPARED = (2048, 4096, 8192)  # tokens of a prompt: full steps of such prompts are ready at the start
SEEN = 16  # steps with the same shape before it is worth a plan, which about as many more pay for
SHAPES = 4096  # remembered
_log = logger(__name__)


class Dense(NamedTuple):
    """Adjacent prompts of one length."""

    start: int  # first token
    rows: int
    length: int


class Library:
    """Which shapes have come often enough, and whether the library can be used at all."""

    def __init__(self, *, least: int = LEAST_TOKENS, seen: int = SEEN) -> None:
        self.least, self.seen = least, seen
        self._counts: Counter[tuple[int, int]] = Counter()
        self._usable: dict[torch.device, bool] = {}

    def choose(self, entries: np.ndarray, fresh: np.ndarray, device: torch.device) -> tuple[list[Dense], np.ndarray]:
        """entries [R, 4]: row | first token | tokens | context. (runs, which entries they hold [R] bool)."""
        taken = np.zeros(len(entries), np.bool_)
        places = np.flatnonzero(fresh & (entries[:, 2] >= self.least))
        runs: list[list[int]] = []
        for place in places.tolist():
            start, length = entries[place, 1:3].tolist()
            if runs and entries[runs[-1][0], 2] == length and entries[runs[-1][-1], 1] + length == start:
                runs[-1].append(place)
            else:
                runs.append([place])
        chosen = []
        if len(self._counts) > SHAPES:
            self._counts.clear()
        for run in runs:
            start, length = entries[run[0], 1:3].tolist()
            self._counts[len(run), length] += 1
            if self._counts[len(run), length] > self.seen and self.usable(device):
                taken[run] = True
                chosen.append(Dense(start, len(run), length))
        return chosen, taken

    def prepare(self, heads: int, qkv: Tensor, longest: int) -> None:
        """Plans for full steps of the size and form of qkv, [T, Hq + 2 Hkv, D]; its contents do not matter."""
        if not self.usable(qkv.device):
            return
        kv_heads = (qkv.shape[1] - heads) // 2
        q, k, v = torch.zeros_like(qkv[:, :heads].contiguous()), qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        for length in PREPARED:
            run = Dense(0, len(qkv) // length, length)
            if run.rows and length <= longest:
                try:
                    dense_attention(q, k, v, run, qkv.shape[2] ** -0.5)
                except RuntimeError as wrong:
                    _log.warning("cuDNN attention cannot be used for heads of size %d: %s", qkv.shape[2], wrong)
                    self._usable[qkv.device] = False
                    return
                self._counts[run.rows, length] = self.seen

    def usable(self, device: torch.device) -> bool:
        """Asked once per device, by a small problem. A CPU has its own kernels behind the same door."""
        if device not in self._usable:
            self._usable[device] = device.type == "cpu" or _works(device)
        return self._usable[device]


def _works(device: torch.device) -> bool:
    if not torch.backends.cudnn.is_available() or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    q = torch.zeros((64, 2, 64), dtype=torch.bfloat16, device=device)
    try:
        dense_attention(q, q[:, :1], q[:, :1], Dense(0, 1, 64), 1.0)
    except RuntimeError as wrong:
        _log.warning("cuDNN attention cannot be used for prompts: %s", wrong)
        return False
    return True


def dense_attention(q: Tensor, k: Tensor, v: Tensor, run: Dense, scale: float) -> Tensor:
    """Causal attention of each prompt of a run, [rows * length, Hq, D]. q [T, Hq, D], k and v [T, Hkv, D]."""
    tokens = slice(run.start, run.start + run.rows * run.length)
    shape = (run.rows, run.length)
    q, k, v = (t[tokens].unflatten(0, shape).transpose(1, 2) for t in (q, k, v))  # [B, H, L, D]
    if q.is_cuda:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        found = cudnn(q, k, v, None, False, 0.0, True, False, scale=scale)[0]
    else:
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return found.transpose(1, 2).flatten(0, 1)
