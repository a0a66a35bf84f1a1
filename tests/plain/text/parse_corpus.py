"""Answers in every format, written from the formats' documentation: how each parser's model writes given calls.

`RENDER[name]` writes calls as that model does, and `LITERAL[name]` are answers copied out by hand with what they mean.
Nothing here uses the parsers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, dict[str, Any]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "metric": {"type": "boolean"},
                    "opts": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "code": {"type": "string"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass(frozen=True)
class Case:
    """An answer and what it means. `tool_text`: content must be exactly this."""

    title: str
    text: str
    calls: list[Call] = field(default_factory=list)
    content: str = ""


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(calls: list[Call], name: str = "name", arguments: str = "arguments") -> list[str]:
    return [dumps({name: function, arguments: given}) for function, given in calls]


def python_value(value: Any) -> str:
    return repr(value)


def python_call(call: Call, words: bool = False) -> str:
    name, given = call
    write: Callable[[Any], str] = dumps if words else python_value
    return f"{name}({', '.join(f'{key}={write(value)}' for key, value in given.items())})"


def text_value(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def xml(calls: list[Call], call: str, close: str, parameter: str, end: str, newline: bool) -> str:
    gap = "\n" if newline else ""
    found = []
    for name, given in calls:
        inner = "".join(f"{parameter % key}{gap}{text_value(value)}{gap}{end}\n" for key, value in given.items())
        found.append(f"{call % name}\n{inner}{close}")
    return "\n".join(found)


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(one, quote) for one in value) + "]"
    return dumps(value)


def gemma(calls: list[Call], start: str, end: str, quote: str) -> str:
    return "".join(f"{start}call:{name}{gemma_value(given, quote)}{end}" for name, given in calls)


def dsml(calls: list[Call], block: str) -> str:
    inner = []
    for name, given in calls:
        lines = [
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{text_value(value)}</｜DSML｜parameter>"
            for key, value in given.items()
        ]
        inner.append("\n".join([f'<｜DSML｜invoke name="{name}">', *lines, "</｜DSML｜invoke>"]))
    return "\n".join([f"<｜DSML｜{block}>", *inner, f"</｜DSML｜{block}>"])


def dsml_spaced(calls: list[Call]) -> str:
    return dsml(calls, "calls").replace("｜DSML｜", "｜DSML｜ ")


def dots(calls: list[Call]) -> str:
    inner = xml(calls, '<invoke name="%s">', "</invoke>", '<parameter name="%s">', "</parameter>", True)
    return f"<dots_function_call>\n{inner}\n</dots_function_call>"


def solar(calls: list[Call]) -> str:
    found = []
    for name, given in calls:
        pairs = [f"<|tool_arg:start|>{k}<|tool_arg:value|>{text_value(v)}<|tool_arg:end|>\n" for k, v in given.items()]
        found.append(f"<|tool_call:start|>{name}\n{''.join(pairs)}<|tool_call:end|>")
    return "\n".join(found)


def glm(calls: list[Call], gap: str) -> str:
    found = []
    for name, given in calls:
        pairs = [f"<arg_key>{k}</arg_key>{gap}<arg_value>{text_value(v)}</arg_value>{gap}" for k, v in given.items()]
        found.append(f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>")
    return "\n".join(found)


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls))


def qwen3(calls: list[Call]) -> str:
    blocks = [xml([c], "<function=%s>", "</function>", "<parameter=%s>", "</parameter>", True) for c in calls]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def deepseek_v3(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(given)}<｜tool▁call▁end｜>" for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(given)}<|tool_call_end|>"
        for i, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def step3(calls: list[Call]) -> str:
    inner = "\n".join(
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        + xml(
            [call], '<steptml:invoke name="%s">', "</steptml:invoke>", '<steptml:parameter name="%s">',
            "</steptml:parameter>", False,
        )
        + "<｜tool_call_end｜>"
        for call in calls
    )  # fmt: skip
    return f"<｜tool_calls_begin｜>\n{inner}\n<｜tool_calls_end｜>"


def minimax_m2(calls: list[Call]) -> str:
    inner = xml(calls, '<invoke name="%s">', "</invoke>", '<parameter name="%s">', "</parameter>", False)
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def seed_oss(calls: list[Call]) -> str:
    blocks = [xml([c], "<function=%s>", "</function>", "<parameter=%s>", "</parameter>", False) for c in calls]
    return "\n".join(f"<seed:tool_call>\n{block}\n</seed:tool_call>" for block in blocks)


def hy_v3(calls: list[Call]) -> str:
    inner = "\n".join(glm([call], "\n").replace(f"<tool_call>{call[0]}", f"<tool_call>{call[0]}<tool_sep>", 1)
                      for call in calls)  # fmt: skip
    return f"<tool_calls>\n{inner}\n</tool_calls>"


def kimi_k3(calls: list[Call]) -> str:
    inner = []
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", list: "array"}
    for index, (name, given) in enumerate(calls, 1):
        arguments = [
            f'<|open|>argument key="{key}" type="{kinds.get(type(value), "object")}"<|sep|>'
            f"{text_value(value)}<|close|>argument<|sep|>"
            for key, value in given.items()
        ]
        inner.append(f'<|open|>call tool="{name}" index="{index}"<|sep|>{"".join(arguments)}<|close|>call<|sep|>')
    return f"<|open|>tools<|sep|>{''.join(inner)}<|close|>tools<|sep|>"


def compact(calls: list[Call], call: str, close: str, parameter: str, end: str) -> list[str]:
    return [
        f"{call % name}{''.join(f'{parameter % key}{text_value(value)}{end}' for key, value in given.items())}{close}"
        for name, given in calls
    ]


M3 = "]<]minimax[>["


def m3_value(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{M3}<{key}>{m3_value(one)}{M3}</{key}>" for key, one in value.items())
    if isinstance(value, list):
        return "".join(f"{M3}<item>{m3_value(one)}{M3}</item>" for one in value)
    return text_value(value)


def minimax_m3(calls: list[Call]) -> str:
    inner = []
    for name, given in calls:
        arguments = "".join(f"{M3}<{key}>{m3_value(value)}{M3}</{key}>\n" for key, value in given.items())
        inner.append(f'{M3}<invoke name="{name}">\n{arguments}{M3}</invoke>\n')
    return f"{M3}<tool_call>\n{''.join(inner)}{M3}</tool_call>"


def cohere(calls: list[Call]) -> str:
    rows = [
        dumps({"tool_call_id": str(i), "tool_name": name, "parameters": given}) for i, (name, given) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(rows) + "\n]<|END_ACTION|>"


def harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(given)}<|call|>"
        for name, given in calls
    )


def joined(calls: list[Call]) -> str:
    return ", ".join(objects(calls))


def mistral_ids(calls: list[Call]) -> str:
    rows = [dumps({"name": name, "arguments": given, "id": f"abcdefgh{i}"}) for i, (name, given) in enumerate(calls)]
    return f"[TOOL_CALLS] [{', '.join(rows)}]"


def mistral_named(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}" for name, given in calls)


Render = Callable[[list[Call]], str]
RENDER: dict[str, Render] = {
    "apertus": lambda calls: f"<|tools_prefix|>{dumps([{n: a} for n, a in calls])}<|tools_suffix|>",
    "cohere_command3": cohere,
    "cohere_command4": cohere,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": lambda calls: dsml(calls, "function_calls"),
    "deepseek_v4": lambda calls: dsml(calls, "tool_calls"),
    "deepseek_v41": dsml_spaced,
    "dots": dots,
    "ernie45": hermes,
    "functiongemma": lambda calls: gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": lambda calls: gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": lambda calls: f"<|function_call|>{objects(calls)[0]}",
    "glm45": lambda calls: glm(calls, "\n"),
    "glm47": lambda calls: glm(calls, ""),
    "granite": lambda calls: f"<|tool_call|>[{joined(calls)}]",
    "granite-20b-fc": lambda calls: " ".join(f"<function_call> {one}" for one in objects(calls)),
    "granite4": hermes,
    "hermes": hermes,
    "hunyuan_a13b": lambda calls: f"<tool_calls>[{joined(calls)}]</tool_calls>",
    "hy_v3": hy_v3,
    "internlm": lambda calls: "".join(
        f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in objects(calls, arguments="parameters")
    ),
    "jamba": lambda calls: "<tool_calls>[\n    " + ",\n    ".join(objects(calls)) + "\n]</tool_calls>",
    "kimi_k2": kimi,
    "kimi_k3": kimi_k3,
    "ling3": lambda calls: glm(calls, ""),
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(map(python_call, calls))}]<|tool_call_end|>",
    "llama3_json": lambda calls: "; ".join(objects(calls, arguments="parameters")),
    "llama4_json": lambda calls: "<|python_start|>" + "; ".join(objects(calls, arguments="parameters"))
    + "<|python_end|>",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{', '.join(map(python_call, calls))}]<|python_end|>",
    "longcat": lambda calls: "\n".join(
        f"<longcat_tool_call>\n{one}\n</longcat_tool_call>" for one in objects(calls)
    ),
    "mimo": lambda calls: "\n".join(
        f"<tool_call>{one}</tool_call>"
        for one in compact(calls, "<function=%s>", "</function>", "<parameter=%s>", "</parameter>")
    ),
    "minicpm5": lambda calls: "\n".join(
        compact(calls, '<function name="%s">', "</function>", '<param name="%s">', "</param>")
    ),
    "minimax": lambda calls: "<tool_calls>\n" + "\n".join(objects(calls)) + "\n</tool_calls>",
    "minimax_m2": minimax_m2,
    "minimax_m3": minimax_m3,
    "mistral": mistral_ids,
    "olmo3": lambda calls: "<function_calls>\n" + "\n".join(python_call(c, True) for c in calls)
    + "\n</function_calls>",
    "openai": harmony,
    "phi4_mini_json": lambda calls: f"functools[{joined(calls)}]",
    "poolside_v1": lambda calls: glm(calls, ""),
    "pythonic": lambda calls: f"[{', '.join(map(python_call, calls))}]",
    "qwen3_coder": qwen3,
    "qwen3_xml": qwen3,
    "seed_oss": seed_oss,
    "solar_open2": solar,
    "step3": step3,
    "step3p5": qwen3,
    "xlam": lambda calls: f"[{joined(calls)}]",
}  # fmt: skip
# answers that are the call and nothing else, so text before it makes it text
BARE = {"pythonic", "xlam"}
SINGLE = {"gigachat3"}  # one call at most

PARIS: Call = ("get_weather", {"city": "Paris"})
SCENES: dict[str, list[Call]] = {
    "one call": [PARIS],
    "no arguments": [("now", {})],
    "parallel": [PARIS, ("now", {}), ("get_weather", {"city": "Rome", "days": 3})],
    "types": [("get_weather", {"city": "Oslo", "days": -2, "ratio": 0.5, "metric": False, "note": None})],
    "nested": [("get_weather", {"opts": {"a": [1, 2.5, {"b": True}], "c": {"d": None}}, "tags": ["x", "y"]})],
    "unicode": [("get_weather", {"city": "Zürich, 東京 🌧", "note": "naïve"})],
    "escapes": [("get_weather", {"city": 'a "quoted" \\ back', "code": "line one\nline two\tend"})],
    "brackets in text": [("get_weather", {"code": "if (a < b && c[0] > {1}) { return; }", "city": "x, y = z"})],
    "empty values": [("get_weather", {"city": "", "tags": [], "opts": {}})],
}

LITERAL: dict[str, list[Case]] = {
    "hermes": [
        Case(
            "arguments before the name",
            '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
            [PARIS],
        ),
        Case(
            "text before and between",
            'I will look.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
            '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            [PARIS, ("now", {})],
            "I will look.\n",
        ),
        Case(
            "the tag inside a string",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
            [("get_weather", {"city": "</tool_call>"})],
        ),
        Case(
            "a brace missing at the end",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>',
            [PARIS],
        ),
        Case(
            "a brace too many",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>',
            [PARIS],
        ),
        Case(
            "arguments as a string",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Z\\u00fcrich \\ud83c\\udf27\\"}"}'
            "</tool_call>",
            [("get_weather", {"city": "Zürich 🌧"})],
        ),
        Case(
            "a line break inside a string",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>',
            [("get_weather", {"city": "a\nb"})],
        ),
        Case(
            "Python's words",
            '<tool_call>{"name": "get_weather", "arguments": {"metric": True, "note": None}}</tool_call>',
            [("get_weather", {"metric": True, "note": None})],
        ),
        Case("arguments null", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
        Case("no arguments at all", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        Case("no JSON", "<tool_call>get_weather</tool_call>", [], "<tool_call>get_weather</tool_call>"),
        Case("no name", '<tool_call>{"a": 1}</tool_call>', [], '<tool_call>{"a": 1}</tool_call>'),
        Case("only the tag", "so <tool_call>", [], "so <tool_call>"),
        Case("a tag that is none", "a <tool_cal b < c", [], "a <tool_cal b < c"),
        Case("cut in the name", '<tool_call>{"name": "get_w', [], '<tool_call>{"name": "get_w'),
        Case(
            "one bad, one good",
            '<tool_call>oops</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
            [("now", {})],
            "<tool_call>oops</tool_call>",
        ),
    ],
    "mistral": [
        Case("v13", mistral_named([PARIS, ("now", {})]), [PARIS, ("now", {})]),
        Case("v11", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', [PARIS]),
        Case("without its marks", '[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS]),
        Case("text", 'Sure.[TOOL_CALLS]now[ARGS]{}', [("now", {})], "Sure."),
        Case("no call", "[TOOL_CALLS] is a token.", [], "[TOOL_CALLS] is a token."),
        Case("an empty list", "[TOOL_CALLS] []", [], "[TOOL_CALLS] []"),
    ],
    "llama3_json": [
        Case("tag", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
        Case(
            "type first",
            '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
            [PARIS],
        ),
        Case("another object", '{"answer": {"name": "x"}, "n": 1}', [], '{"answer": {"name": "x"}, "n": 1}'),
        Case("a list of numbers", "[1, 2, 3] are three.", [], "[1, 2, 3] are three."),
        Case("space before", '\n {"name": "now", "parameters": {}}', [("now", {})]),
        Case("text after", '{"name": "now", "parameters": {}} done', [("now", {})], "done"),
        Case("text before, and no arguments", 'So {"name": "now"}', [], 'So {"name": "now"}'),
        Case("text around", 'Here: {"name": "get_weather", "parameters": {"city": "Paris"}} Shall I?', [PARIS],
             "Here: Shall I?"),
        Case("text around two", 'Both: {"name": "get_weather", "parameters": {"city": "Paris"}}; '
             '{"name": "now", "parameters": {}} done {so}.', [PARIS, ("now", {})], "Both: done {so}."),
        Case("within another object", 'See {"a": {"name": "now", "parameters": {}}, "b": "}"} and {"c": 1}.', [],
             'See {"a": {"name": "now", "parameters": {}}, "b": "}"} and {"c": 1}.'),
        Case("cut off in the arguments", '{"name": "get_weather", "parameters": {"city": "Par', [],
             '{"name": "get_weather", "parameters": {"city": "Par'),
        Case("cut off, with text before", 'So: {"name": "get_weather", "parameters": {"city": "Paris"', [],
             'So: {"name": "get_weather", "parameters": {"city": "Paris"'),
        Case("arguments that are no JSON", '{"name": "now", "parameters": {invalid json}', [],
             '{"name": "now", "parameters": {invalid json}'),
        Case("after a thought", '<think>{"name": "now", "parameters": {}}?</think>\n{"name": "now", "parameters": {}}',
             [("now", {})], '<think>{"name": "now", "parameters": {}}?</think>'),
    ],
    "pythonic": [
        Case("no keyword", "[f(1)] is a call", [], "[f(1)] is a call"),
        Case("a list", "[1] Smith, 2020", [], "[1] Smith, 2020"),
        Case("an expression", "[now(zone=a + b)]", [("now", {"zone": "a + b"})]),
        Case("no literal", "[now(zone=str(1))]", [("now", {"zone": "str"})], "(1))]"),
        Case("quotes", "[now(a='x\\'y', b=\"\"\"p\"q\"\"\", c='\\u00e9\\x41')]",
             [("now", {"a": "x'y", "b": 'p"q', "c": "éA"})]),
        Case("tuple and trailing commas", "[now(a=(1, 2,), b={'k': [True, None,],},)]",
             [("now", {"a": [1, 2], "b": {"k": [True, None]}})]),
        Case("numbers", "[now(a=-1, b=1e3, c=.5, d=1_000, e=0x10)]",
             [("now", {"a": -1, "b": 1000.0, "c": 0.5, "d": 1000, "e": 16})]),
    ],
    "granite": [
        Case("3.1", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    ],
    "llama4_pythonic": [
        Case("bare", '[get_weather(city="Paris"), now()]', [PARIS, ("now", {})]),
    ],
    "xlam": [
        Case("fence", 'Here:\n```json\n[{"name": "now", "arguments": {}}]\n```', [("now", {})], "Here:\n"),
        Case("other JSON in a fence", '```json\n{"a": 1}\n```', [], '```json\n{"a": 1}\n```'),
        Case("tag", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', [("now", {})]),
        Case("mistral's", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', [("now", {})]),
        Case("after a thought", '<think>[1] maybe</think>\n[{"name": "now", "arguments": {}}]', [("now", {})],
             "<think>[1] maybe</think>"),
        Case("after a thought that the prompt began", 'maybe</think>[{"name": "now", "arguments": {}}]',
             [("now", {})], "maybe</think>"),
        Case("in a thought", '<think>```json\n[{"name": "now", "arguments": {}}]\n```</think>No.', [],
             '<think>```json\n[{"name": "now", "arguments": {}}]\n```</think>No.'),
    ],
    "hy_v3": [
        Case("in one line", "Ok<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", [("now", {})], "Ok"),
        Case("without the outer tags", "<tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Paris"
             "</arg_value></tool_call>", [PARIS]),
    ],
    "kimi_k3": [
        Case("within text", '<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call '
             'tool="now" index="0"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
             "<|end_of_msg|>", [("now", {})], "I look."),
        Case("types of its own", '<|open|>tools<|sep|><|open|>call tool="now" index="0"<|sep|><|open|>argument key="a" '
             'type="number"<|sep|>3<|close|>argument<|sep|><|open|>argument key="b" type="string"<|sep|>3<|close|>'
             "argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>", [("now", {"a": 3, "b": "3"})]),
    ],
    "mimo": [
        Case("in lines, whose breaks are the text's", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
             "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
             [("get_weather", {"city": "\nParis\n", "days": 3})]),
    ],
    "minicpm5": [
        Case("quoted text", '<function name="get_weather"><param name="code"><![CDATA[if a < b: </param>\n]]></param>'
             '<param name="days"><![CDATA[3]]></param></function>',
             [("get_weather", {"code": "if a < b: </param>\n", "days": 3})]),
        Case("other quotes", "<function name='get_weather'>\n  <param name='city'>Paris</param>\n</function>", [PARIS]),
        Case("no call", '<function name="', [], '<function name="'),
    ],
    "minimax_m3": [
        Case("text before", f'I look.{M3}<tool_call>\n{M3}<invoke name="now">\n{M3}</invoke>\n{M3}</tool_call>',
             [("now", {})], "I look."),
        Case("lists of one and of objects", f'{M3}<tool_call>{M3}<invoke name="get_weather">{M3}<tags>{M3}<item>7'
             f"{M3}</item>{M3}</tags>{M3}<opts>{M3}<a>{M3}<item>{M3}<b>x{M3}</b>{M3}</item>{M3}</a>{M3}</opts>"
             f"{M3}</invoke>{M3}</tool_call>", [("get_weather", {"tags": ["7"], "opts": {"a": [{"b": "x"}]}})]),
        Case("a mark alone", f"so {M3} it is", [], f"so {M3} it is"),
        Case("cut off", f'{M3}<tool_call>{M3}<invoke name="get_weather">{M3}<days>3', [],
             f'{M3}<tool_call>{M3}<invoke name="get_weather">{M3}<days>3'),
    ],
    "gigachat3": [
        Case(
            "3.0",
            'Ok<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
            [PARIS],
            "Ok",
        ),
        Case("without marks", 'function call{"name": "now", "arguments": {}}', [("now", {})]),
        Case("the words", "a function call is made", [], "a function call is made"),
    ],
    "phi4_mini_json": [
        Case("the module", "Use functools.partial", [], "Use functools.partial"),
    ],
    "qwen3_coder": [
        Case(
            "closing tags missing",
            "<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>",
            [("get_weather", {"city": "Paris", "days": 3})],
        ),
        Case(
            "an unknown parameter is text",
            "<tool_call>\n<function=get_weather>\n<parameter=zip>\n75001\n</parameter>\n</function>\n</tool_call>",
            [("get_weather", {"zip": "75001"})],
        ),
        Case(
            "a value that does not fit its type",
            "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
            [("get_weather", {"days": "many"})],
        ),
        Case(
            "Python's literals",
            "<tool_call>\n<function=get_weather>\n<parameter=opts>\n{'a': True}\n</parameter>\n<parameter=metric>\n"
            "True\n</parameter>\n</function>\n</tool_call>",
            [("get_weather", {"opts": {"a": True}, "metric": True})],
        ),
        Case("no call", "<tool_call>\nnothing\n</tool_call>", [], "<tool_call>\nnothing\n</tool_call>"),
        Case("text", "x < y. <function", [], "x < y. <function"),
    ],
    "glm45": [
        Case("no call", "<tool_call>not a name</tool_call>", [], "<tool_call>not a name</tool_call>"),
    ],
    "glm47": [
        Case("no arguments", "<tool_call>now</tool_call>", [("now", {})]),
    ],
    "kimi_k2": [
        Case("no call", "<|tool_calls_section_begin|>what?", [], "<|tool_calls_section_begin|>what?"),
    ],
    "deepseek_v32": [
        Case(
            "without its mark",
            '<function_calls>\n<invoke name="get_weather">\n<parameter name="city" string="true">Paris</parameter>\n'
            '<parameter name="days" string="false">10</parameter>\n</invoke>\n</function_calls>',
            [("get_weather", {"city": "Paris", "days": 10})],
        ),
        Case("what the schema says goes before what the tag says",
             '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
             + "".join(f'<｜DSML｜parameter name="{key}" string="{said}">{value}</｜DSML｜parameter>\n'
                       for key, said, value in (("days", "true", "3"), ("opts", "true", '{"a": 1}'),
                                                ("city", "false", "75001"), ("metric", "true", "True"),
                                                ("note", "true", "null"), ("tags", "true", '["x"]')))
             + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
             [("get_weather", {"days": 3, "opts": {"a": 1}, "city": "75001", "metric": True, "note": "null",
                               "tags": ["x"]})]),
        Case("all in one", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
             'name="arguments" string="false">{"city": "Paris"}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
             "</｜DSML｜function_calls>", [PARIS]),
    ],
    "functiongemma": [
        Case("no call", "<start_function_call>hello<end_function_call>", [],
             "<start_function_call>hello<end_function_call>"),
    ],
    "openai": [
        Case("preamble and final", "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant<|channel|>final"
             "<|message|>It rains.<|return|>", [], "Looking.\nIt rains."),
        Case("recipient before the channel", "<|start|>assistant to=functions.now<|channel|>commentary "
             "<|constrain|>json<|message|>{}<|call|>", [("now", {})]),
        Case("plain text", "Hello there", [], "Hello there"),
    ],
    "hunyuan_a13b": [
        Case("in a thought", '<think><tool_calls>[{"name": "now", "arguments": {}}]</tool_calls></think>No.', [],
             '<think><tool_calls>[{"name": "now", "arguments": {}}]</tool_calls></think>No.'),
        Case("answer tags", "<answer>\nHi\n</answer>", [], "\nHi\n"),
    ],
    "ernie45": [
        Case("response tags", "<response>\nHi\n</response>", [], "Hi"),
    ],
    "cohere_command3": [
        Case("response tags", "<|START_RESPONSE|>Hi<|END_RESPONSE|>", [], "Hi"),
    ],
}  # fmt: skip

# One or two more of each family that has none above, as its documentation or template shows them.
LITERAL |= {
    "apertus": [
        Case("pretty", '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>',
             [PARIS, ("now", {})]),
        Case("no list", "<|tools_prefix|>get_weather<|tools_suffix|>", [],
             "<|tools_prefix|>get_weather<|tools_suffix|>"),
    ],
    "cohere_command4": [
        Case("plan first", "I will look it up.\n<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": "
             "\"get_weather\", \"parameters\": {\"city\": \"Paris\"}}\n]<|END_ACTION|>", [PARIS],
             "I will look it up.\n"),
    ],
    "deepseek_v3": [
        Case("a line break before the block",
             "Let me check.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
             '{\n  "city": "Paris"\n}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [PARIS], "Let me check.\n"),
        Case("no fence", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
             '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [PARIS]),
    ],
    "deepseek_v31": [
        Case("two in a row", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
             "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
             [PARIS, ("now", {})]),
        Case("only the block's tags", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", [],
             "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ],
    "deepseek_v4": [
        Case("a string that looks like a number", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
             '<｜DSML｜parameter name="city" string="true">10</｜DSML｜parameter>\n'
             '<｜DSML｜parameter name="tags" string="false">["a", "b"]</｜DSML｜parameter>\n'
             "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", [("get_weather", {"city": "10", "tags": ["a", "b"]})]),
    ],
    "deepseek_v41": [
        Case("V4's tags", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
             'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', [PARIS]),
        Case("mixed outer tags",
             'So.\n\n<｜DSML｜ tool_calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter '
             'name="city" string="true">Paris</｜DSML｜ parameter>\n<｜DSML｜ parameter name="days" string="false">3'
             "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
             [("get_weather", {"city": "Paris", "days": 3})], "So.\n\n"),
        Case("the mark alone", "<｜DSML｜ calls", [], "<｜DSML｜ calls"),
    ],
    "dots": [
        Case("indentation is the value's",
             '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="code">\n'
             "    if a:\n        b\n\n</parameter>\n</invoke>\n</dots_function_call>",
             [("get_weather", {"code": "    if a:\n        b\n"})]),
        Case("text that looks like a list",
             '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">\n'
             '["a"]\n</parameter>\n</invoke>\n</dots_function_call>', [("get_weather", {"city": '["a"]'})]),
        Case("the wrapper alone", "<dots_function_call>\n</dots_function_call>", [], "\n"),
        Case("a tag that lost its place", "So.</dots_function_call> Yes.", [], "So. Yes."),
        Case("a function that is not there", '<dots_function_call>\n<invoke name="rm">\n<parameter name="a">\n1\n'
             "</parameter>\n</invoke>\n</dots_function_call>", [],
             '\n<invoke name="rm">\n<parameter name="a">\n1\n</parameter>\n</invoke>\n'),
        Case("one that is not there and one that is", '<dots_function_call>\n<invoke name="rm">\n</invoke>\n'
             '<invoke name="now">\n</invoke>\n</dots_function_call>', [("now", {})],
             '\n<invoke name="rm">\n</invoke>\n'),
    ],
    "solar_open2": [
        Case("no line breaks",
             "<|tool_call:start|>get_weather<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>"
             "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|><|tool_call:end|>",
             [("get_weather", {"city": "Paris", "days": 3})]),
        Case("a value with line breaks",
             "<|tool_call:start|>get_weather\n<|tool_arg:start|>code<|tool_arg:value|>\n a\n"
             "<|tool_arg:end|>\n<|tool_call:end|>", [("get_weather", {"code": "\n a\n"})]),
        Case("no call", "<|tool_call:start|>not a name<|tool_call:end|>", [],
             "<|tool_call:start|>not a name<|tool_call:end|>"),
    ],
    "gemma4": [
        Case("two, and text", 'Ok.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:now{}'
             "<tool_call|>", [PARIS, ("now", {})], "Ok."),
        Case("no call", "<|tool_call>hello<tool_call|>", [], "<|tool_call>hello<tool_call|>"),
        Case("JSON's strings, and an equals sign", '<|tool_call>call:get_weather{city:<|"|>a\nb<|"|>,tags=["x", "y"],'
             'opts:{"a": "b, c"}}<tool_call|>\n',
             [("get_weather", {"city": "a\nb", "tags": ["x", "y"], "opts": {"a": "b, c"}})]),
    ],
    "granite-20b-fc": [
        Case("two", '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}} <function_call> '
             '{"name": "now", "arguments": {}}', [PARIS, ("now", {})]),
    ],
    "granite4": [
        Case("one line", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>', [PARIS]),
    ],
    "internlm": [
        Case("text first", "I check.<|action_start|><|plugin|>\n"
             '{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>\n', [PARIS], "I check."),
    ],
    "jamba": [
        Case("one line", '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>', [PARIS]),
        Case("an empty list", "<tool_calls>[]</tool_calls>", [], "<tool_calls>[]</tool_calls>"),
    ],
    "lfm2": [
        Case("sets", "<|tool_call_start|>[get_weather(tags={'x', 'y'}, opts={'a': {1, 2}, 'b': {}}, note={(1, 2)})]"
             "<|tool_call_end|>", [("get_weather", {"tags": ["x", "y"], "opts": {"a": [1, 2], "b": {}},
                                                    "note": [[1, 2]]})]),
        Case("quotes within quotes", "<|tool_call_start|>[get_weather(city='it's', code=\"say \"hi\" now\", days=3)]"
             "<|tool_call_end|>", [("get_weather", {"city": "it's", "code": 'say "hi" now', "days": 3})]),
        Case("quotes around an argument", "<|tool_call_start|>[get_weather(code='print('a', 'b')')]<|tool_call_end|>",
             [("get_weather", {"code": "print('a', 'b')"})]),
        Case("quotes in a list", "<|tool_call_start|>[get_weather(tags=['it's', \"a \"b\" c\"])]<|tool_call_end|>",
             [("get_weather", {"tags": ["it's", 'a "b" c']})]),
        Case("text after", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Checking.', [PARIS],
             "Checking."),
    ],
    "longcat": [
        Case("two", '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</longcat_tool_call>\n'
             '<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>', [PARIS, ("now", {})]),
    ],
    "minimax": [
        Case("in a thought", '<think>So <tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls></think>\nNo.', [],
             '<think>So <tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls></think>\nNo.'),
        Case("in one and after it", '<think><tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls>?</think>'
             '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_calls>', [PARIS],
             '<think><tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls>?</think>'),
        Case("one line each", '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
             '{"name": "now", "arguments": {}}\n</tool_calls>', [PARIS, ("now", {})]),
    ],
    "minimax_m2": [
        Case("a value of several lines", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="code">a\nb'
             "</parameter>\n</invoke>\n</minimax:tool_call>", [("get_weather", {"code": "a\nb"})]),
        Case("no call", "<minimax:tool_call>\n</minimax:tool_call>", [], "<minimax:tool_call>\n</minimax:tool_call>"),
        Case("all arguments in one", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="input">'
             '{"city": "Paris"}</parameter>\n</invoke>\n</minimax:tool_call>', [PARIS]),
        Case("arguments that are none", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="arguments">'
             "none</parameter>\n</invoke>\n</minimax:tool_call>", [("get_weather", {"arguments": "none"})]),
        Case("in a thought", '<think><minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call></think>',
             [], '<think><minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call></think>'),
    ],
    "olmo3": [
        Case("JSON's words", "<function_calls>\nget_weather(city=\"Paris\", metric=true, note=null)\nnow()\n"
             "</function_calls>", [("get_weather", {"city": "Paris", "metric": True, "note": None}), ("now", {})]),
    ],
    "seed_oss": [
        Case("in a thought", "<seed:think>So <seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>?"
             "</seed:think>No.", [],
             "<seed:think>So <seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>?</seed:think>No."),
        Case("budget marks are text", "<seed:cot_budget_reflect>10 left</seed:cot_budget_reflect>", [],
             "<seed:cot_budget_reflect>10 left</seed:cot_budget_reflect>"),
        Case("two functions",
             "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
             "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
             [PARIS, ("now", {})]),
    ],
    "step3": [
        Case("no marks around",
             '<steptml:toolcall><steptml:invoke name="get_weather"><steptml:parameter name="city">Paris'
             "</steptml:parameter></steptml:invoke></steptml:toolcall>", [PARIS]),
    ],
}  # fmt: skip
