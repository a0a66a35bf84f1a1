"""minimax, minimax_m2: MiniMax M1 and M2.

M1, one JSON object per line:

    <tool_calls>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    {"name": "now", "arguments": {}}
    </tool_calls>

M2, values by the types of the tool's schema:

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>
"""

from quire.text.parse.call_form import CallForm, TaggedValues, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.tools.jamba import TAGS
from quire.text.parse.writer import ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_FORM = CallForm(json_call(), "}\n", triggers=TAGS[:1], open="\n", between="", end=TAGS[1])
_THOUGHT = ("<think>", "</think>")  # no call is made in it
FORMAT = ToolFormat(JsonBlocks(TAGS[:1], TAGS[1:]), TAGS, forms=(_FORM,), thought=_THOUGHT)
_FORM_M2 = CallForm(
    '<invoke name="{name}">\n',
    "</invoke>\n",
    TaggedValues('<parameter name="{name}">', "</parameter>\n", ("\n<parameter name=", "\n</invoke>")),
    triggers=(_OPEN,),
    open="\n",
    between="",
    end=_CLOSE,
    others=("<invoke name=",),
)
FORMAT_M2 = ToolFormat(
    XmlCalls(
        opens=(_OPEN,),
        closes=(_CLOSE,),
        call=('<invoke name="', "<invoke name="),
        call_close=("</invoke>",),
        parameter=('<parameter name="', "<parameter name="),
        parameter_close=("</parameter>",),
        wrappers=("arguments", "input"),
    ),
    (_OPEN, _CLOSE),
    forms=(_FORM_M2,),
    thought=_THOUGHT,
)
