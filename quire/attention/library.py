"""Fresh prompts through cuDNN's attention, as dense batches.

A prompt whose context is the chunk itself needs no cache, so the library's dense attention can compute it. In: a step's
entries. Out: the runs of adjacent prompts that go there, and their attention. cuDNN prepares a plan for
every shape, which takes tens of milliseconds, so shapes must recur: a prompt is padded to the next of
SHAPES_PER_OCTAVE lengths, which causality allows (the padding is read but changes nothing before it). A
few shapes are planned at start-up; any other is planned once the work it would have saved pays for it, so lengths
that occur once never are. Must not know: caches, blocks, rows.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base.log import logger

LEAST_TOKENS = 1024  # of a prompt: shorter ones are not faster there
PREPARED_RUN = 2048  # tokens of a prompt: a full step of such prompts is planned at start-up
PREPARED = (4096, 8192)  # tokens: so is one prompt of these lengths
SHAPES_PER_OCTAVE = 16  # lengths from one power of two to the next: a prompt is padded by 3% on average
WORTH = 16 * 8 * 2048**2  # rows times squared lengths seen before a shape is planned; about as many more pay for it
SHAPES = 4096  # tracked
_log = logger(__name__)


class Dense(NamedTuple):
    """Adjacent prompts of one length."""

    start: int  # first token
    rows: int
    length: int
    padded: int  # length of the shape they are computed in; more than `length` for one row only

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.rows * self.length)


def shape_of(length: int) -> int:
    """The next length that has a shape."""
    step = max(1, (1 << (length - 1).bit_length()) // 2 // SHAPES_PER_OCTAVE)
    return -(-length // step) * step


class Library:
    """Which shapes have occurred often enough, and whether the library can be used at all."""

    def __init__(self, *, least: int = LEAST_TOKENS, worth: int = WORTH) -> None:
        self.least, self.worth = least, worth
        self._seen: Counter[tuple[int, int]] = Counter()  # work of (rows, length) so far
        self._usable: dict[torch.device, bool] = {}

    def choose(self, entries: np.ndarray, fresh: np.ndarray, device: torch.device) -> tuple[list[Dense], np.ndarray]:
        """entries [R, 4]: row | first token | tokens | context. (runs, which entries they contain [R] bool)."""
        taken = np.zeros(len(entries), np.bool_)
        candidates = np.flatnonzero(fresh & (entries[:, 2] >= self.least))
        if not len(candidates) or not self.usable(device):
            return [], taken
        runs: list[list[int]] = []
        for entry in candidates.tolist():
            start, length = entries[entry, 1:3].tolist()
            if runs and entries[runs[-1][0], 2] == length and entries[runs[-1][-1], 1] + length == start:
                runs[-1].append(entry)
            else:
                runs.append([entry])
        if len(self._seen) > SHAPES:
            self._seen.clear()
        chosen = []
        for run in runs:
            start, length = entries[run[0], 1:3].tolist()
            padded_shapes = self._shapes(start, length, len(run))
            taken[run] = bool(padded_shapes)
            chosen += padded_shapes
        return chosen, taken

    def _shapes(self, start: int, length: int, rows: int) -> list[Dense]:
        """For `rows` prompts of one length: all in one, each padded, or none of them."""
        padded = shape_of(length)
        if self._ready(rows, length):
            return [Dense(start, rows, length, length)]
        if self._ready(1, padded):
            return [Dense(start + i * length, 1, length, padded) for i in range(rows)]
        self._seen[rows, length] += rows * length**2
        if (rows, length) != (1, padded):
            self._seen[1, padded] += rows * padded**2
        return []

    def _ready(self, rows: int, length: int) -> bool:
        return self._seen[rows, length] >= self.worth

    def prepare(self, heads: int, qkv: Tensor, longest: int) -> None:
        """Plan the shapes prepared at start-up, with the layout of qkv, [T, Hq + 2 Hkv, D]; its contents do
        not matter."""
        if not self.usable(qkv.device):
            return
        kv_heads = (qkv.shape[1] - heads) // 2
        q, k, v = torch.zeros_like(qkv[:, :heads].contiguous()), qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        for rows, length in ((len(qkv) // PREPARED_RUN, PREPARED_RUN), *((1, length) for length in PREPARED)):
            if 0 < rows * length <= len(qkv) and length <= longest:
                try:
                    dense_attention(q, k, v, Dense(0, rows, length, length), qkv.shape[2] ** -0.5)
                except RuntimeError as wrong:
                    _log.warning("cuDNN attention cannot be used for heads of size %d: %s", qkv.shape[2], wrong)
                    self._usable[qkv.device] = False
                    return
                self._seen[rows, length] = self.worth

    def usable(self, device: torch.device) -> bool:
        """Tested once per device, with a small problem. A CPU has other kernels behind the same interface."""
        if device not in self._usable:
            self._usable[device] = device.type == "cpu" or _works(device)
        return self._usable[device]


def _works(device: torch.device) -> bool:
    if not torch.backends.cudnn.is_available() or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    q = torch.zeros((64, 2, 64), dtype=torch.bfloat16, device=device)
    try:
        dense_attention(q, q[:, :1], q[:, :1], Dense(0, 1, 64, 64), 1.0)
    except RuntimeError as wrong:
        _log.warning("cuDNN attention cannot be used for prompts: %s", wrong)
        return False
    return True


def dense_attention(q: Tensor, k: Tensor, v: Tensor, run: Dense, scale: float) -> Tensor:
    """Causal attention of each prompt of a run, [rows * length, Hq, D]. q [T, Hq, D], k and v [T, Hkv, D]."""
    shape = (run.rows, run.padded)
    q, k, v = (_padded(t, run, is_query=t is q).unflatten(0, shape).transpose(1, 2) for t in (q, k, v))
    if q.is_cuda:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        result = cudnn(q, k, v, None, False, 0.0, True, False, scale=scale)[0]
    else:
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return result.transpose(1, 2).flatten(0, 1)[: run.rows * run.length]


def _padded(x: Tensor, run: Dense, *, is_query: bool) -> Tensor:
    """The run's tokens and what follows them; at the end of the step, a zero-padded copy.

    The copy has the strides of x, because a plan is specific to shapes and strides. Zeros, because a NaN in the padding
    would propagate through a weight of zero. Queries are independent, so their padding may be any
    memory, if there is enough of it (`prepare_qkv` allocates more).
    """
    last = run.start + run.rows * run.padded
    if last <= len(x):
        return x[run.start : last]
    shape, row = (run.padded, *x.shape[1:]), x.stride(0)
    offset = x.storage_offset() + run.start * row
    if is_query and (offset + run.padded * row) * x.element_size() <= x.untyped_storage().nbytes():
        return x.as_strided(shape, x.stride(), offset)
    padded = x.new_empty(run.padded * row).as_strided(shape, x.stride())
    padded[: run.length] = x[run.tokens]
    padded[run.length :] = 0
    return padded
