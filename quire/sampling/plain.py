"""The choice for rows that need only the best token, or a draw after temperature, top_k and top_p.

Their parameters are columns on the device, sent again when a row changed, and everything is decided there: nothing is
read back and no shape depends on what a row asks for, so this also runs inside a graph. Rows that need more of the
pipeline go through sampler.py. The last column belongs to padding: greedy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.ops import sample
from quire.sampling import selection as needs
from quire.sampling.rows import SamplingRows

PLAIN = needs.RANDOM | needs.TOP_K | needs.TOP_P
FILTERS = needs.TOP_K | needs.TOP_P
_WORDS = 5  # int32 words of a row: two of the seed, temperature, top_p, top_k


class PlainSampler:
    def __init__(self, rows: SamplingRows, tokens: Tensor) -> None:
        """`tokens` [max_rows + 1, width] int32: the rows' tokens; the choice is written there."""
        self._rows, self._tokens = rows, tokens
        self._count = tokens.shape[0]
        self._words = torch.zeros(_WORDS * self._count, dtype=torch.int32, device=tokens.device)
        self.seeds = self._words[: 2 * self._count].view(torch.int64)
        self.temperature, self.top_p = (self._column(i).view(torch.float32) for i in (2, 3))
        self.top_k = self._column(4)
        self._choose = sample.sample_rows.on(tokens.device)
        self._is_new = True

    def _column(self, i: int) -> Tensor:
        return self._words[i * self._count : (i + 1) * self._count]

    def needs_of(self, rows: np.ndarray) -> int | None:
        """None: these rows need more than the plain choice. Else which of its parts they use."""
        used = int(np.bitwise_or.reduce(self._rows.flags[rows])) if rows.size else 0
        return None if used & ~PLAIN else used

    def refresh(self) -> None:
        """Send the columns, if a row changed since the last time."""
        if not (self._rows.take_changed() or self._is_new):
            return
        self._is_new = False
        rows, flags, n = self._rows, self._rows.flags, self._count
        sent = torch.empty(_WORDS * n, dtype=torch.int32, pin_memory=self._words.device.type != "cpu")
        words = sent.numpy()
        words[: 2 * n].view(np.int64)[:] = rows.seed
        words[2 * n : 3 * n].view(np.float32)[:] = np.where(flags & needs.RANDOM, rows.temperature, 0.0)
        words[3 * n : 4 * n].view(np.float32)[:] = np.where(flags & needs.TOP_P, rows.top_p, 1.0)
        words[4 * n :] = np.where(flags & needs.TOP_K, rows.top_k, 0)
        self._words.copy_(sent, non_blocking=True)

    def __call__(self, logits: Tensor, row_index: Tensor, positions: Tensor, out: Tensor, *, filters: bool) -> None:
        """logits [n, V], left alone; row_index and positions [n] int32; out int32 [2, n]: token, bits of its score."""
        self._choose(
            logits, row_index, positions, self.seeds, self.temperature, self.top_k, self.top_p, filters=filters,
            out=out[0], scores=out[1].view(torch.float32), tokens=self._tokens,
        )  # fmt: skip
