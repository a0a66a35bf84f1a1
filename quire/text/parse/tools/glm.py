"""glm45, glm47: Zhipu GLM 4.5, 4.6, 4.7.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

4.7 writes it without the line breaks, and a call without arguments as <tool_call>now</tool_call>. Strings stand as they
are, other values as JSON; which one it is, the tool's schema says.
"""

import re

from quire.text.parse.json_text import quoted, skip_space
from quire.text.parse.tags import Source, Steps, Tags
from quire.text.parse.typed import parameter_types
from quire.text.parse.writer import LONGEST_NAME, ToolFormat, Writer
from quire.text.parse.xml_calls import read_value

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TAGS = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
_STARTS, _LATER = Tags(_OPEN), Tags(_OPEN, _CLOSE)
_HEADER_ENDS = Tags(_KEY, _CLOSE, _OPEN)
_KEY_ENDS, _VALUE_ENDS = Tags(_KEY_END, _CLOSE), Tags(_VALUE_END)
_NAME = re.compile(r"[\w.:/\-]+")


def read(source: Source, out: Writer) -> Steps[None]:
    while True:
        tag = yield from source.until(_STARTS if out.index < 0 else _LATER, out.content)
        if not tag:
            return
        if tag == _OPEN:
            source.record(tag)
            yield from _one(source, out)


def _one(source: Source, out: Writer) -> Steps[None]:
    header, tag = yield from source.text_until(_HEADER_ENDS, keep=(_OPEN, _CLOSE))
    name = header.strip()
    if tag in ("", _OPEN) or len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        out.content(source.recorded())
        return
    source.recorded()
    out.open(name)
    first = True
    while tag == _KEY:
        source.record(_KEY)
        key, tag = yield from source.text_until(_KEY_ENDS, keep=(_CLOSE,))
        yield from skip_space(source)
        if tag != _KEY_END or not (yield from source.accept(_VALUE)):
            out.content(source.recorded())
        else:
            source.recorded()
            key = key.strip()
            out.arguments(f"{'{' if first else ', '}{quoted(key)}: ")
            first = False
            types = parameter_types(out.tools, name, key)
            if not (yield from read_value(source, out.arguments, _VALUE_ENDS, types, trim=False)):
                return
        yield from skip_space(source)
        tag = yield from source.until(_HEADER_ENDS, out.content, keep=(_OPEN, _CLOSE))
    if tag:
        out.arguments("{}" if first else "}")
        yield from source.accept(_CLOSE)


FORMAT = ToolFormat(read, _TAGS)
