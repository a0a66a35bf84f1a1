"""gigachat3: GigaChat 3 and 3.1. One call, after the text.

3.0: text<|message_sep|>

     function call<|role_sep|>
     {"name": "get_weather", "arguments": {"city": "Paris"}}
3.1: text<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}

The separators of 3.0 are special tokens with their newlines; without them `function call{...}` is left.
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

_OPENS = (
    "<|message_sep|>\n\nfunction call<|role_sep|>\n",
    "function call<|role_sep|>\n",
    "function call<|role_sep|>",
    "function call",
    "<|function_call|>",
    "<|function call|>",
)
_SPECIAL = ("<|message_sep|>\n\n", "<|role_sep|>\n", "<|message_sep|>", "<|role_sep|>", *_OPENS[4:])
_FORM = CallForm(json_call(), "}", triggers=(*_OPENS[4:], _OPENS[0]), others=("function call{", "function call["))
FORMAT = ToolFormat(JsonBlocks(_OPENS), _SPECIAL, forms=(_FORM,))
