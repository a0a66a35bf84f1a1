"""Every tool parser: the same calls and the same text however an answer is cut, nothing lost, nothing raised."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from quire.text.parse.base import Delta, Folded, fold
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.parse.forced import forced_schema
from quire.text.parse.registry import TOOL_PARSERS, find_tool_parser
from tests.plain.text.parse_corpus import BARE, LITERAL, RENDER, SCENES, SINGLE, TOOLS, Case
from tests.plain.text.parse_corpus_more import MORE
from tests.products import marked

NAMES = sorted(RENDER)
WORD = re.compile(r"[A-Za-z]{4,}")


def feed(name: str, pieces: Sequence[str], **asked: Any) -> list[Delta]:
    choice = ParserChoice(find_tool_parser(name))
    parser = choice.parser(ParseRequest(tools=TOOLS, **asked))
    found: list[Delta] = []
    for number, piece in enumerate(pieces):
        found += parser.feed(piece, (), final=number == len(pieces) - 1)
    return found


def parse(name: str, pieces: Sequence[str], **asked: Any) -> Folded:
    return fold(feed(name, pieces, **asked))


def shown(folded: Folded) -> Any:
    return folded.content, folded.reasoning, [(call.name, call.arguments) for call in folded.calls]


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def tokens(text: str) -> list[str]:
    """Roughly as a tokenizer cuts: words, marks, white space."""
    return re.findall(r"<[^<>\s]{1,40}>|\w{1,6}|\s+|[^\w\s]", text) or [""]


def random_cuts(text: str, count: int, seed: int) -> Iterator[list[str]]:
    chance = random.Random(seed)
    for _ in range(count):
        yield cut(text, chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 6))))


def cases(name: str) -> list[Case]:
    render, found = RENDER[name], []
    for title, calls in SCENES.items():
        if name in SINGLE:
            calls = calls[:1]
        found.append(Case(title, render(calls), calls))
        if name not in BARE:
            found.append(Case(f"{title}, text before", "Let me see: 1 < 2.\n" + render(calls), calls,
                              "Let me see: 1 < 2.\n"))  # fmt: skip
    if name != "openai":
        found.append(Case("text after", RENDER[name]([SCENES["one call"][0]]) + "\nDone.", SCENES["one call"], "Done."))
        found.append(Case("no call", "Plain [text] with <b>marks</b>, {braces} and (1 < 2).", [],
                          "Plain [text] with <b>marks</b>, {braces} and (1 < 2)."))  # fmt: skip
    found.append(Case("nothing", ""))
    found.append(Case("white space", " \n", [], " \n"))
    return found + LITERAL.get(name, []) + MORE.get(name, [])


NAMED = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots ernie45
functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b internlm jamba kimi_k2
lfm2 llama3_json llama4_json llama4_pythonic longcat minimax minimax_m2 mistral olmo3 openai phi4_mini_json pythonic
qwen3_coder qwen3_xml seed_oss solar_open2 step3 step3p5 xlam hy_v3 kimi_k3 ling3 mimo minicpm5 minimax_m3 poolside_v1
"""


def test_every_parser_has_a_corpus() -> None:
    """hf reads what a tokenizer says: tests/engine/test_parse_hf.py."""
    assert set(NAMED.split()) <= set(TOOL_PARSERS.names())
    assert sorted(set(TOOL_PARSERS.names()) - {"hf"}) == NAMES
    assert all(len(cases(name)) >= 12 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_means_what_it_says(name: str) -> None:
    for case in cases(name):
        found = parse(name, [case.text])
        calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
        assert calls == case.calls, (case.title, case.text)
        content = found.content.strip() if case.title == "text after" else found.content
        assert content == case.content, (case.title, case.text)
        assert found.reasoning == ""
        assert all(call.id for call in found.calls)
        assert len({call.id for call in found.calls}) == len(found.calls)


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_gives_the_same(name: str) -> None:
    """Whole, by character, by token and at 15 random places, also what breaks off or is damaged."""
    check_cuts(name, 15)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_any_of_many_cuts_gives_the_same(name: str) -> None:
    check_cuts(name, 200)


def check_cuts(name: str, most: int) -> None:
    text = RENDER[name](SCENES["types"])
    broken = [text[: len(text) // 2], text[:-4], text.replace('"', "", 1), text.replace(">", "", 1), text[5:]]
    for number, case in enumerate([*cases(name), *(Case("broken", one) for one in broken)]):
        want = shown(parse(name, [case.text]))
        count = 10 if case.title.endswith(", text before") else most
        cuts = (list(case.text) or [""], tokens(case.text), *random_cuts(case.text, count, number))
        for pieces in {tuple(one): one for one in cuts}.values():  # a short text is cut at the same places many times
            assert shown(parse(name, pieces)) == want, (case.title, pieces)


@pytest.mark.parametrize("name", NAMES)
def test_cut_off_anywhere(name: str) -> None:
    check_beginnings(name, every=5)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_cut_off_at_every_place(name: str) -> None:
    check_beginnings(name, every=1)


def check_beginnings(name: str, every: int) -> None:
    """Beginnings of an answer: no exception, the same whole and by character, and no word gone."""
    for title in ("parallel", "nested", "escapes"):
        text = RENDER[name](SCENES[title][: 1 if name in SINGLE else None])
        for end in range(0, len(text), every):
            want = shown(parse(name, [text[:end]]))
            assert shown(parse(name, list(text[:end]) or [""])) == want, text[:end]
            assert_words_kept(name, text[:end], want)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_answers(name: str) -> None:
    check_damaged(name, every=6)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_many_damaged_answers(name: str) -> None:
    check_damaged(name, every=1)


def check_damaged(name: str, every: int) -> None:
    """Every so many of 60 answers."""
    chance = random.Random(f"damage {name}")
    bits = [
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        "<",
        ">",
        "(",
        ")",
        ",",
        "=",
        ":",
        "\n",
        "\\u12",
        "null",
        "WORDY",
        "```",
    ]
    for title in ("parallel", "nested", "text"):
        text = RENDER[name](SCENES.get(title, SCENES["one call"])[: 1 if name in SINGLE else None])
        for number in range(60):
            damaged = text
            for _ in range(chance.randint(1, 3)):
                at = chance.randrange(len(damaged) + 1)
                if chance.random() < 0.5:
                    damaged = damaged[:at] + damaged[at + chance.randint(1, 8) :]
                else:
                    damaged = damaged[:at] + chance.choice(bits) + damaged[at:]
            if number % every:
                continue
            want = shown(parse(name, [damaged]))
            for pieces in (list(damaged) or [""], *random_cuts(damaged, 5, len(damaged))):
                assert shown(parse(name, pieces)) == want, pieces
            assert_words_kept(name, damaged, want)


def assert_words_kept(name: str, text: str, want: Any) -> None:
    """Words of the answer are in what is shown, but for those of the format itself."""
    if name == "openai":
        return  # a message's header is protocol, all of it
    own = {word.lower() for word in WORD.findall(RENDER[name]([("a", {"b": 1, "c": "d"}), ("a", {})]))}
    own |= {"functools", "function", "json", "true", "false", "null", "none", "string"}
    said = json.dumps(want, ensure_ascii=False).lower()
    plain = re.sub(r"<\|open\|>[^<>]*<\|sep\|>|<[/|｜]?[^<>]*>", " ", text)
    for word in WORD.findall(plain):
        lower = word.lower()
        part_of_own = any(lower in one or one in lower for one in own)
        assert lower in said or part_of_own, (word, text, want)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_stream(name: str) -> None:
    """A long string arrives in many parts, before its call is over."""
    city = "abcdefgh " * 50
    text = RENDER[name]([("get_weather", {"city": city})])
    half = feed(name, [*text[: text.index("abcdefgh") + 200], ""])
    parts = [delta.call.arguments for delta in half if delta.call is not None]
    assert "".join(parts).count("abcdefgh") >= 18
    assert len(parts) > 100


@pytest.mark.parametrize("name", NAMES)
def test_parallel_false_keeps_the_first(name: str) -> None:
    text = RENDER[name](SCENES["parallel"])
    found = parse(name, list(text), parallel=False)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == SCENES["parallel"][:1]


@pytest.mark.parametrize("name", NAMES)
def test_first_delta_of_a_call_names_it(name: str) -> None:
    seen: set[int] = set()
    for delta in feed(name, list(RENDER[name](SCENES["parallel"][: 1 if name in SINGLE else None]))):
        if delta.call is not None:
            assert (delta.call.name is not None) == (delta.call.index not in seen)
            assert (delta.call.id is not None) == (delta.call.index not in seen)
            seen.add(delta.call.index)


CUT = ["hermes", "llama3_json", "mistral", "kimi_k2", "deepseek_v31", "qwen3_coder", "glm45", "minimax_m3", "granite"]


@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_cut_off_is_no_call(name: str) -> None:
    """A whole answer shows its text; what a stream has shown by then is no JSON, so nobody makes the call."""
    text = RENDER[name]([("get_weather", {"city": "Paris, Texas"})])
    cut_at = text.index("Texas")
    found = parse(name, [text[:cut_at]])
    assert (found.calls, found.content) == ([], text[:cut_at])
    deltas = feed(name, list(text[:cut_at]))
    parts = [delta.call for delta in deltas if delta.call is not None]
    assert parts[0].name == "get_weather" and parts[-1].broken == text[:cut_at]
    with pytest.raises(ValueError):
        json.loads("".join(part.arguments for part in parts))
    both = parse(name, [text + "\n" + text[:cut_at]] if name != "granite" else [text])
    assert [json.loads(call.arguments) for call in both.calls] == [{"city": "Paris, Texas"}]


def test_a_forced_call_may_not_add_keys() -> None:
    """Objects are closed where they list their keys and say nothing of others, however deep; maps stay maps."""
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    parameters = {
        "properties": {
            "one": inner, "many": {"type": "array", "items": inner}, "map": {"type": "object"},
            "open": {**inner, "additionalProperties": True}, "either": {"anyOf": [inner, {"type": "null"}]},
            "both": {"allOf": [inner, {"$ref": "#/$defs/part"}]}, "named": {"$ref": "#/$defs/whole"},
        },
        "$defs": {"part": inner, "whole": inner},
    }  # fmt: skip
    before = json.dumps(parameters)
    tools = [{"function": {"name": "f", "parameters": parameters}}, {"function": {"name": "g"}}]
    named = forced_schema(tools, "f", parallel=True)
    assert json.dumps(parameters) == before
    closed = {**inner, "additionalProperties": False}
    assert named["type"] == "object" and named["additionalProperties"] is False
    assert named["properties"] == {
        "one": closed, "many": {"type": "array", "items": closed}, "map": {"type": "object"},
        "open": {**inner, "additionalProperties": True}, "either": {"anyOf": [closed, {"type": "null"}]},
        "both": {"allOf": [inner, {"$ref": "#/$defs/part"}]}, "named": {"$ref": "#/$defs/whole"},
    }  # fmt: skip
    assert named["$defs"] == {"part": inner, "whole": closed}
    for empty in ({"properties": {}}, {}, None):
        given = [{"function": {"name": "f", "parameters": empty}}]
        found = forced_schema(given, "f", parallel=True)
        assert (found["type"], found["properties"], found["additionalProperties"]) == ("object", {}, False)
        call = forced_schema(given, "", parallel=True)["items"]["anyOf"][0]
        assert call["properties"]["parameters"]["additionalProperties"] is False


HOSTILE = {
    "open tags": lambda render: render([("a", {"b": "c"})])[:12] * 60_000,
    "an open string": lambda render: render([("get_weather", {"city": "x" * 700_000})])[:-40],
    "brackets": lambda render: render([("get_weather", {"opts": {}})])[:-12].replace("{}", "") + "[{" * 300_000,
    "backslashes": lambda render: render([("get_weather", {"city": "Q"})]).replace("Q", "\\" * 700_000),
    "spaces": lambda render: render([("get_weather", {"city": "Q"})]).replace(" ", " " * 200_000),
    "angles": lambda render: "<" * 700_000,
    "half tags": lambda render: (render([("a", {})])[:5] + " ") * 100_000,
}  # fmt: skip


def hostile(name: str, size: int) -> None:
    for title, make in HOSTILE.items():
        text = make(RENDER[name])[:size]
        began = time.thread_time()
        parse(name, [text[at : at + 50] for at in range(0, len(text), 50)])
        spent = time.thread_time() - began
        assert spent < 60 * size / 1_000_000 + 5, (title, spent)  # a quadratic parser needs hours


@pytest.mark.parametrize("name", NAMES)
def test_hostile_answers(name: str) -> None:
    hostile(name, 60_000)


@pytest.mark.parametrize(
    "name",
    marked(
        ["hermes", "pythonic", "qwen3_coder", "deepseek_v3", "glm45", "gemma4", "openai"],
        ["hermes", "pythonic", "glm45"],
    ),
)
def test_a_hostile_megabyte(name: str) -> None:
    hostile(name, 1_000_000)


def test_ids() -> None:
    assert re.fullmatch(
        r"chatcmpl-tool-[0-9a-f]{32}", parse("hermes", [RENDER["hermes"](SCENES["one call"])]).calls[0].id
    )
    assert re.fullmatch(r"[0-9a-zA-Z]{9}", parse("mistral", [RENDER["mistral"](SCENES["one call"])]).calls[0].id)
    cohere = parse("cohere_command3", [RENDER["cohere_command3"](SCENES["parallel"])])
    assert [call.id for call in cohere.calls] == ["0", "1", "2"]  # the model's own, which it expects to see again
    kimi = parse("kimi_k2", [RENDER["kimi_k2"](SCENES["parallel"])])
    assert [call.id for call in kimi.calls] == ["functions.get_weather:0", "functions.now:1", "functions.get_weather:2"]
