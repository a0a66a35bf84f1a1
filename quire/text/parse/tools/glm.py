"""glm45, glm47: Zhipu GLM 4.5, 4.6, 4.7; ling3, poolside_v1: Ling 3 and Poolside Laguna, which write as 4.7 does.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

4.7 writes it without the line breaks, and a call without arguments as <tool_call>now</tool_call>.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.pair_calls import PairCalls
from quire.text.parse.writer import ToolFormat

_CALLS = PairCalls("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _form(gap: str) -> CallForm:
    values = TaggedValues(f"<arg_key>{{name}}</arg_key>{gap}<arg_value>", f"</arg_value>{gap}")
    return CallForm("{name}" + gap, "</tool_call>", values, triggers=("<tool_call>",))


FORMAT = ToolFormat(_CALLS, _CALLS.tags, forms=(_form("\n"),))
FORMAT_47 = ToolFormat(_CALLS, _CALLS.tags, forms=(_form(""),))
