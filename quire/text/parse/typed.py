"""From the text of a parameter to JSON, by what the tool's schema says it is.

In: text as it stood between two tags, and the parameter schemas of the tools. Out: JSON text. Nothing is evaluated:
JSON is read as JSON, Python's literals by python_values.py; what fits no type stays a string. Must not know: formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.parse.json_text import quoted
from quire.text.parse.python_values import literal_as_json

Types = frozenset[str]
TEXT: Types = frozenset({"string"})
ANY: Types = frozenset()  # nothing is known
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_MOST = 128  # schemas looked at for one parameter: references may go in circles
_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip


def parameter_types(tools: Mapping[str, Mapping[str, Any]], function: str, parameter: str) -> Types:
    """What a parameter may be; ANY if the tool does not say."""
    return types_of(*parameter_schema(tools, function, parameter))


def parameter_schema(
    tools: Mapping[str, Mapping[str, Any]], function: str, parameter: str
) -> tuple[Any, Mapping[str, Any]]:
    """(the parameter's schema or None, the function's)."""
    schema = tools.get(function)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(parameter) if isinstance(properties, Mapping) else None, schema or {}


def types_of(schema: Any, root: Mapping[str, Any]) -> Types:
    """What a value of this schema may be; `root`: what it refers to."""
    return _types(schema, root, [_MOST])


def has_parameter(tools: Mapping[str, Mapping[str, Any]], function: str, parameter: str) -> bool:
    """Whether a function lists this parameter; where it lists none at all, that cannot be told."""
    properties = tools.get(function, {}).get("properties")
    return not isinstance(properties, Mapping) or not properties or parameter in properties


def as_members(text: str) -> str | None:
    """What stands between the braces of a JSON object; None if the text is none."""
    read = read_json(text.strip())
    return read[1][1:-1] if read is not None and isinstance(read[0], dict) else None


def tool_schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    """{function: parameter schema} of a request's tools, whatever shape they have."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            schemas[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return schemas


def is_text(types: Types) -> bool:
    """Whether the value can be handed on as a string while it arrives."""
    return types == TEXT


def as_json(text: str, types: Types) -> str:
    """The value as JSON. With no types known, what reads as JSON is JSON."""
    bare = text.strip()
    if "number" in types and _NUMBER.fullmatch(bare):
        return bare  # however large
    read = read_json(bare)
    if read is not None:
        value, written = read
        kind = _KINDS[type(value)]
        if not types or kind in types or (kind == "integer" and "number" in types):
            return written
        if kind == "number" and "integer" in types and value == int(value):
            return str(int(value))
        if "string" not in types and kind != "string":
            return written
    lower = bare.lower()
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if "null" in types and lower in ("null", "none"):
        return "null"
    if types & {"object", "array"} and bare[:1] in ("{", "[", "("):
        literal = literal_as_json(bare)
        if literal is not None:
            return literal
    return quoted(text)


def read_json(text: str) -> tuple[Any, str] | None:
    """(value, the value written again) of strict JSON; None if it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _types(schema: Any, root: Mapping[str, Any], left: list[int]) -> Types:
    """`left`: how many schemas may still be looked at."""
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return ANY
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/")[:16]:
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, left)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({_name(named)})
    if isinstance(named, list):
        return frozenset(_name(one) for one in named if isinstance(one, str))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            options = [_types(one, root, left) for one in schema[key][:_MOST] if left[0] > 0]
            return frozenset().union(*options)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    kinds = frozenset(_KINDS.get(type(value), "string") for value in values[:64])
    if not kinds and "properties" in schema:
        return frozenset({"object"})
    return kinds or (frozenset({"array"}) if "items" in schema else ANY)


_NAMES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string", "int": "integer",
    "uint": "integer", "long": "integer", "short": "integer", "float": "number", "double": "number", "num": "number",
    "bool": "boolean", "binary": "boolean", "dict": "object", "map": "object", "list": "array", "arr": "array",
    "none": "null",
}  # fmt: skip


def _name(name: str) -> str:
    """Tools are also described with other languages' words."""
    lower = name.strip().lower()
    return _NAMES.get(lower, lower)
