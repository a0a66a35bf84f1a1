"""The chat templates of examples/: they show the tools and a conversation with calls, and what they write for a call is
what the parser of the same family reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.text.chat import normalize_messages
from quire.text.parse.base import fold
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.parse.registry import find_tool_parser
from quire.text.template import render
from tests.plain.text.parse_corpus import SCENES, TOOLS

FOLDER = Path(__file__).parents[3] / "examples"
# template -> (parser, what stands before the assistant's call, what ends it)
FAMILIES = {
    "hermes": ("hermes", "<|im_start|>assistant\n", "<|im_end|>"),
    "llama3.1_json": ("llama3_json", "assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama4_pythonic": ("llama4_pythonic", "assistant<|header_end|>\n\n", "<|eot|>"),
    "mistral_parallel": ("mistral", "[/INST]", "</s>"),
    "granite_20b_fc": ("granite-20b-fc", "ASSISTANT: ", "\nOBSERVATION"),
    "internlm2_tool": ("internlm", "<|im_start|>assistant\n", "<|im_end|>"),
    "functiongemma": ("functiongemma", "<start_of_turn>model\n", "<start_function_response>"),
}


def test_every_template_is_here() -> None:
    found = {path.name.removeprefix("tool_chat_template_").removesuffix(".jinja") for path in FOLDER.glob("tool_chat*")}
    assert found == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scene", ["one call", "parallel", "nested", "types", "unicode"])
def test_what_is_written_can_be_read(name: str, scene: str) -> None:
    parser, before, end = FAMILIES[name]
    calls = SCENES[scene]
    made = [
        {"id": f"call-12345678{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
        for i, (n, a) in enumerate(calls)
    ]
    messages = normalize_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": made},
            {"role": "tool", "tool_call_id": made[0]["id"], "name": "get_weather", "content": "rainy"},
        ],
        as_parts=False,
        wrap_strings=False,
        keep_none=False,
    )
    source = (FOLDER / f"tool_chat_template_{name}.jinja").read_text()
    variables = {"tools": TOOLS, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    text = render(source, {**variables, "messages": messages})
    for word in ("Be brief.", "Weather?", "rainy", "get_weather", "metric"):
        assert word in text
    said = text.split(before, 1)[1].split(end, 1)[0]
    found = fold(ParserChoice(find_tool_parser(parser)).parser(ParseRequest(tools=TOOLS)).feed(said, (), final=True))
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert found.content.strip() == ""
    plain = render(source, {**variables, "tools": None, "messages": messages[:2]})
    assert "get_weather" not in plain
    assert "Weather?" in plain
