"""Calls that a request only allows, but whose arguments it holds to a schema (`strict`): the structural tag for them.

    free text … trigger ──▶ one of the tools' calls, word for word as the form says ──▶ free text …
In: the tools of a request, a family's CallForms, the tokenizer's special tokens. Out: a structural tag in xgrammar's
form, whose parts are plain data. A tag's text that is a special token is said by its id. A schema that a form has no
words for is refused by name. Must not know: grammars, how a tag is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.schema.errors import InputError
from quire.text.parse.call_form import BareValues, CallForm, ElementValues, JsonValues, PythonValues, TaggedValues
from quire.text.parse.json_text import quoted
from quire.text.parse.typed import parameter_types

Part = dict[str, Any]
_MOST_PARAMETERS = 64  # of a function whose values are not one JSON object; the tag grows with their square
_NUMBER = {"type": "regex", "pattern": "[0-9]{1,4}"}
_WORD = {"type": "regex", "pattern": "[A-Za-z0-9_.:$@-]{1,64}"}
_TAG_NAME = re.compile(r"[\w.:\-]{1,64}")
_QUOTED = {"type": "regex", "pattern": r"'([^'\\\n\r]|\\[nrt'\"\\])*'"}
_ROOT = frozenset((
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description", "$schema",
    "$id", "$comment", "strict",
))  # fmt: skip
_TEXT = frozenset(("type", "enum", "const", "title", "description", "default", "examples", "$comment"))
_PYTHON_LITERALS = {"boolean": ("True", "False", "true", "false"), "null": ("None", "null")}


def strict_tag(
    tools: Sequence[Mapping[str, Any]], forms: Sequence[CallForm], special: Mapping[str, int], *, parallel: bool
) -> dict[str, Any]:
    """Free text in which every call is one of the tools', with arguments of its schema if it is strict."""
    functions = [tool["function"] for tool in tools]
    made = [_Maker(form, special).calls(functions, parallel) for form in forms]
    rules: dict[str, list[Part]] = {}
    for form, calls in zip(forms, made, strict=True):
        for trigger in form.triggers:
            first, rest = _cut(trigger, special)
            rules.setdefault(first, []).append(sequence(_literal(rest, special), calls, _literal(form.end, special)))
    excluded = {_cut(text, special)[0]: None for form in forms for text in form.others}
    others = [text for text in excluded if not any(first in text or text in first for first in rules)]
    alone = not parallel or any(form.alone for form in forms)
    free: Part = {"type": "any_text", "excludes": others}
    if rules:
        pairs = [[first, either(*parts)] for first, parts in rules.items()]
        free = {"type": "dispatch", "rules": pairs, "loop": not alone, "excludes": others}
    bare = [(form, calls) for form, calls in zip(forms, made, strict=True) if form.bare]
    if bare:
        letters = "".join(sorted({letter for form, _ in bare for letter in form.bare}))
        begun = [sequence(calls, _literal(form.bare_end, special)) for form, calls in bare]
        free = _not_begun_with(letters, free, begun, special)
    return {"format": free, "in_reasoning": any(form.in_thought for form in forms)}


def _not_begun_with(letters: str, free: Part, begun: list[Part], special: Mapping[str, int]) -> Part:
    """An answer that begins with one of these letters, or with a trigger, is calls; any other is free."""
    rules = free.get("rules", ())
    letters += "".join({head[0] for head, _ in rules if not head.startswith(tuple(special) or "\0")})
    first = {"type": "regex", "pattern": f"[^ \\t\\r\\n{re.escape(letters)}]"}
    heads = [sequence(_literal(head, special), part) for head, part in rules]
    return optional(either(*begun, *heads, sequence(first, free)))


# ---- parts -----------------------------------------------------------------------------------------------------------


def _text(value: str) -> Part:
    return {"type": "const_string", "value": value}


def sequence(*parts: Part | None) -> Part:
    present = [part for part in parts if part is not None]
    if not present:
        return {"type": "sequence", "elements": [_text("")]}
    return present[0] if len(present) == 1 else {"type": "sequence", "elements": present}


def either(*parts: Part) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Part) -> Part:
    return {"type": "optional", "content": part}


def free_text(*excludes: str) -> Part:
    return {"type": "any_text", "excludes": list(excludes)}


def json_value(schema: Mapping[str, Any]) -> Part:
    return {"type": "json_schema", "json_schema": schema}


def _literal(text: str, special: Mapping[str, int]) -> Part | None:
    """A text word for word; None if there is none."""
    if not text:
        return None
    marks = sorted((mark for mark in special if mark in text), key=len, reverse=True)
    if not marks:
        return _text(text)
    fragments = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return sequence(
        *(
            {"type": "token", "token": special[fragment]} if fragment in special else _text(fragment)
            for fragment in fragments
            if fragment
        )
    )


def _mark(text: str, special: Mapping[str, int]) -> str:
    """What free text must not have so as not to have this text: a special token of it, if there is one."""
    return next((mark for mark in special if mark in text), text)


def _cut(trigger: str, special: Mapping[str, int]) -> tuple[str, str]:
    """(what calls begin with, the rest of the trigger): a special token inside begins them by itself."""
    marks = [(trigger.find(mark), -len(mark), mark) for mark in special if mark in trigger]
    if not marks:
        return trigger, ""
    at, _, mark = min(marks)
    tail = trigger[at + len(mark) :]
    others = [tail.find(other) for other in special if other in tail]
    size = min(others, default=len(tail))
    return mark + tail[:size], tail[size:]


# ---- calls -----------------------------------------------------------------------------------------------------------


class _Maker:
    """One form's calls."""

    def __init__(self, form: CallForm, special: Mapping[str, int]) -> None:
        self.form, self.special = form, special

    def calls(self, functions: Sequence[Mapping[str, Any]], parallel: bool) -> Part:
        one = either(*(self._call(function) for function in functions))
        between = self.form.between
        if between is None or not parallel:
            return sequence(self._exactly(self.form.open), one)
        more = {"type": "star", "content": sequence(self._exactly(between), one)}
        return sequence(self._exactly(self.form.open), one, more)

    def _exactly(self, text: str) -> Part | None:
        return _literal(text, self.special)

    def _call(self, function: Mapping[str, Any]) -> Part:
        name = function["name"]
        head, number, rest = self.form.call.replace("{name}", name).partition("{number}")
        begin = [self._exactly(head), dict(_NUMBER) if number else None, self._exactly(rest)]
        is_strict = function.get("strict") is True
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        values = self.form.values
        if isinstance(values, JsonValues):
            arguments = json_value(schema if is_strict else {"type": "object"})
        elif isinstance(values, TaggedValues) and not is_strict:
            arguments = self._free_arguments(values)
        elif isinstance(values, ElementValues) and not is_strict:
            arguments = _free_elements(schema, values, self.special, values.after)
        else:
            arguments = _Arguments(name, schema, self.special).written(values)
        return sequence(*begin, arguments, self._exactly(self.form.close))

    def _free_arguments(self, values: TaggedValues) -> Part:
        """Anything up to the end of the call; any arguments, where their tags have its special tokens too."""
        end = _mark(self.form.close.strip(), self.special)
        if end not in values.begin + values.end:
            return free_text(end)
        begin = [
            dict(_WORD) if fragment.startswith("{") else _literal(fragment, self.special)
            for fragment in re.split(r"(\{name\}|\{text\}|\{type\})", values.begin)
        ]
        value = free_text(_mark(values.end.strip(), self.special))
        return {"type": "star", "content": sequence(*begin, value, _literal(values.end, self.special))}


def _free_elements(schema: Any, values: ElementValues, special: Mapping[str, int], after: str = "") -> Part:
    """Arguments of a function that is not strict: tags by the names of its schema, any text between them."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        properties = {}

    def content(one: Any) -> Part:
        inner = one if isinstance(one, Mapping) else {}
        if inner.get("type") == "array" and isinstance(inner.get("items"), Mapping):
            return {"type": "star", "content": _element("item", content(inner["items"]), values, special)}
        if isinstance(inner.get("properties"), Mapping):
            return _free_elements(inner, values, special)
        return free_text(_mark(values.mark, special))

    named = [(name, one) for name, one in properties.items() if _TAG_NAME.fullmatch(name)][:_MOST_PARAMETERS]
    parts = [sequence(_element(name, content(one), values, special), _literal(after, special)) for name, one in named]
    return sequence(*map(optional, parts))


def _element(name: str, content: Part, values: ElementValues, special: Mapping[str, int]) -> Part:
    begin, end = f"{values.mark}<{name}>", f"{values.mark}</{name}>"
    return sequence(_literal(begin, special), content, _literal(end, special))


class _Arguments:
    """The arguments of one function, parameter by parameter."""

    def __init__(self, function: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> None:
        self.function, self.schema, self.special = function, schema, special
        unknown = [key for key in schema if key not in _ROOT]
        if unknown or schema.get("type", "object") != "object":
            raise self._refused(f"{unknown[0]!r} at its root" if unknown else f"type {schema.get('type')!r}")
        self.properties: Mapping[str, Any] = schema.get("properties") or {}
        self.required = set(schema.get("required") or ())
        if not isinstance(self.properties, Mapping) or len(self.properties) > _MOST_PARAMETERS:
            raise self._refused(f"more than {_MOST_PARAMETERS} parameters")
        if lacking := self.required - set(self.properties):
            raise self._refused(f"a required parameter {min(lacking)!r} that is not among its properties")

    def written(self, values: TaggedValues | ElementValues | PythonValues | BareValues) -> Part:
        if isinstance(values, ElementValues):
            return self._elements(values, values.after)
        if isinstance(values, TaggedValues):
            parts = [(self._tagged(values, name), name) for name in self.properties]
            return sequence(*(part if name in self.required else optional(part) for part, name in parts))
        if isinstance(values, PythonValues):
            return self._listed([(name, sequence(_text(f"{name}="), self._python(name))) for name in self.properties])
        return self._braces(self.schema, values.quote, ",")

    def _tagged(self, values: TaggedValues, name: str) -> Part:
        is_text = self._is_text(name)
        begin = values.begin.replace("{name}", name).replace("{text}", str(is_text).lower())
        ends = tuple(dict.fromkeys(_mark(end, self.special) for end in (values.end.strip(), *values.ends)))
        schema = self.properties[name]
        if is_text:
            value = self._plain(schema, ends)
        else:  # no string within may end the value; JSON has no line breaks in strings
            value = {**json_value(self._with_definitions(schema)), "excludes": [end for end in ends if "\n" not in end]}
        head, typed, tail = begin.partition("{type}")
        begun = [_literal(head, self.special), self._typed(name) if typed else None, _literal(tail, self.special)]
        return sequence(*begun, value, _literal(values.end, self.special))

    def _typed(self, name: str) -> Part:
        """JSON's word for what a value is, or any of them where it may be several things."""
        types = parameter_types({self.function: self.schema}, self.function, name) or {"string"}
        return either(*map(_text, sorted({"number" if kind == "integer" else kind for kind in types})))

    def _elements(self, values: ElementValues, after: str = "") -> Part:
        parts = []
        for name, schema in self.properties.items():
            if not _TAG_NAME.fullmatch(name):
                raise self._refused(f"the name {name!r}, which cannot be a tag,")
            inner = _element(name, self._content(schema, values), values, self.special)
            part = sequence(inner, _literal(after, self.special))
            parts.append(part if name in self.required else optional(part))
        return sequence(*parts)

    def _content(self, schema: Mapping[str, Any], values: ElementValues) -> Part:
        kind = schema.get("type")
        if kind == "object":
            return _Arguments(self.function, schema, self.special)._elements(values)
        if kind == "array" and isinstance(schema.get("items"), Mapping) and not set(schema) - _TEXT - {"items"}:
            one = self._content(schema["items"], values)
            return {"type": "star", "content": _element("item", one, values, self.special)}
        if kind in ("integer", "number", "boolean", "null"):
            return json_value(schema)
        if kind != "string":
            raise self._refused(f"a value that is {'one of several types' if kind is None else kind!r}")
        return self._plain(schema, (_mark(values.mark, self.special),))

    def _is_text(self, name: str) -> bool:
        types = parameter_types({self.function: self.schema}, self.function, name)
        if not types and set(self.properties[name]) - _TEXT:
            raise self._refused(f"the parameter {name!r}, whose type is not said,")
        return types <= {"string"}

    def _plain(self, schema: Mapping[str, Any], ends: tuple[str, ...]) -> Part:
        """Text as it stands, up to any of `ends`."""
        while isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
            schema = self._target(reference)
        if more := [key for key in schema if key not in _TEXT]:
            raise self._refused(f"{more[0]!r} of text that stands without quotes")
        choices = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if choices is None:
            return free_text(*ends)
        if bad := next((w for w in choices if w != w.strip() or not w or any(end in w for end in ends)), None):
            raise self._refused(f"the value {bad!r}")
        return either(*map(_text, choices))

    def _target(self, reference: str) -> Mapping[str, Any]:
        target: Any = self.schema
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping) or target.get("$ref") == reference:
            raise self._refused(f"the reference {reference!r}")
        return target

    def _with_definitions(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's schema, with what it may refer to."""
        return {**schema, **{key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}}

    def _python(self, name: str) -> Part:
        schema, types = self.properties[name], parameter_types({self.function: self.schema}, self.function, name)
        if types and types <= _PYTHON_LITERALS.keys() and not {"enum", "const"} & set(schema):
            return either(*(_text(word) for kind in sorted(types) for word in _PYTHON_LITERALS[kind]))
        if schema.get("type") != "string" or set(schema) - _TEXT:
            return json_value(self._with_definitions(schema))
        if not {"enum", "const"} & set(schema):
            return either(json_value(schema), dict(_QUOTED))
        choices = schema["enum"] if "enum" in schema else [schema["const"]]
        return either(*(_text(form(word)) for word in choices for form in (quoted, repr)))

    def _listed(self, parts: Sequence[tuple[str, Part]], comma: str = ", ") -> Part:
        """Those required and any of the others, in order, with commas between."""
        variants: list[Part] = []
        for first, (name, part) in enumerate(parts):
            later = [(other, sequence(_text(comma), rest)) for other, rest in parts[first + 1 :]]
            variants.append(
                sequence(part, *(rest if other in self.required else optional(rest) for other, rest in later))
            )
            if name in self.required:
                return either(*variants)
        return optional(either(*variants)) if variants else _text("")

    def _braces(self, schema: Mapping[str, Any], quote: str, comma: str) -> Part:
        inner = _Arguments(self.function, schema, self.special)
        parts = [(name, sequence(_text(f"{name}:"), self._bare(one, quote, comma))) for name, one in
                 inner.properties.items()]  # fmt: skip
        return sequence(_text("{"), inner._listed(parts, comma), _text("}"))

    def _bare(self, schema: Mapping[str, Any], quote: str, comma: str) -> Part:
        kind = schema.get("type")
        if kind == "object":
            return self._braces(schema, quote, comma)
        if kind == "array" and isinstance(schema.get("items"), Mapping) and not set(schema) - _TEXT - {"items"}:
            one = self._bare(schema["items"], quote, comma)
            more = {"type": "star", "content": sequence(_text(comma), one)}
            return sequence(_text("["), optional(sequence(one, more)), _text("]"))
        if kind in ("integer", "number", "boolean", "null") and not {"enum", "const"} & set(schema):
            return json_value(schema)
        if kind != "string":
            raise self._refused(f"a value that is {'one of several types' if kind is None else kind!r}")
        mark = _literal(quote, self.special)
        return sequence(mark, self._plain(schema, (quote,)), mark)

    def _refused(self, what: str) -> InputError:
        return InputError(
            f"the strict function {self.function!r} has {what} in its parameters, which the calls of this model have "
            "no strict form for; leave 'strict' out, or set tool_choice to 'required'",
            param="tools",
        )
