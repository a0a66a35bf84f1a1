"""llguidance: exact JSON schema, regex, Lark, GBNF and tags; with its own limits at every step.

Its compiled form cannot be serialized, but takes a millisecond: the child tests it, the engine compiles it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quire.base.registry import load
from quire.grammar.backend import GrammarVocabulary, Rows
from quire.grammar.backends.tag_lark import tag_as_lark
from quire.grammar.regex import read_regex
from quire.schema.grammar import GrammarKind, GrammarSpec

WHITESPACE = r"[ \n\r\t]{1,20}"  # bounded: no endless whitespace
_LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
           "max_lexer_states": 50_000, "max_grammar_size": 500_000, "max_items_in_row": 20_000,
           "verbose_errors": False}  # fmt: skip
_PARALLEL = 8
_LONGEST = 32  # bytes of the longest token tried when text is tokenized


class Guidance:
    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        package = "llguidance"
        self._matcher = load(f"{package}:LLMatcher")
        self._special = {name.decode(): token_id for token_id, name in vocabulary.special.items() if name}
        self._limits = load(f"{package}:LLParserLimits")(**_LIMITS)
        self._from_gbnf, self._tags = f"{package}.gbnf_to_lark:gbnf_to_lark", load(f"{package}:StructTag")
        self._not_gbnf: type[Exception] = load(f"{package}.gbnf_to_lark:GbnfToLarkError")
        wrapper = load(f"{package}:TokenizerWrapper")(_Tokens(vocabulary))
        self._tokens = load(f"{package}:LLTokenizer")(wrapper, n_vocab=vocabulary.size)
        self._make_executor = load(f"{package}:LLExecutor")

    def compile(self, spec: GrammarSpec) -> bytes:
        grammar = self._grammar(spec)
        matcher = self._matcher(self._tokens, grammar, log_level=0, limits=self._limits)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(_plain(matcher.get_error()))
        return grammar.encode()

    def _grammar(self, spec: GrammarSpec) -> str:
        make = self._matcher
        if spec.kind is GrammarKind.JSON:
            pattern = WHITESPACE if spec.whitespace is None else spec.whitespace
            options = {"whitespace_flexible": False} if spec.compact else {"whitespace_pattern": pattern}
            return str(make.grammar_from_json_schema(_common(spec.text), overrides=options))
        if spec.kind is GrammarKind.REGEX:
            return str(make.grammar_from_regex(read_regex(spec.text).for_guidance))
        if spec.kind is GrammarKind.CHOICE:
            return str(make.grammar_from_regex("|".join(map(_literal, json.loads(spec.text)))))
        if spec.kind is GrammarKind.EBNF:
            return str(make.grammar_from_lark(self._lark_of(spec.text)))
        if spec.kind is GrammarKind.LARK:
            return str(make.grammar_from_lark(spec.text))
        return self._structural_tag(json.loads(spec.text))

    def _lark_of(self, gbnf: str) -> str:
        try:
            return str(load(self._from_gbnf)(gbnf))
        except self._not_gbnf as wrong:  # not a ValueError
            raise ValueError(f"not a GBNF grammar: {wrong}") from None

    def _structural_tag(self, tag: dict[str, Any]) -> str:
        if "structures" not in tag:
            return str(self._matcher.grammar_from_lark(tag_as_lark(tag["format"], self._special, WHITESPACE)))
        tags = []
        for one in tag["structures"]:
            trigger = next((t for t in tag["triggers"] if one["begin"].startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins the tag {one['begin']!r:.80}")
            tags.append(
                self._tags(trigger=trigger, begin=one["begin"], grammar=one.get("schema") or {}, end=one["end"])
            )
        return str(self._tags.to_grammar(tags, assume_special=False))

    def load(self, spec: GrammarSpec, compiled: bytes) -> Any:
        made = self._matcher(self._tokens, compiled.decode(), log_level=0, limits=self._limits)
        if made.is_error():
            raise ValueError(_plain(made.get_error()))
        return made

    def start(self, loaded: Any) -> GuidanceMatcher:
        return GuidanceMatcher(loaded.deep_copy())

    def fill(self, matchers: Sequence[GuidanceMatcher], rows: Rows, indices: Sequence[int]) -> None:
        size = rows.shape[1] * rows.itemsize
        if len(matchers) < _PARALLEL:
            for matcher, index in zip(matchers, indices, strict=True):
                matcher.inner.unsafe_compute_mask_ptr(rows.ctypes.data + index * size, size)
        else:
            pairs = [(matcher.inner, index) for matcher, index in zip(matchers, indices, strict=True)]
            self._executor.unsafe_compute_mask_ptr(pairs, rows.ctypes.data, size, rows.shape[0])

    @cached_property
    def _executor(self) -> Any:
        return self._make_executor()

    def cost(self, loaded: Any) -> int:
        return 1 << 20  # it does not report it


class GuidanceMatcher:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept(self, token_id: int) -> bool:
        return int(self.inner.try_consume_tokens([token_id])) == 1

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    def can_end(self) -> bool:
        return bool(self.inner.is_accepting())

    def fault(self) -> str | None:
        return _plain(self.inner.get_error()) if self.inner.is_error() else None


class _Tokens:
    """The vocabulary in llguidance's interface. Text that a grammar forces is tokenized here, longest token
    first: similar to a tokenizer, and in as few steps."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        texts = vocabulary.tokens + [b""] * (vocabulary.size - len(vocabulary.tokens))
        # special tokens must be distinct, or a mask with one of them has all
        self.tokens = [text or vocabulary.special.get(i) or b"<%d>" % i for i, text in enumerate(texts)]
        self.eos_token_id = vocabulary.ends[0] if vocabulary.ends else 0
        self.bos_token_id = None
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self._known = {text: i for i, text in reversed(list(enumerate(texts))) if text}
        self._longest = min(max(map(len, self._known), default=1), _LONGEST)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        tokens: list[int] = []
        at = 0
        while at < len(data):
            size = next((n for n in range(self._longest, 0, -1) if data[at : at + n] in self._known), 0)
            if size:
                tokens.append(self._known[data[at : at + size]])
            at += size or 1
        return tokens


def _common(schema: str) -> str:
    """With the classes of its patterns as Python has them too."""
    if '"pattern' not in schema or "\\\\" not in schema:
        return schema
    return json.dumps(_patterns(json.loads(schema)), ensure_ascii=False)


def _patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: part if key in ("enum", "const", "default") else _patterns(part) for key, part in schema.items()}
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = read_regex(pattern).for_guidance
    if isinstance(named := made.get("patternProperties"), dict):
        made["patternProperties"] = {read_regex(key).for_guidance: part for key, part in named.items()}
    return made


def _literal(word: str) -> str:
    """One lexeme for all words: thousands of them are a row too long for its parser."""
    return re.sub(r"[][\\.^$*+?{}|()/]", r"\\\g<0>", word)


def _plain(message: str) -> str:
    if message.startswith("NoExtension"):
        return "no token of this model can follow it"
    return message.split("\n<", 1)[0].strip()[:500] or "no reason given"
