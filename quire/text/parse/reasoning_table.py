"""Every family's thinking tags, by the name of its reasoning parser.

`inside` is what an answer begins with when the end of its prompt does not tell (reasoning.py).
"""

from quire.text.parse.reasoning import ReasoningFormat

_START, _END = ("<think>",), ("</think>",)
_THINK = ReasoningFormat(_START, _END)
_INSIDE = ReasoningFormat(_START, _END, inside=True)
_OPENED = ReasoningFormat(_START, _END, opened=True, calls=("<tool_call>",))
_COHERE = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    ends=("<|START_RESPONSE|>", "<|START_TEXT|>", "<|START_ACTION|>"),
    hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)

APERTUS = ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",), ends=("<|tools_prefix|>",))
COHERE_COMMAND3 = _COHERE
COHERE_COMMAND4 = _COHERE
DEEPSEEK_R1 = _INSIDE  # R1 itself, QwQ and the distilled models: the template may or may not open the thought
DEEPSEEK_V3 = _THINK  # V3.1: the template ends with <think> or </think>
DEEPSEEK_V4 = _THINK
DEEPSEEK_V41 = _THINK
ERNIE45 = ReasoningFormat(_START, _END, inside=True, hidden=("\n<response>\n", "<response>\n", "\n</response>"))
GEMMA4 = ReasoningFormat(("<|channel>thought\n", "<|channel>"), ("<channel|>", "\n<channel|>"))
GLM45 = _OPENED
GLM47 = _OPENED
GPTOSS = ReasoningFormat(harmony=True)
GRANITE = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
HOLO2 = _INSIDE
HUNYUAN_A13B = ReasoningFormat(
    ("<think>\n", "<think>"),
    ("\n</think>\n<answer>\n", "\n</think>\n", "</think>"),
    hidden=("<answer>\n", "<answer>", "\n</answer>", "</answer>"),
)
HY_V3 = ReasoningFormat(_START, _END, opened=True, calls=("<tool_calls>", "<tool_call>"))
IDENTITY = ReasoningFormat()
KIMI_K2 = ReasoningFormat(_START, _END, inside=True, ends=("<|tool_calls_section_begin|>",))
KIMI_K3 = ReasoningFormat(
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    opened=True,
    ends=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    hidden=(
        "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>",
    ),
)  # fmt: skip
LING3 = _OPENED
MIMO = ReasoningFormat(_START, _END, calls=("<tool_call>",))  # it thinks only where it was asked to
MINIMAX_M2 = _INSIDE
MINIMAX_M2_APPEND_THINK = ReasoningFormat(prefix="<think>")
MINIMAX_M3 = ReasoningFormat(
    ("<mm:think>", "<think>"), ("</mm:think>", "</think>"), calls=("]<]minimax[>[<tool_call>",)
)
MISTRAL = ReasoningFormat(("[THINK]",), ("[/THINK]",))
NEMOTRON_V3 = _INSIDE
OLMO3 = _INSIDE
OPENAI_GPTOSS = GPTOSS
POOLSIDE_V1 = ReasoningFormat(_START, _END, inside=True, calls=("<tool_call>",))
QWEN3 = _OPENED
SEED_OSS = ReasoningFormat(("<seed:think>",), ("</seed:think>",))
SOLAR_OPEN2 = ReasoningFormat(("<|think:start|>",), ("<|think:end|>",))
STEP3 = _INSIDE
STEP3P5 = ReasoningFormat(  # its template sets both tags on lines of their own
    ("<think>", "<think>\n"), ("</think>", "\n</think>", "</think>\n", "\n</think>\n"), inside=True
)
