"""xgrammar: compiled to JSON in the child, read back in the engine. GBNF, JSON schema, regex and structural tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quire.base.registry import load
from quire.grammar.backend import GrammarVocabulary, Rows
from quire.grammar.regex import read_regex
from quire.schema.grammar import GrammarKind, GrammarSpec

MOST_WHITESPACE = 20  # in a row, between JSON tokens: enough for indentation, but not endless
_PARALLEL = 8  # rows from which several threads fill them
# First byte of every special token: no text has this byte, so only tags can require the token, by its id or,
# in free text, by its name.
_NO_TEXT = b"\xff"


class XGrammar:
    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        package = "xgrammar"
        self._compiled = load(f"{package}:CompiledGrammar")
        self._matcher = load(f"{package}:GrammarMatcher")
        tokens = vocabulary.tokens + [b""] * (vocabulary.size - len(vocabulary.tokens))
        for token_id, name in vocabulary.special.items():
            tokens[token_id] = _NO_TEXT + name
        self._tokens = load(f"{package}:TokenizerInfo")(
            tokens, load(f"{package}:VocabType").RAW, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.ends)
        )
        self._compiler = load(f"{package}:GrammarCompiler")(self._tokens, max_threads=1, cache_enabled=False)
        self._make_batch = load(f"{package}:BatchGrammarMatcher")

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            return str(self._compile(spec).serialize_json()).encode()
        except RuntimeError as wrong:  # its errors all are: "[time] file:line: what"
            if "bad_alloc" in str(wrong):
                raise MemoryError from None
            raise ValueError(_plain(str(wrong))) from None

    def _compile(self, spec: GrammarSpec) -> Any:
        compiler = self._compiler
        if spec.kind is GrammarKind.JSON:
            most = None if spec.compact else MOST_WHITESPACE
            separators = (",", ":") if spec.compact else None
            return compiler.compile_json_schema(
                spec.text, any_whitespace=not spec.compact, max_whitespace_cnt=most, separators=separators
            )
        if spec.kind is GrammarKind.REGEX:
            return compiler.compile_regex(read_regex(spec.text).for_xgrammar)
        if spec.kind is GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(spec.text))
            return compiler.compile_grammar(f"root ::= {choices}")
        if spec.kind is GrammarKind.EBNF:
            return compiler.compile_grammar(spec.text)
        if spec.kind is GrammarKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(_tag(json.loads(spec.text)))
        raise ValueError(f"xgrammar does not read {spec.kind} grammars")

    def load(self, spec: GrammarSpec, compiled: bytes) -> Any:
        return self._compiled.deserialize_json(compiled.decode(), self._tokens)

    def start(self, loaded: Any) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher(loaded))

    def fill(self, matchers: Sequence[XGrammarMatcher], rows: Rows, indices: Sequence[int]) -> None:
        if len(matchers) < _PARALLEL:
            for matcher, index in zip(matchers, indices, strict=True):
                matcher.inner.fill_next_token_bitmask(rows, index)
            return
        self._batch.batch_fill_next_token_bitmask([m.inner for m in matchers], rows, list(indices))

    @cached_property
    def _batch(self) -> Any:
        return self._make_batch()

    def cost(self, loaded: Any) -> int:
        return int(loaded.memory_size_bytes)


class XGrammarMatcher:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept(self, token_id: int) -> bool:
        return bool(self.inner.accept_token(token_id))

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    def can_end(self) -> bool:
        return bool(self.inner.is_completed())

    def fault(self) -> str | None:
        return None


def _tag(tag: dict[str, Any]) -> str:
    """{structures, triggers}, the older form, written in the newer one. Whitespace between JSON tokens is bounded."""
    if "structures" in tag:
        tags = [
            {"begin": one["begin"], "end": one["end"],
             "content": {"type": "json_schema", "json_schema": one.get("schema") or {}}}
            for one in tag["structures"]
        ]  # fmt: skip
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags,
                "stop_after_first": tag.get("stop_after_first", False)}  # fmt: skip
        tag = {"type": "structural_tag", "format": form}
    waiting: list[Any] = [tag["format"]]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            if "json_schema" in part:
                part.setdefault("max_whitespace_cnt", MOST_WHITESPACE)
            elif part.get("type") == "regex":
                part["pattern"] = read_regex(part["pattern"]).for_xgrammar
            waiting += [value for key, value in part.items() if key != "json_schema"]
    return json.dumps(tag)


def _plain(message: str) -> str:
    """Without time, file and line of its source."""
    text = message.strip()
    if text.startswith("[") and ".cc:" in text:
        text = text.split(": ", 1)[-1]
    return text[:500] or "no reason given"
