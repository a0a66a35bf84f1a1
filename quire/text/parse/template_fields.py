"""A tokenizer's `response_template`: the fields of an answer, and where each of them begins and ends.

    {"start_anchor": ..., "fields": {"tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                                                    "transform": {...}}, "content": {}}}
The form is transformers' (parse_response). A mark is some literals or a regular expression; a Mark finds it in a text
that still grows and says from where on the text may yet become one. Must not know: what a field means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.schema.errors import ConfigError
from quire.text.parse.tags import Tags

CONTENTS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
_KEYS = frozenset((
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
))  # fmt: skip
_LONGEST = 4096  # characters that a regular expression may match; a beginning that is longer is text
_SPACE = re.compile(r"\\s[*+?]?|\\n[*+?]?")
_PLAIN = re.compile(r"\\[^\w]|[^\\.^$*+?{}()\[\]|]")


class Found(NamedTuple):
    start: int
    end: int
    names: dict[str, str]


@dataclass(frozen=True)
class Mark:
    """Either `tags`, or a `pattern` and (in `leads`) what its matches begin with after any white space."""

    tags: Tags | None = None
    pattern: re.Pattern[str] | None = None
    leads: Tags | None = None

    def find(self, text: str, at: int, final: bool) -> Found | None:
        if self.tags is not None:
            hit = self.tags.find(text, at, final)
            return None if hit is None else Found(hit[0], hit[0] + len(hit[1]), {})
        assert self.pattern is not None
        match = self.pattern.search(text, at)
        if match is None or match.end() == match.start() or (match.end() == len(text) and not final):
            return None  # it may yet grow
        return Found(*match.span(), {name: value for name, value in match.groupdict().items() if value is not None})

    def sure_end(self, text: str, at: int) -> int:
        """How far the text, in which nothing was found, holds no beginning either."""
        if self.tags is not None:
            return self.tags.sure_end(text, at)
        least = max(at, len(text) - _LONGEST)
        start = least
        if self.leads is not None:
            lead = self.leads.find(text, least, True)
            start = self.leads.sure_end(text, least) if lead is None else lead[0]
        while start > at and text[start - 1].isspace():
            start -= 1
        return start


@dataclass(frozen=True)
class Field:
    name: str
    open: Mark | None
    close: Mark | None
    content: str = "text"
    args: Mapping[str, Any] = field(default_factory=dict)
    transform: Any = None
    each: bool = False


@dataclass(frozen=True)
class Template:
    fields: tuple[Field, ...]
    anchor: Mark
    texts: tuple[str, ...]  # the literal marks

    @property
    def implicit(self) -> Field | None:
        """What is written outside of all others."""
        return next((one for one in self.fields if one.open is None), None)

    def begun(self, prompt: str) -> str:
        """What the prompt has of the answer already."""
        last = 0
        while (match := self.anchor.find(prompt, last, True)) is not None:
            last = match.end
        return prompt[last:] if last else ""


def read_template(declared: Any) -> Template:
    """ConfigError: it is none."""
    if not isinstance(declared, Mapping) or not isinstance(declared.get("fields"), Mapping) or not declared["fields"]:
        raise _wrong("it needs 'fields', which name at least one field")
    if declared.get("version", 1) != 1:
        raise _wrong(f"its version is {declared['version']!r}; 1 is known")
    fields = tuple(_field(name, one) for name, one in declared["fields"].items())
    if sum(one.open is None for one in fields) > 1:
        raise _wrong("only one field may be without 'open'")
    anchor = _mark("start_anchor", declared, "start_anchor", "start_anchor_pattern")
    if anchor is None:
        raise _wrong("it has no 'start_anchor'")
    marks = (mark for one in fields for mark in (one.open, one.close) if mark is not None)
    texts = tuple(text for mark in marks for tags in (mark.tags, mark.leads) if tags for text in tags.tags)
    return Template(fields, anchor, texts)


def _field(name: str, declared: Any) -> Field:
    if not isinstance(declared, Mapping):
        raise _wrong(f"the field {name!r} is not an object")
    if unknown := set(declared) - _KEYS:
        raise _wrong(f"the field {name!r} has {min(unknown)!r}, which is unknown")
    content = declared.get("content", "text")
    if content not in CONTENTS:
        raise _wrong(f"the content of {name!r} is {content!r}; it may be {', '.join(CONTENTS)}")
    return Field(
        name,
        _mark(name, declared, "open", "open_pattern"),
        _mark(name, declared, "close", "close_pattern"),
        content,
        declared.get("content_args") or {},
        declared.get("transform"),
        declared.get("transform_each") is True,
    )


def _mark(name: str, declared: Mapping[str, Any], literal: str, pattern: str) -> Mark | None:
    if literal in declared:
        texts = [declared[literal]] if isinstance(declared[literal], str) else declared[literal]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise _wrong(f"{literal!r} of {name!r} must be a string or a list of strings, none of them empty")
        return Mark(Tags(*texts))
    if pattern not in declared:
        return None
    try:
        leads = _leads(declared[pattern])
        return Mark(pattern=re.compile(declared[pattern], re.DOTALL), leads=Tags(*leads) if leads else None)
    except (re.error, TypeError) as wrong:
        raise _wrong(f"{pattern!r} of {name!r} is not a regular expression: {wrong}") from None


def _leads(source: str) -> tuple[str, ...]:
    """The letters that a match begins with after any white space, for each of its alternatives; none if that cannot be
    told."""
    while (space := _SPACE.match(source)) is not None:
        source = source[space.end() :]
    alternatives = [source]
    if source.startswith("(?:") and ")" in source:
        alternatives = re.split(r"(?<!\\)\|", source[3 : source.index(")")])
    leads = tuple(map(_lead, alternatives))
    return leads if all(leads) else ()


def _lead(source: str) -> str:
    at, letters = 0, list[str]()
    while (plain := _PLAIN.match(source, at)) is not None:
        at = plain.end()
        letters.append(plain.group()[-1])
    if source[at : at + 1] == "|":
        return ""
    if source[at : at + 1] in ("*", "?", "{") and letters:
        letters.pop()
    return "".join(letters)


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"the tokenizer's response_template cannot be used: {what}", param="tool_call_parser")
