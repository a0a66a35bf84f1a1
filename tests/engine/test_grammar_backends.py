"""Every installed grammar backend over one corpus: random walks along its masks end in texts that the judge accepts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.config.extras import StructuredOutputsConfig
from quire.grammar.backend import BACKENDS, PACKAGES, Backend, GrammarVocabulary, Matcher, make_backend
from quire.grammar.request import make_spec
from quire.schema.errors import InputError
from quire.schema.grammar import GrammarSpec
from quire.schema.params import StructuredOutputsParams as Constraint
from tests.engine.schema_corpus import GRAMMARS, REGEXES, SCHEMAS, random_schema

EOS = 128
WORDS = [b'{"', b'":', b'", "', b'"}', b"tr", b"ue", b"alse", b"null", b"12", b" ", b"  ", b"},", b"]}", b"name", b"ab"]
WORDS += [letter.encode() for letter in "éèêüключ"]  # whole letters: what \w means beyond them is each backend's own
VOCABULARY = GrammarVocabulary(tokens=[bytes([i]) for i in range(128)] + [b""] + WORDS, size=300, ends=(EOS,))
CLOSERS = [i for i, word in enumerate(VOCABULARY.tokens) if word[-1:] in (b'"', b"}", b"]", b")")]
CHOICES = [["red", "green"], ["yes"], ["a", "ab", "abc"], ["a.b", "c|d", "(e)"], ["é", "ü"]]
LEAST = {"xgrammar": 20, "guidance": 45, "outlines": 20, "lm-format-enforcer": 12}  # schemas it takes of those below
MOST_TOKENS = 400


@pytest.fixture(params=sorted(PACKAGES))
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param][0])
    return str(request.param)


@lru_cache(maxsize=8)
def made(name: str) -> Backend:
    return make_backend(name, VOCABULARY)


def spec_of(name: str, **given: Any) -> GrammarSpec | None:
    """None: this backend is not given it."""
    try:
        return make_spec(Constraint(**given), StructuredOutputsConfig(backend=name, disable_fallback=True))
    except InputError:
        return None


def walk(backend: Backend, matcher: Matcher, dice: random.Random) -> str | None:
    """A text along the masks; None: it did not come to an end."""
    rows, said = np.zeros((1, VOCABULARY.words), np.int32), b""
    for step in range(MOST_TOKENS):
        rows[:] = 0
        backend.fill([matcher], rows, [0])
        assert matcher.fault() is None, matcher.fault()
        found = np.flatnonzero(np.unpackbits(rows.view(np.uint8)[0], bitorder="little")[: len(VOCABULARY.tokens)])
        may = [int(token) for token in found if token != EOS]
        if matcher.can_end() and (not may or dice.random() < 0.5):
            return said.decode()
        assert may, f"nothing may follow {said!r}"
        closers = [token for token in CLOSERS if token in may] if step > 12 else []
        token = dice.choice(closers or may)
        assert matcher.accept(token), (said, token)
        said += VOCABULARY.tokens[token]
    return None


def judge(name: str, constraints: list[dict[str, Any]], accepts: Callable[[str, int], bool]) -> int:
    """How many of them this backend takes; all texts of those are right."""
    backend, dice, taken, ended = made(name), random.Random(5), 0, 0
    for i, given in enumerate(constraints):
        if (spec := spec_of(name, **given)) is None:
            continue
        try:
            compiled = backend.compile(spec)
        except ValueError:  # then the next backend is asked
            continue
        taken += 1
        loaded = backend.load(spec, compiled)
        for _ in range(2):
            text = walk(backend, backend.start(loaded), dice)
            ended += text is not None
            assert text is None or accepts(text, i), (name, given, text)
    assert ended >= taken, f"{ended} of {2 * taken} walks came to an end"
    return taken


def test_json(name: str) -> None:
    dice = random.Random(3)
    plain = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "boolean"}},
             "required": ["a"], "additionalProperties": False}  # fmt: skip
    nested = {"type": "array", "items": plain, "minItems": 1, "maxItems": 2}
    more = [{"type": "object", "properties": {"p": part, "q": {"type": "integer"}}, "required": ["p", "q"]}
            for part in (plain, nested, {"type": "null"}, {"type": "string", "enum": ["x", "y"]}, {"type": "boolean"},
                         {"type": "array", "items": {"type": "boolean"}, "maxItems": 3})]  # fmt: skip
    schemas = [plain, nested, *more, *SCHEMAS, *(random_schema(dice) for _ in range(30))]

    def accepts(text: str, i: int) -> bool:
        return bool(jsonschema.Draft202012Validator(schemas[i]).is_valid(json.loads(text)))

    assert judge(name, [{"json": schema} for schema in schemas], accepts) >= LEAST[name]
    compact = judge(name, [{"json": s, "disable_any_whitespace": True} for s in more],
                    lambda text, i: " " not in re.sub('"[^"]*"', "", text) and accepts(text, i + 2))  # fmt: skip
    assert compact or name == "lm-format-enforcer"


def test_regexes(name: str) -> None:
    taken = judge(name, [{"regex": one} for one in REGEXES], lambda text, i: bool(re.fullmatch(REGEXES[i], text)))
    assert taken >= 20


def test_classes_of_letters_are_pythons(name: str) -> None:
    """Letters that Unicode, ASCII and Python's re do not agree about."""
    letters = [chr(code) for code in (*range(33, 127), 0x1C, 0xB2, 0xBD, 0xE9, 0x301, 0x660, 0x200D, 0x2167, 0x4E00)]
    vocabulary = GrammarVocabulary(
        tokens=[*(letter.encode() for letter in letters), b""], size=200, ends=(len(letters),)
    )
    backend = make_backend(name, vocabulary)
    for source in (r"\w", r"[\w.-]", r"[^\w\s]", r"\W", r"\S", r"\d", r"[^\d]", r"[^\W\d]"):
        for given in ({"regex": source}, {"json": {"type": "string", "pattern": f"^{source}$"}}):
            if (spec := spec_of(name, **given)) is None or name in ("outlines", "lm-format-enforcer"):
                continue
            matcher, rows = (
                backend.start(backend.load(spec, backend.compile(spec))),
                np.zeros((1, vocabulary.words), np.int32),
            )
            assert "json" not in given or matcher.accept(letters.index('"'))
            backend.fill([matcher], rows, [0])
            bits = np.unpackbits(rows.view(np.uint8)[0], bitorder="little")
            said = [letter for letter, bit in zip(letters, bits, strict=False) if bit and letter not in '"\\']
            assert said and all(re.fullmatch(source, letter) for letter in said), (given, said)


def test_choices_and_grammars(name: str) -> None:
    assert judge(name, [{"choice": one} for one in CHOICES], lambda text, i: text in CHOICES[i]) >= 4
    answers = list(GRAMMARS.values())
    taken = judge(name, [{"grammar": one} for one in GRAMMARS], lambda text, i: text in answers[i])
    assert taken == {"xgrammar": 2, "guidance": 4}.get(name, 0)


def test_going_back(name: str) -> None:
    backend, spec = made(name), spec_of(name, regex="ab[0-9]c")
    assert spec is not None
    matcher = backend.start(backend.load(spec, backend.compile(spec)))
    assert all(matcher.accept(token) for token in b"ab7c") and matcher.can_end()
    matcher.rollback(2)
    assert not matcher.can_end() and matcher.accept(ord("1")) and matcher.accept(ord("c")) and matcher.can_end()
    assert not matcher.accept(ord("x"))


GOING = [{"regex": r"(ab|[0-9]{2,4}|é+)*c"}, {"choice": ["abc", "abd", "xyz"]}, {"json": {
    "type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["a", "b"], "additionalProperties": False}}]  # fmt: skip


def test_any_way_there_and_back(name: str) -> None:
    """Accepted, refused and taken back in any order: the mask is that of a matcher that was told what is left."""
    backend, dice, compared = made(name), random.Random(11), 0

    def mask(matcher: Matcher) -> bytes:
        rows = np.zeros((1, VOCABULARY.words), np.int32)
        backend.fill([matcher], rows, [0])
        return rows.tobytes()

    for given in GOING:
        spec = spec_of(name, **given)
        assert spec is not None, (name, given)
        loaded = backend.load(spec, backend.compile(spec))
        for _ in range(6):
            matcher, said = backend.start(loaded), list[int]()
            for _ in range(40):
                bits = np.unpackbits(np.frombuffer(mask(matcher), np.uint8), bitorder="little")
                may = [int(i) for i in np.flatnonzero(bits[: len(VOCABULARY.tokens)]) if i != EOS]
                roll = dice.random()
                if said and (roll < 0.3 or not may):
                    count = dice.randint(1, min(len(said), 8))
                    matcher.rollback(count)
                    del said[-count:]
                elif roll < 0.4:
                    never = next(i for i in range(128) if i not in may)
                    assert not matcher.accept(never)
                else:
                    for token in dice.sample(may, 1):
                        assert matcher.accept(token)
                        said.append(token)
                fresh = backend.start(loaded)
                assert all(fresh.accept(token) for token in said)
                assert mask(matcher) == mask(fresh) and matcher.can_end() == fresh.can_end(), (given, said)
                assert matcher.fault() is None
                compared += 1
    assert compared > 500


def test_the_names_are_those_of_the_option() -> None:
    assert set(PACKAGES) <= set(BACKENDS.names())
