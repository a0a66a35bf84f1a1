"""lfm2: Liquid LFM2.

<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>
"""

from quire.text.parse.python_calls import PythonCalls
from quire.text.parse.writer import ToolFormat

_TAGS = ("<|tool_call_start|>", "<|tool_call_end|>")
FORMAT = ToolFormat(PythonCalls(_TAGS[:1], _TAGS[1:]), _TAGS)
