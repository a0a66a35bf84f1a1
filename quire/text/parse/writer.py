"""DeltaWriter and FormatParser: what a format says of an answer, as Deltas.

A format (a generator over a TextSource) tells a DeltaWriter what it found: content, thought, the opening of a call,
more of its arguments. FormatParser runs the format as text arrives. White space alone, before, between and after calls,
belongs to the calls and is not content. Must not know: any format.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.text.parse.base import CallDelta, Delta
from quire.text.parse.call_form import CallForm
from quire.text.parse.tags import ANYTHING, SPACE, Steps, Tags, TextSource

LONGEST_NAME = 256  # characters of a function's or a parameter's name; what is longer is no name
NewId = Callable[[str, int], str]


def random_id(name: str, index: int) -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


class DeltaWriter:
    """Collects one answer's Deltas. `tools`: the functions' parameter schemas, by name."""

    __slots__ = (
        "_arguments", "_deltas", "_fresh", "_kind", "_new_id", "_on_open", "_parts", "_space", "first_only", "index",
        "tools",
    )  # fmt: skip

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        new_id: NewId = random_id,
        first_only: bool = False,
        keep_space: bool = False,
    ) -> None:
        self.tools = tools or {}
        self.first_only = first_only  # drop every call after the first
        self.index = -1  # of the last call opened
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._kind, self._parts = "", list[str]()
        self._fresh = not keep_space  # no content since the beginning or the last call
        self._space: list[str] = []  # white space that is content only if other content follows
        self._arguments: list[str] = []  # of the last call
        self._on_open: Callable[[], None] | None = None

    def on_open(self, act: Callable[[], None]) -> None:
        """Whom to tell that a call begins."""
        self._on_open = act

    def content(self, text: str) -> None:
        if self._fresh:
            if not text or text.isspace():
                self._space.append(text)
                return
            self._fresh = False
            self._put("content", "".join(self._space))
            self._space.clear()
        self._put("content", text)

    def reasoning(self, text: str) -> None:
        self._put("reasoning", text)

    def open(self, name: str, call_id: str | None = None) -> None:
        """A call begins. What follows in `arguments` is its own."""
        self._flush()
        self.index += 1
        self._fresh = True
        self._space.clear()
        self._arguments.clear()
        if self._on_open is not None:
            self._on_open()
        if not self.first_only or self.index == 0:
            call_id_used = call_id or self._new_id(name, self.index)
            self._deltas.append(Delta(call=CallDelta(self.index, "", call_id_used, name)))

    def arguments(self, text: str) -> None:
        if not self.first_only or self.index == 0:
            self._arguments.append(text)
            self._put("arguments", text)

    def break_off(self, text: str) -> None:
        """The answer is over. If the last call's arguments are not, `text` is what the call is shown as."""
        if self.index < 0 or not self._fresh or (self.first_only and self.index > 0):
            return
        if _is_json("".join(self._arguments)):
            return
        self._flush()
        self._deltas.append(Delta(call=CallDelta(self.index, broken=text)))

    def take(self, final: bool = False) -> list[Delta]:
        """What came since the last time."""
        if final and self._space and self.index < 0:
            self._put("content", "".join(self._space))
        self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _put(self, kind: str, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if self._parts:
            text = "".join(self._parts)
            self._parts.clear()
            if self._kind == "arguments":
                self._deltas.append(Delta(call=CallDelta(self.index, text)))
            else:
                self._deltas.append(Delta(text) if self._kind == "content" else Delta(reasoning=text))
        self._kind = ""


Read = Callable[[TextSource, DeltaWriter], Steps[None]]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes its calls. `read` reads a whole answer.

    `tags`: where one of them is a special token of the tokenizer, special tokens must stay in the text.
    `hidden`: tags around the text that are no part of it. `forms`: its calls word for word, where they can be told so.
    """

    read: Read
    tags: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    new_id: NewId = random_id
    forms: tuple[CallForm, ...] = ()
    after: Callable[[str], Read] | None = None  # instead of `read`, where the prompt is known and matters
    strict_read: Read | None = None  # instead of `read`, if calls are constrained to a schema (strict.py)
    thought: tuple[str, str] | None = None  # tags of a thought that an answer may begin with: no call is made in it
    is_answer: bool = False  # the whole answer is the arguments, also where they break off
    tells_broken: bool = True  # the text of a call that broke off can be told, and is shown instead of the call


class FormatParser:
    """An OutputParser that runs a format."""

    def __init__(self, read: Read, writer: DeltaWriter, *, shows_broken: bool = True) -> None:
        self._source, self._writer, self._shows_broken = TextSource(), writer, shows_broken
        self._steps = _whole(read, self._source, writer)
        if shows_broken:
            writer.on_open(self._source.begin_call)

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Sequence[Delta]:
        self._source.push(text, final)
        next(self._steps, None)
        if final and self._shows_broken:
            self._writer.break_off(self._source.call_text())
        return self._writer.take(final)


def _whole(read: Read, source: TextSource, out: DeltaWriter) -> Steps[None]:
    yield from read(source, out)
    yield from read_text(source, out)


def read_text(source: TextSource, out: DeltaWriter) -> Steps[None]:
    """All that is left is content."""
    yield from source.span(ANYTHING, out.content)


def read_thought(source: TextSource, out: DeltaWriter, tags: tuple[str, str], inside: bool) -> Steps[None]:
    """A thought that an answer begins with, as content. `inside`: the prompt has begun it."""
    begin, end = tags
    source.record()
    yield from source.span(SPACE)
    begun = yield from source.accept(begin)
    out.content(source.recorded())
    if begun or inside:
        out.content((yield from source.until(Tags(end), out.content)))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    except RecursionError:  # deep, and whole as far as can be told
        return True
    return True


def each_call(source: TextSource, out: DeltaWriter, tags: tuple[Tags, Tags], opens: str, read: Read) -> Steps[None]:
    """Text up to each tag, and a call where one `opens`. `tags`: those before the first call, those after it."""
    while tag := (yield from source.until(tags[out.index >= 0], out.content)):
        if tag == opens:
            source.record(tag)
            yield from read(source, out)
