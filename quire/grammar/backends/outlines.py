"""outlines-core: regular expressions, and JSON schemas that can be expressed as a regular expression.

Compiled in the child to a table of states and tokens, which is sent as bytes. `choose.py` does not select it for what
the table does not enforce exactly (bounds of numbers, recursion, ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from quire.base.registry import load
from quire.grammar.backend import MOST_ROLLBACK, GrammarVocabulary, Rows
from quire.schema.grammar import GrammarKind, GrammarSpec

WHITESPACE = r"[ \n\r\t]{0,20}"
_DEPTH = 3  # recursion that is unrolled; recursive schemas do not get here
_STATE_BYTES = 1 << 20  # a table is about as large as its binary form; at least this


class Outlines:
    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        package = "outlines_core"
        self._index, self._guide = load(f"{package}:Index"), load(f"{package}:Guide")
        self._regex_of = load(f"{package}:json_schema.build_regex_from_schema")
        token_ids: dict[bytes, list[int]] = {}
        for token_id, word in enumerate(vocabulary.tokens):
            if word:
                token_ids.setdefault(word, []).append(token_id)
        self._vocabulary = load(f"{package}:Vocabulary")(vocabulary.ends[0], token_ids)

    def compile(self, spec: GrammarSpec) -> bytes:
        made = self._index(self._regex(spec), self._vocabulary)
        (binary,) = made.__reduce__()[1]
        return bytes(binary)

    def _regex(self, spec: GrammarSpec) -> str:
        if spec.kind is GrammarKind.REGEX:
            return bare_regex(spec.text)
        if spec.kind is GrammarKind.CHOICE:
            return "|".join(map(literal, json.loads(spec.text)))
        if spec.kind is GrammarKind.JSON:
            blanks = "" if spec.compact else WHITESPACE if spec.whitespace is None else spec.whitespace
            return str(self._regex_of(spec.text, blanks, _DEPTH))
        raise ValueError(f"outlines does not read {spec.kind} grammars")

    def load(self, spec: GrammarSpec, compiled: bytes) -> Any:
        return self._index.from_binary(compiled), len(compiled)

    def start(self, loaded: Any) -> OutlinesMatcher:
        index, _ = loaded
        return OutlinesMatcher(index, self._guide(index, MOST_ROLLBACK))

    def fill(self, matchers: Sequence[OutlinesMatcher], rows: Rows, indices: Sequence[int]) -> None:
        num_words = rows.shape[1]
        for matcher, row in zip(matchers, indices, strict=True):
            matcher.inner.write_mask_into(rows.ctypes.data + row * num_words * rows.itemsize, num_words, rows.itemsize)

    def cost(self, loaded: Any) -> int:
        return int(loaded[1]) + _STATE_BYTES


class OutlinesMatcher:
    __slots__ = ("_index", "inner")

    def __init__(self, index: Any, inner: Any) -> None:
        self._index, self.inner = index, inner

    def accept(self, token_id: int) -> bool:
        try:
            self.inner.advance(token_id, False)
        except ValueError:
            return False
        return True

    def rollback(self, count: int) -> None:
        self.inner.rollback_state(count)

    def can_end(self) -> bool:
        return bool(self._index.is_final_state(self.inner.get_state()))

    def fault(self) -> str | None:
        return None


def bare_regex(source: str) -> str:
    """The entire text must match anyway: anchors of its start and end are redundant."""
    source = source.removeprefix("^")
    ends = source.endswith("$") and (len(source) - len(source[:-1].rstrip("\\"))) % 2 == 1
    return source[:-1] if ends else source


def literal(word: str) -> str:
    return re.sub(r"[][\\.^$*+?{}|()/#&~-]", r"\\\g<0>", word)
