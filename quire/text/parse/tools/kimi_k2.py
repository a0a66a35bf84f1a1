"""kimi_k2: Moonshot Kimi K2.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

without the line break. `functions.get_weather:0` is the call's id, which the model expects to see again.
"""

import re

from quire.text.parse.call_form import CallForm
from quire.text.parse.marked_calls import MarkedCalls, Named
from quire.text.parse.writer import ToolFormat

_OPENS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_CLOSES = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL, _SEPARATOR, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?([^\s:]+):\d+")


def _name(header: str) -> Named:
    text = header.strip()
    match = _ID.fullmatch(text)
    return (match.group(1), text) if match else (text.removeprefix("functions."), None)


def _new_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


FORMAT = ToolFormat(
    MarkedCalls(_OPENS, _CALL, _SEPARATOR, _END, _CLOSES, name=_name),
    (*_OPENS, *_CLOSES, _CALL, _SEPARATOR, _END),
    new_id=_new_id,
    forms=(
        CallForm(
            f"{_CALL}functions.{{name}}:{{number}}{_SEPARATOR}",
            _END,
            triggers=_OPENS[:1],
            between="",
            end=_CLOSES[0],
            others=(_CALL, _OPENS[1]),
        ),
    ),
)
