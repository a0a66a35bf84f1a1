"""Calls written as tags: <function=f><parameter=city>Paris</parameter></function>.

A call opens with its function's tag. Values that the tool's schema calls strings stream as they arrive; others are read
whole and become JSON of their type (typed.py). Text that stands between parameters is content. Must not know: which
model writes like this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quire.text.parse.json_text import inside_quotes, quoted, skip_space
from quire.text.parse.tags import Emit, Steps, Tags, TextSource, drop
from quire.text.parse.typed import ANY, TEXT, Types, as_json, as_members, has_parameter, is_text, parameter_types
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter

_CDATA, _CDATA_END = "<![CDATA[", Tags("]]>")
_TYPE_ATTRIBUTE = re.compile(r'\btype="(\w{1,32})"')
_NO_TEXT = frozenset({"number", "integer", "boolean", "object", "array", "null"})


@dataclass(frozen=True)
class XmlCalls:
    """`call` and `parameter` begin a tag, whose name follows: "<function=" or '<invoke name="'.

    `around`: marks that stand before or after one call and say nothing. `trim`: a newline at either end of a value is
    no part of it. `unknown`: the types of a parameter that no schema describes. `wrappers`: a parameter that a function
    does not have, and that then holds all of its arguments. `known_only`: a function that the request does not have is
    no call, and neither `opens` nor `closes` are ever text. `header_end`: the end of the tags of calls and parameters.
    `cdata`: a value may be quoted as XML quotes text.
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
    wrappers: tuple[str, ...] = ()
    known_only: bool = False
    header_end: str = ">"
    cdata: bool = False
    _header_ends: Tags = field(init=False, repr=False)
    _starts: Tags = field(init=False, repr=False)
    _later: Tags = field(init=False, repr=False)
    _next: Tags = field(init=False, repr=False)
    _ends: Tags = field(init=False, repr=False)
    _breaks: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # a value may lack its closing tag: a line that begins with another tag of the call ends it too
        breaks = tuple(f"\n{tag}" for tag in (*self.parameter, *self.call_close))
        stray = self.closes if self.known_only else ()
        for name, made in (
            ("_header_ends", Tags(self.header_end, "\n", "<")),
            ("_starts", Tags(*self.opens, *self.call, *stray)),
            ("_later", Tags(*self.opens, *self.call, *self.closes, *self.around)),
            ("_next", Tags(*self.parameter, *self.call_close, *self.closes, *self.call, *self.around)),
            ("_ends", Tags(*self.parameter_close, *breaks)),
            ("_breaks", breaks),
        ):
            object.__setattr__(self, name, made)

    def __call__(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        while True:
            tag = yield from source.until(self._starts if out.index < 0 else self._later, out.content)
            if not tag:
                return
            if tag in self.call:
                source.record(tag)
                yield from self._one(source, out, tag)
            elif tag in self.opens:
                source.record(*(() if self.known_only else (tag,)))
                yield from self._block(source, out)

    def _block(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
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

    def _one(self, source: TextSource, out: DeltaWriter, tag: str) -> Steps[bool]:
        """A call, after its opening; False if it is none."""
        header = yield from self._header(source, tag)
        if header is None or (self.known_only and out.tools and header[0] not in out.tools):
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
            header = yield from self._header(source, tag)
            lost = source.recorded()
            if header is None:
                out.content(lost)
                continue
            key = header[0]
            begin = f"{'{' if first else ', '}{quoted(key)}: "
            if first and key in self.wrappers and not has_parameter(out.tools, name, key):
                text, tag = yield from source.text_until(self._ends, self._breaks)
                inner = as_members(text)
                first = inner == ""
                out.arguments(begin + as_json(text, ANY) if inner is None else "{" + inner if inner else "")
            else:
                out.arguments(begin)
                first = False
                types = _settled(header[1], parameter_types(out.tools, name, key)) or self.unknown
                tag = yield from self._value(source, out.arguments, types)
            if not tag:
                return True  # the answer ended within the value
        if tag:
            out.arguments("{}" if first else "}")
        return True

    def _value(self, source: TextSource, emit: Emit, types: Types) -> Steps[str]:
        """A parameter's; the tag that ends it, "" where the answer does."""
        if self.cdata:
            source.record()
            yield from skip_space(source)
            if (yield from source.accept(_CDATA)):
                source.recorded()
                if (yield from read_value(source, emit, _CDATA_END, types, trim=False)):
                    return (yield from source.until(self._ends, drop, self._breaks))
                return ""
            if (lead := source.recorded()) and is_text(types):
                emit('"' + inside_quotes(lead.removeprefix("\n") if self.trim else lead))
                return (yield from _read_text(source, emit, self._ends, self.trim, self._breaks))
        return (yield from read_value(source, emit, self._ends, types, self.trim, self._breaks))

    def _header(self, source: TextSource, tag: str) -> Steps[tuple[str, Types] | None]:
        """(name, types if the tag itself says) from the rest of an opening tag."""
        text, end = yield from source.text_until(self._header_ends, keep=("\n", "<"))
        if end != self.header_end or len(text) > LONGEST_NAME:
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
            return name, _NO_TEXT
        declared = _TYPE_ATTRIBUTE.search(rest)
        return name, frozenset() if declared is None else frozenset({declared.group(1)})


def read_value(
    source: TextSource, emit: Emit, ends: Tags, types: Types, trim: bool, keep: tuple[str, ...] = ()
) -> Steps[str]:
    """The text before the next of `ends`, as JSON of its type; that tag. "": the answer ended."""
    if not is_text(types):
        text, tag = yield from source.text_until(ends, keep)
        text = text.removeprefix("\n").removesuffix("\n") if trim else text
        emit(as_json(text, types) if tag else text)
        return tag
    emit('"')
    if trim:
        yield from source.accept("\n")
    return (yield from _read_text(source, emit, ends, trim, keep))


def _read_text(source: TextSource, emit: Emit, ends: Tags, trim: bool, keep: tuple[str, ...]) -> Steps[str]:
    """A string whose opening quote is written, and its closing one."""
    pending = ""  # a newline that may be the last character

    def stream(text: str) -> None:
        nonlocal pending
        text = pending + text
        pending = "\n" if trim and text.endswith("\n") else ""
        emit(inside_quotes(text.removesuffix("\n") if pending else text))

    tag = yield from source.until(ends, stream, keep)
    if not tag:
        emit(inside_quotes(pending))
        return ""
    emit('"')
    return tag


def _settled(declared: Types, known: Types) -> Types:
    """A parameter's types by its tag and by the tool's schema: the schema's, of them those that the tag allows."""
    return (declared & known) or known or declared
