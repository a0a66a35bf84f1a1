"""Thinking before an answer: where it begins and ends, in text and in tokens.

ReasoningFormat is one family's tags and habits (reasoning_table.py). Whether an answer begins inside a thought is read
off its prompt's end, since chat templates open or close the block there; only where the prompt says nothing does the
family's habit count. Tool calls are looked for after the thought only. In: a TextSource. Must not know: tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.parse.json_text import skip_space
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.writer import DeltaWriter

_TAIL = 1 << 16  # characters of a prompt that is being continued in which a thought may have begun


@dataclass(frozen=True)
class ReasoningFormat:
    """`start` and `end`: tags, the usual one first. `inside`: an answer begins within a thought, unless its prompt
    tells. `opened`: the family's templates begin the thought, so where no prompt is known an answer is within it.
    `ends`: marks that end a thought too and are no part of it. `calls`: the same, where calls are looked for: models
    make a call without having closed the thought. `hidden`: marks around the text that follows. `prefix`: text put
    before the answer, which then holds its thought."""

    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    inside: bool = False
    opened: bool = False
    ends: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    prefix: str = ""
    harmony: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.start, *self.end, *self.ends, *self.calls, *self.hidden)

    def begins_inside(self, prompt: str | None, *, continues: bool = False, thinking: bool | None = None) -> bool:
        """Whether an answer to this prompt begins within a thought. `continues`: its last message is gone on with.
        `thinking`: False where the request switched it off, which a prompt need not show."""
        if not self.end:
            return False
        if prompt is None and not continues:
            return (self.inside or self.opened) and thinking is not False
        tail = (prompt or "")[-_TAIL:]
        if continues:
            start = max(tail.rfind(tag.strip()) for tag in self.start)
            end = max(tail.rfind(tag.strip()) for tag in self.end)
            return start > end
        tail = tail.rstrip()
        if any(tail.endswith(tag.strip()) for tag in self.end):
            return False
        opens = any(tail.endswith(tag.strip()) for tag in self.start)
        return opens or (self.inside and thinking is not False)

    def read(self, source: TextSource, out: DeltaWriter, inside: bool, calls: bool = False) -> Steps[tuple[str, ...]]:
        """The thought, if there is one; the marks to hide in what follows, which is left. `calls`: are looked for."""
        if self.prefix:
            out.content(self.prefix)
        if not self.end:
            return ()
        source.record()
        yield from skip_space(source)
        if (yield from source.accept_any(sorted(self.start, key=len, reverse=True))):
            source.recorded()
        elif inside:
            out.reasoning(source.recorded())
        else:
            out.content(source.recorded())
            return self.hidden
        ends = (*self.ends, *self.calls) if calls else self.ends
        tag = yield from source.until(Tags(*self.end, *ends), out.reasoning, keep=ends)
        hidden = (*self.hidden, *self.end) if calls and tag in self.calls else self.hidden
        source.hide(hidden)
        return hidden


@dataclass(frozen=True)
class ReasoningTokens:
    """The same tags for what follows an answer token by token. `start` and `end`: token ids of the usual tags.
    `forced`: what a thinking budget says to end a thought, `first` where nothing was thought yet. `starts`, `ends`: the
    tags' texts, in every form. `may_stop`: an answer may end within its thought, because calls are made there."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    may_stop: bool = False


def is_reasoning_end(tokens: ReasoningTokens, token_ids: Sequence[int]) -> bool:
    """Whether the last thought in these tokens is over: the last end tag comes after the last start tag."""
    return _last(token_ids, tokens.end) > _last(token_ids, tokens.start)


def _last(token_ids: Sequence[int], pattern: Sequence[int]) -> int:
    size = len(pattern)
    if not size:
        return -1
    for at in range(len(token_ids) - size, -1, -1):
        if token_ids[at] == pattern[0] and list(token_ids[at : at + size]) == list(pattern):
            return at
    return -1
