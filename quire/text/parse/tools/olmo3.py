"""olmo3: Ai2 Olmo 3.

    <function_calls>
    get_weather(city="Paris", metric=true)
    now()
    </function_calls>

One call per line; true, false and null beside Python's words.
"""

from quire.text.parse.python_calls import PythonCalls
from quire.text.parse.writer import ToolFormat

_TAGS = ("<function_calls>", "</function_calls>")
FORMAT = ToolFormat(PythonCalls(_TAGS[:1], _TAGS[1:]), _TAGS)
