"""jamba: AI21 Jamba 1.5 and 1.6.

<tool_calls>[
    {"name": "get_weather", "arguments": {"city": "Paris"}},
    {"name": "now", "arguments": {}}
]</tool_calls>
"""

from quire.text.parse.call_form import CallForm, json_call
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.writer import ToolFormat

TAGS = ("<tool_calls>", "</tool_calls>")
_FORM = CallForm(json_call(), "}", triggers=TAGS[:1], open="[\n    ", between=",\n    ", end="\n]" + TAGS[1])
FORMAT = ToolFormat(JsonBlocks(TAGS[:1], TAGS[1:]), TAGS, forms=(_FORM,))
