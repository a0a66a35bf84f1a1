"""hunyuan_a13b: Tencent Hunyuan A13B.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]</tool_calls>

With thinking on, the text stands between <answer> and </answer>.
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

_TAGS = ("<tool_calls>", "</tool_calls>")
_FORM = CallForm(json_call(), "}", triggers=_TAGS[:1], open="[", between=", ", end="]" + _TAGS[1])
FORMAT = ToolFormat(
    JsonBlocks(_TAGS[:1], _TAGS[1:]),
    _TAGS,
    hidden=("<answer>", "</answer>"),
    forms=(_FORM,),
    thought=("<think>", "</think>"),  # no call is made in it
)
