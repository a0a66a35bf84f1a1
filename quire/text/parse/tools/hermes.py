"""hermes: Nous Hermes 2 Pro and later, Qwen 2.5, QwQ, and many that were trained on the same data.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

One block per call; blocks follow each other. The keys come in either order.
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

TAGS = ("<tool_call>", "</tool_call>")
FORM = CallForm("\n" + json_call(), "}\n</tool_call>", triggers=TAGS[:1])
FORMAT = ToolFormat(JsonBlocks(TAGS[:1], TAGS[1:]), TAGS, forms=(FORM,))
