"""hf: whatever the tokenizer's own `response_template` says (transformers' parse_response).

The template names the fields of an answer by the marks around them: `tool_calls`, a thought (`thinking`, `reasoning` or
`reasoning_content`), and the `content`, which is all the rest. Calls whose content is JSON stream as it is written;
those in other forms are shown when they are whole. A call that is none is content, marks and all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.schema.errors import ConfigError
from quire.text.parse.json_calls import CallKeys, read_broken, read_calls
from quire.text.parse.json_text import quoted, raw_value, skip_space
from quire.text.parse.tags import Emit, Steps, TextSource
from quire.text.parse.template_fields import Field, Found, Mark, Template, read_template
from quire.text.parse.typed import as_json, parameter_types, read_json
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter, Read, ToolFormat

_THOUGHTS = ("thinking", "reasoning", "reasoning_content")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class FromTokenizer:
    """A parser that a tokenizer makes."""

    def __call__(self, tokenizer: Any) -> ToolFormat:
        declared = tokenizer.response_template
        if declared is None:
            raise ConfigError(
                "the tool parser 'hf' reads the tokenizer's response_template, and this tokenizer has none: name the "
                "model's own parser",
                param="tool_call_parser",
                value="hf",
            )
        template = read_template(declared)
        return ToolFormat(
            _reader(template, ""), template.texts, after=lambda prompt: _reader(template, prompt), tells_broken=False
        )


FORMAT = FromTokenizer()


def _reader(template: Template, prompt: str) -> Read:
    def read(source: TextSource, out: DeltaWriter) -> Steps[None]:
        answer = _FieldReader(template, out)
        if prompt:
            answer.begin(template.begun(prompt))
        while True:
            text, final = source.rest()
            answer.feed(text, final)
            if final:
                return
            yield

    return read


class _FieldReader:
    """Follows the fields of one answer."""

    def __init__(self, template: Template, out: DeltaWriter) -> None:
        self.template, self.out = template, out
        self.text, self.at = "", 0
        self.region: _Region = self._outside()
        self.inside = False

    def begin(self, text: str) -> None:
        """What the prompt has said already is shown to nobody; it may have opened a field."""
        silent = _FieldReader(self.template, DeltaWriter())
        silent.feed(text, False)
        if silent.inside and silent.region.field.name in _THOUGHTS:
            self.region, self.inside = _Text(silent.region.field, self.out.reasoning), True

    def feed(self, text: str, final: bool) -> None:
        self.text, self.at = self.text[self.at :] + text, 0
        while (step := self._next(final)) is not None:
            mark, hit = step
            self.region.feed(self.text[self.at : hit.start])
            mark_text = self.text[hit.start : hit.end]
            self.at = hit.end
            if isinstance(mark, Field):
                self.region.close("")
                self.region, self.inside = self._inside(mark, hit, mark_text), True
            else:
                self.region.close(mark_text)
                self.region, self.inside = self._outside(), False
        end = len(self.text) if final else min((mark.sure_end(self.text, self.at) for mark, _ in self._marks()),
                                               default=len(self.text))  # fmt: skip
        self.region.feed(self.text[self.at : max(end, self.at)])
        self.at = max(end, self.at)
        if final:
            self.region.close("")

    def _marks(self) -> list[tuple[Mark, Field | None]]:
        """Those that may come next: the end of a field, or the beginning of any."""
        close = self.region.field.close
        if self.inside:
            return [] if close is None else [(close, None)]
        hit: list[tuple[Mark, Field | None]] = [(one.open, one) for one in self.template.fields if one.open]
        return hit if close is None else [*hit, (close, None)]

    def _next(self, final: bool) -> tuple[Field | None, Found] | None:
        """The first mark in the text, unless an earlier one may still be on its way."""
        best: tuple[Field | None, Found] | None = None
        unsure = len(self.text) + 1
        for mark, field in self._marks():
            hit = mark.find(self.text, self.at, final)
            if hit is None:
                unsure = unsure if final else min(unsure, mark.sure_end(self.text, self.at))
            elif best is None or (hit.start, -hit.end) < (best[1].start, -best[1].end):
                best = field, hit
        return None if best is None or unsure <= best[1].start else best

    def _outside(self) -> _Region:
        field = self.template.implicit or Field("content", None, None)
        return _Text(field, self.out.reasoning if field.name in _THOUGHTS else self.out.content)

    def _inside(self, field: Field, hit: Found, mark_text: str) -> _Region:
        if field.name == "tool_calls":
            plan = _plan(field, hit.names)
            return (
                _Collected(field, self.out, hit.names, mark_text)
                if plan is None
                else _Streamed(field, self.out, plan, mark_text)
            )
        return _Text(field, self.out.reasoning if field.name in _THOUGHTS else self.out.content)


class _Region:
    """What is being written. `close`: with the mark that ended it."""

    def __init__(self, field: Field) -> None:
        self.field = field

    def feed(self, text: str) -> None:
        raise NotImplementedError

    def close(self, mark: str) -> None:
        raise NotImplementedError


class _Text(_Region):
    """Text without the white space around it, unless the field keeps it."""

    def __init__(self, field: Field, emit: Emit) -> None:
        super().__init__(field)
        self._emit, self._strip = emit, field.args.get("strip", True)
        self._begun, self._space = False, ""

    def feed(self, text: str) -> None:
        text = self._space + text
        if self._strip:
            text = text if self._begun else text.lstrip()
            shown = text.rstrip()
            text, self._space = shown, text[len(shown) :]
        if text:
            self._begun = True
            self._emit(text)

    def close(self, mark: str) -> None:
        self._space = ""


Plan = Callable[[TextSource, DeltaWriter, str], Steps[Any]]


class _Streamed(_Region):
    """Calls in JSON, read as they arrive."""

    def __init__(self, field: Field, out: DeltaWriter, plan: Plan, mark_text: str) -> None:
        super().__init__(field)
        self._source = TextSource()
        self._steps = plan(self._source, out, mark_text)
        self._out, self._mark_text = out, mark_text

    def feed(self, text: str) -> None:
        if text:
            self._source.push(text, False)
            next(self._steps, None)

    def close(self, mark: str) -> None:
        before = self._out.index
        self._source.push("", True)
        next(self._steps, None)
        rest, _ = self._source.rest()
        self._out.content(rest.strip())
        if self._out.index == before and not self._out.index >= 0:
            self._out.content(mark)


def _plan(field: Field, names: Mapping[str, str]) -> Plan | None:
    """How calls can be read piece by piece; None: they cannot."""
    function = field.transform.get("function") if isinstance(field.transform, Mapping) else None
    if field.content != "json" or {"unquoted_keys", "string_delims"} & set(field.args):
        return None
    if function == "{content}":
        return _objects(CallKeys())
    if not isinstance(function, Mapping):
        return None
    name, arguments = (_path_of(function.get(key)) for key in ("name", "arguments"))
    if name in names and arguments == "content" and len(names[name]) <= LONGEST_NAME:
        return _named(names[name].strip())
    if field.each and name and arguments and "." not in name + arguments:
        return _objects(CallKeys((name,), (arguments,)))
    if (
        name.startswith("content.")
        and arguments.startswith("content.")
        and name.count(".") == arguments.count(".") == 1
    ):
        return _objects(CallKeys((name[8:],), (arguments[8:],)))
    return None


def _path_of(value: Any) -> str:
    match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return match.group(1) if match else ""


def _objects(keys: CallKeys) -> Plan:
    def read(source: TextSource, out: DeltaWriter, mark_text: str) -> Steps[Any]:
        source.record(mark_text)
        yield from read_calls(source, out, keys)

    return read


def _named(name: str) -> Plan:
    def read(source: TextSource, out: DeltaWriter, mark_text: str) -> Steps[Any]:
        out.open(name)
        if (yield from skip_space(source)) in ("{", "["):
            if not (yield from raw_value(source, out.arguments)):
                yield from read_broken(source, out, None)
        else:
            out.arguments("{}")

    return read


class _Collected(_Region):
    """Calls in any other form, read when they are whole."""

    def __init__(self, field: Field, out: DeltaWriter, names: Mapping[str, str], mark_text: str) -> None:
        super().__init__(field)
        self._out, self._names, self._mark_text = out, names, mark_text
        self._parts: list[str] = []

    def feed(self, text: str) -> None:
        self._parts.append(text)

    def close(self, mark: str) -> None:
        body = "".join(self._parts)
        calls = self._calls(body) if mark or self.field.close is None else []
        if not calls:
            self._out.content(self._mark_text + body + mark)
        else:
            self._out.content(left_over(body, self.field.content, self.field.args))
        for name, arguments in calls:
            self._out.open(name)
            self._out.arguments(arguments)

    def _calls(self, body: str) -> list[tuple[str, str]]:
        """(function, arguments as JSON) of each; none if it is no call."""
        try:
            value = parse_content(body, self.field.content, self.field.args)
            if self.field.each:
                made = [fill(self.field.transform, {**self._names, **item}) for item in value]
            else:
                made = [fill(self.field.transform, {**self._names, "content": value})]
            return [self._call(one["function"]) for one in made]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []

    def _call(self, function: Mapping[str, Any]) -> tuple[str, str]:
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
            raise ValueError("no name")
        name = name.strip()
        if not isinstance(arguments, Mapping):
            return name, arguments if isinstance(arguments, str) else json.dumps(
                arguments, ensure_ascii=False, allow_nan=False
            )
        pairs = (f"{quoted(key)}: {self._value(name, key, value)}" for key, value in arguments.items())
        return name, "{" + ", ".join(pairs) + "}"

    def _value(self, function: str, key: str, value: Any) -> str:
        """As the tool's schema has it, if it is text whose type is known."""
        types = parameter_types(self._out.tools, function, key)
        if isinstance(value, str) and types:
            return as_json(value, types)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)


# ---- what a field's text means ---------------------------------------------------------------------------------------


def parse_content(text: str, kind: str, args: Mapping[str, Any]) -> Any:
    """ValueError: it is none of that kind."""
    bare = text.strip() if args.get("strip", True) else text
    if kind == "json":
        return _json(text, args)
    if kind == "xml-inline":
        return _tags(text, args)
    if kind == "kv-lines":
        return _lines(text, args)
    if kind in ("int", "float"):
        return int(bare) if kind == "int" else float(bare)
    return bare.lower() in ("true", "1") if kind == "bool" else bare


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """JSON, with strings between other marks and keys without quotes where the template says so."""
    marks = [tuple(map(re.escape, pair)) for pair in args.get("string_delims", ())]
    strings = "|".join(f"{begin}(.*?){end}" for begin, end in marks)
    pattern = re.compile(strings or r"(?!)", re.DOTALL)
    parts, at = [], 0
    for match in pattern.finditer(text):
        parts += [_keys(text[at : match.start()], args), quoted(next(g for g in match.groups() if g is not None))]
        at = match.end()
    read = read_json("".join([*parts, _keys(text[at:], args)]))
    if read is not None:
        return read[0]
    if args.get("allow_non_json"):
        return text.strip()
    raise ValueError("not JSON")


def _keys(text: str, args: Mapping[str, Any]) -> str:
    return re.sub(r"(?<=[{,])\s*(\w+):", r'"\1":', text) if args.get("unquoted_keys") else text


def _tags(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    hit: dict[str, Any] = {}
    for match in re.finditer(args["tag_pattern"], text, re.DOTALL):
        key, value = match["key"], _inner(match["value"], args)
        if key in hit and args.get("merge_duplicates"):
            earlier = hit[key] if isinstance(hit[key], list) else [hit[key]]
            value = [*earlier, value]
        hit[key] = value
    return hit


def _lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    separator = args.get("kv_sep", ":")
    pairs = (line.partition(separator) for line in text.split(args.get("line_sep", "\n")) if separator in line)
    return {key.strip(): _inner(value.strip(), args) for key, _, value in pairs}


def left_over(text: str, kind: str, args: Mapping[str, Any]) -> str:
    """What of the text is not in its value."""
    if kind == "xml-inline":
        return re.sub(args["tag_pattern"], "", text, flags=re.DOTALL).strip()
    if kind == "kv-lines":
        separator, end = args.get("kv_sep", ":"), args.get("line_sep", "\n")
        return str(end.join(line for line in text.split(end) if separator not in line)).strip()
    return ""


def _inner(text: str, args: Mapping[str, Any]) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else parse_content(text, parser.get("name", "text"), parser.get("args", {}))


def fill(transform: Any, names: Mapping[str, Any]) -> Any:
    """A template's transform with its places filled. KeyError: a name that is not there."""
    if isinstance(transform, Mapping):
        return {key: fill(part, names) for key, part in transform.items()}
    if isinstance(transform, list):
        return [fill(part, names) for part in transform]
    if not (path := _path_of(transform)):
        return transform
    value: Any = names
    for key in path.split("."):
        value = value[key]
    return value
