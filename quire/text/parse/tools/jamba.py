"""jamba: AI21 Jamba 1.5 and 1.6.

<tool_calls>[
    {"name": "get_weather", "arguments": {"city": "Paris"}},
    {"name": "now", "arguments": {}}
]</tool_calls>
"""

from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

TAGS = ("<tool_calls>", "</tool_calls>")
FORMAT = ToolFormat(JsonBlocks(TAGS[:1], TAGS[1:]), TAGS)
