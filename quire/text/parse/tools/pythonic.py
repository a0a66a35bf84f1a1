"""pythonic: models that write calls as a Python list, such as ToolACE and small Llama 3.2.

    [get_weather(city="Paris", metric=True), now()]

The list is the whole answer, or all of it after a thought. Only keyword arguments with literal values are calls.
"""

from quire.text.parse.call_form import CallForm, PythonValues
from quire.text.parse.python_calls import PythonCalls
from quire.text.parse.writer import ToolFormat

_FORM = CallForm("{name}(", ")", PythonValues(), open="[", between=", ", bare="[", bare_end="]", alone=True)
_THOUGHT = ("<think>", "</think>")
FORMAT = ToolFormat(
    PythonCalls(bare=True, again=_THOUGHT[1:]), forms=(_FORM,), strict_read=PythonCalls(bare=True), thought=_THOUGHT
)
