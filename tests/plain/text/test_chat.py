"""Chat templates: equal to transformers over random conversations, safe when hostile, clear about wrong input."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers import models, pre_tokenizers

from quire.schema.errors import InputError, NotBuiltError
from quire.text.chat import ChatJob, choose_template, render_chat
from quire.text.forms.fast import FastTokenizer
from quire.text.template import LIMITS, Sandbox, TemplateLimits, compile_template, render
from quire.text.template_child import render_all_apart, render_apart
from quire.text.template_facts import TemplateFacts, read_facts

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{ bos_token }}{% set ns = namespace(index=0) %}{% for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.index = ns.index + 1 %}{{- '[SYS]' ~ message['content'] ~ '[/SYS]' }}
{%- elif message['role'] == 'user' %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' and message.content %}{{- ' ' + message['content']|trim + eos_token }}
{%- elif message['role'] not in ['tool', 'assistant'] %}{{- raise_exception('Unknown role ' + message['role']) }}
{%- endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if message['role'] == 'tool' %}{% continue %}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""
QWEN_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "system") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PARTS = """{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<{{ part.type }}>{%- endif -%}
{%- endfor -%}
{%- endif -%}{%- endmacro -%}
{%- for message in messages[:] -%}
<{{ message.role }}>{% generation %}{{ show(message.content) }}{% endgeneration %}{{ '\n' }}
{%- endfor -%}"""
PARTS_ONLY = """{% for m in messages %}{{ m.role }}:
{%- for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{{ '\n' }}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen": QWEN_TOOLS, "parts": PARTS}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & 'later' in Zürich",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def pipeline() -> Pipeline:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Pipeline(models.BPE({token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def tokenizer_with(template: str | dict[str, str] | None) -> FastTokenizer:
    return FastTokenizer("here", pipeline(), special=SPECIAL, chat_template=template)


def conversation(rng: random.Random, *, tools: bool) -> list[dict[str, Any]]:
    said = ["Hi there", " padded  ", "línea\nnueva 🦙 <b>&amp;</b>", "{{ not a template }}", "a</s>b", ""]
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(said)})
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": rng.choice(said)})
        if tools and rng.random() < 0.6:
            arguments = {"city": rng.choice(["Zürich", "北京"]), "n": rng.randint(0, 9)}
            call = {"id": "abc123456", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            messages.append({"role": "assistant", "content": rng.choice(["", "I look."]), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "abc123456", "name": "get_weather", "content": '{"t": 3}'})
        messages.append({"role": "assistant", "content": rng.choice(["Sure. ", "ok", "No\n\nway"])})
    if rng.random() < 0.6:
        messages.append({"role": "user", "content": "last"})
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=pipeline(), **SPECIAL)
    ours = tokenizer_with(TEMPLATES[name])
    rng = random.Random(len(name))
    rendered = refused = continued = 0
    for _ in range(150):
        tools = rng.random() < 0.5
        messages = conversation(rng, tools=tools)
        options: dict[str, Any] = {"tools": TOOLS if tools else None, "add_generation_prompt": rng.random() < 0.5}
        if not options["add_generation_prompt"] and messages[-1]["role"] == "assistant":
            options["continue_final_message"] = rng.random() < 0.7
        before = copy.deepcopy(messages)
        try:
            expected = oracle.apply_chat_template(
                messages, chat_template=TEMPLATES[name], tokenize=False, date_string="today", **options
            )
        except Exception as wrong:  # noqa: BLE001  # the template's own refusal, or transformers' about the last message
            with pytest.raises(InputError) as caught:
                render_chat(ours, messages, template_kwargs={"date_string": "today"}, **options)
            assert str(wrong) in str(caught.value) or "continue_final_message" in str(caught.value)
            refused += 1
            continue
        text = render_chat(ours, messages, template_kwargs={"date_string": "today"}, **options)
        assert text == expected
        ids = ours.apply_chat_template(messages, date_string="today", **options)
        assert ids == ours.encode(text, add_special_tokens=False)
        assert messages == before, "the caller's messages were changed"
        rendered += 1
        continued += bool(options.get("continue_final_message"))
    assert rendered > 60 and continued > 5
    assert (refused > 0) == (name == "gemma")


def test_what_a_template_wants_is_read_from_its_syntax() -> None:
    expected = {
        "chatml": TemplateFacts(False, False, False, False),
        "llama3": TemplateFacts(False, True, False, False),
        "parts": TemplateFacts(True, True, False, True),
    }
    for name, facts in expected.items():
        assert read_facts(TEMPLATES[name]) == facts, name
    assert read_facts(PARTS_ONLY) == TemplateFacts(True, False, False, False)
    loops = [
        "{% for message in messages %}{% set c = message.content %}{% for p in c %}{% endfor %}{% endfor %}",
        "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for p in m.get('content') %}{% endfor %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.m = messages[0] %}{% for p in ns.m.content %}{% endfor %}",
        "{% for p in messages[0].content %}{% endfor %}",
        "{% for p in (messages | last)['content'] %}{% endfor %}",
        "{% macro f(a, b) %}{% for p in b %}{% endfor %}{% endmacro %}{{ f(1, b=messages[0].content) }}",
        "{% for m in messages %}{% if m.content %}{% for p in m.content[1:] %}{% endfor %}{% endif %}{% endfor %}",
    ]
    for source in loops:
        assert read_facts(source).loops_content, source
    for source in (
        "{% for m in messages %}{% for call in m.tool_calls %}{{ m.content }}{% endfor %}{% endfor %}",
        "{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}",
    ):
        assert not read_facts(source).loops_content, source
    assert read_facts("{% for m in messages %}{% if m.content is none %}{% endif %}{% endfor %}").tests_none


MIXED = [{"role": "user", "content": ["plain", {"type": "text", "text": "one"}, {"text": "two"}]}]


def test_content_parts_arrive_as_the_template_wants_them() -> None:
    strings, parts = tokenizer_with("{{ messages[0].content }}"), tokenizer_with(PARTS_ONLY)
    assert render_chat(strings, MIXED) == "plain\none\ntwo"
    assert render_chat(parts, MIXED) == "user:[plain][one][two]\n"
    assert render_chat(parts, [{"role": "user", "content": "text"}]) == "user:[text]\n"
    assert render_chat(tokenizer_with(PARTS), [{"role": "user", "content": "text"}]) == "<user>text\n"
    assert render_chat(strings, MIXED, content_format="openai").startswith("[{'type': 'text', 'text': 'plain'}")
    loose = tokenizer_with("{% for part in messages[0].content %}{{ part }}|{% endfor %}")
    assert render_chat(loose, [{"role": "user", "content": "ab"}], content_format="string") == "a|b|"
    refusal = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    assert render_chat(strings, refusal) == "no"


def test_media_are_refused_unless_something_stands_for_them() -> None:
    ours, strings = tokenizer_with(PARTS), tokenizer_with("{{ messages[0].content }}")
    raw = [{"role": "user", "content": [{"type": "text", "text": "see"}, {"image_url": {"url": "x"}}]}]
    placed = {"type": "image", "written": "<img>"}
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, placed, {"type": "text", "text": "it"}]}]
    for unplaced, media in ((raw, ""), (raw, "first"), (messages, "")):
        with pytest.raises(NotBuiltError, match="image"):
            render_chat(ours, unplaced, media=media)
    assert render_chat(ours, messages, media="first") == "<user>see<image>it\n"
    assert render_chat(strings, messages, media="first") == "<img>\nsee\nit"
    assert render_chat(strings, messages, media="between") == "see\n<img>\nit"
    mentioned = [{"role": "user", "content": [{"type": "text", "text": "see <img> now"}, placed, placed]}]
    assert render_chat(strings, mentioned, media="first") == "<img>\nsee <img> now"


def test_no_content_is_told_from_empty_content_only_where_asked() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    tells = "{% for m in messages %}{{ 'none' if m.content is none else 'some' }}{% endfor %}"
    assert render_chat(tokenizer_with(tells), messages) == "none"
    assert render_chat(tokenizer_with("{{ messages[0].content | trim }}|"), messages) == "|"
    assert render_chat(tokenizer_with(PARTS_ONLY), messages) == "assistant:\n"


def test_arguments_of_tool_calls_are_data_or_text_as_the_template_needs() -> None:
    def messages(arguments: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    as_data = tokenizer_with("{{ messages[0].tool_calls[0].function.arguments.a }}")
    as_text = tokenizer_with("{{ 'f(' + messages[0].tool_calls[0].function.arguments + ')' }}")
    assert render_chat(as_data, messages('{"a": 1}')) == render_chat(as_data, messages({"a": 1})) == "1"
    for apart in (None, render_apart):
        assert render_chat(as_text, messages('{"a": "ü"}'), apart=apart) == 'f({"a": "ü"})'
    assert render_chat(as_text, messages("{broken")) == "f({broken)"
    assert (
        render_chat(tokenizer_with("{{ messages[0].tool_calls[0].function.arguments | tojson }}"), messages("")) == "{}"
    )


def test_reasoning_goes_by_both_names() -> None:
    both = tokenizer_with("{{ messages[0].reasoning }}|{{ messages[0].reasoning_content }}")
    assert render_chat(both, [{"role": "assistant", "content": "x", "reasoning": "r"}]) == "r|r"
    assert render_chat(both, [{"role": "assistant", "content": "x", "reasoning_content": "r"}]) == "r|r"


def test_continuing_the_last_message() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_chat(tokenizer_with(CHATML), messages, **options).endswith("<|im_start|>assistant\none, two ")
    assert render_chat(tokenizer_with(GEMMA), messages, **options).endswith(
        "<start_of_turn>model\none, two"
    )  # it trims
    parts = [
        *messages[:1],
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert render_chat(tokenizer_with(PARTS_ONLY), parts, **options).endswith("assistant:[a][b")
    with pytest.raises(InputError, match="cannot both be true"):
        render_chat(tokenizer_with(CHATML), messages, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InputError, match="omits the last message"):
        render_chat(tokenizer_with("{{ messages[0].content }}"), messages, **options)
    silent = [{"role": "assistant", "content": []}]
    with pytest.raises(InputError, match="no text to continue"):
        render_chat(tokenizer_with(PARTS_ONLY), silent, **options)


def test_which_template(tmp_path: Path) -> None:
    several = tokenizer_with({"default": "plain", "tool_use": "with tools", "rag": "with documents"})
    hi = [{"role": "user", "content": "hi"}]
    assert render_chat(several, hi) == "plain"
    assert render_chat(several, hi, tools=TOOLS) == "with tools"
    assert render_chat(several, hi, chat_template="rag") == "with documents"
    assert render_chat(several, hi, chat_template="{{ 1 + 1 }}") == "2"
    (tmp_path / "mine.jinja").write_text("from {{ 'file' }}", encoding="utf-8")
    assert render_chat(several, hi, chat_template=str(tmp_path / "mine.jinja")) == "from file"
    with pytest.raises(InputError, match=r"'rga' is not Jinja text.*did you mean 'rag'"):
        render_chat(several, hi, chat_template="rga")
    with pytest.raises(InputError, match="no default one"):
        choose_template(tokenizer_with({"a": "x", "b": "y"}))
    with pytest.raises(InputError, match=r"tokenizer of 'here' has no chat template"):
        render_chat(tokenizer_with(None), hi)


def test_variables_of_the_template() -> None:
    ours = tokenizer_with("{{ tools is none }} {{ documents[0].text }} {{ style }} {{ bos_token }}")
    hi = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"tools": [], "documents": [{"text": "doc"}]}
    assert render_chat(ours, hi, template_kwargs={"style": "brief"}, **options) == "True doc brief <s>"
    assert ours.apply_chat_template(hi, tokenize=False, style="x", **options) == "True doc x <s>"
    for name in ("messages", "tokenize", "add_generation_prompt"):
        with pytest.raises(InputError, match=f"cannot set {name}"):
            render_chat(ours, hi, template_kwargs={name: []})
    now = render_chat(tokenizer_with("{{ strftime_now('%Y') }}"), hi)
    assert now == str(time.localtime().tm_year)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list of dicts, got str"),
        ([5], r"messages\[0\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\] needs a 'role'"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has content of type int"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "unknown type 'hologram'"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "'text' is None, not a string"),
        ([{"role": "user", "content": [7]}], "content part of type int"),
        ([{"role": "assistant", "content": "", "tool_calls": [3]}], "tool call that is not a dict"),
    ],
)
def test_wrong_messages_are_one_clear_error(messages: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        render_chat(tokenizer_with(CHATML), messages)


def test_wrong_options_are_one_clear_error() -> None:
    hi = [{"role": "user", "content": "hi"}]
    with pytest.raises(InputError, match="content_format is one of auto, string, openai, got 'html'"):
        render_chat(tokenizer_with(CHATML), hi, content_format="html")
    with pytest.raises(InputError, match="tools must be a list of dicts"):
        render_chat(tokenizer_with(CHATML), hi, tools=["x"])
    with pytest.raises(InputError, match=r"not valid Jinja, line 2: .*endfor"):
        render_chat(tokenizer_with("\n{% for x in y %}"), hi)
    with pytest.raises(InputError, match="failed: no such role"):
        render_chat(tokenizer_with("{{ raise_exception('no such role') }}"), hi)
    with pytest.raises(InputError, match="failed on these messages: TypeError"):
        render_chat(tokenizer_with("{{ messages + 1 }}"), hi)


HOSTILE = {
    "range": "{% for x in range(10**9) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat a list": "{{ [1] * 10**10 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "doubling with +": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "output": "{% for i in range(90000) %}{{ 'a' * 1000000 }}{% endfor %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "center filter": "{{ 'a' | center(10**10) }}",
    "indent filter": "{{ 'a\\nb' | indent(10**10) }}",
    "percent": "{{ '%09999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format filter": "{{ '%09999999999d' | format(1) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replace filter": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "join": "{{ ('b' * 10**6).join(['a'] * 10**6) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "escape by class": "{{ ''.__class__.__mro__ }}",
    "escape by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "escape by attr": "{{ 'a' | attr('__class__') }}",
    "change the messages": "{{ messages.append(1) }}",
    "private namespace": "{% set n = namespace(_x=1) %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_soon_with_an_error(name: str) -> None:
    start = time.process_time()
    limits = TemplateLimits(seconds=0.5, output_chars=1 << 22)
    with pytest.raises(InputError):
        text = render(HOSTILE[name], {"messages": [{"role": "user", "content": "x"}]}, limits)
        assert text == "", "an escape shows nothing"
        raise InputError("nothing was shown")
    assert time.process_time() - start < 10


HELLO = [{"role": "user", "content": "x"}]
_DEEP = (
    "{% set n = namespace(a=[1], b=[1]) %}"
    "{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
BOMBS = {"grows": _DEEP + "{{ n.a }}", "takes forever": _DEEP + "{{ n.a == n.b }}"}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_apart_cannot_hang_or_fill_the_machine(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(InputError, match=r"the chat template (used more than|took over|failed)"):
        render_apart(ChatJob(BOMBS[name], HELLO, {}), TemplateLimits(seconds=1.0))
    assert time.perf_counter() - start < 100


UNREADABLE = {
    "deep": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "nested blocks": "{% for x in y %}" * 30 + "{% endfor %}" * 30,
    "long": "{{x}}" * 200_000,
    "number": "{{ " + "9" * 5000 + " }}",
    "folded": "{{ 'a' | int('b', [1]) }}{{ 1 // 0 }}",
    "no Jinja": "{% for %}",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_template_that_cannot_be_read_is_read_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its facts: nothing of it is compiled, or kept, in this process."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was parsed here")

    monkeypatch.setattr(Sandbox, "_parse", never)
    before = compile_template.cache_info().currsize, read_facts.cache_info().currsize
    with pytest.raises(
        InputError, match=r"the chat template (cannot be compiled|is not valid|used more|took over|failed)"
    ) as told:
        render_chat(tokenizer_with(CHATML), HELLO, chat_template=UNREADABLE[name], apart=render_apart)
    assert told.value.param == "chat_template" and len(str(told.value)) < 5000
    assert (compile_template.cache_info().currsize, read_facts.cache_info().currsize) == before


@pytest.mark.parametrize("name", ["deep", "nested blocks", "number"])
def test_what_cannot_be_compiled_is_an_error_of_the_template(name: str) -> None:
    with pytest.raises(InputError, match="cannot be compiled"):
        render(UNREADABLE[name], {})


def test_an_answer_apart_has_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "{% set x = 'x' * 1000000 %}{% for i in range(20) %}{{ x }}{% endfor %}"
    assert len(render(long, {})) == 20_000_000
    with pytest.raises(InputError, match="more than 16777216 characters of output"):
        render_apart(ChatJob(long, HELLO, {}))
    odd = [{"role": "user", "content": "\ud800 \n\x00 é"}]
    assert render_apart(ChatJob("{{ messages[0].content }}", odd, {})) == odd[0]["content"]


def test_many_conversations_apart_share_one_limit() -> None:
    """Of characters, and of seconds: each alone would pass."""
    conversations = [[{"role": "user", "content": text}] for text in ("one", "\ud800 é", "")]
    job = ChatJob("<{{ messages[0].content }}>", (), {})
    assert render_all_apart(job, conversations) == ["<one>", "<\ud800 é>", "<>"]
    with pytest.raises(InputError, match="wrote over 11 characters for 3 conversations"):
        render_all_apart(job, conversations, TemplateLimits(output_chars=11))
    busy = ChatJob("{% for i in range(20) %}{% for j in range(20) %}{% endfor %}{% endfor %}{{ messages }}", (), {})
    with pytest.raises(InputError, match=r"the chat template (used more than 1 seconds|took over|failed: more than 1)"):
        render_all_apart(busy, [HELLO] * 50_000, TemplateLimits(seconds=1.0))


def test_a_template_apart_gives_the_same_text() -> None:
    messages = conversation(random.Random(3), tools=True)
    ours = tokenizer_with(QWEN_TOOLS)
    assert render_chat(ours, messages, tools=TOOLS, apart=render_apart) == render_chat(ours, messages, tools=TOOLS)
    with pytest.raises(InputError, match="failed: no"):
        render_chat(ours, messages, chat_template="{{ raise_exception('no') }}", apart=render_apart)
    with pytest.raises(InputError, match="must be plain JSON"):
        render_chat(ours, messages, template_kwargs={"x": object()}, apart=render_apart)


def test_threads_render_at_once() -> None:
    ours = tokenizer_with(QWEN_TOOLS)
    chats = [conversation(random.Random(seed), tools=True) for seed in range(8)]
    expected = [render_chat(ours, chat, tools=TOOLS) for chat in chats]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(40):
            if render_chat(ours, chats[index], tools=TOOLS) != expected[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_compiled_template_is_kept() -> None:
    source = QWEN_TOOLS + "{# kept #}" * 50
    ours = tokenizer_with(source)
    hi = [{"role": "user", "content": "hi"}]
    before = compile_template.cache_info()
    for _ in range(10):
        render_chat(ours, hi)
    after = compile_template.cache_info()
    assert after.misses - before.misses == 1 and after.hits - before.hits >= 9


def test_a_very_long_template_is_refused() -> None:
    with pytest.raises(InputError, match=f"the limit is {LIMITS.template_chars}"):
        render("x" * (LIMITS.template_chars + 1), {})


def test_jinja_is_loaded_by_the_first_rendering_only() -> None:
    code = "import sys, quire.text.chat, quire.text.tokenizer; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False"
