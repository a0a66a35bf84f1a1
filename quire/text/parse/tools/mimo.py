"""mimo: Xiaomi MiMo.

    <tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>

As Qwen3-Coder writes, in one line or in several; a line break at either end of a text is the text's own.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.writer import ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_TAGS = ("<tool_call>", "</tool_call>")
FORMAT = ToolFormat(
    XmlCalls(
        opens=_TAGS[:1],
        closes=_TAGS[1:],
        call=("<function=",),
        call_close=("</function>",),
        parameter=("<parameter=",),
        parameter_close=("</parameter>",),
        trim=False,
    ),
    _TAGS,
    forms=(
        CallForm(
            "<function={name}>",
            "</function>" + _TAGS[1],
            TaggedValues("<parameter={name}>", "</parameter>", ("\n<parameter=", "\n</function>")),
            triggers=_TAGS[:1],
            others=("<function=",),
        ),
    ),
)
