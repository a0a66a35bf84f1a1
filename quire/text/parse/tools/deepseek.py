"""deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, deepseek_v41: DeepSeek V3, R1, V3.1, V3.2, V4, V4.1.

The bars are U+FF5C, the low lines U+2581. V3 and R1-0528, with the arguments in a fence:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>, without the line break.

V3.2, where a parameter says whether it is a string or JSON:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V3.2 sometimes leaves ｜DSML｜ out of every tag. V4 has <｜DSML｜tool_calls> for the outer tag.
V4.1 has <｜DSML｜ calls>, and a blank after ｜DSML｜ in every tag; it may fall back to V4's tags.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.json_calls import read_body
from quire.text.parse.json_text import raw_value, skip_space
from quire.text.parse.marked_calls import MarkedCalls
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter, ToolFormat
from quire.text.parse.xml_calls import XmlCalls

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TAGS = (_OPEN, _CLOSE, _CALL, _SEPARATOR, _END)
_NAME_ENDS = Tags("\n", "```", "{", _END, _CLOSE, _CALL)
_FENCES = ("```json", "```")


class FencedCalls(MarkedCalls):
    """The name stands on a line after the separator, the arguments in a fence below it."""

    def _one(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        kind, tag = yield from source.text_until(self._header, keep=(self.call, self.call_close, *self.closes))
        if tag != self.separator:
            out.content(source.recorded())
            return
        name, tag = yield from source.text_until(_NAME_ENDS, keep=("```", "{", _END, _CLOSE, _CALL))
        name = name.strip()
        if tag not in ("\n", "```", "{") or not name or len(name) > LONGEST_NAME:
            out.content(source.recorded())
            return
        source.recorded()
        out.content("" if kind.strip() == "function" else kind)
        out.open(name)
        yield from skip_space(source)
        fenced = yield from source.accept_any(_FENCES)
        if (yield from skip_space(source)) != "{" or not fenced:
            yield from read_body(source, out, self._ends)
            return
        if (yield from raw_value(source, out.arguments)):
            yield from skip_space(source)
            yield from source.accept("```")
            yield from skip_space(source)
            yield from source.until(self._ends, out.content)
        else:
            yield from source.until(self._ends, out.arguments)


def _markup(*blocks: str, marks: tuple[str, ...] = ("｜DSML｜", "")) -> XmlCalls:
    return XmlCalls(
        opens=tuple(f"<{mark}{block}>" for mark in marks for block in blocks),
        closes=tuple(f"</{mark}{block}>" for mark in marks for block in blocks),
        call=tuple(f'<{mark}invoke name="' for mark in marks),
        call_close=tuple(f"</{mark}invoke>" for mark in marks),
        parameter=tuple(f'<{mark}parameter name="' for mark in marks),
        parameter_close=tuple(f"</{mark}parameter>" for mark in marks),
        trim=False,
        wrappers=("arguments", "input"),
    )


def _marked_form(call: str, close: str, between: str) -> CallForm:
    return CallForm(call, close, triggers=(_OPEN,), between=between, end=_CLOSE, others=(_CALL,))


def _markup_form(block: str, mark: str = "｜DSML｜") -> CallForm:
    marks = (mark, "" if mark == "｜DSML｜" else "｜DSML｜")  # the parser takes the other one too
    ends = [f"{tag}{each}{name}" for each in marks for tag, name in (("</", "parameter>"), ("\n</", "invoke>"))]
    ends += [f'\n<{each}parameter name="' for each in marks]
    return CallForm(
        f'<{mark}invoke name="{{name}}">\n',
        f"</{mark}invoke>\n",
        TaggedValues(f'<{mark}parameter name="{{name}}" string="{{text}}">', f"</{mark}parameter>\n", tuple(ends)),
        triggers=(f"<{mark}{block}>",),
        open="\n",
        between="",
        end=f"</{mark}{block}>",
        others=(f"<{marks[1]}{block}>", f"<{marks[1]}tool_calls>", *(f'<{each}invoke name="' for each in marks)),
    )


FORMAT_V3 = ToolFormat(
    FencedCalls((_OPEN,), _CALL, _SEPARATOR, _END, (_CLOSE,)),
    _TAGS,
    forms=(_marked_form(f"{_CALL}function{_SEPARATOR}{{name}}\n```json\n", f"\n```{_END}", "\n"),),
)
FORMAT_V31 = ToolFormat(
    MarkedCalls((_OPEN,), _CALL, _SEPARATOR, _END, (_CLOSE,)),
    _TAGS,
    forms=(_marked_form(f"{_CALL}{{name}}{_SEPARATOR}", _END, ""),),
)
_MARK = ("｜DSML｜",)
FORMAT_V32 = ToolFormat(_markup("function_calls"), _MARK, forms=(_markup_form("function_calls"),))
FORMAT_V4 = ToolFormat(_markup("tool_calls"), _MARK, forms=(_markup_form("tool_calls"),))
FORMAT_V41 = ToolFormat(
    _markup("calls", "tool_calls", marks=("｜DSML｜ ", "｜DSML｜")), _MARK, forms=(_markup_form("calls", "｜DSML｜ "),)
)
