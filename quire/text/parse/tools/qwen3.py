"""qwen3_coder, qwen3_xml: Qwen3-Coder and models that write like it.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values by the types of the tool's schema. The outer tags and the parameter's closing tag may be missing.
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
    ),
    _TAGS,
    forms=(
        CallForm(
            "\n<function={name}>\n",
            "</function>\n" + _TAGS[1],
            TaggedValues("<parameter={name}>\n", "\n</parameter>\n", ("\n<parameter=", "\n</function>")),
            triggers=_TAGS[:1],
            others=("<function=",),
        ),
    ),
)
