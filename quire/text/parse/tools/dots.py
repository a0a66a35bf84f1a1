"""dots: Rednote dots3.

    <dots_function_call>
    <invoke name="get_weather">
    <parameter name="city">
    Paris
    </parameter>
    </invoke>
    </dots_function_call>

Several calls may stand in one block. One line break on either side of a value is no part of it; values by the types of
the tool's schema. A function that the request does not have is text; the outer tags never are.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.writer import ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_TAGS = ("<dots_function_call>", "</dots_function_call>")
FORMAT = ToolFormat(
    XmlCalls(
        opens=_TAGS[:1],
        closes=_TAGS[1:],
        call=('<invoke name="',),
        call_close=("</invoke>",),
        parameter=('<parameter name="',),
        parameter_close=("</parameter>",),
        known_only=True,
    ),
    _TAGS,
    forms=(
        CallForm(
            '<invoke name="{name}">\n',
            "</invoke>\n",
            TaggedValues('<parameter name="{name}">\n', "\n</parameter>\n", ('\n<parameter name="', "\n</invoke>")),
            triggers=_TAGS[:1],
            open="\n",
            between="",
            end=_TAGS[1],
            others=('<invoke name="',),
        ),
    ),
)
