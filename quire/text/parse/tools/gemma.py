"""functiongemma, gemma4: Google FunctionGemma and Gemma 4.

FunctionGemma: <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
Gemma 4:       <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Keys stand bare, strings between two marks, objects and lists in their brackets. Calls follow each other. A model may
fall into JSON's strings and into = after a key.
"""

import re
from dataclasses import dataclass, field

from quire.text.parse.call_form import BareValues, CallForm
from quire.text.parse.json_text import inside_quotes, quoted, raw_string, skip_space
from quire.text.parse.python_values import DEEPEST, scalar
from quire.text.parse.tags import Emit, Steps, Tags, TextSource
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter, ToolFormat, each_call

_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"[^:={}\[\],<]*")
_SCALAR = re.compile(r"[^,{}\[\]<]*")


@dataclass(frozen=True)
class BareCalls:
    open: str
    close: str
    quote: str
    _starts: Tags = field(init=False, repr=False)
    _later: Tags = field(init=False, repr=False)
    _quote: Tags = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, made in (
            ("_starts", Tags(self.open)),
            ("_later", Tags(self.open, self.close)),
            ("_quote", Tags(self.quote)),
        ):
            object.__setattr__(self, name, made)

    def __call__(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        yield from each_call(source, out, (self._starts, self._later), self.open, self._one)

    def _one(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        yield from skip_space(source)
        named = yield from source.accept("call:")
        name = yield from source.word(_NAME)
        if not named or not name or len(name) > LONGEST_NAME or (yield from skip_space(source)) != "{":
            out.content(source.recorded())
            return
        source.recorded()
        out.open(name)
        yield from self._value(source, out.arguments, 0)
        out.content(source.recorded())
        yield from skip_space(source)
        yield from source.accept(self.close)

    def _value(self, source: TextSource, emit: Emit, depth: int) -> Steps[bool]:
        """One value as JSON. False: broken, yet what was written is whole."""
        if (yield from source.accept(self.quote)):
            emit('"')
            tag = yield from source.until(self._quote, lambda text: emit(inside_quotes(text)))
            emit('"')
            return bool(tag)
        mark = yield from source.peek()
        if mark == '"':
            return (yield from raw_string(source, emit))
        if mark in ("{", "["):
            return (yield from self._items(source, emit, depth))
        text = (yield from source.word(_SCALAR)).strip()
        emit(scalar(text))
        return bool(text)

    def _items(self, source: TextSource, emit: Emit, depth: int) -> Steps[bool]:
        opener = yield from source.take(1)
        closer = "}" if opener == "{" else "]"
        emit(opener)
        first, whole = True, depth < DEEPEST
        while whole:
            mark = yield from skip_space(source)
            if mark == closer:
                yield from source.take(1)
                break
            if mark == "" or (not first and mark != ","):
                whole = False
                break
            if not first:
                yield from source.take(1)
                yield from skip_space(source)
            key = (yield from self._key(source)) if opener == "{" else ""
            if key is None:
                whole = False
                break
            emit(("" if first else ", ") + key)
            first = False
            whole = yield from self._value(source, emit, depth + 1)
        emit(closer)
        return whole

    def _key(self, source: TextSource) -> Steps[str | None]:
        """A key and its colon, as JSON. If it is none, what was read stays recorded."""
        source.record()
        if (yield from source.accept(self.quote)):
            key, tag = yield from source.text_until(self._quote)
            if not tag:
                return None
        else:
            key = (yield from source.word(_KEY)).strip().strip('"')
        if not key or not (yield from source.accept_any((":", "="))):
            return None
        yield from skip_space(source)
        source.recorded()
        return f"{quoted(key)}: "


_CALL = ("<start_function_call>", "<end_function_call>", "<escape>")
_CALL_4 = ("<|tool_call>", "<tool_call|>", '<|"|>')


def _format(tags: tuple[str, str, str]) -> ToolFormat:
    form = CallForm("call:{name}", tags[1], BareValues(tags[2]), triggers=tags[:1])
    return ToolFormat(BareCalls(*tags), tags, forms=(form,))


FUNCTION_GEMMA = _format(_CALL)
GEMMA_4 = _format(_CALL_4)
