"""hunyuan_a13b: Tencent Hunyuan A13B.

    <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]</tool_calls>

With thinking on, the text stands between <answer> and </answer>.
"""

from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

_TAGS = ("<tool_calls>", "</tool_calls>")
FORMAT = ToolFormat(JsonBlocks(_TAGS[:1], _TAGS[1:]), _TAGS, hidden=("<answer>", "</answer>"))
