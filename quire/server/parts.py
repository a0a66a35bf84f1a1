"""AnswerParts: an answer's Deltas as an ordered list of text, thought and calls, for dialects that show it in pieces.

In: Deltas as a parser gives them. Out: what to tell a client: a part opens, grows, is closed. The list that is left at
the end is the whole answer, so both forms of a dialect come from here. Must not know: any dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from quire.text.parse.base import Delta


class Kind(Enum):
    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"


class Change(Enum):
    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


class Part:
    """One piece of an answer."""

    __slots__ = ("_pieces", "call_id", "call_index", "index", "kind", "name")

    def __init__(self, index: int, kind: Kind, call_index: int = -1, call_id: str = "", name: str = "") -> None:
        self.index, self.kind = index, kind
        self.call_index, self.call_id, self.name = call_index, call_id, name
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Of a call: its arguments."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def grow(self, text: str) -> None:
        self._pieces.append(text)


class Step(NamedTuple):
    change: Change
    part: Part
    text: str = ""  # what the part grew by


class AnswerParts:
    """A growing answer. One part is open at a time: calls come one after the other."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: Part | None = None

    def feed(self, deltas: Iterable[Delta]) -> Iterator[Step]:
        for delta in deltas:
            if (call := delta.call) is not None and call.broken is None:
                new = Part(len(self.all), Kind.CALL, call.index, call.id or "", call.name or "")
                yield from self._add(new, call.arguments)
            if delta.reasoning:
                yield from self._add(Part(len(self.all), Kind.THOUGHT), delta.reasoning)
            if delta.content:
                yield from self._add(Part(len(self.all), Kind.TEXT), delta.content)

    def begin(self) -> Iterator[Step]:
        """An empty text, for dialects in which an answer without a word has one."""
        yield from self._add(Part(len(self.all), Kind.TEXT), "")

    def end(self) -> Iterator[Step]:
        """Nothing follows."""
        if self._open is not None:
            yield Step(Change.CLOSED, self._open)
            self._open = None

    def _add(self, new: Part, text: str) -> Iterator[Step]:
        part = self._open
        if part is None or part.kind is not new.kind or part.call_index != new.call_index:
            yield from self.end()
            self._open = part = new
            self.all.append(part)
            yield Step(Change.OPENED, part)
        if text:
            part.grow(text)
            yield Step(Change.GREW, part, text)
