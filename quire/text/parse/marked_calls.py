"""Calls whose name and arguments stand between marks: BEGIN name SEP {json} END.

A call opens at the separator. Its arguments stream as they are written, up to the mark that ends it. Must not know:
which model writes like this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.text.parse.json_calls import read_body
from quire.text.parse.json_text import skip_space
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter

Named = tuple[str, str | None]  # a function and the id the model gave the call


def plain_name(header: str) -> Named:
    return header.strip(), None


@dataclass(frozen=True)
class MarkedCalls:
    """`name` makes a name of what stands before the separator; "" is no call."""

    opens: tuple[str, ...]
    call: str
    separator: str
    call_close: str
    closes: tuple[str, ...]
    name: Callable[[str], Named] = plain_name
    _starts: Tags = field(init=False, repr=False)
    _later: Tags = field(init=False, repr=False)
    _header: Tags = field(init=False, repr=False)
    _ends: Tags = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, made in (
            ("_starts", Tags(*self.opens, self.call)),
            ("_later", Tags(*self.opens, self.call, self.call_close, *self.closes)),
            ("_header", Tags(self.separator, self.call, self.call_close, *self.closes)),
            ("_ends", Tags(self.call_close, *self.closes)),
        ):
            object.__setattr__(self, name, made)

    def __call__(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        while True:
            tag = yield from source.until(self._starts if out.index < 0 else self._later, out.content)
            if not tag:
                return
            if tag == self.call:
                source.record(tag)
            elif tag in self.opens:
                source.record(tag)
                yield from skip_space(source)
                if not (yield from source.accept(self.call)):
                    out.content(source.recorded())
                    continue
            else:
                continue
            yield from self._one(source, out)

    def _one(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        header, tag = yield from source.text_until(self._header, keep=(self.call, self.call_close, *self.closes))
        name, call_id = self.name(header)
        if tag != self.separator or not name or len(header) > LONGEST_NAME:
            out.content(source.recorded())
            return
        source.recorded()
        out.open(name, call_id)
        yield from read_body(source, out, self._ends)
