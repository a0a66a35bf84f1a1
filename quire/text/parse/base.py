"""Delta and OutputParser: between an answer's new text and what a chat shows of it.

In: the new text and token ids of one answer, piece by piece. Out: Deltas, in order; everything a dialect renders of an
answer comes through here, streamed or whole: a whole answer is the fold of the same Deltas. How a parser is put
together from a reasoning format and a tool format is in choose.py. Must not know: dialects, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec


class CallDelta(msgspec.Struct, frozen=True):
    """What is new in a tool call. The first of a call has its id and name; later ones more of the arguments.

    `broken`: the answer ended before the arguments were whole JSON; this is the call's text. Nobody can make such a
    call: a whole answer shows its text instead. A stream has shown its beginning already, and nothing more follows."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    broken: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """What is new in an answer: text, or thought, or part of a call; one of them."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class OutputParser(Protocol):
    """One per answer; it may hold text back until it knows what the text is."""

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Sequence[Delta]:
        """What to show now. `final`: nothing follows, so nothing may be held back."""


ParserFactory = Callable[[], OutputParser]


class PlainParser:
    """All text is content."""

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Sequence[Delta]:
        return (Delta(text),) if text else ()


class ToolCall(msgspec.Struct):
    """A whole call. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class Folded(msgspec.Struct):
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []


def fold(deltas: Iterable[Delta]) -> Folded:
    """The whole answer that the Deltas are parts of."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        if (part := delta.call) is None:
            continue
        if part.broken is not None:
            calls.pop(part.index, None)
            content.append(part.broken)
            continue
        if part.index not in calls:
            calls[part.index] = ToolCall(part.id or "", part.name or "")
        arguments.setdefault(part.index, []).append(part.arguments)
    for index, call in calls.items():
        call.arguments = "".join(arguments[index])
    return Folded("".join(content), "".join(reasoning), [calls[index] for index in sorted(calls)])
