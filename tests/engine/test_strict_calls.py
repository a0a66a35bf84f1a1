"""Strict tools under tool_choice auto, every parser: what its tag allows, the parser reads as calls of the schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.config.extras import StructuredOutputsConfig
from quire.grammar.backend import Backend, GrammarVocabulary, make_backend
from quire.grammar.request import make_spec
from quire.schema.errors import InputError
from quire.schema.params import StructuredOutputsParams as Constraint
from quire.text.parse.base import Folded, fold
from quire.text.parse.call_form import PythonValues
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.parse.registry import TOOL_PARSERS, find_tool_parser
from tests.plain.text.parse_corpus import RENDER, python_call

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "sure": {"type": "boolean"},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}},
                  "required": ["lat"], "additionalProperties": False},
    },
    "required": ["city", "days", "place"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "strict": True,
                                      "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
GIVEN = {
    "city": "Bonn é",
    "unit": "C",
    "days": 3,
    "sure": True,
    "place": {"lat": 1.5, "name": "x"},
}
CALLS = [("get_weather", GIVEN), ("now", {})]
FORMATS = [name for name in TOOL_PARSERS.names() if name != "hf"]
NAMES = sorted(name for name in FORMATS if find_tool_parser(name).forms)
FREE = sorted(set(FORMATS) - set(NAMES))
ONCE = sorted({find_tool_parser(name).forms: name for name in NAMES}.values())  # some families write alike
EOS, FIRST = 256, 257
TURNED = [("hermes", True), ("kimi_k2", False), ("deepseek_v32", False)]


def is_special(name: str) -> bool:
    """Tags of this form are special tokens, as a rule."""
    return any(mark in tag for tag in find_tool_parser(name).tags for mark in ("|", "｜", "["))


class Tokenizer:
    """Bytes, if `special` the tags of a format as special tokens, and words that end what a call is made of."""

    def __init__(self, name: str, special: bool) -> None:
        form = find_tool_parser(name)
        tags = [tag for tag in form.tags if special]
        self.tags = [tag for tag in dict.fromkeys(tags) if not any(other != tag and other in tag for other in tags)]
        self.skipped_ids = frozenset(range(EOS, FIRST + len(self.tags)))
        ends = [text for one in form.forms for text in (one.close, one.end, *vars(one.values).values()) if text]
        pieces = "|".join(map(re.escape, self.tags)) or "\0"
        texts = [text for text in ends if isinstance(text, str) and "{name}" not in text]
        self.words = [part for text in texts for part in re.split(pieces, text) if part.strip()]

    def id_to_token(self, token_id: int) -> str:
        return "<eos>" if token_id == EOS else self.tags[token_id - FIRST]

    def vocabulary(self) -> GrammarVocabulary:
        special = {FIRST + i: tag.encode() for i, tag in enumerate(self.tags)}
        tokens = [bytes([i]) for i in range(256)] + [b""] * (1 + len(self.tags)) + [w.encode() for w in self.words]
        return GrammarVocabulary(tokens=tokens, size=len(tokens) + 3, ends=(EOS,), special=special)

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            tag = next((i for i, tag in enumerate(self.tags) if text.startswith(tag)), None)
            if tag is not None:
                found.append(FIRST + tag)
                text = text[len(self.tags[tag]) :]
            else:
                found += text[0].encode()
                text = text[1:]
        return found

    def text(self, token_ids: list[int]) -> str:
        named = [*self.tags, *self.words]
        said = b"".join(bytes([i]) if i < EOS else named[i - FIRST].encode() for i in token_ids)
        return said.decode("utf-8", "replace")


class Held:
    """A format with its tag compiled."""

    def __init__(self, backend: str, name: str, special: bool, tools: list[Any] = TOOLS) -> None:
        self.tokenizer = Tokenizer(name, special)
        self.choice = ParserChoice(find_tool_parser(name), None, self.tokenizer)
        vocabulary = self.tokenizer.vocabulary()
        self.backend: Backend = make_backend(backend, vocabulary)
        self.num_tokens = len(vocabulary.tokens)
        self.rows = np.zeros((1, vocabulary.words), np.int32)
        tag = self.choice.strict_tag(tools, parallel=True)
        spec = make_spec(Constraint(structural_tag=tag), StructuredOutputsConfig())
        assert spec.backends == ("xgrammar", "guidance")
        self.loaded = self.backend.load(spec, self.backend.compile(spec))

    def takes(self, text: str) -> bool:
        matcher = self.backend.start(self.loaded)
        return all(matcher.accept(token) for token in self.tokenizer.encode(text)) and matcher.can_end()

    def parse(self, text: str) -> Folded:
        return fold(self.choice.parser(ParseRequest(tools=TOOLS)).feed(text, (), final=True))

    def say(self, begin: str, dice: random.Random) -> str:
        """`begin`, and then whatever the masks allow, to an end."""
        matcher, said = self.backend.start(self.loaded), self.tokenizer.encode(begin)
        for token in said:
            assert matcher.accept(token), (begin, self.tokenizer.text([token]))
        for step in range(600):
            self.rows[:] = 0
            self.backend.fill([matcher], self.rows, [0])
            bits = np.unpackbits(self.rows.view(np.uint8)[0], bitorder="little")[: self.num_tokens]
            may = [int(i) for i in np.flatnonzero(bits) if i != EOS]
            if matcher.can_end() and (not may or dice.random() < 0.3 + step / 100):
                return self.tokenizer.text(said)
            assert may, self.tokenizer.text(said)
            late = dice.random() < 0.4 + step / 40
            wanted = [i for i in may if i >= FIRST or chr(i) in "\"'}]),"] if late else []
            wanted = wanted or [i for i in may if 32 < i < 127 or i >= FIRST] or may
            token = dice.choice(wanted)
            assert matcher.accept(token), (self.tokenizer.text(said)[-80:], self.tokenizer.text([token]))
            said.append(token)
        raise AssertionError(f"no end: {self.tokenizer.text(said)[:2000]}")


def triggers(name: str) -> list[str]:
    forms = find_tool_parser(name).forms
    return [*(trigger for form in forms for trigger in form.triggers), *(form.bare[:1] for form in forms if form.bare)]


def test_those_that_cannot_be_held() -> None:
    assert FREE == ["xlam"]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
@pytest.mark.parametrize(("name", "special"), [(name, is_special(name)) for name in ONCE] + TURNED)
def test_a_call_is_held_to_its_schema(name: str, special: bool, backend: str) -> None:
    """What the masks allow, the parser reads as calls of the schema; and the model's own way is among it."""
    made, dice = Held(backend, name, special), random.Random(name)
    judges = {
        tool["function"]["name"]: jsonschema.Draft202012Validator(tool["function"]["parameters"]) for tool in TOOLS
    }
    for begin in triggers(name):
        for _ in range(3):
            text = made.say(begin, dice)
            found = made.parse(text)
            assert found.calls, text
            for call in found.calls:
                judges[call.name].validate(json.loads(call.arguments))
    calls: list[Any] = CALLS[:1] if name in ("gigachat3", "openai") else CALLS
    assert made.takes(own := own_way(name, calls)), own
    assert made.takes("Plain words: 1 < 2.")
    assert not made.takes(own_way(name, [("get_weather", {**GIVEN, "days": "many"})]))
    assert not made.takes(own_way(name, [("get_weather", {**GIVEN, "unit": "K"})]))
    assert not made.takes(own_way(name, [("get_whether", GIVEN)]))


@pytest.mark.parametrize("name", ["kimi_k3", "minimax_m3", "qwen3_coder"])
def test_a_tool_beside_a_strict_one_is_free(name: str) -> None:
    """Its arguments may be what they like, also where its tags are made of the same special tokens as its end."""
    free = {"function": {"name": "get_weather", "parameters": {**SCHEMA, "minProperties": 1}}}
    made = Held("xgrammar", name, is_special(name), [free, TOOLS[1]])
    assert made.takes(own_way(name, CALLS))
    assert made.takes(own_way(name, [("get_weather", {"city": "Bonn", "days": "many"})]))
    assert made.takes(own_way(name, [("now", {})]))
    assert not made.takes(own_way(name, [("now", {"city": "Bonn"})]))
    assert not made.takes(own_way(name, [("get_whether", GIVEN)]))


@pytest.mark.parametrize(
    "schema, says",
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "one of several types"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "'array'"),
        ({"type": "string", "pattern": "a+"}, "'pattern'"),
    ],
)
def test_what_elements_cannot_hold_is_refused_by_name(schema: dict[str, Any], says: str) -> None:
    tool = {"function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": schema}}}}
    with pytest.raises(InputError, match=says):
        ParserChoice(find_tool_parser("minimax_m3")).strict_tag([tool], parallel=True)
    tool["function"]["parameters"] = {"type": "object", "properties": {"a b": {"type": "string"}}}
    with pytest.raises(InputError, match="cannot be a tag"):
        ParserChoice(find_tool_parser("minimax_m3")).strict_tag([tool], parallel=True)


def own_way(name: str, calls: list[Any]) -> str:
    """As the family's template writes them."""
    text = RENDER[name](calls).removesuffix("<|call|>")
    if any(isinstance(form.values, PythonValues) for form in find_tool_parser(name).forms):
        text = text.replace(", ".join(map(python_call, calls)), ", ".join(python_call(c, True) for c in calls))
    return re.sub(', "id": "[a-z0-9]*"', "", text) if name == "mistral" else text


def test_a_parser_that_cannot_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"qwen3_coder.*required"):
        ParserChoice(find_tool_parser("xlam")).strict_tag(TOOLS, parallel=True)
    assert ParserChoice(find_tool_parser("xlam")).strict_tag([{"function": {"name": "f"}}], parallel=True) is None
