"""Requirements of a JSON schema: keywords, sizes, and what a backend would not enforce exactly.

In: a parsed schema. Out: Needs, or an InputError that names the keyword and its location. Nothing is compiled here.
A keyword that no backend enforces is refused, because an answer that ignores it would not be valid; so is a
dangling reference, which some backends would treat as a schema of anything. Targets of references are checked too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.grammar.refs import References
from quire.grammar.regex import read_regex
from quire.schema.errors import InputError

MOST_DEPTH = 64
MOST_NODES = 20_000
LARGE_OPTIONAL = 24  # optional properties of one object from which xgrammar's compile time grows with their square
LARGE_VALUES = 1000
_PARAM = "structured_outputs"
_ENOUGH = 32  # reasons against a backend; a client may cause any number
_SHOWN = 200  # characters of a location

_NOTES = frozenset((
    "$schema", "$id", "$comment", "$anchor", "$vocabulary", "title", "description", "default", "example", "examples",
    "deprecated", "readOnly", "writeOnly", "discriminator", "contentEncoding", "contentMediaType", "strict", "nullable",
))  # fmt: skip
_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = frozenset((
    "type", "enum", "const", "$ref", "required", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
))  # fmt: skip
_KNOWN = _VALUES | {*_ONE, *_LISTS, *_NAMED}
# No constraint unless a keyword of another group is present too, by the standard.
_HARMLESS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_REFUSED = frozenset((
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems", "contains", "contentSchema",
    "unevaluatedItems", "unevaluatedProperties", "propertyNames", "$dynamicRef", "$recursiveRef", "$dynamicAnchor",
    "$recursiveAnchor",
))  # fmt: skip
# What xgrammar ignores or interprets differently than the standard.
_NOT_XGRAMMAR = (
    "pattern", "patternProperties", "format", "multipleOf", "oneOf", "allOf", "additionalItems", "minProperties",
    "maxProperties",
)  # fmt: skip
_TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "object": dict,
    "array": list,
}  # fmt: skip
_ALONE = ("$ref", "anyOf", "enum", "const")  # beside these xgrammar reads no other constraint


@dataclass
class Needs:
    """A constraint's requirements for a backend. `not_xgrammar`: reasons, in order of discovery, against xgrammar.
    `keywords`: those of a schema, and descriptions of unusual forms."""

    not_xgrammar: list[str] = field(default_factory=list)
    keywords: dict[str, None] = field(default_factory=dict)

    def note(self, reason: str) -> None:
        if len(self.not_xgrammar) < _ENOUGH and reason not in self.not_xgrammar:
            self.not_xgrammar.append(reason)

    def beyond(self, known: Collection[str]) -> str | None:
        """The first keyword or form that is not among these."""
        return next((name for name in self.keywords if name not in known), None)


class _Subschema(NamedTuple):
    """A schema within a schema."""

    node: object
    path: str
    depth: int
    base: str  # that references in it are relative to


def tag_part(name: object) -> str:
    """The description of a part of a structural tag."""
    return f"the part {name!r:.40} of a structural tag"


def read_schema(schema: object) -> Needs:
    """Walk the schema once, without recursion."""
    needs, references, num_nodes = Needs(), References(schema), 0
    waiting = [_Subschema(schema, "", 0, "")]
    referring: list[Mapping[str, Any]] = []
    while waiting:
        while waiting:
            part = waiting.pop()
            num_nodes += 1
            if num_nodes > MOST_NODES:
                raise _refuse(f"the schema has more than {MOST_NODES} parts", value=num_nodes)
            node = _read_part(part, needs)
            if node is None:
                continue
            base = references.enter(node, part.base)
            if "$ref" in node:
                referring.append(node)
            waiting += [_Subschema(child, path, part.depth + 1, base) for child, path in _children(node, part.path)]
        waiting = _read_references(referring, references, needs)
        referring = []
    return needs


def _read_part(part: _Subschema, needs: Needs) -> Mapping[str, Any] | None:
    """None: it is true or false, and has no subschemas."""
    node, path = part.node, part.path
    if part.depth > MOST_DEPTH:
        raise _refuse(f"the schema is nested deeper than {MOST_DEPTH} levels", value=part.depth)
    if isinstance(node, bool):
        if node is False and not path.endswith(("/additionalProperties", "/items", "/additionalItems")):
            needs.note("a schema that is false")
        if not path.endswith("/additionalProperties"):
            needs.keywords["a schema that is true or false"] = None
        return None
    if not isinstance(node, Mapping):
        raise _refuse(f"{_at(path)} is {node!r:.80}; a schema is an object, true or false", value=node)
    _read_node(node, path, needs)
    return node


def _read_references(referring: list[Mapping[str, Any]], references: References, needs: Needs) -> list[_Subschema]:
    """Targets of references that are not in the position of a subschema."""
    extra: dict[int, _Subschema] = {}
    for node in referring:
        target = references.find(node)
        if not references.is_plain(node):
            needs.note("a '$ref' that is not a plain pointer")
            needs.keywords["a '$ref' that is not a plain pointer"] = None
        if isinstance(target, Mapping) and not references.entered(target):
            extra[id(target)] = _Subschema(target, f"/…/{str(node['$ref']).rpartition('/')[2]}", 0, "")
    return list(extra.values())


def _children(node: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:
    path = path[: _SHOWN + 1]  # only for messages; each of many children has one
    for name in _ONE:
        if name in node:
            value = node[name]
            if isinstance(value, list):  # `items` as a list, from before prefixItems
                yield from ((child, f"{path}/{name}/{i}") for i, child in enumerate(value))
            else:
                yield value, f"{path}/{name}"
    for name in _LISTS:
        if name in node:
            if not isinstance(node[name], list) or not node[name]:
                raise _refuse(f"{name} at {_at(path)} must be a list of schemas that is not empty")
            yield from ((child, f"{path}/{name}/{i}") for i, child in enumerate(node[name]))
    for name in _NAMED:
        if name in node:
            if not isinstance(node[name], Mapping):
                raise _refuse(f"{name} at {_at(path)} must map names to schemas")
            yield from ((child, f"{path}/{name}/{key:.{_SHOWN}}") for key, child in node[name].items())


def _read_node(node: Mapping[str, Any], path: str, needs: Needs) -> None:
    for name in node:
        if name in _REFUSED and not (name == "uniqueItems" and node[name] is False):
            raise _refuse(
                f"the JSON schema keyword '{name}' at {_at(path)} is not supported: no grammar backend enforces it",
                value=name,
            )
        if name not in _KNOWN and name not in _NOTES and name not in _HARMLESS and name != "uniqueItems":
            needs.note(f"the unknown keyword {name!r:.80}")
        if name in _NOT_XGRAMMAR:
            needs.note(f"'{name}'")
        if name not in _NOTES:
            needs.keywords[name] = None
    _read_object(node, path, needs)  # before anything assumes that `required` is a list of names
    _read_forms(node, needs)
    if "pattern" in node:
        _read_pattern(node["pattern"], path)
    _read_alone(node, needs)
    _read_type(node, path, needs)
    values = node.get("enum")
    if values is not None and (not isinstance(values, list) or not values):
        raise _refuse(f"enum at {_at(path)} must be a list that is not empty")
    if isinstance(values, list) and len(values) > LARGE_VALUES:
        needs.note(f"an enum of {len(values)} values")
    if isinstance(node.get("items"), list):
        needs.note("'items' as a list")


def _read_forms(node: Mapping[str, Any], needs: Needs) -> None:
    """What the simpler backends do not support although they know the keyword."""
    keywords = needs.keywords
    constraining = [name for name in node if name in _KNOWN and name not in ("$defs", "definitions")]
    kind = node.get("type")
    if isinstance(kind, list):
        keywords["several types"] = None
    if not constraining:
        keywords["a schema that takes anything"] = None
    if constraining == ["type"] and kind in ("object", "array"):
        keywords[f"an {kind} of anything"] = None
    if (
        any(name in node for name in _ALONE)
        and len(constraining) > 1
        and constraining not in (["type", "enum"], ["enum", "type"])
    ):
        keywords["a constraint beside another"] = None
    if "type" not in node and not any(name in node for name in _ALONE):
        keywords["a constraint without a 'type'"] = None
    if kind == "array" and "items" not in node:
        keywords["an array of anything"] = None
    if "pattern" in node and ("minLength" in node or "maxLength" in node):
        keywords["'pattern' beside a length"] = None
    values = node["enum"] if isinstance(node.get("enum"), list) else [node["const"]] if "const" in node else []
    for value in values:
        if not isinstance(value, str) or not value.isascii() or any(c in '\\"/' or ord(c) < 32 for c in value):
            keywords["a value that is not plain ASCII text"] = None
        if not isinstance(value, str | int | float | bool | None):
            keywords["a value that is a list or an object"] = None
    if "properties" in node and isinstance(node["properties"], Mapping):
        if set(node.get("required") or ()) - set(node["properties"]):
            keywords["a required property that is not declared"] = None
        if any(not name.isascii() or any(c in '\\"/' or ord(c) < 32 for c in name) for name in node["properties"]):
            keywords["a property whose name is not plain ASCII text"] = None
    elif kind == "object":
        keywords["an object of anything"] = None
    if isinstance(node.get("additionalProperties"), Mapping):
        keywords["'additionalProperties' with a schema"] = None


def _read_pattern(pattern: object, path: str) -> None:
    if not isinstance(pattern, str):
        raise _refuse(f"pattern at {_at(path)} must be a string")
    try:
        read_regex(pattern)
    except InputError as wrong:
        raise _refuse(f"pattern at {_at(path)}: {wrong}", value=wrong.value) from None


def _read_alone(node: Mapping[str, Any], needs: Needs) -> None:
    single = [name for name in _ALONE if name in node]
    if not single:
        return
    others = [name for name in node if name in _KNOWN and name not in (single[0], "$defs", "definitions")]
    if others == ["type"] and single[0] in ("enum", "const") and _all_of_type(node):
        return
    if others:
        needs.note(f"'{single[0]}' beside '{others[0]}'")


def _all_of_type(node: Mapping[str, Any]) -> bool:
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    values = node["enum"] if "enum" in node else [node["const"]]
    return isinstance(values, list) and all(any(_is_of(value, kind) for kind in kinds) for value in values)


def _is_of(value: object, kind: object) -> bool:
    expected = _TYPES.get(kind) if isinstance(kind, str) else None
    if expected is None or (isinstance(value, bool) and kind != "boolean"):
        return False
    return isinstance(value, expected)  # type: ignore[arg-type]


def _read_type(node: Mapping[str, Any], path: str, needs: Needs) -> None:
    declared = node.get("type")
    kinds = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if declared is not None and not kinds:
        raise _refuse(f"type at {_at(path)} is an empty list")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _refuse(
                f"type at {_at(path)} is {kind!r:.80}; it must be one of {', '.join(_TYPES)}", value=str(kind)[:80]
            )
    if declared is None and any(name in node for name in _VALUES - {"$ref", "enum", "const", "required"}):
        needs.note("a constraint without a 'type'")
    bounds = [n for n in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if n in node]
    if bounds and (kinds != ["integer"] or any(isinstance(node[n], bool | float) for n in bounds)):
        needs.note(f"'{bounds[0]}' of a number")
    if len(kinds) > 1 and any(name in node for name in _KNOWN - {"type", "$defs", "definitions"}):
        needs.note("a constraint beside several types")
    if node.get("maxLength") is not None or node.get("minLength"):
        needs.note("a string's length")  # it would allow control characters in the string, and take seconds
    if isinstance(most := node.get("maxItems"), int) and most > LARGE_VALUES:
        needs.note(f"a maxItems of {most}")


def _read_object(node: Mapping[str, Any], path: str, needs: Needs) -> None:
    required, properties = node.get("required", ()), node.get("properties")
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise _refuse(f"required at {_at(path)} must be a list of names")
    named = set(properties) if isinstance(properties, Mapping) else set()
    if set(required) - named:
        needs.note("a required property that is not declared")
    if len(named - set(required)) > LARGE_OPTIONAL:
        needs.note(f"{len(named - set(required))} optional properties")


def _at(path: str) -> str:
    return f"'#{path}'" if len(path) <= _SHOWN else f"'#{path[:_SHOWN]}…'"


def _refuse(message: str, *, value: object = None) -> InputError:
    return InputError(message, param=_PARAM, value=value)
