"""lfm2: Liquid LFM2.

<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>
"""

from quire.text.parse.call_form import CallForm, PythonValues
from quire.text.parse.python_calls import PythonCalls
from quire.text.parse.writer import ToolFormat

_TAGS = ("<|tool_call_start|>", "<|tool_call_end|>")
_FORM = CallForm("{name}(", ")", PythonValues(), triggers=_TAGS[:1], open="[", between=", ", end="]" + _TAGS[1])
FORMAT = ToolFormat(PythonCalls(_TAGS[:1], _TAGS[1:]), _TAGS, forms=(_FORM,))
