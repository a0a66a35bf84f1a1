"""DraftStates: recurrent states after each draft of a step, until it is known which drafts are right.

Keys and values of a wrong draft are written over; a state that has seen it is lost. So the state after a draft goes to
a spare block, behind those of the KV layout (attention/state.py), and once tokens are accepted, the state after the
last right draft is copied to the row's own block. Where a row's states are saved at block ends, each block that right
drafts reach gets its own. What wrong drafts wrote is left where it is. Spare blocks are used from the first on, so
memory is touched for as many drafts as a step ever had. Must not know: what a state is, how drafts are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.schema.kv import KVKind
from quire.schema.step import Grant
from quire.worker.kv_memory import KVMemory
from quire.worker.rows import Rows

MOST_SPARE = 64  # drafts of one step whose states are kept, if one row's are not more


def num_spare(drafts_per_row: int, max_rows: int) -> int:
    """Drafts of one step for which states are kept."""
    return min(max_rows * drafts_per_row, max(MOST_SPARE, drafts_per_row))


class DraftStates:
    def __init__(self, rows: Rows, kv: KVMemory) -> None:
        """`kv`: has as many spare blocks for each group of states."""
        self._rows, self._kv = rows, kv
        self._tables = [table for table in rows.tables if table.group.kind is KVKind.STATE]
        self.most = kv.num_spare // len(self._tables)
        for i, table in enumerate(self._tables):
            table.spare = kv.layout.num_blocks + i * self.most
        self._first_of: dict[str, int] = {}  # by request: its first spare block in this step, counted from 0

    def place(self, row_order: Sequence[tuple[str, int]]) -> None:
        """Requests of a step and their drafts, in the order of rows, as the plan of its states places them."""
        self._first_of, at = {}, 0
        for request_id, count in row_order:
            self._first_of[request_id] = at
            at += count

    def settle(self, grant: Grant, num_right: int) -> None:
        """Of the drafts of a grant so many were right."""
        if not num_right:
            return
        row, first = self._rows.row_of[grant.request_id], grant.start + grant.count - grant.num_drafts
        last = first + num_right - 1
        sources, targets = list[int](), list[int]()
        for table in self._tables:
            size, spare = table.group.block_size, table.spare + self._first_of[grant.request_id] - first
            blocks = np.arange(first // size, last // size + 1)
            sources += (spare + np.minimum((blocks + 1) * size - 1, last)).tolist()
            targets += table.host[row, blocks].tolist()
        self._kv.copy_within(sources, targets)
