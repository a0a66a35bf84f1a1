"""From StructuredOutputsParams to a GrammarSpec: validated, with its backends. Runs in the caller's process.

Every refusal is an InputError that names the limit or the keyword, in time and memory bounded by the size of the
input. Must not know: tokens, how anything is compiled.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from quire.config.extras import StructuredOutputsConfig
from quire.grammar import choose
from quire.grammar.regex import read_regex
from quire.grammar.schema import LARGE_VALUES, Needs, read_schema, tag_part
from quire.schema.errors import InputError
from quire.schema.grammar import GrammarKind, GrammarSpec
from quire.schema.params import StructuredOutputsParams

MOST_CHOICES = 20_000
MOST_PARTS = 100_000  # of a structural tag
_PARAM = "structured_outputs"
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def make_spec(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> GrammarSpec:
    compact = params.disable_any_whitespace or config.disable_any_whitespace
    if params.whitespace_pattern is not None:
        if params.json is None and not params.json_object:
            raise _refuse("whitespace_pattern is for json only")
        if compact:
            raise _refuse("whitespace_pattern and disable_any_whitespace cannot both be set")
        read_regex(params.whitespace_pattern)
    kind, text, needs = _read(params, config)
    if len(text) > config.max_grammar_bytes:
        raise _too_long(kind, len(text), config)
    spec = GrammarSpec(
        kind=kind,
        text=text,
        compact=compact and kind is GrammarKind.JSON,
        whitespace=params.whitespace_pattern,
        in_thought=isinstance(params.structural_tag, dict) and params.structural_tag.get("in_reasoning") is True,
    )
    return replace(spec, backends=choose.choose(spec, needs, config))


def _read(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> tuple[GrammarKind, str, Needs]:
    """Kind, text, and its requirements for a backend."""
    if params.json is not None:
        closed = params.disable_additional_properties or config.disable_additional_properties
        return _json(params.json, config, closed=closed)
    if params.json_object is not None:
        if params.json_object is not True:
            raise _refuse(f"json_object is {params.json_object!r}; omit it or set it to true")
        return GrammarKind.JSON, json.dumps(_ANY_OBJECT), read_schema(_ANY_OBJECT)
    if params.regex is not None:
        if not isinstance(params.regex, str):
            raise _refuse(f"regex must be a string, got {type(params.regex).__name__}")
        return GrammarKind.REGEX, params.regex, Needs(read_regex(params.regex).not_xgrammar)
    if params.choice is not None:
        return _choice(params.choice)
    if params.grammar is not None:
        if not isinstance(params.grammar, str) or not params.grammar.strip():
            raise _refuse("grammar must be a string that is not empty")
        return (GrammarKind.EBNF if "::=" in params.grammar else GrammarKind.LARK), params.grammar, Needs()
    return _tag(params.structural_tag, config)


def _json(schema: object, config: StructuredOutputsConfig, *, closed: bool) -> tuple[GrammarKind, str, Needs]:
    if isinstance(schema, str):
        if len(schema) > config.max_grammar_bytes:
            raise _too_long(GrammarKind.JSON, len(schema), config)
        schema = _parse(schema, "json")
    elif not isinstance(schema, dict | bool):
        raise _refuse(f"json must be a JSON schema (a mapping, or its text), got {type(schema).__name__}")
    try:
        schema = _whole_numbers(schema)
    except RecursionError:
        raise _refuse("the schema is nested too deeply") from None
    needs = read_schema(schema)
    if schema is False:
        raise _refuse("the schema is false, so no answer could be valid")
    if schema is True or schema == {}:
        schema = _ANY_OBJECT  # any value is valid; a bare number has no natural end
        needs = read_schema(schema)
    if closed:
        schema = _close(schema)
    return GrammarKind.JSON, _dump(schema), needs


def _whole_numbers(schema: Any) -> Any:
    """1.0 as 1: in JSON schema they are equal, and backends expect integers for counts and bounds."""
    if isinstance(schema, list):
        return [_whole_numbers(part) for part in schema]
    if isinstance(schema, dict):
        return {key: _whole_numbers(part) for key, part in schema.items()}
    return int(schema) if isinstance(schema, float) and schema.is_integer() and abs(schema) < 1 << 53 else schema


def _choice(entries: object) -> tuple[GrammarKind, str, Needs]:
    if not isinstance(entries, list | tuple) or not entries or not all(isinstance(word, str) for word in entries):
        raise _refuse("choice must be a list of strings that is not empty")
    if len(entries) > MOST_CHOICES:
        raise _refuse(f"choice has {len(entries)} entries; the limit is {MOST_CHOICES}", value=len(entries))
    distinct = list(dict.fromkeys(entries))
    reasons = [f"a choice of {len(distinct)}"] if len(distinct) > LARGE_VALUES else []
    if any(not word or any(ord(letter) < 32 for letter in word) for word in distinct):
        reasons.append("a choice with control characters, or an empty one")
    return GrammarKind.CHOICE, _dump(distinct), Needs(reasons)


def _tag(tag: object, config: StructuredOutputsConfig) -> tuple[GrammarKind, str, Needs]:
    """Either {structures, triggers}, or {"type": "structural_tag", "format": ...}."""
    if isinstance(tag, str) and len(tag) > config.max_grammar_bytes:
        raise _too_long(GrammarKind.STRUCTURAL_TAG, len(tag), config)
    parsed = _parse(tag, "structural_tag") if isinstance(tag, str) else tag
    if not isinstance(parsed, dict):
        raise _refuse("structural_tag must be JSON of an object")
    if "structures" not in parsed:
        if "format" not in parsed:
            raise _refuse("structural_tag needs 'format', or 'structures' and 'triggers'")
        needs = _read_parts(parsed["format"])
        return GrammarKind.STRUCTURAL_TAG, _dump({"type": "structural_tag", "format": parsed["format"]}), needs
    structures, triggers = parsed["structures"], parsed.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise _refuse("structural_tag needs a list of 'structures' and a list of 'triggers'")
    reasons: list[str] = []
    for one in structures:
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("begin", "end")):
            raise _refuse("each of structural_tag's structures needs 'begin' and 'end'")
        if not any(isinstance(t, str) and t and one["begin"].startswith(t) for t in triggers):
            raise _refuse(f"no trigger begins the structural tag {one['begin']!r:.80}")
        reasons += read_schema(one.get("schema") or {}).not_xgrammar
    rebuilt: dict[str, Any] = {"structures": structures, "triggers": triggers}
    if parsed.get("stop_after_first") is True:  # one of them, and the text ends; guidance has no word for it
        rebuilt["stop_after_first"] = True
    return GrammarKind.STRUCTURAL_TAG, _dump({"type": "structural_tag", **rebuilt}), Needs(reasons)


def _read_parts(form: object) -> Needs:
    """Requirements of the parts of a structural tag, without recursion. The backend validates the parts."""
    needs, waiting, num_parts = Needs(), [form], 0
    while waiting:
        part = waiting.pop()
        num_parts += 1
        if num_parts > MOST_PARTS:
            raise _refuse(f"the structural tag has more than {MOST_PARTS} parts", value=num_parts)
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if kind is not None:
            needs.keywords[tag_part(kind)] = None
        if "json_schema" in part:
            needs_of_part = read_schema(part["json_schema"])
            needs.not_xgrammar += needs_of_part.not_xgrammar
            if part.get("style", "json") != "json":
                needs.keywords["'style' of a structural tag"] = None
        if kind == "regex":
            if not isinstance(part.get("pattern"), str):
                raise _refuse(
                    f"the pattern of a structural tag's regex must be a string, got {part.get('pattern')!r:.80}"
                )
            needs.not_xgrammar += read_regex(part["pattern"]).not_xgrammar
        waiting += [value for key, value in part.items() if key != "json_schema" and isinstance(value, list | dict)]
    return needs


def _close(schema: Any) -> Any:
    """Close objects that list properties, unless they are explicitly open. The depth is already bounded."""
    if isinstance(schema, list):
        return [_close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: part if key in ("enum", "const", "default") else _close(part) for key, part in schema.items()}
    if isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _parse(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise _refuse(f"{name} is nested too deeply") from None
    except ValueError as wrong:
        raise _refuse(f"{name} is not valid JSON: {wrong}") from None


def _dump(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as wrong:  # a lone surrogate is a ValueError too
        raise _refuse(f"the constraint cannot be written as JSON: {wrong}") from None
    return text


def _too_long(kind: GrammarKind, length: int, config: StructuredOutputsConfig) -> InputError:
    return _refuse(
        f"the {kind} constraint has {length} characters; the limit is max_grammar_bytes={config.max_grammar_bytes}",
        value=length,
    )


def _refuse(message: str, *, value: object = None) -> InputError:
    return InputError(message, param=_PARAM, value=value)
