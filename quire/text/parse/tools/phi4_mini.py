"""phi4_mini_json: Microsoft Phi-4-mini.

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]

Its special tokens <|tool_call|> and <|/tool_call|> may stand around a list too.
"""

from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

_TAGS = ("<|tool_call|>", "<|/tool_call|>")
FORMAT = ToolFormat(JsonBlocks(("functools[", _TAGS[0]), _TAGS[1:]), _TAGS)
