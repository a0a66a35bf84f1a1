"""phi4_mini_json: Microsoft Phi-4-mini.

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]

Its special tokens <|tool_call|> and <|/tool_call|> may stand around a list too.
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

_TAGS = ("<|tool_call|>", "<|/tool_call|>")
_FORM = CallForm(json_call(), "}", triggers=("functools[",), between=", ", end="]", others=_TAGS[:1])
FORMAT = ToolFormat(JsonBlocks(("functools[", _TAGS[0]), _TAGS[1:]), _TAGS, forms=(_FORM,))
