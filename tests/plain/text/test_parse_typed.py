"""Values between tags, by the types of a tool's schema; and the schemas of calls that must be."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from quire.schema.errors import InputError
from quire.text.parse.base import fold
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.parse.forced import forced_schema
from quire.text.parse.python_values import literal_as_json
from quire.text.parse.typed import as_json, parameter_types, tool_schemas


def types(schema: Any, root: dict[str, Any] | None = None) -> set[str]:
    return set(parameter_types({"f": {"properties": {"a": schema}, **(root or {})}}, "f", "a"))


def test_types_of_a_parameter() -> None:
    assert types({"type": "string"}) == {"string"}
    assert types({"type": ["integer", "null"]}) == {"integer", "null"}
    assert types({"anyOf": [{"type": "string"}, {"type": "array"}]}) == {"string", "array"}
    assert types({"enum": ["a", 1, None]}) == {"string", "integer", "null"}
    assert types({"const": True}) == {"boolean"}
    assert types({"properties": {}}) == {"object"}
    assert types({"$ref": "#/$defs/x"}, {"$defs": {"x": {"type": "number"}}}) == {"number"}
    assert types({"type": "int"}) == {"integer"}
    for nonsense in (None, 5, {}, {"type": 5}, {"$ref": "#/nowhere"}, {"anyOf": 5}):
        assert types(nonsense) == set()


def test_references_in_circles_take_no_time() -> None:
    began = time.process_time()
    circle = {"anyOf": [{"$ref": "#/$defs/x"}] * 1000}
    assert types(circle, {"$defs": {"x": circle}}) == set()
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5", {"string", "integer"}, 5),
        ("five", {"integer"}, "five"),
        ("5", {"string", "null"}, "5"),
        ("null", {"string", "null"}, None),
        ("True", {"boolean"}, True),
        ("None", {"null"}, None),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': (1, None)}", {"object"}, {"a": [1, None]}),
        ("{broken", {"object"}, "{broken"),
        ("[1, 2", {"array"}, "[1, 2"),
        ("1e999", {"number"}, float("inf")),
        ("NaN", {"number"}, "NaN"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("anything", set(), "anything"),
        ("[1]", set(), [1]),
    ],
)  # fmt: skip
def test_values(text: str, kinds: set[str], value: Any) -> None:
    assert json.loads(as_json(text, frozenset(kinds))) == value


def test_python_literals() -> None:
    assert literal_as_json("{'a': [1, 2.5, 'x', None, True], 3: {}}") == '{"a": [1, 2.5, "x", null, true], "3": {}}'
    assert literal_as_json("[1, 2") is None
    assert literal_as_json("[1] + [2]") is None
    assert literal_as_json("[" * 1000) is None
    assert literal_as_json("__import__('os')") is None


def test_tools_in_every_shape() -> None:
    given = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}, {"name": "g"}, 5, {"function": 5}]
    assert tool_schemas(given) == {"f": {"a": 1}, "g": {}}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_schema_of_calls_that_must_be() -> None:
    tools = [tool("f", type="object", **{"$defs": {"x": {"type": "string"}}}), tool("g", type="object")]
    schema = forced_schema(tools, "", parallel=True)
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    assert schema["$defs"] == {"x": {"type": "string"}}
    assert [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]] == [["f"], ["g"]]
    assert forced_schema(tools, "", parallel=False)["maxItems"] == 1
    assert forced_schema(tools, "g", parallel=True) == {"type": "object"}
    other = tool("h", **{"$defs": {"x": {"type": "number"}}})
    with pytest.raises(InputError, match=r"\$defs/x"):
        forced_schema([*tools, other], "", parallel=True)
    assert "$defs" not in forced_schema([tool("f", **{"$defs": 5})], "", parallel=True)


def test_forced_answers_are_read_back() -> None:
    tools = [tool("f", type="object")]
    for text, forced, calls in (
        ('[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]', "", ['{"a": 1}', "{}"]),
        ('{"a": [1, 2]}', "f", ['{"a": [1, 2]}']),
        ("", "f", []),
    ):
        for every in (1, 1000):
            parser = ParserChoice().parser(ParseRequest(tools=tools, forced=forced))
            pieces = [text[at : at + every] for at in range(0, len(text), every)]
            found = fold(d for piece in pieces for d in parser.feed(piece, (), final=False))
            rest = fold(parser.feed("", (), final=True))
            assert [call.arguments for call in found.calls] == calls
            assert (found.content, rest.content, rest.calls) == ("", "", [])
