"""Every reasoning parser: thought and answer told apart, however the answer is cut, and together with tools."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from quire.schema.errors import ConfigError
from quire.text.parse.base import Folded, fold
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.parse.reasoning import ReasoningTokens, is_reasoning_end
from quire.text.parse.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    find_reasoning_parser,
    find_tool_parser,
    load_plugin,
)
from tests.plain.text.parse_corpus import RENDER, SCENES, TOOLS

TAGS = {
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "solar_open2": ("<|think:start|>", "<|think:end|>"),
}
HARMONY = {"gptoss", "openai_gptoss"}
PLAIN = {"identity", "minimax_m2_append_think"}
NAMES = sorted(REASONING_PARSERS.names())
TAGGED = [name for name in NAMES if name not in HARMONY | PLAIN]
INSIDE = [
    "deepseek_r1", "ernie45", "holo2", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "step3",
    "step3p5",
]  # fmt: skip
OPENED = ["glm45", "glm47", "hy_v3", "kimi_k3", "ling3", "qwen3"]  # their templates begin the thought
ENDED_BY_A_CALL = ["glm45", "glm47", "hy_v3", "ling3", "mimo", "poolside_v1", "qwen3"]


def parse(name: str, text: str, *, tool: str | None = None, every: int = 0, **asked: object) -> Folded:
    choice = ParserChoice(find_tool_parser(tool) if tool else None, find_reasoning_parser(name))
    parser = choice.parser(ParseRequest(tools=TOOLS if tool else (), **asked))
    step = every or max(1, len(text))
    pieces = [text[at : at + step] for at in range(0, len(text), step)] or [""]
    return fold(delta for n, piece in enumerate(pieces) for delta in parser.feed(piece, (), final=n == len(pieces) - 1))


def tags(name: str) -> tuple[str, str]:
    return TAGS.get(name, ("<think>", "</think>"))


def test_the_names_of_the_spec_are_here() -> None:
    wanted = "deepseek_r1 deepseek_v3 ernie45 glm45 gptoss granite holo2 hunyuan_a13b identity minimax_m2 mistral"
    wanted += " olmo3 openai_gptoss qwen3 seed_oss step3"
    assert set(wanted.split()) <= set(NAMES)
    for name in NAMES:
        find_reasoning_parser(name)


@pytest.mark.parametrize("name", TAGGED)
def test_thought_and_answer(name: str) -> None:
    start, end = tags(name)
    for text in (f"{start}I wonder < why.{end}Because.", f"\n{start}I wonder < why.{end}Because."):
        for every in (0, 1, 2, 3, 7):
            found = parse(name, text, every=every)
            assert (found.reasoning, found.content) == ("I wonder < why.", "Because.")


def corpus(name: str) -> list[str]:
    """Answers as the family writes them: a thought and an answer, one of them alone, broken off, with marks inside."""
    start, end = tags(name)
    call = RENDER["openai" if name in HARMONY else "hermes"](SCENES["parallel"])
    if name in HARMONY:
        start, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
    return [
        f"{start}The user asks.\n\nSo 2 < 3.{end}\n\nIt is **3**.",
        f"\n{start}Züri, 東京 🌧?{end}Ja – é.",
        f"{start}{end}Straight away.",
        "No thought at all, and <b>marks</b>.",
        f"{start}It breaks off{end[: len(end) // 2]}",
        f"No beginning.{end}The answer.",
        f"{start}One {start} in another {end} and {end} again.",
        f"{start}Look it up.{end}\n{call}",
        f"{start}Maybe {call}?{end}No.",
        f"{start[:-1]} {end[:-1]} {end[1:]}",
    ]


@pytest.mark.parametrize("name", sorted({find_reasoning_parser(name): name for name in NAMES}.values()))
def test_any_cut_gives_the_same(name: str) -> None:
    tool = "openai" if name in HARMONY else "hermes"
    for number, text in enumerate(corpus(name)):
        chance = random.Random(number)
        want = shown(parse(name, text, tool=tool))
        cuts = [sorted(chance.sample(range(len(text) + 1), min(len(text), 5))) for _ in range(200)]
        ways = [[text[a:b] for a, b in pairwise([0, *cut, len(text)])] for cut in cuts]
        for pieces in (list(text), re.findall(r"<[^<>\s]{1,40}>|\w{1,6}|\s+|[^\w\s]", text), *ways):
            assert shown(parse_pieces(name, pieces, tool)) == want, pieces
        said = want[0] + want[1] + json.dumps(want[2], ensure_ascii=False)
        for word in ("user", "Züri", "Straight", "marks", "breaks", "beginning", "another", "Look", "Maybe"):
            assert word not in text or word in said, (text, want)


def parse_pieces(name: str, pieces: list[str], tool: str) -> Folded:
    parser = ParserChoice(find_tool_parser(tool), find_reasoning_parser(name)).parser(ParseRequest(tools=TOOLS))
    return fold(d for n, piece in enumerate(pieces) for d in parser.feed(piece, (), final=n == len(pieces) - 1))


def shown(found: Folded) -> tuple[str, str, list[tuple[str, str]]]:
    return found.content, found.reasoning, [(call.name, call.arguments) for call in found.calls]


@pytest.mark.parametrize("name", TAGGED)
def test_the_prompt_tells_where_an_answer_begins(name: str) -> None:
    start, end = tags(name)
    inside = parse(name, f"why{end}so", prompt=f"<user>hi<assistant>{start}\n")
    assert (inside.reasoning, inside.content) == ("why", "so")
    outside = parse(name, "just so", prompt=f"<user>hi<assistant>{start}\n\n{end}\n\n")
    assert (outside.reasoning, outside.content) == ("", "just so")


@pytest.mark.parametrize("name", TAGGED)
def test_what_counts_when_the_prompt_says_nothing(name: str) -> None:
    found = parse(name, "no tags at all", prompt="<user>hi<assistant>")
    want = ("no tags at all", "") if name in INSIDE else ("", "no tags at all")
    assert (found.reasoning, found.content) == want


@pytest.mark.parametrize("name", TAGGED)
def test_a_thought_that_is_gone_on_with(name: str) -> None:
    start, end = tags(name)
    found = parse(name, f" more{end}so", prompt=f"<assistant>{start}I think", continues=True)
    assert (found.reasoning, found.content) == (" more", "so")
    found = parse(name, " more", prompt=f"<assistant>{start}I think{end}The answer", continues=True)
    assert (found.reasoning, found.content) == ("", " more")


@pytest.mark.parametrize("name", TAGGED)
def test_a_thought_cut_off(name: str) -> None:
    start, end = tags(name)
    for size in range(min(len(end), 9)):
        text = f"{start}so{end[:size]}"
        found = parse(name, text, every=1)
        assert found.content == ""
        assert found.reasoning.startswith("so")
        assert found == parse(name, text)


@pytest.mark.parametrize("name", ENDED_BY_A_CALL)
def test_a_call_ends_a_thought(name: str) -> None:
    """A call within the thought ends it, where calls are looked for and not held to a schema."""
    call = RENDER["hermes"](SCENES["one call"])
    text = f"let me look\n{call}"
    for every in (0, 1, 5):
        for answer, asked in ((text, {"prompt": "<think>\n"}), (f"<think>{text}", {"prompt": "assistant\n"})):
            found = parse(name, answer, tool="hermes", every=every, **asked)
            assert (found.reasoning, found.content) == ("let me look\n", "")
            assert [(one.name, json.loads(one.arguments)) for one in found.calls] == SCENES["one call"]
        found = parse(name, f"<think>{text}</think>So.", tool="hermes", every=every)
        assert (found.reasoning, found.content, len(found.calls)) == ("let me look\n", "So.", 1)
    assert parse(name, f"<think>{text}</think>So.").reasoning == text  # no tools: nothing but thought
    choice = ParserChoice(find_tool_parser("hermes"), find_reasoning_parser(name))
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    held = fold(choice.parser(ParseRequest(tools=strict)).feed(f"<think>{text}</think>So.", (), final=True))
    assert (held.reasoning, held.content, held.calls) == (text, "So.", [])


@pytest.mark.parametrize("name", OPENED)
def test_no_prompt_and_no_start_tag(name: str) -> None:
    """Where no prompt is known, an answer of a family whose templates begin the thought is within it."""
    _, end = tags(name)
    for every in (0, 1, 3):
        found = parse(name, f"why{end}so", every=every)
        assert (found.reasoning, found.content) == ("why", "so")
        assert parse(name, "cut off", every=every).reasoning == "cut off"
        assert parse(name, "so", every=every, thinking=False).content == "so"
        assert parse(name, "so", every=every, prompt="assistant\n").content == "so"


@pytest.mark.parametrize("name", INSIDE)
def test_thinking_that_was_switched_off(name: str) -> None:
    """A request that switched it off has no thought, whatever the family's habit; the prompt's end goes before."""
    start, end = tags(name)
    assert parse(name, "so", prompt="<user>hi<assistant>", thinking=False).content == "so"
    found = parse(name, f"why{end}so", prompt=f"<user>hi<assistant>{start}\n", thinking=False)
    assert (found.reasoning, found.content) == ("why", "so")


@pytest.mark.parametrize(("name", "text"), [
    ("step3p5", "<think>\nwhy\n</think>\nso"), ("step3p5", "why\n</think>\nso"), ("step3p5", "<think>why</think>so"),
    ("gemma4", "<|channel>thought\nwhy\n<channel|>so"), ("gemma4", "<|channel>thought\nwhy<channel|>so"),
])  # fmt: skip
def test_line_breaks_of_the_tags_are_no_thought(name: str, text: str) -> None:
    for every in (0, 1, 2, 3, 5, 8):
        found = parse(name, text, every=every)
        assert (found.reasoning, found.content) == ("why", "so")


@pytest.mark.parametrize("name", [name for name in TAGGED if name not in ENDED_BY_A_CALL])
def test_with_tools(name: str) -> None:
    """Calls within the thought are thought; after it they are calls."""
    start, end = tags(name)
    call = RENDER["hermes"](SCENES["one call"])
    text = f"{start}maybe {call}?{end}\n\n{RENDER['hermes'](SCENES['parallel'])}"
    for every in (0, 1, 5):
        found = parse(name, text, tool="hermes", every=every)
        assert found.reasoning == f"maybe {call}?"
        assert [(one.name, json.loads(one.arguments)) for one in found.calls] == SCENES["parallel"]
        assert found.content == ""


PAIRS = [
    ("minimax_m2", "minimax_m2"), ("kimi_k2", "kimi_k2"), ("glm45", "glm45"), ("hunyuan_a13b", "hunyuan_a13b"),
    ("seed_oss", "seed_oss"), ("ernie45", "ernie45"), ("cohere_command3", "cohere_command3"), ("mistral", "mistral"),
    ("apertus", "apertus"), ("gemma4", "gemma4"), ("step3", "step3"), ("deepseek_v3", "deepseek_v31"),
    ("hy_v3", "hy_v3"), ("kimi_k3", "kimi_k3"), ("ling3", "ling3"), ("mimo", "mimo"), ("minimax_m3", "minimax_m3"),
    ("poolside_v1", "poolside_v1"), ("glm47", "glm47"), ("qwen3", "qwen3_coder"),
    ("olmo3", "olmo3"), ("deepseek_r1", "llama3_json"), ("qwen3", "xlam"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tool"), PAIRS)
def test_a_familys_own_pair(name: str, tool: str) -> None:
    start, end = tags(name)
    text = f"{start}let me look{end}\n{RENDER[tool](SCENES['parallel'])}"
    chance = random.Random(0)
    want = parse(name, text, tool=tool)
    assert want.reasoning == "let me look"
    assert [(one.name, json.loads(one.arguments)) for one in want.calls] == SCENES["parallel"]
    for every in (1, *(chance.randint(2, 40) for _ in range(20))):
        found = parse(name, text, tool=tool, every=every)
        for call, other in zip(found.calls, want.calls, strict=True):
            assert (call.name, call.arguments) == (other.name, other.arguments)
        assert (found.reasoning, found.content) == (want.reasoning, want.content)


@pytest.mark.parametrize("name", sorted(HARMONY))
def test_harmony(name: str) -> None:
    thought = "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>analysis<|message|>Then.<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    for every in (0, 1, 3):
        found = parse(name, thought + final, every=every)
        assert (found.reasoning, found.content) == ("First.\nThen.", "It rains.")
        text = f"{thought}<|start|>assistant{RENDER['openai'](SCENES['parallel'])}"
        found = parse(name, text, tool="openai", every=every)
        assert found.reasoning == "First.\nThen."
        assert [(one.name, json.loads(one.arguments)) for one in found.calls] == SCENES["parallel"]
    bare = parse(name, RENDER["openai"](SCENES["one call"]))
    assert bare.calls == []
    assert "Paris" in bare.content


def test_identity_and_append() -> None:
    assert parse("identity", "<think>a</think>b").content == "<think>a</think>b"
    assert parse("minimax_m2_append_think", "a</think>b", every=1).content == "<think>a</think>b"


def test_reasoning_left_out() -> None:
    found = parse("qwen3", "<think>a</think>b", include_reasoning=False)
    assert (found.reasoning, found.content) == ("", "b")


def test_a_tag_in_the_answer_is_the_answer() -> None:
    found = parse("qwen3", "<think>a</think>The tag <think> opens and </think> closes.")
    assert found.content == "The tag <think> opens and </think> closes."
    assert parse("qwen3", "It is <think>.", prompt="assistant").content == "It is <think>."


def test_special_tokens_stay_only_where_a_tag_is_one() -> None:
    class Tokenizer:
        skipped_ids = frozenset({7})

        def __init__(self, text: str) -> None:
            self.text = text

        def id_to_token(self, token_id: int) -> str:
            return self.text

    kimi, qwen = find_tool_parser("kimi_k2"), find_reasoning_parser("qwen3")
    special = "<|tool_call_begin|>"
    assert ParserChoice(kimi, None, Tokenizer(special)).keeps_special_tokens(with_tools=True)
    assert not ParserChoice(kimi, None, Tokenizer(special)).keeps_special_tokens(with_tools=False)
    assert not ParserChoice(kimi, qwen, Tokenizer("<|im_end|>")).keeps_special_tokens(with_tools=True)
    assert ParserChoice(None, qwen, Tokenizer("</think>")).keeps_special_tokens(with_tools=False)
    harmony = find_reasoning_parser("openai_gptoss")
    assert ParserChoice(None, harmony, Tokenizer("<|channel|>")).keeps_special_tokens(with_tools=False)


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_is_reasoning_end() -> None:
    tokens = ReasoningTokens((1,), (2,))
    assert is_reasoning_end(tokens, [1, 5, 2, 6])
    assert not is_reasoning_end(tokens, [1, 5, 2, 1, 6])
    assert not is_reasoning_end(tokens, [5])


# ---- names and plug-ins --------------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'hermes'.*granite"):
        find_tool_parser("hermess")
    with pytest.raises(ConfigError, match="deepseek_r1"):
        find_reasoning_parser("nobody")


def test_a_plugin_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from quire.text.parse.json_calls import JsonBlocks\n"
        "from quire.text.parse.registry import TOOL_PARSERS\n"
        "from quire.text.parse.writer import ToolFormat\n"
        "TOOL_PARSERS.register('test_mine', ToolFormat(JsonBlocks(('<<',), ('>>',))))\n"
    )
    try:
        choice = ParserChoice.of(None, tool="test_mine", tool_plugin=str(file))
        parser = choice.parser(ParseRequest(tools=TOOLS))
        found = fold(parser.feed('a <<{"name": "now", "arguments": {}}>>', (), final=True))
        assert [(call.name, call.arguments) for call in found.calls] == [("now", "{}")]
    finally:
        TOOL_PARSERS._paths.pop("test_mine", None)
    with pytest.raises(ConfigError, match="no file"):
        load_plugin("nowhere.py", "tool_parser_plugin")
    file.write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_plugin(str(file), "tool_parser_plugin")
