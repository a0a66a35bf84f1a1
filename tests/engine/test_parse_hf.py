"""The parser `hf` beside transformers' own parse_response, over templates in every form that it knows."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from quire.schema.errors import ConfigError
from quire.text.parse.base import Delta, Folded, fold
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.parse.registry import find_tool_parser
from tests.plain.text.parse_corpus import RENDER, SCENES, TOOLS

oracle = pytest.importorskip("transformers.utils.chat_parsing").parse_response
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
QWEN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                       "transform": {"type": "function", "function": "{content}"}},
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}  # fmt: skip
CODER: dict[str, Any] = {
    **QWEN,
    "fields": {
        **QWEN["fields"],
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "repeats": True,
            "close_pattern": r"</function>\s*</tool_call>", "content": "xml-inline", "transform": CALL,
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        },
    },
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
            "content": "json", "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": CALL,
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}  # fmt: skip
COHERE: dict[str, Any] = {
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
        "content": {},
    },
}  # fmt: skip
NAMED: dict[str, Any] = {
    "start_anchor": "<a>",
    "fields": {
        "tool_calls": {"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "repeats": True, "content": "json",
                       "transform": CALL},
        "content": {},
    },
}  # fmt: skip
LINES: dict[str, Any] = {
    "start_anchor": "<a>",
    "fields": {
        "tool_calls": {"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "repeats": True,
                       "content": "kv-lines", "transform": CALL},
        "content": {},
    },
}  # fmt: skip
TEMPLATES = {"qwen": QWEN, "coder": CODER, "gemma": GEMMA, "cohere": COHERE, "named": NAMED, "lines": LINES}
THINKS = {"qwen": ("<think>", "</think>"), "gemma": ("<|channel>thought\n", "<channel|>"),
          "cohere": ("<|START_THINKING|>", "<|END_THINKING|>")}  # fmt: skip


def named(calls: list[Any]) -> str:
    return "".join(f"<call {name}>{json.dumps(given)}</call>" for name, given in calls)


def lines(calls: list[Any]) -> str:
    flat = [(name, {k: v for k, v in given.items() if isinstance(v, str | int)}) for name, given in calls]
    return "".join(
        f"<call {name}>" + "\n".join(f"{k}: {v}" for k, v in given.items()) + "</call>" for name, given in flat
    )


WRITE = {"qwen": RENDER["hermes"], "coder": RENDER["qwen3_coder"], "gemma": RENDER["gemma4"],
         "cohere": RENDER["cohere_command3"], "named": named, "lines": lines}  # fmt: skip
SCENE = {
    name: ["one call", "no arguments", "parallel", "types", "nested", "unicode", "brackets in text"] for name in WRITE
}
SCENE["lines"] = ["one call", "parallel"]


def feed(template: Any, pieces: list[str], **asked: Any) -> list[Delta]:
    tokenizer: Any = SimpleNamespace(response_template=template)
    choice = ParserChoice.of(tokenizer, tool="hf")
    parser = choice.parser(ParseRequest(tools=TOOLS, **asked))
    return [d for n, piece in enumerate(pieces) for d in parser.feed(piece, (), final=n == len(pieces) - 1)]


def shown(found: Folded) -> Any:
    return found.content, found.reasoning, [(call.name, json.loads(call.arguments)) for call in found.calls]


def expected(template: Any, text: str, prefix: str = "") -> Any:
    said = oracle(text, template, prefix=prefix, tools=TOOLS)
    calls = said.get("tool_calls") or []
    flat = [one for item in calls for one in (item if isinstance(item, list) else [item])]
    thought = said.get("thinking") or said.get("reasoning_content") or ""
    found = [(one["function"]["name"], one["function"]["arguments"]) for one in flat]
    return said.get("content") or "", thought, found


def answers(name: str) -> list[str]:
    begin, end = THINKS.get(name, ("", ""))
    found = ["Plain [text] with <b>marks</b>, {braces} and (1 < 2).", ""]
    for scene in SCENE[name]:
        text = WRITE[name](SCENES[scene])
        found += [text, f"Let me see: 1 < 2.\n{text}"]
        if begin:
            found.append(f"{begin}Hm, <tool>?{end}\n{text}")
    return found


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_as_transformers_reads_it(name: str) -> None:
    template, chance = TEMPLATES[name], random.Random(name)
    for text in answers(name):
        want = expected(template, text)
        assert shown(fold(feed(template, [text]))) == want, text
        count = 200 if text.count("get_weather") > 1 else 10
        cuts = [sorted(chance.sample(range(len(text) + 1), min(len(text), 5))) for _ in range(count)]
        ways = [[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
        for pieces in (list(text) or [""], *ways):
            assert shown(fold(feed(template, pieces))) == want, pieces


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_cut_off_or_damaged(name: str) -> None:
    """Nothing is raised, all cuts give the same, and no word is lost."""
    template, text = TEMPLATES[name], "So: " + WRITE[name](SCENES["one call"])
    chance = random.Random(name)
    damaged = [text[:end] for end in range(0, len(text), 2)]
    for _ in range(60):
        at = chance.randrange(len(text))
        damaged.append(text[:at] + chance.choice(["", "}", '"', "<", "</", ">"]) + text[at + chance.randint(1, 6) :])
    for one in damaged:
        found = fold(feed(template, [one]))
        whole = [(call.name, call.arguments) for call in found.calls]
        again = fold(feed(template, list(one) or [""]))
        assert (again.content, [(call.name, call.arguments) for call in again.calls]) == (found.content, whole), one
        for word in ("Paris", "get_weather", "city"):
            said = json.dumps([found.content, whole])
            assert word not in one or word in said, (one, said)


@pytest.mark.parametrize("name", ["qwen", "cohere", "named"])
def test_json_streams(name: str) -> None:
    city = "abcdefgh " * 50
    text = WRITE[name]([("get_weather", {"city": city})])
    parts = [d.call.arguments for d in feed(TEMPLATES[name], [*text[:250], ""]) if d.call is not None]
    assert "".join(parts).count("abcdefgh") >= 15 and len(parts) > 100


def test_a_thought_that_the_prompt_opened() -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    text = "Hm.</think>It rains."
    want = expected(QWEN, text, prompt)
    assert shown(fold(feed(QWEN, [text], prompt=prompt))) == want == ("It rains.", "Hm.", [])


def test_what_is_no_template() -> None:
    for given, word in ((None, "has none"), ({}, "fields"), ({"fields": {"a": {"open": ""}}}, "'open'"),
                        ({"fields": {"a": {"close_pattern": "("}}}, "regular expression"),
                        ({"fields": {"a": {}}}, "start_anchor"), ({"fields": {"a": {"x": 1}}}, "'x'")):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            find_tool_parser("hf")(SimpleNamespace(response_template=given))
