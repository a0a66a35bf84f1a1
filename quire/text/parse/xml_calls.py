"""Calls written as tags: <function=f><parameter=city>Paris</parameter></function>.

A call opens with its function's tag. Values that the tool's schema calls strings stream as they arrive; others are read
whole and become JSON of their type (typed.py). Text that stands between parameters is content. Must not know: which
model writes like this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.text.parse.json_text import inside_quotes, quoted, skip_space
from quire.text.parse.tags import Emit, Source, Steps, Tags
from quire.text.parse.typed import TEXT, Types, as_json, is_text, parameter_types
from quire.text.parse.writer import LONGEST_NAME, Writer

_HEADER_END = Tags(">", "\n", "<")


@dataclass(frozen=True)
class XmlCalls:
    """`call` and `parameter` begin a tag, whose name follows: "<function=" or '<invoke name="'.

    `around`: marks that stand before or after one call and say nothing. `trim`: a newline at either end of a value is
    no part of it. `unknown`: the types of a parameter that no schema describes.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    call: tuple[str, ...]
    call_close: tuple[str, ...]
    parameter: tuple[str, ...]
    parameter_close: tuple[str, ...]
    around: tuple[str, ...] = ()
    trim: bool = True
    unknown: Types = TEXT
    _starts: Tags = field(init=False, repr=False)
    _later: Tags = field(init=False, repr=False)
    _next: Tags = field(init=False, repr=False)
    _ends: Tags = field(init=False, repr=False)
    _breaks: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # a value may lack its closing tag: a line that begins with another tag of the call ends it too
        breaks = tuple(f"\n{tag}" for tag in (*self.parameter, *self.call_close))
        for name, made in (
            ("_starts", Tags(*self.opens, *self.call)),
            ("_later", Tags(*self.opens, *self.call, *self.closes, *self.around)),
            ("_next", Tags(*self.parameter, *self.call_close, *self.closes, *self.call, *self.around)),
            ("_ends", Tags(*self.parameter_close, *breaks)),
            ("_breaks", breaks),
        ):
            object.__setattr__(self, name, made)

    def __call__(self, source: Source, out: Writer) -> Steps[None]:
        while True:
            tag = yield from source.until(self._starts if out.index < 0 else self._later, out.content)
            if not tag:
                return
            if tag in self.call:
                source.record(tag)
                yield from self._one(source, out, tag)
            elif tag in self.opens:
                source.record(tag)
                yield from self._block(source, out)

    def _block(self, source: Source, out: Writer) -> Steps[None]:
        count = 0
        while True:
            yield from skip_space(source)
            if (yield from source.accept_any(self.around)):
                continue
            if not (tag := (yield from source.accept_any(self.call))):
                break
            if count:
                source.record(tag)
            if not (yield from self._one(source, out, tag)):
                return
            count += 1
        if count:
            yield from source.accept_any(self.closes)
        else:
            out.content(source.recorded())

    def _one(self, source: Source, out: Writer, tag: str) -> Steps[bool]:
        """A call, after its opening; False if it is none."""
        header = yield from _header(source, tag)
        if header is None:
            out.content(source.recorded())
            return False
        source.recorded()
        name = header[0]
        out.open(name)
        first = True
        while True:
            yield from skip_space(source)
            tag = yield from source.until(self._next, out.content, keep=(*self.closes, *self.call, *self.around))
            if tag not in self.parameter:
                break
            source.record(tag)
            header = yield from _header(source, tag)
            lost = source.recorded()
            if header is None:
                out.content(lost)
                continue
            out.arguments(f"{'{' if first else ', '}{quoted(header[0])}: ")
            first = False
            types = header[1] or parameter_types(out.tools, name, header[0]) or self.unknown
            if not (yield from read_value(source, out.arguments, self._ends, types, self.trim, self._breaks)):
                return True  # the answer ended within the value
        if tag:
            out.arguments("{}" if first else "}")
        return True


def read_value(
    source: Source, emit: Emit, ends: Tags, types: Types, trim: bool, keep: tuple[str, ...] = ()
) -> Steps[bool]:
    """The text before the next of `ends`, as JSON of its type. False: the answer ended."""
    if not is_text(types):
        text, tag = yield from source.text_until(ends, keep)
        text = text.removeprefix("\n").removesuffix("\n") if trim else text
        emit(as_json(text, types) if tag else text)
        return bool(tag)
    emit('"')
    if trim:
        yield from source.accept("\n")
    held = ""  # a newline that may be the last character

    def stream(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if trim and text.endswith("\n") else ""
        emit(inside_quotes(text.removesuffix("\n") if held else text))

    tag = yield from source.until(ends, stream, keep)
    if not tag:
        emit(inside_quotes(held))
        return False
    emit('"')
    return True


def _header(source: Source, tag: str) -> Steps[tuple[str, Types] | None]:
    """(name, types if the tag itself says) from the rest of an opening tag."""
    text, end = yield from source.text_until(_HEADER_END, keep=("\n", "<"))
    if end != ">" or len(text) > LONGEST_NAME:
        return None
    if not tag.endswith('"'):
        name, rest = text.strip().strip("\"'"), ""
    else:
        name, _, rest = text.partition('"')
        name = name.strip()
    if not name:
        return None
    if 'string="true"' in rest:
        return name, TEXT
    if 'string="false"' in rest:
        return name, frozenset({"number", "integer", "boolean", "object", "array", "null"})
    return name, frozenset()
