"""olmo3: Ai2 Olmo 3.

    <function_calls>
    get_weather(city="Paris", metric=true)
    now()
    </function_calls>

One call per line; true, false and null beside Python's words.
"""

from quire.text.parse.call_form import CallForm, PythonValues
from quire.text.parse.python_calls import PythonCalls
from quire.text.parse.writer import ToolFormat

_TAGS = ("<function_calls>", "</function_calls>")
_FORM = CallForm("{name}(", ")\n", PythonValues(), triggers=_TAGS[:1], open="\n", between="", end=_TAGS[1])
FORMAT = ToolFormat(PythonCalls(_TAGS[:1], _TAGS[1:]), _TAGS, forms=(_FORM,))
