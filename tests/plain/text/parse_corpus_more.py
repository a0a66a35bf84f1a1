"""More answers in every format, as these models write them: text around calls, several of them, and what goes wrong."""

from __future__ import annotations

from tests.plain.text.parse_corpus import PARIS, Call, Case

ROME: Call = ("get_weather", {"city": "Rome", "days": 3})
MORE: dict[str, list[Case]] = {
    "llama4_json": [
        Case("bare", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
        Case(
            "bare, two",
            '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
            [PARIS, ("now", {})],
        ),
        Case(
            "a list",
            '<|python_start|>[{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}]<|python_end|>',
            [ROME],
        ),
        Case("arguments", '<|python_start|>{"name": "now", "arguments": {}}<|python_end|>', [("now", {})]),
        Case("the older tag", '<|python_tag|>{"name": "now", "parameters": {}}', [("now", {})]),
        Case(
            "text after", '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>Done.', [("now", {})], "Done."
        ),
        Case("other JSON", '{"temperature": 21}', [], '{"temperature": 21}'),
        Case("cut in the name", '<|python_start|>{"name": "get_w', [], '<|python_start|>{"name": "get_w'),
    ],
    "qwen3_xml": [
        Case(
            "text before",
            "I'll check.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
            "</tool_call>",
            [PARIS],
            "I'll check.\n\n",
        ),
        Case("no outer tags", "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>", [PARIS]),
        Case(
            "on one line",
            "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
            [PARIS],
        ),
        Case(
            "an object of several lines",
            '<tool_call>\n<function=get_weather>\n<parameter=opts>\n{\n  "a": [1, 2]\n}\n</parameter>\n</function>\n'
            "</tool_call>",
            [("get_weather", {"opts": {"a": [1, 2]}})],
        ),
        Case(
            "a tag inside a value",
            "<tool_call>\n<function=get_weather>\n<parameter=code>\n<b>x</b> </function >\n</parameter>\n</function>\n"
            "</tool_call>",
            [("get_weather", {"code": "<b>x</b> </function >"})],
        ),
        Case("no parameters", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
        Case("the tag alone", "Use <tool_call> for calls.", [], "Use <tool_call> for calls."),
    ],
    "step3p5": [
        Case(
            "two blocks",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>"
            "\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [ROME, ("now", {})],
        ),
        Case(
            "text before and after",
            "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
            "</tool_call>\nOne moment.",
            [PARIS],
            "Sure.\n\nOne moment.",
        ),
        Case(
            "a list",
            '<tool_call>\n<function=get_weather>\n<parameter=tags>\n["a", "é"]\n</parameter>\n</function>\n'
            "</tool_call>",
            [("get_weather", {"tags": ["a", "é"]})],
        ),
        Case(
            "several lines",
            "<tool_call>\n<function=get_weather>\n<parameter=code>\nfor i in x:\n    f(i)\n\n"
            "</parameter>\n</function>\n</tool_call>",
            [("get_weather", {"code": "for i in x:\n    f(i)\n"})],
        ),
        Case(
            "a parameter left open",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
            [PARIS],
        ),
        Case("no function", "<tool_call>\n{}\n</tool_call>", [], "<tool_call>\n{}\n</tool_call>"),
    ],
    "granite": [
        Case("text before", 'Ok. <|tool_call|>[{"name": "now", "arguments": {}}]', [("now", {})], "Ok. "),
        Case(
            "3.1, two",
            '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
            [PARIS, ("now", {})],
        ),
        Case("an empty list", "<|tool_call|>[]", [], "<|tool_call|>[]"),
        Case("no list", '<|tool_call|>{"name": "now", "arguments": {}}', [("now", {})]),
        Case("cut off", '<|tool_call|>[{"name": "no', [], '<|tool_call|>[{"name": "no'),
    ],
    "granite-20b-fc": [
        Case("text before", 'Ok. <function_call> {"name": "now", "arguments": {}}', [("now", {})], "Ok. "),
        Case("closed", '<function_call>{"name": "now", "arguments": {}}</function_call>', [("now", {})]),
        Case("no call", "<function_call> now", [], "<function_call> now"),
        Case("no arguments", '<function_call> {"name": "now"}', [("now", {})]),
        Case("cut off", '<function_call> {"name": "no', [], '<function_call> {"name": "no'),
    ],
    "granite4": [
        Case(
            "two",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>\n'
            '{"name": "now", "arguments": {}}\n</tool_call>',
            [PARIS, ("now", {})],
        ),
        Case(
            "text before",
            'I look.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            [("now", {})],
            "I look.\n",
        ),
        Case("a brace missing", '<tool_call>{"name": "now", "arguments": {}</tool_call>', [("now", {})]),
        Case("no JSON", "<tool_call>now</tool_call>", [], "<tool_call>now</tool_call>"),
    ],
    "llama4_pythonic": [
        Case("text after", "<|python_start|>[now()]<|python_end|>Done.", [("now", {})], "Done."),
        Case(
            "nested",
            "[get_weather(opts={'a': [1, {'b': None}]}, tags=['x'])]",
            [("get_weather", {"opts": {"a": [1, {"b": None}]}, "tags": ["x"]})],
        ),
        Case("a list", "[1, 2, 3]", [], "[1, 2, 3]"),
        Case("cut off", "<|python_start|>[get_wea", [], "<|python_start|>[get_wea"),
    ],
    "glm45": [
        Case(
            "text before",
            "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
            [PARIS],
            "Sure.\n",
        ),
        Case(
            "a number and a list",
            "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
            '<arg_key>tags</arg_key>\n<arg_value>["a"]</arg_value>\n</tool_call>',
            [("get_weather", {"days": 3, "tags": ["a"]})],
        ),
        Case(
            "an unknown parameter",
            "<tool_call>get_weather\n<arg_key>zip</arg_key>\n<arg_value>75001</arg_value>\n</tool_call>",
            [("get_weather", {"zip": 75001})],
        ),
        Case(
            "several lines",
            "<tool_call>get_weather\n<arg_key>code</arg_key>\n<arg_value>a\n\nb</arg_value>\n</tool_call>",
            [("get_weather", {"code": "a\n\nb"})],
        ),
    ],
    "glm47": [
        Case(
            "two",
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call><tool_call>now"
            "</tool_call>",
            [PARIS, ("now", {})],
        ),
        Case(
            "line breaks",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
            [PARIS],
        ),
        Case("text after", "<tool_call>now</tool_call>\nDone.", [("now", {})], "Done."),
        Case("no call", "<tool_call>", [], "<tool_call>"),
    ],
    "kimi_k2": [
        Case(
            "text before",
            "Checking.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
            [PARIS],
            "Checking.",
        ),
        Case(
            "no prefix",
            "<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            [("now", {})],
        ),
        Case(
            "no section",
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [("now", {})],
        ),
        Case(
            "cut off",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.no",
            [],
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.no",
        ),
    ],
    "functiongemma": [
        Case(
            "two",
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
            "<start_function_call>call:now{}<end_function_call>",
            [PARIS, ("now", {})],
        ),
        Case("text before", "Ok.<start_function_call>call:now{}<end_function_call>", [("now", {})], "Ok."),
        Case(
            "nested",
            "<start_function_call>call:get_weather{opts:{a:[1,<escape>x<escape>]},metric:true}<end_function_call>",
            [("get_weather", {"opts": {"a": [1, "x"]}, "metric": True})],
        ),
        Case("no end", "<start_function_call>call:get_weather{city:<escape>Paris<escape>}", [PARIS]),
    ],
    "internlm": [
        Case("arguments", '<|action_start|><|plugin|>\n{"name": "now", "arguments": {}}<|action_end|>', [("now", {})]),
        Case(
            "one line",
            '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>',
            [PARIS],
        ),
        Case("no end", '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}', [("now", {})]),
        Case(
            "no call",
            "<|action_start|><|plugin|>\nnow<|action_end|>",
            [],
            "<|action_start|><|plugin|>\nnow<|action_end|>",
        ),
    ],
    "lfm2": [
        Case("text before", "Let me look.<|tool_call_start|>[now()]<|tool_call_end|>", [("now", {})], "Let me look."),
        Case("two", '<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>', [PARIS, ("now", {})]),
        Case("no list", "<|tool_call_start|>now()<|tool_call_end|>", [("now", {})]),
        Case("no call", "<|tool_call_start|>[]<|tool_call_end|>", [], "<|tool_call_start|>[]<|tool_call_end|>"),
    ],
    "longcat": [
        Case(
            "text before",
            'Ok.\n<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>',
            [("now", {})],
            "Ok.\n",
        ),
        Case(
            "arguments as text",
            '<longcat_tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</longcat_tool_call>',
            [PARIS],
        ),
        Case("no end", '<longcat_tool_call>{"name": "now", "arguments": {}}', [("now", {})]),
        Case("no call", "<longcat_tool_call>now</longcat_tool_call>", [], "<longcat_tool_call>now</longcat_tool_call>"),
    ],
    "minimax": [
        Case(
            "text before", 'Ok.\n<tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls>', [("now", {})], "Ok.\n"
        ),
        Case("no line breaks", '<tool_calls>{"name": "now", "arguments": {}}</tool_calls>', [("now", {})]),
        Case("empty", "<tool_calls>\n</tool_calls>", [], "<tool_calls>\n</tool_calls>"),
        Case("cut off", '<tool_calls>\n{"name": "no', [], '<tool_calls>\n{"name": "no'),
    ],
    "olmo3": [
        Case("text before", "Ok.\n<function_calls>\nnow()\n</function_calls>", [("now", {})], "Ok.\n"),
        Case("one line", '<function_calls>get_weather(city="Paris")</function_calls>', [PARIS]),
        Case(
            "nested",
            '<function_calls>\nget_weather(opts={"a": [1, null]}, tags=["x"])\n</function_calls>',
            [("get_weather", {"opts": {"a": [1, None]}, "tags": ["x"]})],
        ),
        Case("empty", "<function_calls>\n</function_calls>", [], "<function_calls>\n</function_calls>"),
    ],
    "phi4_mini_json": [
        Case("text before", 'Ok. functools[{"name": "now", "arguments": {}}]', [("now", {})], "Ok. "),
        Case(
            "its tokens",
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
            [PARIS],
        ),
        Case("parameters", 'functools[{"name": "now", "parameters": {}}]', [("now", {})]),
        Case("empty", "functools[]", [], "functools[]"),
        Case("cut off", 'functools[{"name": "no', [], 'functools[{"name": "no'),
    ],
    "hunyuan_a13b": [
        Case("text before", 'Ok.<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', [("now", {})], "Ok."),
        Case(
            "two",
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": '
            "{}}]</tool_calls>",
            [PARIS, ("now", {})],
        ),
        Case(
            "in an answer",
            '<answer><tool_calls>[{"name": "now", "arguments": {}}]</tool_calls></answer>',
            [("now", {})],
        ),
        Case("empty", "<tool_calls>[]</tool_calls>", [], "<tool_calls>[]</tool_calls>"),
    ],
    "ernie45": [
        Case(
            "text before",
            '<response>\nOk.\n</response>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            [("now", {})],
            "Ok.\n",
        ),
        Case("one line", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>', [PARIS]),
        Case("no end", '<tool_call>\n{"name": "now", "arguments": {}}\n', [("now", {})]),
        Case("no call", "<tool_call>\n</tool_call>", [], "<tool_call>\n</tool_call>"),
    ],
    "cohere_command3": [
        Case(
            "one line",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
            [("now", {})],
        ),
        Case(
            "no id",
            '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>',
            [PARIS],
        ),
        Case(
            "text and a call",
            '<|START_RESPONSE|>Ok.<|END_RESPONSE|><|START_ACTION|>[{"tool_name": "now", "parameters": '
            "{}}]<|END_ACTION|>",
            [("now", {})],
            "Ok.",
        ),
        Case("empty", "<|START_ACTION|>[]<|END_ACTION|>", [], "<|START_ACTION|>[]<|END_ACTION|>"),
        Case("cut off", '<|START_ACTION|>[{"tool_na', [], '<|START_ACTION|>[{"tool_na'),
    ],
    "cohere_command4": [
        Case("text tags", "<|START_TEXT|>Hi<|END_TEXT|>", [], "Hi"),
        Case(
            "two",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}, '
            '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
            [PARIS, ("now", {})],
        ),
        Case("no end", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]', [("now", {})]),
        Case("empty", "<|START_ACTION|>[]<|END_ACTION|>", [], "<|START_ACTION|>[]<|END_ACTION|>"),
    ],
    "deepseek_v32": [
        Case(
            "text before",
            'Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            [("now", {})],
            "Ok.\n\n",
        ),
        Case(
            "a string that looks like a list",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            [("get_weather", {"city": "[1]"})],
        ),
        Case(
            "nested",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="opts" '
            'string="false">{"a": [1]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            [("get_weather", {"opts": {"a": [1]}})],
        ),
        Case(
            "the block alone",
            "<｜DSML｜function_calls>\n</｜DSML｜function_calls>",
            [],
            "<｜DSML｜function_calls>\n</｜DSML｜function_calls>",
        ),
    ],
    "deepseek_v4": [
        Case(
            "two",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
            'Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>",
            [PARIS, ("now", {})],
        ),
        Case(
            "text before",
            'Ok.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
            [("now", {})],
            "Ok.\n\n",
        ),
        Case("the mark alone", "<｜DSML｜tool_calls", [], "<｜DSML｜tool_calls"),
        Case("no block", '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>', [("now", {})]),
    ],
    "step3": [
        Case(
            "text before",
            'Ok.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
            "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
            [("now", {})],
            "Ok.",
        ),
        Case(
            "a number",
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
            '<steptml:parameter name="days">3</steptml:parameter>'
            "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
            [("get_weather", {"days": 3})],
        ),
        Case(
            "the block alone",
            "<｜tool_calls_begin｜>\n<｜tool_calls_end｜>",
            [],
            "<｜tool_calls_begin｜>\n<｜tool_calls_end｜>",
        ),
        Case(
            "cut in the name",
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="no',
            [],
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="no',
        ),
    ],
}
