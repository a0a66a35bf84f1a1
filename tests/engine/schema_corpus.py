"""JSON schemas, regular expressions and grammars that constrained answers are judged by."""

from __future__ import annotations

import random
from typing import Any

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
     "required": ["name", "age"]},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["a", "b"],
     "additionalProperties": False},
    {"type": "object", "properties": {"kind": {"enum": ["cat", "dog", 3, None]}}, "required": ["kind"]},
    {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 25}, "minItems": 1, "maxItems": 4},
    {"type": "string", "enum": ["north", "south", "é", "a \"quoted\" one"]},
    {"const": {"x": [1, 2]}},
    {"type": "integer", "minimum": -12, "maximum": 130},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 100},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"anyOf": [{"type": "integer", "maximum": 99, "minimum": 0}, {"type": "string", "enum": ["none"]}]},
    {"oneOf": [
        {"type": "object", "properties": {"t": {"const": "a"}, "v": {"type": "integer", "maximum": 9, "minimum": 0}},
         "required": ["t", "v"], "additionalProperties": False},
        {"type": "object", "properties": {"t": {"const": "b"}, "w": {"type": "boolean"}}, "required": ["t", "w"],
         "additionalProperties": False},
    ]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
    {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "additionalProperties": False, "required": ["v"],
        "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9},
                       "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}}}},
    {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}, "required": ["a"],
     "additionalProperties": {"type": "boolean"}},
    {"type": "array", "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}],
     "items": False, "minItems": 2},
    {"type": "object", "properties": {"deep": {"type": "object", "properties": {"list": {
        "type": "array", "items": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                                   "additionalProperties": False}, "minItems": 2, "maxItems": 2}},
        "required": ["list"], "additionalProperties": False}}, "required": ["deep"], "additionalProperties": False},
    {"type": "object", "properties": {f"p{i}": {"type": "integer", "minimum": 0, "maximum": 9} for i in range(30)},
     "additionalProperties": False},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"title": "Noted", "description": "d", "type": "boolean", "default": True, "examples": [False]},
    {"type": "array", "items": {"enum": [f"value {i}" for i in range(1500)]}, "minItems": 1, "maxItems": 1},
]  # fmt: skip

REGEXES = [
    r"\d{3}-\d{4}", r"[a-z]{3,6}", r"(cat|dog)s?", r"\w+@\w+\.(com|org)", r"[A-Z][a-z]*( [A-Z][a-z]*)?",
    r"0x[0-9a-f]{4}",
    r"^start.end$", r"a.{3}b", r"(?:ab){2,4}", r"[^a-z]{2}", r"\$\d+\.\d{2}", r"(?P<year>\d{4})/(0[1-9]|1[0-2])",
    r"(?i)yes|no", r"[\w.-]{1,8}", r"\S{4}", r"x*?y", r"(a|b|c)(1|2|3)", r"\u00e9t\u00e9", r"[éèê]{2}",
    r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
    r"\[\d\]", r"(true|false|null)", r"-?(0|[1-9]\d{0,3})(\.\d{1,2})?", r"\t?tab", r"(\d\s){2}\d", r"[\]\-a]{2}",
    r"a{0,3}b",
    r"Q: [^\n]{1,20}\?", r"(([ab]{2})c){2}", r"#[0-9A-F]{6}",
]  # fmt: skip

GRAMMARS = {
    'root ::= "yes" | "no"': {"yes", "no"},
    'root ::= greeting " " name\ngreeting ::= "hi" | "bye"\nname ::= "Ann" | "Bob"': {
        f"{a} {b}" for a in ("hi", "bye") for b in ("Ann", "Bob")
    },
    'start: "left" | "right"': {"left", "right"},
    'start: A B\nA: "x" | "y"\nB: /[12]/': {a + b for a in "xy" for b in "12"},
}


MORE_REGEXES = [
    r"[01]{8}", r"v\d+\.\d+\.\d+", r"(?:mon|tues|wednes)day", r"[A-F0-9]{2}(:[A-F0-9]{2}){2}", r"<b>[a-z ]{1,12}</b>",
    r"\(\d{3}\) \d{3}", r"(yes|no)(, (yes|no)){2}", r"[a-z]+_[a-z]+", r"\d{1,2}:[0-5]\d (AM|PM)", r"([a-z])([0-9])\.",
    r"\+\d{2} \d{4}", r"[a-zA-Z]{2}\d{2}[a-zA-Z]{2}", r"(red|blue) (car|bus)", r"=+>", r"\{\}|\[\]", r"[ab]{2}|[cd]{3}",
    r"a?b?c?d", r"https?://[a-z]{2,8}\.(com|org)/", r"\w{3}\s\w{3}", r"[^\s\d]{4}",
]  # fmt: skip

# The judge of each is a regular expression for the same language, or for one that holds it.
MORE_GRAMMARS = {
    "root ::= digit digit\ndigit ::= [0-9]": r"[0-9]{2}",
    'root ::= "[" item ("," item){0,2} "]"\nitem ::= "a" | "b"': r"\[[ab](,[ab]){0,2}\]",
    'root ::= "(" root ")" | "x"': r"\(*x\)*",
    'root ::= term op term\nterm ::= [1-9]\nop ::= "+" | "-" | "*"': r"[1-9][-+*][1-9]",
    'root ::= "SELECT " col " FROM " tab\ncol ::= "a" | "b"\ntab ::= "t" | "u"': r"SELECT [ab] FROM [tu]",
    'root ::= word (" " word)? "."\nword ::= [a-z]{2,5}': r"[a-z]{2,5}( [a-z]{2,5})?\.",
    'root ::= "<" name ">" "</" "a>"\nname ::= "a"': r"<a></a>",
    'root ::= ("ab" | "cd"){2}': r"(ab|cd){2}",
    'root ::= "é" [àü]': r"é[àü]",
    "root ::= [^a-z]{3}": r"[^a-z]{3}",
    "start: NAME\nNAME: /[A-Z][a-z]{2,6}/": r"[A-Z][a-z]{2,6}",
    'start: "(" start ")" | "y"': r"\(*y\)*",
    'start: pair ("," pair)?\npair: KEY "=" VALUE\nKEY: /[a-c]/\nVALUE: /[0-9]{1,2}/': r"[a-c]=\d\d?(,[a-c]=\d\d?)?",
    'start: A~2\nA: "ha"': r"haha",
    'start: "if " COND " then " WORD\nCOND: "p" | "q"\nWORD: /[a-z]{1,4}/': r"if [pq] then [a-z]{1,4}",
    'start: (X | Y)+ "."\nX: "x"\nY: "y"': r"[xy]+\.",
}


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are short, so that an answer ends within few tokens."""
    kinds = ["boolean", "null", "integer", "enum", "string", "number"] + ["object", "array", "any"] * (depth > 0) * 2
    kind = dice.choice(kinds)
    if kind == "integer":
        low = dice.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + dice.randrange(0, 200)}
    if kind == "number":
        low = dice.randrange(-5, 5)
        return {"type": "number", "minimum": low, "maximum": low + dice.randrange(1, 9)}
    if kind == "enum":
        return {"enum": dice.sample(["a", "b c", 1, 2.5, None, True, "ü", {"k": []}], dice.randrange(1, 4))}
    if kind == "string":
        return dice.choice([
            {"type": "string", "maxLength": 6}, {"type": "string", "minLength": 1, "maxLength": 4},
            {"type": "string", "pattern": "^[a-c]{1,4}$"}, {"type": "string", "format": "time"},
        ])  # fmt: skip
    if kind == "any":
        return {"anyOf": [random_schema(dice, depth - 1) for _ in range(dice.randrange(1, 4))]}
    if kind == "array":
        low = dice.randrange(0, 2)
        return {"type": "array", "items": random_schema(dice, depth - 1), "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = dice.sample(["id", "name", "a b", "x", "ключ"], dice.randrange(1, 4))
        required = [name for name in names if dice.random() < 0.6]
        made: dict[str, Any] = {"type": "object", "properties": {n: random_schema(dice, depth - 1) for n in names}}
        return made | ({"required": required} if required else {}) | {"additionalProperties": False}
    return {"type": kind}
