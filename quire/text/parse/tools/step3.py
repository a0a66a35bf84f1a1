"""step3, step3p5: StepFun Step-3 and Step-3.5.

Step-3 (the bars are U+FF5C):

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
    <steptml:parameter name="city">Paris</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

Step-3.5 writes as Qwen3-Coder does.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.tools import qwen3
from quire.text.parse.writer import ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_OPEN, _CLOSE = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _SEPARATOR, _END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
FORMAT = ToolFormat(
    XmlCalls(
        opens=(_OPEN, "<steptml:toolcall>"),
        closes=(_CLOSE, "</steptml:toolcall>"),
        call=('<steptml:invoke name="',),
        call_close=("</steptml:invoke>",),
        parameter=('<steptml:parameter name="',),
        parameter_close=("</steptml:parameter>",),
        around=(f"{_CALL}function{_SEPARATOR}", _CALL, _END),
    ),
    (_OPEN, _CLOSE, _CALL, _SEPARATOR, _END),
    forms=(
        CallForm(
            f'{_CALL}function{_SEPARATOR}<steptml:invoke name="{{name}}">\n',
            f"</steptml:invoke>{_END}\n",
            TaggedValues(
                '<steptml:parameter name="{name}">',
                "</steptml:parameter>\n",
                ('\n<steptml:parameter name="', "\n</steptml:invoke>"),
            ),
            triggers=(_OPEN,),
            open="\n",
            between="",
            end=_CLOSE,
            others=("<steptml:toolcall>", '<steptml:invoke name="'),
        ),
    ),
)
FORMAT_3P5 = qwen3.FORMAT
