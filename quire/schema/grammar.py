"""GrammarSpec: a constraint on a request's text in one normal form, checked, with the backends that may compile it.

Made by quire/grammar/request.py in the caller's process; the engine compiles it. Equal specs share one compiled form.
"""

from __future__ import annotations

import enum

import msgspec


class GrammarKind(enum.StrEnum):
    JSON = "json"  # text is a JSON schema
    REGEX = "regex"
    CHOICE = "choice"  # text is a JSON list of strings
    EBNF = "ebnf"  # rules written `root ::= ...`
    LARK = "lark"  # rules written `start: ...`
    STRUCTURAL_TAG = "structural_tag"  # text is JSON


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    kind: GrammarKind
    text: str
    compact: bool = False  # JSON without any whitespace
    whitespace: str | None = None  # a regular expression for the whitespace between JSON tokens
    in_thought: bool = False  # it does not wait for the end of a thought
    backends: tuple[str, ...] = ()  # in the order they are tried
