"""minimax_m3: MiniMax M3. Every tag has the mark ]<]minimax[>[ before it, left out here:

    <tool_call>
    <invoke name="get_weather">
    <city>Paris</city>
    <opts><units>metric</units></opts>
    <tags><item>rain</item><item>wind</item></tags>
    </invoke>
    </tool_call>

A parameter's name is its tag; objects are tags within it, lists are `item`s. Values by the types of the tool's schema.
A string streams as it arrives, anything else is read whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.parse.call_form import CallForm, ElementValues
from quire.text.parse.json_text import quoted, skip_space
from quire.text.parse.python_values import DEEPEST
from quire.text.parse.tags import Steps, Tags, TextSource
from quire.text.parse.typed import Types, as_json, is_text, parameter_schema, types_of
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter, ToolFormat
from quire.text.parse.xml_calls import read_value

MARK = "]<]minimax[>["
OPEN, _CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
_CALL, _CALL_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
_STARTS, _LATER = Tags(OPEN, _CALL), Tags(OPEN, _CALL, _CLOSE)
_NEXT, _MARKS = Tags(f"{MARK}<", _CALL, _CALL_END, _CLOSE, f"{MARK}</"), Tags(MARK)
_HEADER_END = Tags(">", "<", "\n")
_NAME = re.compile(r"[\w.:\-]+")


def read(source: TextSource, out: DeltaWriter) -> Steps[None]:
    while tag := (yield from source.until(_LATER if out.index >= 0 else _STARTS, out.content)):
        if tag == _CLOSE:
            continue
        source.record(tag)
        if tag == OPEN:
            yield from skip_space(source)
            if not (yield from source.accept(_CALL)):
                out.content(source.recorded())
                continue
        yield from _call(source, out)


def _call(source: TextSource, out: DeltaWriter) -> Steps[None]:
    header, tag = yield from source.text_until(_HEADER_END, keep=("<", "\n"))
    name = header.partition('"')[0].strip()
    if tag != ">" or len(header) > LONGEST_NAME or not _NAME.fullmatch(name):
        out.content(source.recorded())
        return
    source.recorded()
    out.open(name)
    first = True
    while True:
        yield from skip_space(source)
        tag = yield from source.until(_NEXT, out.content, keep=(_CALL, _CLOSE))
        if tag != f"{MARK}<":
            break
        source.record(tag)
        key = yield from _tag_name(source)
        if key is None:
            out.content(source.recorded())
            continue
        source.recorded()
        out.arguments(f"{'{' if first else ', '}{quoted(key)}: ")
        first = False
        schema, root = parameter_schema(out.tools, name, key)
        types = types_of(schema, root)
        if is_text(types):
            whole = bool((yield from read_value(source, out.arguments, Tags(_end(key)), types, trim=False)))
        else:
            source.record()
            value = yield from _element(source, key, schema, root, 0)
            text = source.recorded()
            whole = value is not None or bool((yield from source.peek()))
            if whole:
                out.arguments(quoted(text) if value is None else value)
        if not whole:
            return
    if tag == f"{MARK}</":
        out.content(tag)
    if tag:
        out.arguments("{}" if first else "}")


def _end(name: str) -> str:
    return f"{MARK}</{name}>"


def _tag_name(source: TextSource) -> Steps[str | None]:
    """The rest of an opening tag."""
    text, tag = yield from source.text_until(_HEADER_END, keep=("<", "\n"))
    return text if tag == ">" and len(text) <= LONGEST_NAME and _NAME.fullmatch(text) else None


def _element(source: TextSource, name: str, schema: Any, root: Mapping[str, Any], depth: int) -> Steps[str | None]:
    """What stands between two tags, as JSON; the second one is read. None: it never came, or the text is no value."""
    text, tag = yield from source.text_until(_MARKS, keep=(MARK,))
    if not tag or depth > DEEPEST:
        return None
    types = types_of(schema, root)
    if (yield from source.accept(_end(name))):
        return _leaf(text, types)
    members: list[tuple[str, str]] = []
    while not (yield from source.accept(_end(name))):
        if not (yield from source.accept(f"{MARK}<")):
            return None
        child = yield from _tag_name(source)
        if child is None:
            return None
        member = yield from _element(source, child, _inner(schema, root, child), root, depth + 1)
        if member is None:
            return None
        members.append((child, member))
        yield from skip_space(source)
    if "object" not in types and all(child == "item" for child, _ in members):
        return f"[{', '.join(member for _, member in members)}]"
    return "{" + ", ".join(f"{quoted(child)}: {member}" for child, member in members) + "}"


def _leaf(text: str, types: Types) -> str:
    if not text.strip() and types and not types & {"string", "null"}:
        return "[]" if "array" in types else "{}" if "object" in types else json.dumps(text)
    return as_json(text, types)


def _inner(schema: Any, root: Mapping[str, Any], name: str) -> Any:
    """The schema of a member or of an item."""
    if not isinstance(schema, Mapping):
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/")[:16]:
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target if isinstance(target, Mapping) else {}
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("items") if name == "item" else None


_FORM = CallForm(
    f'{_CALL}{{name}}">\n',
    f"{_CALL_END}\n",
    ElementValues(MARK, "\n"),
    triggers=(f"{OPEN}\n",),
    between="",
    end=_CLOSE,
    others=(_CALL,),
)
FORMAT = ToolFormat(read, (MARK,), thought=("<mm:think>", "</mm:think>"), forms=(_FORM,))
