"""Reasoning before the answer, token by token: a grammar waits for its end, and a budget may force that end.

    may open ──start tag──▶ opening ──its last token──▶ inside ──end tag, or the budget's──▶ over
         └── anything else ──────┴──▶ over
Tags are found in the bytes that tokens add, because a tag that is not a single token may be split in any way; a
forced end is a sequence of tokens. The state advances only by committed tokens, a fork of it also by drafts. Must not
know: the tags of models, grammars.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass


class Stage(enum.Enum):
    MAY_OPEN = enum.auto()  # reasoning or the answer may start
    OPENING = enum.auto()  # inside the start tag
    INSIDE = enum.auto()
    OVER = enum.auto()


_BEFORE = (Stage.MAY_OPEN, Stage.OPENING)


@dataclass(frozen=True)
class Marks:
    """A family's tags. `starts`, `ends`: every form, as bytes. `start`, `end`: tokens of the one that is said by force.
    `first`: said instead of `end` where nothing was thought yet. `may_stop`: a text may end inside a thought, even one
    that a grammar waits for."""

    starts: tuple[bytes, ...]
    ends: tuple[bytes, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]
    text_of: Callable[[int], bytes]
    first: tuple[int, ...] = ()
    may_stop: bool = False


class Thought:
    """One request's. `inside`: it is open when the answer begins. `bound`: a grammar waits for its end. `budget`:
    tokens after which the end is forced."""

    __slots__ = ("_closer", "_longest", "_seen", "_tail", "bound", "budget", "count", "marks", "stage")

    def __init__(self, marks: Marks, *, inside: bool, bound: bool, budget: int | None = None) -> None:
        self.marks, self.bound, self.budget = marks, bound, budget
        self.stage = Stage.INSIDE if inside or not marks.starts else Stage.MAY_OPEN
        self.count = 0  # tokens of the thought so far
        self._closer = marks.end
        self._longest = max(len(tag) for tag in marks.ends)
        self._seen: list[int] = []  # the last tokens
        self._tail = b""  # the last bytes

    def fork(self) -> Thought:
        """The same thought, to be advanced by tokens that are not certain."""
        other = copy.copy(self)
        other._seen = list(self._seen)
        return other

    def opener(self) -> int | None:
        """The start tag's next token, while a grammar waits to see whether reasoning starts."""
        return self.marks.start[len(self._seen)] if self.bound and self.stage in _BEFORE else None

    def forced(self) -> int | None:
        """The one token that must come next, because the budget is used up."""
        if self.stage is not Stage.INSIDE or self.budget is None or self.count < self.budget:
            return None
        if self.count == 0 and self.marks.first:
            self._closer = self.marks.first
        return self._closer[self._num_forced()]

    def feed(self, token_id: int) -> bool:
        """Whether this token belongs to the reasoning."""
        if self.stage is Stage.OVER:
            return False
        if self.stage is Stage.INSIDE:
            self._think(token_id)
        elif self.bound:
            return self._open_by_token(token_id)
        else:
            self._open_by_text(self.marks.text_of(token_id))
        return True

    def _think(self, token_id: int) -> None:
        forced_id = self.forced()
        done = 0 if forced_id is None else self._num_forced() + 1
        self.count += 1
        self._seen = [*self._seen, token_id][-len(self._closer) :]
        self._tail += self.marks.text_of(token_id)
        if forced_id == token_id and done < len(self._closer):
            return  # a forced end is completed, whatever other tag it contains
        if done == len(self._closer) or any(tag in self._tail for tag in self.marks.ends):
            self.stage = Stage.OVER
        self._tail = self._tail[-self._longest :]

    def _num_forced(self) -> int:
        """How many tokens of the forced end have been generated."""
        closer = self._closer
        for size in range(min(len(closer) - 1, len(self._seen)), 0, -1):
            if tuple(self._seen[-size:]) == closer[:size]:
                return size
        return 0

    def _open_by_token(self, token_id: int) -> bool:
        if token_id != self.marks.start[len(self._seen)]:
            self.stage = Stage.OVER
            return False
        self._seen.append(token_id)
        opened = len(self._seen) == len(self.marks.start)
        self.stage = Stage.INSIDE if opened else Stage.OPENING
        if opened:
            self._seen = []
        return True

    def _open_by_text(self, text: bytes) -> None:
        self._tail = lead = (self._tail + text).lstrip()
        if tag := next((tag for tag in self.marks.starts if lead.startswith(tag)), None):
            self.stage, self._tail = Stage.INSIDE, lead[len(tag) :]
        elif not any(tag.startswith(lead) for tag in self.marks.starts):
            self.stage = Stage.OVER
