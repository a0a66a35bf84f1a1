"""The loaded custom processors as one step of the pipeline, and a wall around them.

In: how the batch changed, logits of the rows at hand. Out: the same logits, changed; and which rows a processor lost.
A processor that raises loses the requests it stood for, never the engine: one adapter callable its own request, a whole
processor every request of the batch (its state is then unknown, so it starts anew).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.base.log import logger
from quire.sampling.processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor

if TYPE_CHECKING:
    from quire.config import EngineConfig

_log = logger(__name__)


class CustomSteps:
    def __init__(self, classes: Sequence[type[LogitsProcessor]], config: EngineConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._processors = [self._make(one) for one in classes]
        self._failed: dict[int, str] = {}

    def update(self, update: BatchUpdate | None, num_rows: int) -> None:
        """Once per step, before any logits."""
        for place, processor in enumerate(self._processors):
            try:
                processor.update_state(update)
            except Exception as wrong:  # noqa: BLE001  # a user's code at its boundary
                self._lose(range(num_rows), processor, "update_state", wrong)
                self._processors[place] = self._make(type(processor))

    def apply(self, logits: Tensor, rows: np.ndarray, num_rows: int, *, invariant: bool) -> Tensor:
        """`rows`: the batch rows that `logits` [len(rows), V] belong to. Runs the processors of one kind."""
        chosen = [p for p in self._processors if p.is_argmax_invariant() is invariant]
        if not chosen:
            return logits
        whole = rows.size == num_rows and bool((rows[1:] > rows[:-1]).all())
        index = torch.from_numpy(rows).to(logits.device)
        batch = logits if whole else logits.new_zeros((num_rows, logits.shape[1])).index_copy_(0, index, logits)
        for processor in chosen:
            batch = self._run(processor, batch, rows)
        return batch if whole else batch[index]

    def take_failures(self) -> dict[int, str]:
        """Batch row -> reason, of this step."""
        failed, self._failed = self._failed, {}
        return failed

    def _run(self, processor: LogitsProcessor, batch: Tensor, rows: np.ndarray) -> Tensor:
        try:
            changed = processor.apply(batch)
            if changed.shape != batch.shape:
                raise ValueError(f"apply returned shape {tuple(changed.shape)}, wanted {tuple(batch.shape)}")
        except Exception as wrong:  # noqa: BLE001  # a user's code at its boundary
            self._lose(rows.tolist(), processor, "apply", wrong)
            return batch
        if isinstance(processor, AdapterLogitsProcessor) and processor.failures:
            sampled = set(rows.tolist())
            self._failed |= {row: why for row, why in processor.failures.items() if row in sampled}
            processor.failures.clear()
        return changed

    def _lose(self, rows: range | list[int], processor: LogitsProcessor, call: str, wrong: Exception) -> None:
        name = type(processor).__name__
        _log.exception("logits processor %s failed in %s; its %d requests fail", name, call, len(rows))
        reason = f"logits processor {name}.{call} raised {type(wrong).__name__}: {wrong}"
        self._failed |= dict.fromkeys(rows, reason)

    def _make(self, kind: type[LogitsProcessor]) -> LogitsProcessor:
        return kind(self._config, self._device, False)
