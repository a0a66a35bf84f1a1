"""Schemas of arguments with their objects closed: a call may not have a parameter that its function does not list.

JSON Schema leaves an object open unless it says otherwise; a function's parameters are read as the whole list. Objects
that list no properties stay as they are (they are maps), and so do those that several schemas describe together. In: a
schema as a request gave it. Out: a new one. Must not know: grammars, calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_SHARED = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas")
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalProperties", "contains")
_DEEPEST = 64


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema, in which objects with properties have no others unless they say so."""
    closed_schema: dict[str, Any] = _closed(schema, frozenset(_parts_of_others(schema, 0)), 0)
    return closed_schema


def _closed(schema: Any, left: frozenset[str], depth: int) -> Any:
    """`left`: names of definitions that describe only a part of some object."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema
    made = dict(schema)
    shared = any(key in schema for key in _SHARED)
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            part = key != "properties"
            made[key] = {
                name: one if part and name in left else _closed(one, left, depth + 1)
                for name, one in schema[key].items()
            }
    for key in _LISTS:
        if isinstance(schema.get(key), list) and "properties" not in schema:
            made[key] = [_closed(one, left, depth + 1) for one in schema[key]]
    for key in _ONES:
        if isinstance(schema.get(key), Mapping):
            made[key] = _closed(schema[key], left, depth + 1)
    if isinstance(schema.get("properties"), Mapping) and not shared and not any(key in schema for key in _SAYS):
        made["additionalProperties"] = False
    return made


def _parts_of_others(schema: Any, depth: int) -> set[str]:
    """Definitions that stand beside other schemas of the same object: in allOf, or next to properties."""
    names: set[str] = set()
    if depth > _DEEPEST:
        return names
    if isinstance(schema, list):
        return names.union(*(_parts_of_others(one, depth + 1) for one in schema))
    if not isinstance(schema, Mapping):
        return names
    joined = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
    if "properties" in schema:
        joined += [schema, *(one for key in _LISTS if isinstance(schema.get(key), list) for one in schema[key])]
    for one in joined:
        if isinstance(one, Mapping) and isinstance(one.get("$ref"), str):
            names.add(one["$ref"].rpartition("/")[2])
    return names.union(*(_parts_of_others(one, depth + 1) for one in schema.values()))
