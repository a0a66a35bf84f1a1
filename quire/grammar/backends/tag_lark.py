"""A structural tag as a Lark grammar, the way llguidance reads one.

    {"type": "sequence", "elements": [...]} ──▶ start: "<call>" ( %json {...} | ... ) "</call>"
Free text up to a literal is one lazy lexeme, so the first such literal ends it; what it must not contain is excluded
by negation. Special tokens are referred to by id, and none of them is free text. Must not know: vocabularies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.grammar.backends.outlines import literal

PARTS = frozenset((
    "const_string", "json_schema", "regex", "any_text", "sequence", "or", "optional", "star", "plus", "tag", "token",
    "triggered_tags", "dispatch",
))  # fmt: skip
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}
_ANY = r"(.|\n)*"


def tag_as_lark(form: dict[str, Any], special: Mapping[str, int], whitespace: str) -> str:
    """`special`: the ids of special tokens by name. ValueError: a part that cannot be expressed."""
    writer = _Writer(special, whitespace)
    start = writer.part(form)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


class _Writer:
    def __init__(self, special: Mapping[str, int], whitespace: str) -> None:
        self.special, self.whitespace = special, whitespace
        self.rules: list[str] = []
        self._texts: dict[tuple[str, ...], str] = {}

    def part(self, node: Any) -> str:
        kind = node.get("type") if isinstance(node, dict) else None
        if kind == "const_string":
            return _quoted(node["value"])
        if kind == "token" and isinstance(node["token"], int):
            return f"<[{node['token']}]>"
        if kind == "json_schema":
            schema = _without(node["json_schema"], {text[0] for text in node.get("excludes", ())})
            return "%json " + json.dumps(self._spaced(schema), ensure_ascii=False)
        if kind == "regex":
            return _regex(node["pattern"])
        if kind == "any_text":
            return self._text(node.get("excludes", ()))
        if kind == "sequence":
            return self._sequence(node["elements"])
        if kind == "or":
            return "(" + " | ".join(self.part(one) or '""' for one in node["elements"]) + ")"
        if kind in _REPEATS:
            return f"({self.part(node['content'])}){_REPEATS[kind]}"
        if kind == "tag":
            return self._sequence([_const(node["begin"]), node["content"], _const(node["end"])])
        if kind == "triggered_tags":
            return self._triggered(node)
        if kind == "dispatch":
            return self._dispatch(node["rules"], node.get("excludes", ()), node.get("loop", True))
        raise ValueError(f"guidance has no structural tag part {kind!r:.40}")

    def _spaced(self, schema: Any) -> Any:
        return {**schema, "x-guidance": {"whitespace_pattern": self.whitespace}} if isinstance(schema, dict) else schema

    def _sequence(self, nodes: list[Any]) -> str:
        excluded: list[str] = []
        flat = list(_flat(nodes))
        at = 0
        while at < len(flat):
            node, after = flat[at], flat[at + 1] if at + 1 < len(flat) else {}
            if node.get("type") == "any_text" and after.get("type") == "const_string":
                excluded.append(self._lazy(node.get("excludes", ()), after["value"]))
                at += 1
            else:
                excluded.append(self.part(node))
            at += 1
        return " ".join(part for part in excluded if part)

    def _triggered(self, node: dict[str, Any]) -> str:
        rules = []
        for trigger in node["triggers"]:
            tags = [tag for tag in node["tags"] if tag["begin"].startswith(trigger)]
            variants = [{**tag, "begin": tag["begin"][len(trigger) :]} for tag in tags]
            rules.append((trigger, {"type": "or", "elements": variants}))
        return self._dispatch(rules, node.get("excludes", ()), not node.get("stop_after_first", False))

    def _dispatch(self, rules: list[Any], excludes: Any, loop: bool) -> str:
        """Free text, in which each pattern is followed by its part."""
        parts = [f"{self._text_before(pattern, excludes)} {self.part(part)}" for pattern, part in rules]
        variants, text = " | ".join(parts), self._text(excludes)
        return f"({variants})* {text}" if loop else f"({variants} | {text})"

    def _text_before(self, pattern: str, excludes: Any) -> str:
        name = next((name for name in self.special if pattern.startswith(name)), None)
        if name is None:
            return self._lazy(excludes, pattern)
        return f"{self._text(excludes)} <[{self.special[name]}]> {_quoted(pattern[len(name) :])}"

    def _lazy(self, excludes: Any, end: str) -> str:
        return self._rule("text[lazy]", f"{self._text(excludes)} {_quoted(end)}")

    def _text(self, excludes: Any) -> str:
        """A terminal: any text without these."""
        key = tuple(excludes)
        if key not in self._texts:
            none = "|".join(map(literal, key))
            without = f" & ~/{_ANY}({_slashed(none)}){_ANY}/" if key else ""
            self._texts[key] = f"TEXT{len(self._texts)}"
            self.rules.append(f"{self._texts[key]}: /{_ANY}/{without}")
        return self._texts[key]

    def _rule(self, name: str, body: str) -> str:
        stem, bracket, rest = name.partition("[")
        made = f"{stem}_{len(self.rules)}"
        self.rules.append(f"{made}{bracket}{rest}: {body}")
        return made


def _without(schema: Any, letters: set[str]) -> Any:
    """The schema, whose free strings have none of these characters, and thus no text that starts with one."""
    if isinstance(schema, list):
        return [_without(part, letters) for part in schema]
    if not isinstance(schema, dict) or not letters:
        return schema
    limited = {k: part if k in ("enum", "const", "default") else _without(part, letters) for k, part in schema.items()}
    if limited.get("type") == "string" and not {"enum", "const", "pattern", "format"} & set(limited):
        limited["pattern"] = f"^[^{re.escape(''.join(sorted(letters)))}]*$"
    return limited


def _flat(nodes: list[Any]) -> Any:
    for node in nodes:
        if isinstance(node, dict) and node.get("type") == "sequence":
            yield from _flat(node["elements"])
        else:
            yield node


def _const(value: Any) -> dict[str, Any]:
    return {"type": "const_string", "value": value} if isinstance(value, str) else value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex(pattern: str) -> str:
    return f"/{_slashed(pattern)}/"


def _slashed(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
