"""Calls written as Python: [f(a=1, b="x"), g()].

A call opens when its first keyword (or its empty bracket) is there; before that the text is given back as content.
Arguments stream as JSON, value by value, strings as they arrive. Where a value is no literal, the arguments are closed
and what follows is content. Must not know: which model writes like this.
"""

from __future__ import annotations

import re

from quire.text.parse.json_text import quoted, skip_space
from quire.text.parse.python_values import value
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter

_NAME = re.compile(r"[\w.\-]*")
_KEYWORD = re.compile(r"\w*")
_BETWEEN = re.compile(r"[\s,;\[\]]*")


class PythonCalls:
    """Calls between tags, or (`bare`) as the whole answer or all of it after one of `again`, then in a list."""

    def __init__(
        self,
        opens: tuple[str, ...] = (),
        closes: tuple[str, ...] = (),
        *,
        bare: bool = False,
        again: tuple[str, ...] = (),
    ) -> None:
        self._opens, self._closes, self._bare, self._again = opens, closes, bare, again
        self._marks = Tags(*opens, *again) if opens or again else None
        self._later = Tags(*opens, *again, *closes) if opens or again else None

    def __call__(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        if self._bare:
            yield from self._begin(source, out)
        if self._marks is None or self._later is None:
            return
        while True:
            tag = yield from source.until(self._marks if out.index < 0 else self._later, out.content)
            if not tag:
                return
            if tag in self._opens:
                source.record(tag)
                if (yield from read_calls(source, out)):
                    yield from source.accept_any(self._closes)
            elif tag in self._again:
                out.content(tag)
                yield from self._begin(source, out)

    def _begin(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        """An answer that may be a list of calls and nothing else."""
        source.record()
        if (yield from skip_space(source)) == "[":
            yield from read_calls(source, out)
        else:
            out.content(source.recorded())


def read_calls(source: TextSource, out: DeltaWriter) -> Steps[int]:
    """As many as come; how many. What was recorded before is given back if none does."""
    count = 0
    while True:
        yield from source.span(_BETWEEN)
        mark = yield from source.peek()
        if not mark.isidentifier():
            break
        if count:
            source.record()
        keyword = yield from _open(source, out)
        if keyword is None:
            out.content(source.recorded())
            return count
        count += 1
        if keyword and not (yield from _arguments(source, out)):
            return count
    if not count:
        out.content(source.recorded())
    return count


def _open(source: TextSource, out: DeltaWriter) -> Steps[str | None]:
    """`name(` and its first keyword with `=`; "" after `name()`, a whole call; None: no call."""
    name = yield from source.word(_NAME)
    if not name or len(name) > LONGEST_NAME or not (yield from source.accept("(")):
        return None
    yield from skip_space(source)
    keyword = "" if (yield from source.accept(")")) else (yield from _keyword(source))
    if keyword is None:
        return None
    source.recorded()
    out.open(name)
    out.arguments(f"{{{quoted(keyword)}: " if keyword else "{}")
    return keyword


def _keyword(source: TextSource) -> Steps[str | None]:
    yield from skip_space(source)
    keyword = yield from source.word(_KEYWORD)
    yield from skip_space(source)
    if not keyword or len(keyword) > LONGEST_NAME or not (yield from source.accept("=")):
        return None
    return keyword


def _arguments(source: TextSource, out: DeltaWriter) -> Steps[bool]:
    """From the first value to the closing bracket. False: broken; the arguments are whole JSON all the same."""
    while True:
        whole = yield from value(source, out.arguments, argument=True)
        mark = yield from skip_space(source)
        if not whole or mark not in (",", ")"):
            out.arguments("}")
            out.content(source.recorded())
            return False
        yield from source.take(1)
        if mark == "," and (yield from skip_space(source)) == ")":
            mark = yield from source.take(1)
        if mark == ")":
            out.arguments("}")
            return True
        source.record(",")
        keyword = yield from _keyword(source)
        lost = source.recorded()
        if keyword is None:
            out.arguments("}")
            out.content(lost)
            return False
        out.arguments(f", {quoted(keyword)}: ")
