"""solar_open2: Upstage Solar Open 2.

    <|tool_call:start|>get_weather
    <|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>
    <|tool_call:end|>

One block per call; values by the types of the tool's schema.
"""

from quire.text.parse.call_form import CallForm, TaggedValues
from quire.text.parse.pair_calls import PairCalls
from quire.text.parse.typed import TEXT
from quire.text.parse.writer import ToolFormat

_CALLS = PairCalls(
    "<|tool_call:start|>", "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "", "<|tool_arg:end|>", TEXT
)
_FORM = CallForm(
    "{name}\n",
    "<|tool_call:end|>",
    TaggedValues("<|tool_arg:start|>{name}<|tool_arg:value|>", "<|tool_arg:end|>\n"),
    triggers=("<|tool_call:start|>",),
)
FORMAT = ToolFormat(_CALLS, _CALLS.tags, forms=(_FORM,))
