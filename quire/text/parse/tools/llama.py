"""llama3_json, llama4_json, llama4_pythonic: Meta Llama 3.1 and later.

JSON: {"name": "get_weather", "parameters": {"city": "Paris"}}

With <|python_tag|> before it or not (Llama 4: <|python_start|> ... <|python_end|>), and with text around it or not.
Several calls are separated by semicolons. Some other JSON object is content, and so is all that is in it.

Pythonic (Llama 4): [get_weather(city="Paris"), now()], with <|python_start|> and <|python_end|> around it or not.
"""

from quire.text.parse.call_form import CallForm, PythonValues, json_call
from quire.text.parse.json_calls import CallKeys, JsonBlocks
from quire.text.parse.python_calls import PythonCalls
from quire.text.parse.writer import ToolFormat

_OPEN, _START, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_KEYS = CallKeys(name=("name", "function"), arguments=("parameters", "arguments"), strict=True)
_CALL = json_call(arguments="parameters")
_FORM = CallForm(_CALL, "}", triggers=(_OPEN,), between="; ", bare="{[", alone=True)
_FORM_4 = CallForm(_CALL, "}", triggers=(_START,), between="; ", end=_END, alone=True)
_PYTHON = CallForm(
    "{name}(", ")", PythonValues(), triggers=(_START,), open="[", between=", ", end="]" + _END, bare="[", bare_end="]",
    alone=True,
)  # fmt: skip
_MARKS, _THOUGHT = ((_OPEN, _START), (_END,)), ("<think>", "</think>")
FORMAT = ToolFormat(
    JsonBlocks(*_MARKS, keys=_KEYS, bare="{[", anywhere=True),
    (_OPEN, _START, _END),
    forms=(_FORM, _FORM_4),
    strict_read=JsonBlocks(*_MARKS, keys=_KEYS, bare="{["),
    thought=_THOUGHT,
)
PYTHONIC = ToolFormat(
    PythonCalls((_START,), (_END,), bare=True, again=_THOUGHT[1:]),
    (_START, _END),
    forms=(_PYTHON,),
    strict_read=PythonCalls((_START,), (_END,), bare=True),
    thought=_THOUGHT,
)
