"""xlam: Salesforce xLAM, in any of the forms its models use.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
    ```json
    [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    ```
    [TOOL_CALLS][{...}]
    <tool_call>[{...}]</tool_call>

A list of other objects, or other JSON in a fence, is content. A thought may stand before the call.
"""

from quire.text.parse.json_calls import CallKeys, JsonBlocks
from quire.text.parse.writer import ToolFormat

_OPENS = ("```json", "[TOOL_CALLS]", "<tool_call>")
_CLOSES = ("```", "[/TOOL_CALLS]", "</tool_call>")
_THOUGHT = ("<think>", "</think>")
FORMAT = ToolFormat(
    JsonBlocks(_OPENS, _CLOSES, keys=CallKeys(strict=True), bare="[{", again=_THOUGHT[1:]),
    (*_OPENS[1:], *_CLOSES[1:]),
    thought=_THOUGHT,
)
