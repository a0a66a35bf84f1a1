"""seed_oss: ByteDance Seed-OSS.

<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
</function>
</seed:tool_call>
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.writer import ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
FORMAT = ToolFormat(
    XmlCalls(
        opens=_TAGS[:1],
        closes=_TAGS[1:],
        call=("<function=",),
        call_close=("</function>",),
        parameter=("<parameter=",),
        parameter_close=("</parameter>",),
    ),
    _TAGS,
    forms=(
        CallForm(
            "\n<function={name}>\n",
            "</function>\n" + _TAGS[1],
            TaggedValues("<parameter={name}>", "</parameter>\n", ("\n<parameter=", "\n</function>")),
            triggers=_TAGS[:1],
            others=("<function=",),
        ),
    ),
    thought=("<seed:think>", "</seed:think>"),  # no call is made in it
)
