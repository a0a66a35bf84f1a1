"""gpt-oss' format against the package oss-harmony: prompts to the letter, answers message by message."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.schema.errors import InputError
from quire.text.chat import render_chat
from quire.text.harmony import render_harmony
from quire.text.parse.base import fold
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.tokenizer import load_tokenizer
from quire.text.typescript import write_type

harmony = pytest.importorskip("openai_harmony")
RANKS = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"  # o200k_base, by its address
DATE = "2025-06-28"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where", "examples": ["Rome"]},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": ["integer", "null"]},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "which": {"oneOf": [{"type": "string", "description": "a name"}, {"type": "integer", "default": 3}]},
    },
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "How it is.\nAnd will be.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = importlib.util.find_spec("litellm")
    assert found is not None and found.origin is not None, "the vocabulary lies in litellm, of the same extra"
    ranks = Path(found.origin).parent / RANKS
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copy(ranks, folder / "o200k_base.tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def by_oracle(encoding: Any, messages: list[Any], *, drop: bool = False) -> str:
    config = harmony.RenderConversationConfig(auto_drop_analysis=drop)
    conversation = harmony.Conversation.from_messages(messages)
    ids = encoding.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT, config=config)
    return str(encoding.decode_utf8(ids))


def system(effort: str = "MEDIUM") -> Any:
    content = harmony.SystemContent.new().with_conversation_start_date(DATE)
    content = content.with_reasoning_effort(harmony.ReasoningEffort[effort])
    return harmony.Message.from_role_and_content(harmony.Role.SYSTEM, content)


def developer(instructions: str | None, tools: list[Any]) -> Any:
    content = harmony.DeveloperContent.new()
    if instructions:
        content = content.with_instructions(instructions)
    if tools:
        described = [harmony.ToolDescription.new(f["name"], f["description"], parameters=f.get("parameters")) for f in
                     (tool["function"] for tool in tools)]  # fmt: skip
        content = content.with_function_tools(described)
    return harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)


def user(text: str) -> Any:
    return harmony.Message.from_role_and_content(harmony.Role.USER, text)


def said(channel: str, text: str, to: str | None = None) -> Any:
    message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)
    return message if to is None else message.with_recipient(to).with_content_type("<|constrain|>json")


def result(name: str, text: str) -> Any:
    author = harmony.Author.new(harmony.Role.TOOL, f"functions.{name}")
    return harmony.Message.from_author_and_content(author, text).with_channel("commentary").with_recipient("assistant")


def ours(messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> str:
    return render_harmony(messages, tools, True, False, {"current_date": DATE, **options})


def call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


HI: dict[str, Any] = {"role": "user", "content": "Hi"}


# ---- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_who_it_is(encoding: Any, effort: str) -> None:
    assert ours([HI], reasoning_effort=effort) == by_oracle(encoding, [system(effort.upper()), user("Hi")])


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("words", [None, "Be brief."])
def test_instructions_and_tools(encoding: Any, role: str, tools: list[Any], words: str | None) -> None:
    given = [{"role": role, "content": words}, HI] if words else [HI]
    told = [developer(words, tools)] if words or tools else []
    assert ours(given, tools) == by_oracle(encoding, [system(), *told, user("Hi")])


def test_a_tool_loop_keeps_its_thoughts(encoding: Any) -> None:
    given = [
        HI,
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [
            call("weather", '{"city":"Rome"}', 1), call("now", "{}", 2)]},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]  # fmt: skip
    spelled = [
        system(), developer(None, TOOLS), user("Hi"), said("analysis", "Hm."), said("commentary", "I look."),
        said("commentary", '{"city":"Rome"}', "functions.weather"), said("commentary", "{}", "functions.now"),
        result("now", "noon"), result("weather", "sunny"),
    ]  # fmt: skip
    assert ours(given, TOOLS) == by_oracle(encoding, spelled, drop=True)


def test_thoughts_before_an_answer_are_dropped(encoding: Any) -> None:
    given: list[dict[str, Any]] = [
        HI,
        {"role": "assistant", "content": None, "reasoning": "One.", "tool_calls": [call("now", "{}", 1)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "assistant", "content": "It is noon.", "reasoning_content": "Two."},
        {"role": "user", "content": "And now?"},
    ]
    spelled = [
        system(), developer(None, TOOLS), user("Hi"), said("analysis", "One."),
        said("commentary", "{}", "functions.now"), result("now", "noon"), said("analysis", "Two."),
        said("final", "It is noon."), user("And now?"),
    ]  # fmt: skip
    assert ours(given, TOOLS) == by_oracle(encoding, spelled, drop=True)
    # a second loop: those of the first are old, its own are not
    more = [*given, {"role": "assistant", "reasoning": "Three.", "tool_calls": [call("now", "{}", 2)]},
            {"role": "tool", "tool_call_id": "call_2", "content": "one"}]  # fmt: skip
    kept = [one for one in spelled if one.channel != "analysis"]
    kept += [said("analysis", "Three."), said("commentary", "{}", "functions.now"), result("now", "one")]
    assert ours(more, TOOLS) == by_oracle(encoding, kept)


def test_random_schemas(encoding: Any) -> None:
    draw = random.Random(7)

    def schema(depth: int) -> dict[str, Any]:
        kinds = ["string", "enum", "number", "boolean", "integer"]
        kind = draw.choice([*kinds, "array", "object", "several", "oneOf", "any"] if depth else kinds)
        found: dict[str, Any] = {"type": kind}
        if kind == "enum":
            found = {"type": "string", "enum": draw.sample("abc", 2)}
        elif kind == "array" and draw.random() < 0.8:
            found["items"] = schema(depth - 1)
        elif kind == "object":
            found = an_object(depth - 1)
        elif kind == "several":
            found = {"type": draw.choice([["string", "null"], ["null", "integer"], ["string", "number"]])}
        elif kind == "oneOf":
            found = {"oneOf": [schema(depth - 1) for _ in range(draw.randint(1, 3))]}
        elif kind == "any":
            found = draw.choice([{}, {"anyOf": [{"type": "string"}]}, {"$ref": "#/x"}])
        about = {"description": ["one", "two\nlines"], "default": ["a", 1, None, {"q": ["é"]}], "title": ["T"],
                 "nullable": [True, False], "examples": [["x", "y"], [1]]}  # fmt: skip
        for name, values in about.items():
            if draw.random() < 0.2:
                found[name] = draw.choice(values)
        return found

    def an_object(depth: int) -> dict[str, Any]:
        names = draw.sample("pqrs", draw.randint(0, 3))
        properties = {name: schema(depth) for name in names}
        return {"type": "object", "properties": properties, "required": [n for n in names if draw.random() < 0.5]}

    given = [an_object(3) for _ in range(300)]
    tools = [{"function": {"name": "f", "description": "D", "parameters": one}} for one in given]
    told = by_oracle(encoding, [developer(None, tools)])
    assert told.count("type f = ") == len(given)
    for one, there in zip(given, told.split("type f = (_: ")[1:], strict=True):
        assert there.startswith(f"{write_type(one)}) => any;\n\n"), json.dumps(one)


def test_going_on_and_refusals() -> None:
    begun = [HI, {"role": "assistant", "content": "It is"}]
    text = render_harmony(begun, None, False, True, {})
    assert text.endswith("<|end|><|start|>assistant<|channel|>final<|message|>It is")
    assert render_harmony([HI], None, False, False, {}).endswith("<|message|>Hi<|end|>")
    with pytest.raises(InputError, match="low, medium, high"):
        ours([HI], reasoning_effort="max")
    with pytest.raises(InputError, match="answers no call"):
        ours([HI, {"role": "tool", "content": "x"}])
    with pytest.raises(InputError, match="last message"):
        render_harmony([HI], None, False, True, {})


def test_a_tokenizer_with_its_marks_writes_it(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    marks = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>", "<|end|>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    made.add_special_tokens(marks[1:])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    made.save(str(tmp_path / "tokenizer.json"))
    assert render_chat(load_tokenizer(str(tmp_path)), [HI]) == "Hi"
    made.add_special_tokens(marks)
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert render_chat(loaded, [HI]).endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert render_chat(loaded, [HI], chat_template="{{ messages[0].content }}!") == "Hi!"


# ---- answers ------------------------------------------------------------------------------------------------------


def test_answers_are_read_as_the_oracle_reads_them(encoding: Any) -> None:
    draw = random.Random(3)
    choice = ParserChoice.of(None, tool="openai", reasoning="openai_gptoss")
    words = ["Hm.", "It is 4 < 5.", "line\nbreak", "été", "{}"]
    for _ in range(60):
        row = [said("analysis", draw.choice(words)) for _ in range(draw.randint(0, 2))]
        row += [said("commentary", draw.choice(words)) for _ in range(draw.randint(0, 1))]
        if draw.random() < 0.5:
            given = json.dumps({"city": draw.choice(words)})
            row.append(said("commentary", given, f"functions.{draw.choice(['weather', 'now'])}"))
        else:
            row.append(said("final", draw.choice(words)))
        text = by_oracle(encoding, row).removeprefix("<|start|>assistant").removesuffix("<|start|>assistant")
        ids = encoding.encode(text, allowed_special="all")
        there = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        parts = [(one.channel, one.recipient, one.content[0].text) for one in there]
        parser = choice.parser(ParseRequest(prompt="<|start|>assistant", tools=TOOLS))
        cuts = sorted(draw.sample(range(len(text)), min(8, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        deltas = [d for piece in pieces for d in parser.feed(piece, [], final=False)]
        answer = fold([*deltas, *parser.feed("", [], final=True)])
        assert (answer.reasoning or "") == "\n".join(t for channel, _, t in parts if channel == "analysis")
        assert (answer.content or "") == "\n".join(t for channel, to, t in parts if channel != "analysis" and not to)
        called = [(to.removeprefix("functions."), json.loads(t)) for _, to, t in parts if to]
        assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == called
