"""Tags and TextSource: the text of one answer as it arrives, read up to the next of some tags.

A format is written as a generator over a TextSource: it yields when it needs more text than has arrived, so it reads as
if the whole answer were there, and it cannot depend on how the answer was cut into pieces. Nothing is held back but
what could still become one of the tags looked for. Every method is linear in the text it passes over. Must not know:
what the tags mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], object]
SPACE = re.compile(r"[ \t\r\n]*")
ANYTHING = re.compile(r"[\s\S]*")


def drop(text: str) -> None:
    """An Emit for text that says nothing."""


class Tags:
    """Some literal strings, to be found in a text that is still growing."""

    def __init__(self, *tags: str) -> None:
        self.tags = tuple(sorted(set(tags), key=len, reverse=True))
        if not self.tags or not self.tags[-1]:
            raise ValueError(f"tags must be non-empty strings, got {tags!r}")
        self._regex = re.compile("|".join(map(re.escape, self.tags)))
        self._reach = len(self.tags[0]) - 1
        self._firsts = frozenset(tag[0] for tag in self.tags)
        # a tag that begins another one, or stands within it, is only sure when the other can no longer come
        self._longer = {tag: [t for t in self.tags if t != tag and t.startswith(tag)] for tag in self.tags}
        self._overlap = any(tag in other[1:] for tag in self.tags for other in self.tags)

    def find(self, text: str, start: int, final: bool) -> tuple[int, str] | None:
        """(where, which) of the first tag; the longer of two that begin at the same place."""
        match = self._regex.search(text, start)
        if match is None:
            return None
        at, tag = match.start(), match.group()
        if not final and (self._longer[tag] or self._overlap):
            growing = self.sure_end(text, start)  # here begins what may yet be a tag
            if growing < at or (growing == at and self._longer[tag]):
                return None
        return at, tag

    def sure_end(self, text: str, start: int) -> int:
        """How far the text, which holds no tag, can be no beginning of one."""
        for at in range(max(start, len(text) - self._reach), len(text)):
            if text[at] in self._firsts:
                rest = text[at:]
                for tag in self.tags:
                    if tag.startswith(rest):
                        return at
        return len(text)


class TextSource:
    """What has arrived and is not yet read. One reader."""

    __slots__ = ("_at", "_final", "_hidden", "_last", "_record", "_since", "_text", "_unseen")

    def __init__(self, text: str = "", *, final: bool = False) -> None:
        self._text, self._at, self._final = text, 0, final
        self._record: list[str] | None = None
        self._last = ""  # what was remembered last
        self._since: list[str] | None = None  # a call's text
        self._hidden: Tags | None = None
        self._unseen = ""  # not yet known to hold no hidden tag

    def push(self, text: str, final: bool) -> None:
        self._final = final
        if self._hidden is not None:
            text = self._shown(text)
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0

    def hide(self, tags: Collection[str]) -> None:
        """From here on these tags are not in the text at all."""
        if tags:
            rest = self._text[self._at :] + self._unseen
            self._unseen, self._at = "", 0
            self._hidden = Tags(*tags)
            self._text = self._shown(rest)

    def _shown(self, text: str) -> str:
        assert self._hidden is not None
        text, at, shown = self._unseen + text, 0, list[str]()
        while (hit := self._hidden.find(text, at, self._final)) is not None:
            shown.append(text[at : hit[0]])
            at = hit[0] + len(hit[1])
        end = len(text) if self._final else self._hidden.sure_end(text, at)
        shown.append(text[at:end])
        self._unseen = text[end:]
        return "".join(shown)

    # ---- what was read, for when it turns out to be no call ------------------------------------------------------

    def record(self, *parts: str) -> None:
        """Remember what is read from now on, after `pieces`."""
        self._record = list(parts)

    def recorded(self) -> str:
        """What was remembered; stops remembering."""
        record, self._record = self._record, None
        self._last = "".join(record or ())
        return self._last

    @property
    def last_recorded(self) -> str:
        return self._last

    def begin_call(self) -> None:
        """Keep the text of the call whose beginning was remembered last."""
        self._since = [self._last]

    def call_text(self) -> str:
        """All that was read since."""
        return "".join(self._since or ())

    def rest(self) -> tuple[str, bool]:
        """All that has arrived, and whether that is the end."""
        return self._take(len(self._text)), self._final

    # ---- reading -------------------------------------------------------------------------------------------------

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        if self._since is not None:
            self._since.append(text)
        return text

    def until(self, tags: Tags, emit: Emit, keep: Collection[str] = ()) -> Steps[str]:
        """Hand on all text before the next tag; the tag, which is read too unless it is one to keep. "" is the end."""
        while True:
            hit = tags.find(self._text, self._at, self._final)
            if hit is not None:
                at, tag = hit
                if at > self._at:
                    emit(self._take(at))
                if tag not in keep:
                    self._take(at + len(tag))
                return tag
            end = len(self._text) if self._final else tags.sure_end(self._text, self._at)
            if end > self._at:
                emit(self._take(end))
            if self._final:
                return ""
            yield

    def span(self, pattern: re.Pattern[str], emit: Emit = drop) -> Steps[None]:
        """Hand on all characters of a class; `pattern` is that class, starred."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                emit(self._take(match.end()))
            if self._at < len(self._text) or self._final:
                return
            yield

    def peek(self) -> Steps[str]:
        """The next character, unread; "" at the end."""
        while self._at >= len(self._text):
            if self._final:
                return ""
            yield
        return self._text[self._at]

    def glance(self, offset: int) -> Steps[str]:
        """The character so far ahead, unread; "" past the end."""
        while self._at + offset >= len(self._text):
            if self._final:
                return ""
            yield
        return self._text[self._at + offset]

    def take(self, count: int) -> Steps[str]:
        """So many characters; fewer at the end."""
        while len(self._text) - self._at < count and not self._final:
            yield
        return self._take(min(len(self._text), self._at + count))

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next."""
        while True:
            if self._text.startswith(literal, self._at):
                self._take(self._at + len(literal))
                return True
            rest = self._text[self._at : self._at + len(literal)]
            if self._final or not literal.startswith(rest):
                return False
            yield

    def accept_any(self, literals: Collection[str]) -> Steps[str]:
        """Read whichever of them comes next; "" if none does."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        return ""

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """All characters of a class, as one string."""
        parts: list[str] = []
        yield from self.span(pattern, parts.append)
        return "".join(parts)

    def text_until(self, tags: Tags, keep: Collection[str] = ()) -> Steps[tuple[str, str]]:
        """(all text before the next tag, the tag)."""
        parts: list[str] = []
        tag = yield from self.until(tags, parts.append, keep)
        return "".join(parts), tag
