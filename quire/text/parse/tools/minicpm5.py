"""minicpm5: OpenBMB MiniCPM5.

    <function name="get_weather"><param name="city">Paris</param></function>

A value with line breaks or marks of XML is quoted: <![CDATA[if a < b:]]>. Values by the types of the tool's schema.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.writer import ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_CALL, _END = ('<function name="', "<function name="), "</function>"
FORMAT = ToolFormat(
    XmlCalls(
        opens=(),
        closes=(),
        call=_CALL,
        call_close=(_END,),
        parameter=('<param name="', "<param name="),
        parameter_close=("</param>",),
        cdata=True,
    ),
    (*_CALL, _END, "<function", "<param", "</param>"),
    forms=(
        CallForm(
            '{name}">',
            _END,
            TaggedValues('<param name="{name}">', "</param>", ("<![CDATA[", "\n<param name=", "\n</function>")),
            triggers=_CALL[:1],
            others=("<function name='",),
        ),
    ),
)
