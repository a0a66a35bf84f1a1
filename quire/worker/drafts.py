"""Drafts: what a drafter proposed for each row, and where the tokens of a step that checks them really lie.

The row knows how far it is; a plan knows how far it can be (schema/step.py). `resolve` turns the one into the other and
writes the drafts behind the row's last token, where the forward pass reads them. Only for a worker whose results are
there at once: on a device of its own, lengths would have to stay on it. Must not know: how drafts are made or chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.schema.step import Grant
from quire.worker.rows import Rows

Drafter = Callable[[str, list[int]], Sequence[int]]  # request id and its tokens so far -> what may come next


class Drafts:
    def __init__(self, drafter: Drafter, rows: Rows) -> None:
        self._drafter, self._rows = drafter, rows
        self.of: dict[str, list[int]] = {}  # by request

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.of.pop(request_id, None)

    def resolve(self, grants: Sequence[Grant]) -> tuple[Grant, ...]:
        """The grants with the starts, counts and numbers of drafts that are true."""
        return tuple([self._resolve(grant) for grant in grants])

    def _resolve(self, grant: Grant) -> Grant:
        row = self._rows.row_of[grant.request_id]
        length = int(self._rows.lengths[row])
        start = min(grant.start, length - 1)
        drafts = self.of.get(grant.request_id, [])[: grant.num_drafts]
        if drafts:
            written = torch.tensor(drafts, dtype=self._rows.tokens.dtype)
            self._rows.tokens[row, length : length + len(drafts)] = written
        count = grant.count - grant.num_drafts + len(drafts)
        return Grant(grant.request_id, start, count, grant.samples, grant.epoch, grant.new_blocks, len(drafts))

    def propose(self, request_id: str) -> list[int]:
        """For the row's next step, after what it has sampled."""
        row = self._rows.row_of[request_id]
        known = self._rows.tokens[row, : int(self._rows.lengths[row])].tolist()
        self.of[request_id] = proposed = list(self._drafter(request_id, known))
        return proposed
