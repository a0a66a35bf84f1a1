"""Calls that a request insists on: the JSON schema an answer must follow, and the format that reads it back.

`forced` is "" for some call to any of the tools (tool_choice "required": a list of {"name", "parameters"}), or the name
of the one function whose arguments the whole answer is. Objects are closed (closed.py). In: the tools of a request.
Must not know: grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.schema.errors import InputError
from quire.text.parse.closed import closed
from quire.text.parse.json_calls import JsonBlocks
from quire.text.parse.json_text import skip_space
from quire.text.parse.tags import ANYTHING, Steps, TextSource
from quire.text.parse.writer import DeltaWriter, ToolFormat

_DEFINITIONS = ("$defs", "definitions")
_LIST = ToolFormat(JsonBlocks((), bare="[{"), is_answer=True)


def forced_format(forced: str) -> ToolFormat:
    return ToolFormat(_whole_answer(forced), is_answer=True) if forced else _LIST


def forced_schema(tools: Sequence[Mapping[str, Any]], forced: str, *, parallel: bool) -> dict[str, Any]:
    """What the answer (after any thought) must be."""
    functions = [tool["function"] for tool in tools]
    if forced:
        chosen = next(function for function in functions if function["name"] == forced)
        return _parameters(chosen)
    shared: dict[str, dict[str, Any]] = {}
    calls = [_call_schema(function, shared) for function in functions]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, **shared}


def _call_schema(function: Mapping[str, Any], shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One function's call; what its schema refers to moves to the root, where references look for it."""
    parameters = _parameters(function)
    for key in _DEFINITIONS:
        definitions = parameters.pop(key, None)
        for name, definition in definitions.items() if isinstance(definitions, Mapping) else ():
            if shared.setdefault(key, {}).setdefault(name, definition) != definition:
                raise InputError(f"two tools define {key}/{name} differently; rename one of them", param="tools")
    return {
        "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments must be: of a function without parameters an object without keys."""
    made = closed(function.get("parameters") or {"properties": {}})
    return (
        made if any(key in made for key in ("type", "$ref", "anyOf", "oneOf", "allOf")) else {"type": "object", **made}
    )


def _whole_answer(name: str) -> Any:
    def read(source: TextSource, out: DeltaWriter) -> Steps[None]:
        if (yield from skip_space(source)):
            out.open(name)
            yield from source.span(ANYTHING, out.arguments)

    return read
