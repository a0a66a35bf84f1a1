"""Calls written as JSON objects: {"name": "f", "arguments": {...}}, alone, in a row, or in a list.

A call opens when its name is known and its arguments begin; until then what was read is remembered, and given back as
content if it turns out to be no call. Arguments then stream as they are written. Arguments that break off stay
arguments, up to the tag that ends the call: no text is lost. Must not know: which model writes like this.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass

from quire.text.parse.json_text import depth_of, quoted, raw_value, skim, skip_space, string, string_value
from quire.text.parse.tags import ANYTHING, SPACE, Emit, Steps, Tags, TextSource, drop
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter

_BEFORE = re.compile(r"[\s,;\[]*")
_AFTER = re.compile(r"[\s,;\[\]}]*")
_JSON_OBJECT = re.compile(r'[\s,;\[]*\{\s*"')


class CallOutcome(enum.Enum):
    DONE = "a whole call"
    NO_CALL = "something else; nothing was written"
    BROKEN = "a call whose arguments broke off"


@dataclass(frozen=True)
class CallKeys:
    """What an object's keys are called. `id`: of the call, if the model expects to see it again; it counts where it
    comes before the arguments. `strict`: an object that begins with another key is no call. `whole`: nor is one
    without arguments."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    others: tuple[str, ...] = ("type", "id", "tool_call_id", "index", "description")
    id: str = ""
    strict: bool = False
    whole: bool = False


KEYS = CallKeys()


def read_object(source: TextSource, out: DeltaWriter, keys: CallKeys) -> Steps[CallOutcome]:
    """One call; the next character is its brace."""
    yield from source.take(1)
    name: str | None = None
    call_id: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    opened = False
    spare: list[str] = []  # what else the object holds
    while True:
        mark = yield from skip_space(source)
        if mark == ",":
            yield from source.take(1)
            continue
        if mark == "}":
            yield from source.take(1)
            break
        if opened:
            source.record()
        key = (yield from _key(source)) if mark == '"' else None
        if key is None:
            out.content(source.recorded() if opened else "")
            return CallOutcome.DONE if opened else CallOutcome.NO_CALL
        if opened:
            source.recorded()
        mark = yield from source.peek()
        if key in keys.name and name is None and mark == '"':
            name = yield from string_value(source, LONGEST_NAME)
            if not name:
                return CallOutcome.NO_CALL
            if early is not None:
                opened = _open(source, out, name, spare, call_id)
                out.arguments("".join(early))
        elif key in keys.arguments and not opened and early is None:
            if name is None:
                early = []
                if not (yield from read_arguments(source, early.append)):
                    return CallOutcome.NO_CALL
                continue
            opened = _open(source, out, name, spare, call_id)
            if not (yield from read_arguments(source, out.arguments)):
                return CallOutcome.BROKEN
        elif key == keys.id and mark == '"':
            call_id = yield from string_value(source, LONGEST_NAME)
            if call_id is None:
                return CallOutcome.DONE if opened else CallOutcome.NO_CALL
        elif key in keys.others:
            if not (yield from raw_value(source, drop)):
                return CallOutcome.DONE if opened else CallOutcome.NO_CALL
        elif opened:
            out.content(f"{quoted(key)}: ")
            if not (yield from raw_value(source, out.content)):
                return CallOutcome.DONE
        else:
            spare.append(f"{quoted(key)}: ")
            if keys.strict or not (yield from raw_value(source, spare.append)):
                return CallOutcome.NO_CALL
    if not opened and name is not None and not spare and not keys.whole:
        opened = _open(source, out, name, spare, call_id)
        out.arguments("{}")
    return CallOutcome.DONE if opened else CallOutcome.NO_CALL


def read_arguments(source: TextSource, emit: Emit) -> Steps[bool]:
    """A value that is a call's arguments: an object, JSON text within a string, or nothing at all."""
    mark = yield from source.peek()
    if mark == '"':
        return (yield from string(source, emit))
    if mark in ("{", "["):
        return (yield from raw_value(source, emit))
    parts: list[str] = []
    whole = yield from raw_value(source, parts.append)
    text = "".join(parts)
    emit("{}" if text == "null" else text)
    return whole


def read_calls(source: TextSource, out: DeltaWriter, keys: CallKeys = KEYS, ends: Tags | None = None) -> Steps[int]:
    """Calls in a row or in a list, as many as come; how many. What was recorded before is given back if none does."""
    count = 0
    while True:
        yield from source.span(_AFTER if count else _BEFORE)
        if (yield from source.peek()) != "{":
            break
        if count:
            source.record()
        outcome = yield from read_object(source, out, keys)
        if outcome is CallOutcome.NO_CALL:
            out.content(source.recorded())
            return count
        count += 1
        if outcome is CallOutcome.BROKEN:
            yield from read_broken(source, out, ends)
            return count
    if not count:
        out.content(source.recorded())
    return count


def read_broken(source: TextSource, out: DeltaWriter, ends: Tags | None) -> Steps[None]:
    """The rest of arguments that are no JSON."""
    if ends is None:
        yield from source.span(ANYTHING, out.arguments)
    else:
        yield from source.until(ends, out.arguments, keep=ends.tags)


def read_body(source: TextSource, out: DeltaWriter, ends: Tags) -> Steps[str]:
    """Arguments that stand alone before an end tag; the tag, read."""
    mark = yield from skip_space(source)
    if mark != "{":
        text, tag = yield from source.text_until(ends)
        out.arguments(text.strip() or ("{}" if tag else ""))
        return tag
    if not (yield from raw_value(source, out.arguments)):
        return (yield from source.until(ends, out.arguments))
    yield from source.span(SPACE)
    text, tag = yield from source.text_until(ends)
    out.content(text)
    return tag


class JsonBlocks:
    """Calls between an opening and a closing tag, or (`bare`) as the whole answer: such an answer begins with one of
    these letters, also after any of `again`. `anywhere`: calls also stand in the midst of text, with all their keys."""

    def __init__(
        self,
        opens: tuple[str, ...],
        closes: tuple[str, ...] = (),
        *,
        keys: CallKeys = KEYS,
        bare: str = "",
        again: tuple[str, ...] = (),
        anywhere: bool = False,
    ):
        self._opens, self._closes, self._keys, self._bare, self._again = opens, closes, keys, bare, again
        self._strict = dataclasses.replace(keys, strict=True)
        self._whole = dataclasses.replace(keys, strict=True, whole=True)
        self._ends = Tags(*closes) if closes else None
        marks = (*opens, *again, *(("{",) if anywhere else ()))
        self._marks = Tags(*marks) if marks else None
        self._later = Tags(*marks, *closes) if marks else None

    def __call__(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        if self._bare:
            yield from self._begin(source, out)
        if self._marks is None or self._later is None:
            return
        while True:
            # once there was a call, a closing tag that lost its place says nothing
            tags = self._marks if out.index < 0 else self._later
            tag = yield from source.until(tags, out.content, keep=("{",))
            if not tag:
                return
            if tag == "{":
                source.record()
                yield from self._bare_calls(source, out, self._whole)
            elif tag in self._opens:
                source.record(tag)
                yield from self._block(source, out)
            elif tag in self._again:
                out.content(tag)
                yield from self._begin(source, out)

    def _begin(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        """An answer that may be calls and nothing else."""
        source.record()
        yield from skip_space(source)
        if (yield from source.accept_any(self._opens)):
            yield from self._block(source, out)
        elif (yield from source.peek()) in tuple(self._bare):
            yield from self._bare_calls(source, out, self._strict)
        else:
            out.content(source.recorded())

    def _bare_calls(self, source: TextSource, out: DeltaWriter, keys: CallKeys) -> Steps[None]:
        if not (yield from read_calls(source, out, keys)):
            text = source.last_recorded
            if _JSON_OBJECT.match(text):  # no call is looked for within it
                yield from skim(source, out.content, depth_of(text))

    def _block(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        if (yield from read_calls(source, out, self._keys, self._ends)):
            yield from source.accept_any(self._closes)


def _key(source: TextSource) -> Steps[str | None]:
    """A key and its colon; the next character is its value's."""
    key = yield from string_value(source, LONGEST_NAME)
    if key is None or (yield from skip_space(source)) != ":":
        return None
    yield from source.take(1)
    yield from skip_space(source)
    return key


def _open(source: TextSource, out: DeltaWriter, name: str, spare: list[str], call_id: str | None) -> bool:
    source.recorded()
    out.content("".join(spare))
    out.open(name, call_id or None)
    return True
