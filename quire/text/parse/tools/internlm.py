"""internlm: InternLM 2.5 and 3.

<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

_OPEN, _CLOSE = "<|action_start|><|plugin|>", "<|action_end|>"
_FORM = CallForm("\n" + json_call(arguments="parameters"), "}" + _CLOSE, triggers=(_OPEN,))
FORMAT = ToolFormat(JsonBlocks((_OPEN,), (_CLOSE,)), ("<|action_start|>", "<|plugin|>", _CLOSE), forms=(_FORM,))
