"""From StructuredOutputsParams to a GrammarSpec: checked, sized, and with backends named. Runs where the caller is.

Every refusal is an InputError that names the limit or the keyword, made in time and memory bounded by the size of what
was given. Must not know: tokens, how anything is compiled.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from quire.config.extras import StructuredOutputsConfig
from quire.grammar import choose
from quire.grammar.regex import read_regex
from quire.grammar.schema import MANY_VALUES, Needs, read_schema, tag_part
from quire.schema.errors import InputError
from quire.schema.grammar import GrammarKind, GrammarSpec
from quire.schema.params import StructuredOutputsParams

MOST_CHOICES = 20_000
MOST_PARTS = 100_000  # of a structural tag
_PARAM = "structured_outputs"
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def make_spec(given: StructuredOutputsParams, config: StructuredOutputsConfig) -> GrammarSpec:
    compact = given.disable_any_whitespace or config.disable_any_whitespace
    if given.whitespace_pattern is not None:
        if given.json is None and not given.json_object:
            raise _refuse("whitespace_pattern is for json only")
        if compact:
            raise _refuse("whitespace_pattern and disable_any_whitespace cannot both be given")
        read_regex(given.whitespace_pattern)
    kind, text, needs = _read(given, config)
    if len(text) > config.max_grammar_bytes:
        raise _too_long(kind, len(text), config)
    spec = GrammarSpec(
        kind=kind,
        text=text,
        compact=compact and kind is GrammarKind.JSON,
        whitespace=given.whitespace_pattern,
        in_thought=isinstance(given.structural_tag, dict) and given.structural_tag.get("in_reasoning") is True,
    )
    return replace(spec, backends=choose.choose(spec, needs, config))


def _read(given: StructuredOutputsParams, config: StructuredOutputsConfig) -> tuple[GrammarKind, str, Needs]:
    """Kind, text, and what it needs of a backend."""
    if given.json is not None:
        closed = given.disable_additional_properties or config.disable_additional_properties
        return _json(given.json, config, closed=closed)
    if given.json_object is not None:
        if given.json_object is not True:
            raise _refuse(f"json_object is {given.json_object!r}; leave it out or give true")
        return GrammarKind.JSON, json.dumps(_ANY_OBJECT), read_schema(_ANY_OBJECT)
    if given.regex is not None:
        if not isinstance(given.regex, str):
            raise _refuse(f"regex must be a string, got {type(given.regex).__name__}")
        return GrammarKind.REGEX, given.regex, Needs(read_regex(given.regex).not_xgrammar)
    if given.choice is not None:
        return _choice(given.choice)
    if given.grammar is not None:
        if not isinstance(given.grammar, str) or not given.grammar.strip():
            raise _refuse("grammar must be a string that is not empty")
        return (GrammarKind.EBNF if "::=" in given.grammar else GrammarKind.LARK), given.grammar, Needs()
    return _tag(given.structural_tag, config)


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
        raise _refuse("the schema is nested too deeply to be read") from None
    needs = read_schema(schema)
    if schema is False:
        raise _refuse("the schema is false, so no answer could be valid")
    if schema is True or schema == {}:
        schema = _ANY_OBJECT  # any value would do; a bare number has no natural end
        needs = read_schema(schema)
    if closed:
        schema = _close(schema)
    return GrammarKind.JSON, _dump(schema), needs


def _whole_numbers(schema: Any) -> Any:
    """1.0 as 1: to JSON schema they are the same, and backends want counts and bounds without a point."""
    if isinstance(schema, list):
        return [_whole_numbers(part) for part in schema]
    if isinstance(schema, dict):
        return {key: _whole_numbers(part) for key, part in schema.items()}
    return int(schema) if isinstance(schema, float) and schema.is_integer() and abs(schema) < 1 << 53 else schema


def _choice(words: object) -> tuple[GrammarKind, str, Needs]:
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) for word in words):
        raise _refuse("choice must be a list of strings that is not empty")
    if len(words) > MOST_CHOICES:
        raise _refuse(f"choice has {len(words)} entries; the limit is {MOST_CHOICES}", value=len(words))
    kept = list(dict.fromkeys(words))
    reasons = [f"a choice of {len(kept)}"] if len(kept) > MANY_VALUES else []
    if any(not word or any(ord(letter) < 32 for letter in word) for word in kept):
        reasons.append("a choice with control characters, or an empty one")
    return GrammarKind.CHOICE, _dump(kept), Needs(reasons)


def _tag(given: object, config: StructuredOutputsConfig) -> tuple[GrammarKind, str, Needs]:
    """Either {structures, triggers}, or {"type": "structural_tag", "format": ...}."""
    if isinstance(given, str) and len(given) > config.max_grammar_bytes:
        raise _too_long(GrammarKind.STRUCTURAL_TAG, len(given), config)
    parsed = _parse(given, "structural_tag") if isinstance(given, str) else given
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
    kept: dict[str, Any] = {"structures": structures, "triggers": triggers}
    if parsed.get("stop_after_first") is True:  # one of them, and the text ends; guidance has no word for it
        kept["stop_after_first"] = True
    return GrammarKind.STRUCTURAL_TAG, _dump({"type": "structural_tag", **kept}), Needs(reasons)


def _read_parts(form: object) -> Needs:
    """What the parts of a structural tag need, without recursion. What a part may be, the backend says."""
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
            found = read_schema(part["json_schema"])
            needs.not_xgrammar += found.not_xgrammar
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
    """Objects that name their properties and do not say otherwise take no others. The depth is bounded by now."""
    if isinstance(schema, list):
        return [_close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part if key in ("enum", "const", "default") else _close(part) for key, part in schema.items()}
    if isinstance(kept.get("properties"), dict):
        kept.setdefault("additionalProperties", False)
    return kept


def _parse(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise _refuse(f"{name} is nested too deeply to be read") from None
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
