"""longcat: Meituan LongCat-Flash.

<longcat_tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</longcat_tool_call>
"""

from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import CallForm, ToolFormat

_TAGS = ("<longcat_tool_call>", "</longcat_tool_call>")
_FORM = CallForm(_TAGS[0], _TAGS[0] + '\n{"name": "{name}", "arguments": ', "}\n" + _TAGS[1])
FORMAT = ToolFormat(JsonBlocks(_TAGS[:1], _TAGS[1:]), _TAGS, form=_FORM)
