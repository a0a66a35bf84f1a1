"""mistral: Mistral's models, by the version of their tokenizer.

up to v7: [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1B2c3D4e"}, ...]
v11:      [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}
v13:      [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}

All in brackets are special tokens; [ARGS] may be missing. An id is nine letters and digits.
"""

import re
import secrets
import string

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import read_broken, read_calls
from quire.text.parse.json_text import raw_value, skip_space
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter, ToolFormat

_OPEN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_STARTS = Tags(_OPEN)
_NAME_ENDS, _ID_ENDS = Tags(_ARGS, _ID, "{", _OPEN), Tags(_ARGS, "{", _OPEN)
_NAME = re.compile(r"[\w.\-/]+")
_LETTERS = string.ascii_letters + string.digits


def new_id(name: str, index: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def read(source: TextSource, out: DeltaWriter) -> Steps[None]:
    while (tag := (yield from source.until(_STARTS, out.content))) != "":
        source.record(tag)
        if (yield from skip_space(source)) in ("[", "{"):
            yield from read_calls(source, out, ends=_STARTS)
        else:
            yield from _named(source, out)


def _named(source: TextSource, out: DeltaWriter) -> Steps[None]:
    name, tag = yield from source.text_until(_NAME_ENDS, keep=("{", _OPEN))
    name, call_id = name.strip(), None
    if tag == _ID:
        call_id, tag = yield from source.text_until(_ID_ENDS, keep=("{", _OPEN))
        call_id = call_id.strip()[:64]
    if tag not in (_ARGS, "{") or len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        out.content(source.recorded())
        return
    source.recorded()
    out.open(name, call_id)
    if (yield from skip_space(source)) != "{":
        text, _ = yield from source.text_until(_STARTS, keep=(_OPEN,))
        out.arguments(text.strip() or "{}")
    elif not (yield from raw_value(source, out.arguments)):
        yield from read_broken(source, out, _STARTS)


_LIST = CallForm(json_call(), "}", triggers=(_OPEN,), open=" [", between=", ", end="]")
_MARKED = CallForm("{name}" + _ARGS, triggers=(_OPEN,))
FORMAT = ToolFormat(read, (_OPEN, _ARGS, _ID), new_id=new_id, forms=(_LIST, _MARKED))
