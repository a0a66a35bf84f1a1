"""hy_v3: Tencent Hy3.

    <tool_calls>
    <tool_call>get_weather<tool_sep>
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    </tool_calls>

Values by the types of the tool's schema.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.pair_calls import PairCalls
from quire.text.parse.writer import ToolFormat

_OUTER = ("<tool_calls>", "</tool_calls>")
_CALLS = PairCalls(
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", name_end="<tool_sep>",
    around=_OUTER,
)  # fmt: skip
_FORM = CallForm(
    "<tool_call>{name}<tool_sep>\n",
    "</tool_call>\n",
    TaggedValues("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
    triggers=_OUTER[:1],
    open="\n",
    between="",
    end=_OUTER[1],
    others=("<tool_call>",),
)
FORMAT = ToolFormat(_CALLS, _CALLS.tags, forms=(_FORM,))
