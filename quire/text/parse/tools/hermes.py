"""hermes: Nous Hermes 2 Pro and later, Qwen 2.5, QwQ, and many that were trained on the same data.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

One block per call; blocks follow each other. The keys come in either order.
"""

from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import CallForm, ToolFormat

TAGS = ("<tool_call>", "</tool_call>")
FORM = CallForm("<tool_call>", '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>")
FORMAT = ToolFormat(JsonBlocks(TAGS[:1], TAGS[1:]), TAGS, form=FORM)
