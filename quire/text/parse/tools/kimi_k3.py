"""kimi_k3: Moonshot Kimi K3.

    <|open|>tools<|sep|><|open|>call tool="get_weather" index="0"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

without the line breaks. The marks between bars are special tokens, the names between them are text. A value is text or
JSON, as its type says; the tool's schema goes before it.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.writer import ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_SEPARATOR = "<|sep|>"
TOOLS = f"<|open|>tools{_SEPARATOR}"
_HIDDEN = (
    f"<|open|>response{_SEPARATOR}", f"<|close|>response{_SEPARATOR}", f"<|close|>message{_SEPARATOR}",
    "<|end_of_msg|>",
)  # fmt: skip
_FORM = CallForm(
    f'<|open|>call tool="{{name}}" index="{{number}}"{_SEPARATOR}',
    f"<|close|>call{_SEPARATOR}",
    TaggedValues(f'<|open|>argument key="{{name}}" type="{{type}}"{_SEPARATOR}', f"<|close|>argument{_SEPARATOR}"),
    triggers=(TOOLS,),
    between="",
    end=f"<|close|>tools{_SEPARATOR}",
    others=('<|open|>call tool="',),
)
FORMAT = ToolFormat(
    XmlCalls(
        opens=(TOOLS,),
        closes=(f"<|close|>tools{_SEPARATOR}",),
        call=('<|open|>call tool="',),
        call_close=(f"<|close|>call{_SEPARATOR}",),
        parameter=('<|open|>argument key="',),
        parameter_close=(f"<|close|>argument{_SEPARATOR}",),
        trim=False,
        header_end=_SEPARATOR,
    ),
    ("<|open|>", "<|close|>", _SEPARATOR, "<|end_of_msg|>"),
    hidden=_HIDDEN,
    forms=(_FORM,),
)
