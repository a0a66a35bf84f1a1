"""Calls written as a name and pairs of a key and a value, each between tags of its own.

Strings stand as they are, other values as JSON; which one it is, the tool's schema says. Must not know: which model
writes like this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quire.text.parse.json_text import quoted, skip_space
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.typed import Types, parameter_types
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter
from quire.text.parse.xml_calls import read_value

_NAME = re.compile(r"[\w.:/\-]+")


@dataclass(frozen=True)
class PairCalls:
    """`value` may be empty: then the key's end is where the value begins. `unknown`: the types of a parameter that no
    schema describes. `name_end`: stands after the name. `around`: marks outside of calls that say nothing."""

    open: str
    close: str
    key: str
    key_end: str
    value: str
    value_end: str
    unknown: Types = frozenset()
    name_end: str = ""
    around: tuple[str, ...] = ()
    _starts: Tags = field(init=False, repr=False)
    _later: Tags = field(init=False, repr=False)
    _name_ends: Tags = field(init=False, repr=False)
    _header_ends: Tags = field(init=False, repr=False)
    _key_ends: Tags = field(init=False, repr=False)
    _value_ends: Tags = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, made in (
            ("_starts", Tags(self.open, *self.around)),
            ("_later", Tags(self.open, self.close, *self.around)),
            ("_name_ends", Tags(self.key, self.close, self.open, *((self.name_end,) if self.name_end else ()))),
            ("_header_ends", Tags(self.key, self.close, self.open)),
            ("_key_ends", Tags(self.key_end, self.close)),
            ("_value_ends", Tags(self.value_end)),
        ):
            object.__setattr__(self, name, made)

    @property
    def tags(self) -> tuple[str, ...]:
        tags = (self.open, self.close, self.key, self.key_end, self.value, self.value_end, self.name_end, *self.around)
        return tuple(tag for tag in tags if tag)

    def __call__(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        while tag := (yield from source.until(self._later if out.index >= 0 else self._starts, out.content)):
            if tag == self.open:
                source.record(tag)
                yield from self._one(source, out)
            elif tag in self.around:
                yield from skip_space(source)

    def _one(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        header, tag = yield from source.text_until(self._name_ends, keep=(self.open, self.close))
        name = header.strip()
        if tag in ("", self.open) or len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
            out.content(source.recorded())
            return
        source.recorded()
        out.open(name)
        if tag == self.name_end:
            yield from skip_space(source)
            tag = yield from source.until(self._header_ends, out.content, keep=(self.open, self.close))
        first = True
        while tag == self.key:
            source.record(self.key)
            key, tag = yield from source.text_until(self._key_ends, keep=(self.close,))
            if self.value:
                yield from skip_space(source)
            if tag != self.key_end or not (yield from source.accept(self.value)):
                out.content(source.recorded())
            else:
                source.recorded()
                key = key.strip()
                out.arguments(f"{'{' if first else ', '}{quoted(key)}: ")
                first = False
                types = parameter_types(out.tools, name, key) or self.unknown
                if not (yield from read_value(source, out.arguments, self._value_ends, types, trim=False)):
                    return
            yield from skip_space(source)
            tag = yield from source.until(self._header_ends, out.content, keep=(self.open, self.close))
        if tag:
            out.arguments("{}" if first else "}")
            yield from source.accept(self.close)
