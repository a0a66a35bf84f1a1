"""A thought before the answer, in tokens: a grammar does not apply inside it.

    may open ──start tag──▶ opening ──its last token──▶ inside ──end tag──▶ over
         └── anything the grammar allows ──▶ over
Must not know: which model marks its thoughts how.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Stage(enum.Enum):
    MAY_OPEN = enum.auto()  # a thought or the answer may come
    OPENING = enum.auto()  # the start tag has begun and must be completed
    INSIDE = enum.auto()
    OVER = enum.auto()


class Thought:
    """One request's. `inside`: it is open when the answer begins."""

    __slots__ = ("_end", "_seen", "_start", "stage")

    def __init__(self, start: Sequence[int], end: Sequence[int], *, inside: bool) -> None:
        self._start, self._end = tuple(start), tuple(end)
        self._seen: list[int] = []
        self.stage = Stage.INSIDE if inside or not start else Stage.MAY_OPEN

    def opener(self) -> int | None:
        """The token of the start tag that may come next (MAY_OPEN) or must (OPENING)."""
        return self._start[len(self._seen)] if self.stage in (Stage.MAY_OPEN, Stage.OPENING) else None

    def feed(self, token_id: int) -> bool:
        """Whether this token belongs to the thought."""
        if self.stage is Stage.OVER:
            return False
        if self.stage is Stage.MAY_OPEN and token_id != self._start[0]:
            self.stage = Stage.OVER
            return False
        self._seen.append(token_id)
        if self.stage is Stage.INSIDE:
            if tuple(self._seen[-len(self._end) :]) == self._end:
                self.stage = Stage.OVER
        else:
            self.stage = Stage.INSIDE if len(self._seen) == len(self._start) else Stage.OPENING
            if self.stage is Stage.INSIDE:
                self._seen.clear()
        return True
