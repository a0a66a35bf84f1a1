"""grammar/request.py, schema.py, regex.py, choose.py: what a constraint needs and what is refused, with no compile."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from functools import reduce
from typing import Any

import pytest

from quire.config.extras import StructuredOutputsConfig
from quire.grammar import choose
from quire.grammar.regex import read_regex
from quire.grammar.request import make_spec
from quire.grammar.schema import MOST_DEPTH, read_schema
from quire.schema.errors import ConfigError, InputError, MissingExtraError
from quire.schema.grammar import GrammarKind, GrammarSpec
from quire.schema.params import SamplingParams, StructuredOutputsParams

AUTO = StructuredOutputsConfig()


def spec_of(config: StructuredOutputsConfig = AUTO, **given: Any) -> GrammarSpec:
    return make_spec(StructuredOutputsParams(**given), config)


@pytest.mark.parametrize(
    ("given", "kind", "first"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, GrammarKind.JSON, "xgrammar"),
        ({"json": '{"type": "boolean"}'}, GrammarKind.JSON, "xgrammar"),
        ({"json": {"type": "string", "pattern": "^a"}}, GrammarKind.JSON, "guidance"),
        ({"json": {"type": "string", "format": "date"}}, GrammarKind.JSON, "guidance"),
        ({"json": {"oneOf": [{"type": "string"}, {"type": "null"}]}}, GrammarKind.JSON, "guidance"),
        ({"json": {"type": "number", "minimum": 1.5}}, GrammarKind.JSON, "guidance"),
        ({"json": {"type": "integer", "minimum": 1}}, GrammarKind.JSON, "xgrammar"),
        ({"json": {"minLength": 1}}, GrammarKind.JSON, "guidance"),
        ({"json": {"type": "string", "maxLength": 100}}, GrammarKind.JSON, "guidance"),
        ({"json": {"type": "string", "maxLength": 1000}}, GrammarKind.JSON, "guidance"),
        ({"regex": "(a?){500}a{500}b{900}"}, GrammarKind.REGEX, "xgrammar"),
        ({"json": {"type": "string", "enum": ["a"]}}, GrammarKind.JSON, "xgrammar"),
        ({"json": {"type": "string", "enum": ["a", 1]}}, GrammarKind.JSON, "guidance"),
        ({"json": {"anyOf": [{"type": "null"}], "minimum": 1}}, GrammarKind.JSON, "guidance"),
        ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(40)}}}, GrammarKind.JSON, "guidance"),
        ({"json": {"type": "object"}, "whitespace_pattern": "[ ]?"}, GrammarKind.JSON, "guidance"),
        ({"json_object": True}, GrammarKind.JSON, "xgrammar"),
        ({"regex": "[a-z]+"}, GrammarKind.REGEX, "xgrammar"),
        ({"regex": "(?i)yes"}, GrammarKind.REGEX, "guidance"),
        ({"regex": r"\p{L}+"}, GrammarKind.REGEX, "guidance"),
        ({"choice": ["a", "b"]}, GrammarKind.CHOICE, "xgrammar"),
        ({"choice": [str(i) for i in range(3000)]}, GrammarKind.CHOICE, "guidance"),
        ({"grammar": 'root ::= "a"'}, GrammarKind.EBNF, "xgrammar"),
        ({"grammar": 'start: "a"'}, GrammarKind.LARK, "guidance"),
        ({"structural_tag": '{"format": {"type": "any_text"}}'}, GrammarKind.STRUCTURAL_TAG, "xgrammar"),
    ],
)
def test_auto_chooses_by_what_is_needed(given: dict[str, Any], kind: GrammarKind, first: str) -> None:
    spec = spec_of(**given)
    assert (spec.kind, spec.backends[0]) == (kind, first)


def test_a_named_backend_falls_back_unless_told_not_to() -> None:
    given = {"json": {"type": "string", "pattern": "a"}}
    assert spec_of(StructuredOutputsConfig(backend="xgrammar"), **given).backends == ("guidance",)
    with pytest.raises(InputError, match=r"'xgrammar' does not support 'pattern'.*disable_fallback"):
        spec_of(StructuredOutputsConfig(backend="xgrammar", disable_fallback=True), **given)
    assert spec_of(StructuredOutputsConfig(backend="guidance"), choice=["a"]).backends == ("guidance", "xgrammar")


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_is_installed", lambda name: False)
    with pytest.raises(MissingExtraError, match=r'pip install "quire-llm\[xgrammar\]"'):
        spec_of(choice=["a"])
    monkeypatch.setattr(choose, "_is_installed", lambda name: name == "guidance")
    assert spec_of(choice=["a"]).backends == ("guidance",)
    with pytest.raises(MissingExtraError, match=r'pip install "quire-llm\[xgrammar\]"'):
        spec_of(StructuredOutputsConfig(backend="xgrammar"), choice=["a"])


@pytest.mark.parametrize("keyword", ["not", "if", "dependentRequired", "contains", "unevaluatedProperties",
                                     "propertyNames", "dependentSchemas", "uniqueItems"])  # fmt: skip
def test_a_keyword_that_nobody_enforces_is_refused_by_name_and_place(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", keyword: {"type": "integer"}}}}
    with pytest.raises(InputError, match=f"'{keyword}' at '#/properties/a'"):
        spec_of(json=schema)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    assert spec_of(json={"type": "object", "properties": {"not": {"type": "string"}, "if": {}}}).backends


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "a schema is an object"),
        ({"json": {"type": "strin"}}, "'strin'"),
        ({"json": {"type": []}}, "empty list"),
        ({"json": {"enum": []}}, "enum at '#'"),
        ({"json": {"anyOf": []}}, "anyOf at '#'"),
        ({"json": {"properties": [1]}}, "properties at '#'"),
        ({"json": {"required": "a"}}, "required at '#'"),
        ({"json": {"type": "string", "pattern": r"(?=a)"}}, "pattern at '#'"),
        ({"json": "false"}, "no answer could be valid"),
        ({"json": 5}, "got int"),
        ({"regex": "(a"}, "not closed"),
        ({"regex": "[a"}, "not closed"),
        ({"regex": "a)"}, "without"),
        ({"regex": r"(a)\1"}, "back reference"),
        ({"regex": r"\bword"}, "word boundary"),
        ({"regex": "(?<!a)b"}, "look-around"),
        ({"regex": "((a{1000}){1000}){1000}"}, "repeats something 1000000 times"),
        ({"regex": "(" * 200 + "a" + ")" * 200}, "nests groups deeper than 100"),
        ({"regex": "a" * 70_000}, "70000 characters"),
        ({"choice": []}, "not empty"),
        ({"choice": ["a", 1]}, "list of strings"),
        ({"choice": ["a"] * 20_001}, "20001 entries"),
        ({"grammar": "  "}, "not empty"),
        ({"structural_tag": "{}"}, "'format'"),
        ({"structural_tag": '{"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}'}, "no trigger"),
        ({"json": {"type": "object"}, "whitespace_pattern": "["}, "not closed"),
        ({"regex": "a", "whitespace_pattern": " "}, "for json only"),
        ({"choice": ["\ud800"]}, "cannot be written"),
    ],
)
def test_bad_constraints_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        spec_of(**given)
    assert words in str(caught.value)
    assert caught.value.param == "structured_outputs"


def test_exactly_one_constraint() -> None:
    for given in ({}, {"json": {}, "regex": "a"}):
        with pytest.raises(InputError, match="exactly one"):
            StructuredOutputsParams(**given)
    with pytest.raises(InputError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"choice": ["a"]})


@pytest.mark.parametrize(
    "schema",
    [
        reduce(lambda inner, _: {"type": "array", "items": inner}, range(5000), {}),
        {"type": "object", "properties": {str(i): {"type": "string"} for i in range(30_000)}},
        "[" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        json.dumps({"type": "string", "description": "x" * 10_000_000}),
    ],
    ids=["deep", "wide", "unclosed", "deep text", "10 MB"],
)
def test_hostile_schemas_are_refused_at_once(schema: Any) -> None:
    began = time.process_time()  # of computing: the clock on the wall would measure who else is there
    with pytest.raises(InputError):
        spec_of(json=schema)
    assert time.process_time() - began < 5.0


def test_depth_is_counted_by_schemas() -> None:
    read_schema(reduce(lambda inner, _: {"type": "array", "items": inner}, range(MOST_DEPTH), {"type": "null"}))
    with pytest.raises(InputError, match=f"deeper than {MOST_DEPTH}"):
        read_schema(reduce(lambda inner, _: {"type": "array", "items": inner}, range(MOST_DEPTH + 1), {}))


def test_an_empty_schema_asks_for_an_object() -> None:
    assert json.loads(spec_of(json={}).text)["type"] == "object"


def test_undeclared_keys_can_be_shut_out() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    text = json.loads(spec_of(json=schema, disable_additional_properties=True).text)
    assert text["additionalProperties"] is False
    assert text["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in json.loads(spec_of(json=schema).text)


def test_a_dot_is_spelt_out_for_xgrammar() -> None:
    assert read_regex(r"a.\.[.]b").for_xgrammar == r"a[^\n]\.[.]b"


def test_equal_constraints_are_equal_specs() -> None:
    assert spec_of(json={"type": "null"}) == spec_of(json='{"type":   "null"}')
    assert hash(spec_of(choice=["a"])) == hash(spec_of(choice=["a", "a"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"disable_any_whitespace": True}, "backend is 'auto'"),
        ({"disable_additional_properties": True, "backend": "xgrammar"}, "needs backend guidance"),
    ],
)
def test_options_that_need_a_backend(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StructuredOutputsConfig(**given)
    StructuredOutputsConfig(**{**given, "backend": "guidance"})


def test_every_backend_can_be_named_and_falls_back() -> None:
    for name in ("outlines", "lm-format-enforcer"):
        pytest.importorskip(choose.PACKAGES[name][0])
        config = StructuredOutputsConfig(backend=name)
        assert spec_of(config, choice=["a"]).backends[0] == name
        assert name not in spec_of(config, json={"type": "integer", "minimum": 3}).backends
        with pytest.raises(InputError, match=f"'{name}' does not support 'minimum'; xgrammar might, but"):
            spec_of(
                StructuredOutputsConfig(backend=name, disable_fallback=True), json={"type": "integer", "minimum": 3}
            )


@pytest.mark.parametrize("name", ["outlines", "lm-format-enforcer"])
def test_the_extras_that_are_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(choose, "_is_installed", lambda one: one == "guidance")
    with pytest.raises(MissingExtraError, match=rf'pip install "quire-llm\[{name}\]"'):
        spec_of(StructuredOutputsConfig(backend=name), choice=["a"])


def test_the_reason_for_another_backend_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    choose._logged.clear()
    with caplog.at_level("INFO", logger="quire.grammar.choose"):
        assert spec_of(json={"type": "integer", "multipleOf": 7}).backends == ("guidance",)
    assert "xgrammar does not do 'multipleOf'" in caplog.text


@pytest.mark.parametrize(
    "source",
    ["a{" + "9" * 65_000, "\\p{" * 21_000, "(?<" + "a" * 65_000, "(?" + "a" * 65_000, "a{1" + "1," * 32_000],
    ids=["number", "property", "name", "flags", "bounds"],
)  # fmt: skip
def test_a_regex_is_read_in_one_pass(source: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(InputError):
        read_regex(source)
    assert time.thread_time() - began < 3.0  # reading it again at every letter takes minutes


@pytest.mark.parametrize("repeat", ["9" * 5000, "1," + "9" * 5000, "9" * 5000 + ","])
def test_a_repeat_of_thousands_of_digits_is_refused(repeat: str) -> None:
    with pytest.raises(InputError, match="5000 digits"):
        read_regex(f"a{{{repeat}}}")
    read_regex("a{" + "0" * 5000 + "7}")


@pytest.mark.parametrize("required", [5, [{}], [5], "a", {"a": 1}])
def test_required_is_a_list_of_names(required: Any) -> None:
    with pytest.raises(InputError, match="list of names"):
        read_schema({"type": "object", "properties": {"a": {}}, "required": required})


def test_a_schema_of_unknown_keywords_is_read_in_one_pass() -> None:
    began = time.process_time()
    needs = read_schema({f"unknown-{i}": 1 for i in range(60_000)})
    assert time.process_time() - began < 5.0 and 0 < len(needs.not_xgrammar) < 100


def test_a_long_name_is_not_kept_for_each_of_its_children() -> None:
    schema = {"properties": {"x" * 300_000: {"properties": {f"p{i}": {} for i in range(1000)}}}}
    tracemalloc.start()
    try:
        read_schema(schema)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_words_of_a_client_come_to_the_log_escaped(caplog: pytest.LogCaptureFixture) -> None:
    choose._logged.clear()
    with caplog.at_level("INFO", logger="quire.grammar.choose"):
        spec_of(json={"type": "object", "made\nup \x1b[31m": 1})
    assert "made\\nup" in caplog.text and "\x1b" not in caplog.text


BACKENDS = ["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]
NUMBER = {"type": "integer"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("#/nowhere", "does not exist"), ("#/$defs/missing", "does not exist"), ("#/$defs/n/type", "exist"),
        ("#missing", "does not exist"), ("other.json", "does not exist"), ("https://a.example/s#/x", "does not exist"),
        ("file:///etc/passwd", "does not exist"), ("http://[", "does not exist"), ("#/required/0", "does not exist"),
        ("#/required/99999999999", "does not exist"), (5, "not a string"), (None, "not a string"),
        (["#"], "not a string"),
        ("#/properties/a", "back to itself"), ("#/$defs/x", "back to itself"),
    ],
)  # fmt: skip
def test_a_reference_that_names_nothing_is_refused_on_every_backend(backend: str, ref: Any, words: str) -> None:
    circle = {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}} if ref == "#/$defs/x" else {}
    schema = {"type": "object", "properties": {"a": {"$ref": ref}}, "required": ["a"], "$defs": {"n": NUMBER, **circle}}
    with pytest.raises(InputError, match=words):
        spec_of(json=schema, config=StructuredOutputsConfig(backend=backend))
    with pytest.raises(InputError, match=words):
        form = {"type": "json_schema", "json_schema": schema}
        spec_of(structural_tag=json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize(
    ("ref", "more", "plain"),
    [
        ("#/$defs/n", {"$defs": {"n": NUMBER}}, True),
        ("#/definitions/n", {"definitions": {"n": {"$ref": "#/definitions/m"}, "m": NUMBER}}, True),
        ("#/$defs/n", {"$id": "https://example.com/s", "$defs": {"n": NUMBER}}, True),
        ("#", {}, True),
        ("#/$defs/n~1m", {"$defs": {"n/m": NUMBER}}, False),
        ("#/$defs/n%20m", {"$defs": {"n m": NUMBER}}, False),
        ("#n", {"$defs": {"n": {"$anchor": "n", **NUMBER}}}, False),
        ("#n", {"$defs": {"n": {"$id": "#n", **NUMBER}}}, False),
        ("t", {"$id": "https://example.com/s", "$defs": {"n": {"$id": "t", **NUMBER}}}, False),
        ("https://example.com/s#/$defs/n", {"$id": "https://example.com/s", "$defs": {"n": NUMBER}}, False),
        ("#/anyOf/0", {"anyOf": [NUMBER, {"type": "null"}]}, False),
        ("#/$defs/o", {"$defs": {"o": {"$id": "o", "$defs": {"n": NUMBER}, "$ref": "#/$defs/n"}}}, False),
    ],
)
def test_a_reference_within_the_schema_is_served(ref: str, more: dict[str, Any], plain: bool) -> None:
    needs = read_schema({"type": "object", "properties": {"a": {"$ref": ref}}, **more})
    assert ("a '$ref' that is not a plain pointer" not in needs.not_xgrammar) == plain


def test_what_a_reference_names_is_read_wherever_it_stands() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/components/n"}}, "components": {"n": {"not": {}}}}
    with pytest.raises(InputError, match="'not'"):
        read_schema(schema)


def test_many_references_are_followed_once() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(9000)}
    began = time.thread_time()
    read_schema({"$ref": "#/$defs/d0", "$defs": {**chain, "d9000": NUMBER}})
    assert time.thread_time() - began < 3.0


def test_an_address_that_is_none_is_refused() -> None:
    for schema in ({"$ref": "http://["}, {"properties": {"a": {"$id": "http://[", "type": "integer"}}}):
        with pytest.raises(InputError, match="not an address"):
            read_schema({"$id": "https://example.com/s", "type": "object", **schema})
