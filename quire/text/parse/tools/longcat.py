"""longcat: Meituan LongCat-Flash.

<longcat_tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</longcat_tool_call>
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

_TAGS = ("<longcat_tool_call>", "</longcat_tool_call>")
_FORM = CallForm("\n" + json_call(), "}\n" + _TAGS[1], triggers=_TAGS[:1])
FORMAT = ToolFormat(JsonBlocks(_TAGS[:1], _TAGS[1:]), _TAGS, forms=(_FORM,))
