"""DraftMemory: a drafter's own rows and KV memory, apart from those of the model it drafts for.

In: texts as they join, grow and leave. Out: Batches over what the drafter has not computed yet. Blocks come from a pool
of its own, so nothing that the scheduler does (preemption, prefix hits, aborts) can leave them wrong: a text that comes
back is computed again. A text that is too long for the drafter, or for which no block is left, is not drafted for.
Must not know: which tokens are drafted, or what verified them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.batch import Batch
from quire.ops.copy import uploader
from quire.schema.kv import KVSpec
from quire.schema.params import ResolvedParams
from quire.schema.step import NewRow, StepPlan
from quire.worker.device_inputs import DeviceInputs
from quire.worker.inputs import StepShape, build
from quire.worker.kv_memory import KVMemory
from quire.worker.rows import Rows
from quire.worker.trial import scratch_layout

if TYPE_CHECKING:
    from quire.worker.kv_memory import BindsKV


class DraftMemory:
    def __init__(
        self,
        model: BindsKV,
        specs: Sequence[KVSpec],
        backend: AttentionBackend,
        *,
        num_blocks: int,
        max_rows: int,
        max_len: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        """`max_tokens`: of one pass, padding included."""
        layout = scratch_layout(specs, num_blocks)
        self.kv = KVMemory(layout, device)
        self.kv.bind(backend, model)
        self.rows = Rows(layout.groups, max_rows, max_len, device)
        self.max_len, self.backend = max_len, backend
        self.inputs = None if device.type == "cpu" else DeviceInputs(self.rows, max_tokens)
        self._block_size = specs[0].block_size if specs else 1
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # tokens of each text whose keys and values are there and right
        self.drafted: dict[str, list[int]] = {}  # what lies behind the text of a row, and was computed
        self._unwritten: dict[str, list[int]] = {}  # last tokens of texts that their rows do not have yet
        self._upload = uploader(device)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def begin(self, new: NewRow) -> None:
        if len(new.token_ids) < self.max_len:
            self.open(new.request_id, new.token_ids)

    def open(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A text that is short enough."""
        row = NewRow(
            request_id=request_id, epoch=0, token_ids=tuple(token_ids), num_prompt_tokens=len(token_ids),
            params=ResolvedParams(), seed=0,
        )  # fmt: skip
        self.rows.apply(StepPlan(step=0, grants=(), joined=(row,)))
        self._blocks[request_id], self.computed[request_id] = [], 0

    def end(self, request_id: str) -> None:
        if request_id in self.computed:
            self.rows.apply(StepPlan(step=0, grants=(), left=(request_id,)))
            self._free += self._blocks.pop(request_id)
            del self.computed[request_id]
            self.drafted.pop(request_id, None)
            self._unwritten.pop(request_id, None)

    def length(self, request_id: str) -> int:
        return int(self.rows.lengths[self.rows.row_of[request_id]])

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The text goes on with these; what was computed for other tokens in their places is forgotten."""
        if request_id not in self.computed:
            return
        row, length = self.rows.row_of[request_id], self.length(request_id)
        end = length + len(token_ids)
        if end >= self.max_len:
            self.end(request_id)
            return
        drafted, agreed = self.drafted.pop(request_id, []), 0
        while agreed < min(len(drafted), len(token_ids)) and drafted[agreed] == token_ids[agreed]:
            agreed += 1
        self.computed[request_id] = min(self.computed[request_id], length + agreed, end - 1)
        self._unwritten.setdefault(request_id, []).extend(token_ids)
        self.rows.lengths[row] = end

    def write(self, request_ids: Sequence[str]) -> None:
        """Before these texts are computed: what they went on with, in one copy for all of them."""
        written: list[tuple[int, int, int]] = []
        for name in request_ids:
            if tokens := self._unwritten.pop(name, None):
                row, start = self.rows.row_of[name], self.length(name) - len(tokens)
                written += [(row, place, token) for place, token in enumerate(tokens, start)]
        if written:
            self.rows.put(written)

    def reserve(self, request_id: str, length: int) -> bool:
        """Blocks for so many tokens of the text. False: too long, or there are not as many left."""
        blocks = self._blocks.get(request_id)
        if blocks is None or length > self.max_len:
            return False
        needed = -(-length // self._block_size) - len(blocks)
        if needed > len(self._free):
            return False
        if needed > 0:
            new = [self._free.pop() for _ in range(needed)]
            for table in self.rows.tables:
                table.append(self.rows.row_of[request_id], new)
            blocks += new
        return True

    def in_order(self, request_ids: Sequence[str]) -> list[str]:
        """As their rows lie, which is how a Batch has them."""
        return sorted(request_ids, key=self.rows.row_of.__getitem__)

    def batch(self, request_ids: Sequence[str], ends: Sequence[int]) -> Batch:
        """Every text from what is computed up to its end, in the order of rows; they count as computed from now on."""
        rows = np.array([self.rows.row_of[name] for name in request_ids], np.int64)
        starts = np.array([self.computed[name] for name in request_ids], np.int64)
        counts = np.array(ends, np.int64) - starts
        shape = StepShape(rows, starts, counts, np.cumsum(counts), np.ones(len(rows), np.bool_), np.arange(len(rows)))
        self.computed.update(zip(request_ids, ends, strict=True))
        if self.inputs is not None:
            return self.inputs.build(shape, self.backend).batch
        return build(shape, self.rows, self.backend)

    def places(self, request_ids: Sequence[str], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[n] each: their rows, and what stands behind their texts."""
        own = [self.rows.row_of[name] for name in request_ids]
        rows, places = self._upload(np.array([own, lengths], np.int64))
        return rows, places
