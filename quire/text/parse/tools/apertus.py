"""apertus: Swiss AI Apertus.

    <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>

An object per call, whose one key is the function.
"""

import re

from quire.text.parse.call_form import CallForm
from quire.text.parse.json_calls import read_arguments, read_broken
from quire.text.parse.json_text import skip_space, string_value
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter, ToolFormat

_OPEN, _CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
_STARTS, _LATER, _ENDS = Tags(_OPEN), Tags(_OPEN, _CLOSE), Tags(_CLOSE)
_BEFORE, _AFTER = re.compile(r"[\s,\[]*"), re.compile(r"[\s,\[\]}]*")


def read(source: TextSource, out: DeltaWriter) -> Steps[None]:
    while True:
        tag = yield from source.until(_STARTS if out.index < 0 else _LATER, out.content)
        if not tag:
            return
        if tag == _OPEN:
            source.record(tag)
            yield from _calls(source, out)


def _calls(source: TextSource, out: DeltaWriter) -> Steps[None]:
    count = 0
    while True:
        yield from source.span(_AFTER if count else _BEFORE)
        if count:
            source.record()
        if not (yield from source.accept("{")):
            break
        name = None
        if (yield from skip_space(source)) == '"':
            name = yield from string_value(source, LONGEST_NAME)
        if not name or (yield from skip_space(source)) != ":":
            break
        yield from source.take(1)
        yield from skip_space(source)
        source.recorded()
        out.open(name)
        count += 1
        if not (yield from read_arguments(source, out.arguments)):
            yield from read_broken(source, out, _ENDS)
            break
    out.content(source.recorded())
    if count:
        yield from source.accept(_CLOSE)


_FORM = CallForm('{"{name}": ', "}", triggers=(_OPEN,), open="[", between=", ", end="]" + _CLOSE)
FORMAT = ToolFormat(read, (_OPEN, _CLOSE), forms=(_FORM,))
