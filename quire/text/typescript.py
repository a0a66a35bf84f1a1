"""A JSON schema as the TypeScript that gpt-oss was trained on. In: a schema. Out: text, exactly as in oss-harmony.

What that package does not support (anyOf, $ref, const) is `any`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Default = Callable[[Mapping[str, Any]], str]  # how the default of a schema is written
_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def write_type(schema: Any, indent: str = "") -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(schema.get("oneOf"), list):
        return _variants(schema["oneOf"], indent, default=lambda one: _value(one["default"]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join("number" if one == "integer" else str(one) for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{write_type(schema['items'], indent)}[]" if schema.get("items") is not None else "Array<any>"
    if kind == "string" and (choices := _choices(schema)):
        return " | ".join(choices)
    return _NAMES.get(str(kind), "any")


def _object(schema: Mapping[str, Any], indent: str) -> str:
    about = f"{indent}// {schema['description']}\n" if isinstance(schema.get("description"), str) else ""
    properties = schema.get("properties")
    required = schema.get("required") or ()
    lines = [
        _property(name, one, indent, optional=name not in required)
        for name, one in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    return f"{about}{{\n{''.join(lines)}{indent}}}"


def _property(name: str, schema: Any, indent: str, *, optional: bool) -> str:
    field: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    variants = field.get("oneOf")
    about = field.get("description")
    lines = []
    if isinstance(field.get("title"), str):
        lines += [f"// {field['title']}", "//"]
    if isinstance(about, str) and not isinstance(variants, list):
        lines.append(f"// {about}")
    if isinstance(field.get("examples"), list) and field["examples"]:
        lines.append("// Examples:")
        lines += [f"// - {json.dumps(one, ensure_ascii=False)}" for one in field["examples"] if isinstance(one, str)]
    named = f"{name}?" if optional else name
    if isinstance(variants, list):
        first = variants[0] if variants and isinstance(variants[0], Mapping) else {}
        if isinstance(about, str) and first.get("description") != about:
            lines.append(f"// {about}")
        if "default" in field:
            lines.append(f"// default: {_value(field['default'])}")
        lines.append(f"{named}:{_variants(variants, indent, about if isinstance(about, str) else None)}\n{indent},")
    else:
        ending = f", // default: {_default(field)}" if "default" in field else ","
        lines.append(f"{named}: {_or_null(field, write_type(field, indent + '    '))}{ending}")
    return "".join(f"{indent}{line}\n" for line in lines)


def _variants(variants: list[Any], indent: str, about: str | None = None, default: Default | None = None) -> str:
    """`about`: what the property says of itself, which no variant says again, and the first then says nothing."""
    text = ""
    for number, one in enumerate(variants):
        variant: Mapping[str, Any] = one if isinstance(one, Mapping) else {}
        notes = []
        description = variant.get("description")
        if isinstance(description, str) and description != about and not (number == 0 and about is not None):
            notes.append(description)
        if "default" in variant:
            notes.append(f"default: {(default or _default)(variant)}")
        comment = f" // {' '.join(notes)}" if notes else ""
        text += f"\n{indent} | {_or_null(variant, write_type(variant, indent + '   '))}{comment}"
    return text


def _or_null(schema: Mapping[str, Any], written: str) -> str:
    return f"{written} | null" if schema.get("nullable") is True and "null" not in written else written


def _choices(schema: Mapping[str, Any]) -> list[str]:
    values = schema.get("enum")
    return [f'"{word}"' for word in values if isinstance(word, str)] if isinstance(values, list) else []


def _default(schema: Mapping[str, Any]) -> str:
    """Of a choice of words without its quotes."""
    default = schema["default"]
    return default if isinstance(default, str) and _choices(schema) else _value(default)


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
