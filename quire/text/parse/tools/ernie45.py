"""ernie45: Baidu ERNIE 4.5 Thinking.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Text that is no call stands between <response> and </response>.
"""

from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.tools.hermes import FORM, TAGS
from quire.text.parse.writer import ToolFormat

FORMAT = ToolFormat(
    JsonBlocks(TAGS[:1], TAGS[1:]), TAGS, hidden=("<response>\n", "\n</response>", "</response>"), forms=(FORM,)
)
