"""cohere_command3, cohere_command4: Cohere Command R7B, Command A and later.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

Text stands between <|START_RESPONSE|> and <|END_RESPONSE|> (Command 4: <|START_TEXT|> and <|END_TEXT|>).
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import CallKeys, JsonBlocks
from quire.text.parse.writer import ToolFormat

_TAGS = ("<|START_ACTION|>", "<|END_ACTION|>")
_HIDDEN = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_KEYS = CallKeys(name=("tool_name", "name"), arguments=("parameters", "arguments"), id="tool_call_id")
_FORM = CallForm(
    json_call("tool_name", "parameters", first='"tool_call_id": "{number}", '),
    "}",
    triggers=_TAGS[:1],
    open="[\n    ",
    between=",\n    ",
    end="\n]" + _TAGS[1],
)
FORMAT = ToolFormat(JsonBlocks(_TAGS[:1], _TAGS[1:], keys=_KEYS), (*_TAGS, *_HIDDEN), hidden=_HIDDEN, forms=(_FORM,))
