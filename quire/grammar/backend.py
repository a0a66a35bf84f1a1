"""The interface of a grammar backend, and its input: five methods, and the tokens of the vocabulary as bytes.

    child process:   compile(spec) ──▶ bytes                   may take long, may be killed
    engine:          load(spec, bytes) ──▶ compiled, start(compiled) ──▶ Matcher, fill(matchers, rows, places)
A backend's package is imported when it is made, never before. Must not know: requests, steps, processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from quire.base.registry import Registry
from quire.schema.grammar import GrammarSpec

Rows = np.ndarray[tuple[int, int], np.dtype[np.int32]]  # [rows, words]; a bit set: that token may follow

MOST_ROLLBACK = 64

BACKENDS = Registry(
    "grammar backend",
    {
        "xgrammar": "quire.grammar.backends.xgrammar:XGrammar",
        "guidance": "quire.grammar.backends.guidance:Guidance",
        "outlines": "quire.grammar.backends.outlines:Outlines",
        "lm-format-enforcer": "quire.grammar.backends.lm_format_enforcer:LMFormatEnforcer",
    },
    group="quire.grammar_backends",
)
PACKAGES = {  # package, extra
    "xgrammar": ("xgrammar", "xgrammar"),
    "guidance": ("llguidance", "guidance"),
    "outlines": ("outlines_core", "outlines"),
    "lm-format-enforcer": ("lmformatenforcer", "lm-format-enforcer"),
}


class GrammarVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens[i]`: the bytes token i adds to a text; empty for special tokens, which only a tag may require, by id.
    `special`: their names."""

    tokens: list[bytes]
    size: int  # of the model's logits, padding included
    ends: tuple[int, ...]  # end-of-text first, then the model's further ends
    special: dict[int, bytes] = {}

    @property
    def words(self) -> int:
        return (self.size + 31) // 32


class Matcher(Protocol):
    """One request's state in its grammar. Drafted tokens are accepted too, and rolled back."""

    def accept(self, token_id: int) -> bool:
        """False: it does not follow, and the state is unchanged."""

    def rollback(self, count: int) -> None:
        """Undo the last accepted tokens, at most MOST_ROLLBACK."""

    def can_end(self) -> bool: ...

    def fault(self) -> str | None:
        """Why it cannot continue, if so."""


class Backend(Protocol):
    def compile(self, spec: GrammarSpec) -> bytes:
        """All the slow work. ValueError: why this grammar cannot be used."""

    def load(self, spec: GrammarSpec, compiled: bytes) -> Any: ...

    def start(self, loaded: Any) -> Matcher: ...

    def fill(self, matchers: Sequence[Any], rows: Rows, indices: Sequence[int]) -> None:
        """rows[places[i]] becomes the tokens that may follow matchers[i]. End tokens are up to the caller."""

    def cost(self, loaded: Any) -> int:
        """Its memory in bytes, for the cache."""


def make_backend(name: str, vocabulary: GrammarVocabulary) -> Backend:
    backend: Backend = BACKENDS.get(name)(vocabulary)
    return backend
