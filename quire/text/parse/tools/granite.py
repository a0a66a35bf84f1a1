"""granite, granite-20b-fc, granite4: IBM Granite.

3.0: <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
3.1: <tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
20b-functioncalling: <function_call> {"name": "get_weather", "arguments": {"city": "Paris"}} <function_call> {...}
4.0: as hermes, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one block per call
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.tools.hermes import FORM, TAGS
from quire.text.parse.writer import ToolFormat

_LISTS = ("<|tool_call|>", "<tool_call>")
_SINGLE = ("<function_call>",)
_LIST = CallForm(json_call(), "}", triggers=_LISTS, open="[", between=", ", end="]")
_ONE = CallForm(" " + json_call(), "}", triggers=_SINGLE)
FORMAT = ToolFormat(JsonBlocks(_LISTS, ("</tool_call>",)), _LISTS, forms=(_LIST,))
FORMAT_20B = ToolFormat(JsonBlocks(_SINGLE, ("</function_call>",)), _SINGLE, forms=(_ONE,))
FORMAT_4 = ToolFormat(JsonBlocks(TAGS[:1], TAGS[1:]), TAGS, forms=(FORM,))
