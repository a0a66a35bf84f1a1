"""lm-format-enforcer: Python's regular expressions, and simple JSON schemas, matched character by character.

Its parsers return the characters that may follow; here they are walked along a trie of the vocabulary. That is Python
for every token: by far the slowest backend, for those who need its behaviour. A regular expression is turned into
a table in the child, because that may take long. A walk is bounded; exceeding the bound fails only its request.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import numpy as np

from quire.base.registry import load
from quire.grammar.backend import GrammarVocabulary, Rows
from quire.grammar.backends.outlines import bare_regex, literal
from quire.schema.grammar import GrammarKind, GrammarSpec

PACKAGE = "lmformatenforcer"
MOST_VISITS = 1_000_000  # of the trie, for one mask
_REST = "\0rest"  # in the table: every other character
_BYTES = 1 << 20  # memory of a parser; it does not report it


class _Table(msgspec.Struct):
    """A finite state machine. `letters`: letter to column; `moves`: state to column to state."""

    letters: dict[str, int]
    moves: dict[int, dict[int, int]]
    finals: list[int]
    initial: int


class LMFormatEnforcer:
    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        tokens = [(i, _text(word)) for i, word in enumerate(vocabulary.tokens)]
        regular = [(i, text, True) for i, text in tokens if text]
        data = load(f"{PACKAGE}:TokenEnforcerTokenizerData")(
            regular, _join, list(vocabulary.ends), False, vocabulary.size
        )
        self.tree, self._letters = data.tokenizer_tree, data.tokenizer_alphabet
        self.texts = dict(tokens)
        self._config = load(f"{PACKAGE}:CharacterLevelParserConfig")

    def compile(self, spec: GrammarSpec) -> bytes:
        if spec.kind is GrammarKind.JSON:
            self._json(spec)
            return spec.text.encode()
        if spec.kind is GrammarKind.REGEX:
            source = bare_regex(spec.text)
        elif spec.kind is GrammarKind.CHOICE:
            source = "|".join(map(literal, json.loads(spec.text)))
        else:
            raise ValueError(f"lm-format-enforcer does not read {spec.kind} grammars")
        return msgspec.msgpack.encode(_table(source))

    def load(self, spec: GrammarSpec, compiled: bytes) -> Any:
        if spec.kind is not GrammarKind.JSON:
            table = msgspec.msgpack.decode(compiled, type=_Table, strict=False)
            return _InMachine(_Machine(table, self._letters), table.initial), {}
        parser = self._json(spec)
        parser.config = self._config(alphabet=self._letters)
        return parser, {}

    def _json(self, spec: GrammarSpec) -> Any:
        try:
            return load(f"{PACKAGE}:JsonSchemaParser")(json.loads(spec.text))
        except Exception as wrong:  # noqa: BLE001  # of its own making, and pydantic's
            raise ValueError(f"lm-format-enforcer cannot read the schema: {wrong!s:.200}") from None

    def start(self, loaded: Any) -> EnforcerMatcher:
        parser, known = loaded
        return EnforcerMatcher(self, parser, known)

    def fill(self, matchers: Sequence[EnforcerMatcher], rows: Rows, indices: Sequence[int]) -> None:
        for matcher, index in zip(matchers, indices, strict=True):
            rows[index] = matcher.row(rows.shape[1])

    def cost(self, loaded: Any) -> int:
        return _BYTES


class EnforcerMatcher:
    __slots__ = ("_known", "_owner", "_past", "_wrong")

    def __init__(self, owner: LMFormatEnforcer, parser: Any, known: dict[Hashable, Any]) -> None:
        self._owner, self._known = owner, known
        self._past = [parser]  # parsers are immutable, so rollback is easy
        self._wrong: str | None = None

    def accept(self, token_id: int) -> bool:
        parser = self._past[-1]
        text = self._owner.texts.get(token_id) or ""
        try:
            for letter in text:
                if letter not in parser.get_allowed_characters():
                    return False
                parser = parser.add_character(letter)
        except Exception as wrong:  # noqa: BLE001  # a parser of the library's own may raise anything; its request ends, with these words
            self._wrong = f"lm-format-enforcer: {type(wrong).__name__}: {wrong!s:.200}"
            return False
        if text:
            self._past.append(parser)
        return bool(text)

    def rollback(self, count: int) -> None:
        if count:
            del self._past[-count:]

    def can_end(self) -> bool:
        return bool(self._past[-1].can_end())

    def fault(self) -> str | None:
        return self._wrong

    def row(self, num_words: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """What may follow, as bits."""
        parser = self._past[-1]
        key = parser.cache_key()
        if key is not None and key in self._known:
            return self._known[key]  # type: ignore[no-any-return]
        bits = np.zeros(num_words * 32, bool)
        try:
            bits[self._allowed(parser)] = True
        except Exception as wrong:  # noqa: BLE001  # as above
            self._wrong = f"lm-format-enforcer: {type(wrong).__name__}: {wrong!s:.200}"
        row = np.packbits(bits, bitorder="little").view(np.int32)
        if key is not None:
            self._known[key] = row
        return row

    def _allowed(self, parser: Any) -> list[int]:
        tree = self._owner.tree
        tokens: list[int] = []
        shortcut = parser.shortcut_key()
        waiting = [(parser, tree.root)]
        if isinstance(shortcut, tuple) and shortcut[0] == "json_freetext":  # inside a string: known by length
            _, length, least, most = shortcut
            known = tree.json_freetext_tokens
            least, most = max(0, least - length), most - length
            tokens += known.lookup_allowed_tokens(
                min(known.max_token_len, least), min(known.max_token_len, most)
            ).allowed_tokens
            node = tree.root.children.get('"')
            closes = node is not None and '"' in parser.get_allowed_characters()
            waiting = [(parser.add_character('"'), node)] if closes else []
        visits = 0
        while waiting:
            parser, node = waiting.pop()
            visits += 1
            if visits > MOST_VISITS:
                raise RuntimeError(f"more than {MOST_VISITS} possible continuations")
            tokens += node.tokens
            for letter in node.children.keys() & set(parser.get_allowed_characters()):
                waiting.append((parser.add_character(letter), node.children[letter]))
        return tokens


def _table(source: str) -> _Table:
    """interegular's state machine as plain data, without dead states."""
    rest = load("interegular.fsm:anything_else")
    try:
        machine = load("interegular:parse_pattern")(source).to_fsm()
    except Exception as wrong:  # noqa: BLE001  # Unsupported, InvalidSyntax and their kin
        raise ValueError(f"lm-format-enforcer cannot read the expression: {wrong!s:.200}") from None
    letters = {_REST if symbol is rest else str(symbol): column for symbol, column in machine.alphabet.items()}
    before: dict[int, set[int]] = {}
    for state, row in machine.map.items():
        for after in row.values():
            before.setdefault(after, set()).add(state)
    live, waiting = set(machine.finals), list(machine.finals)
    while waiting:
        more = before.get(waiting.pop(), set()) - live
        live |= more
        waiting += more
    moves = {
        state: {c: to for c, to in row.items() if to in live} for state, row in machine.map.items() if state in live
    }
    return _Table(letters, moves, sorted(machine.finals), machine.initial)


class _Machine:
    """A table, and for every state the characters that may follow."""

    def __init__(self, table: _Table, letters: str) -> None:
        self.table, self.finals = table, frozenset(table.finals)
        named = table.letters
        self._columns: dict[int, list[str]] = {}
        for letter in {*letters, *(name for name in named if name != _REST)}:
            if (column := named.get(letter, named.get(_REST))) is not None:
                self._columns.setdefault(column, []).append(letter)
        self._known: dict[int, frozenset[str]] = {}

    def letters(self, state: int) -> frozenset[str]:
        if state not in self._known:
            columns = self.table.moves.get(state, {})
            self._known[state] = frozenset(letter for c in columns for letter in self._columns.get(c, ()))
        return self._known[state]

    def move(self, state: int, letter: str) -> int:
        named = self.table.letters
        return self.table.moves[state][named[letter] if letter in named else named[_REST]]


class _InMachine:
    """A state of a machine, with the methods of lm-format-enforcer's parsers."""

    __slots__ = ("_machine", "_state")

    def __init__(self, machine: _Machine, state: int) -> None:
        self._machine, self._state = machine, state

    def get_allowed_characters(self) -> frozenset[str]:
        return self._machine.letters(self._state)

    def add_character(self, letter: str) -> _InMachine:
        return _InMachine(self._machine, self._machine.move(self._state, letter))

    def can_end(self) -> bool:
        return self._state in self._machine.finals

    def cache_key(self) -> Hashable:
        return self._state

    def shortcut_key(self) -> Hashable:
        return None


def _text(word: bytes) -> str:
    """Tokens with incomplete characters are not text and never allowed."""
    try:
        return word.decode()
    except UnicodeDecodeError:
        return ""


def _join(token_ids: Sequence[int]) -> str:
    raise RuntimeError("every token stands for itself")
