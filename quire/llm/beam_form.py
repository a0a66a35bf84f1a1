"""Beam search bound to a form: which tokens may follow each beam. The search asks, the engine only ranks.

In: a constraint and the tokens of beams. Out: for each beam the tokens that may follow it. The grammar is compiled as
for any request, in a process that may be killed, and followed here: an extension that it forbids is never ranked.
Must not know: engines, how beams are scored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.schema.errors import QuireError
from quire.schema.params import StructuredOutputsParams

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.grammar.backend import GrammarVocabulary, Matcher
    from quire.grammar.compiler import Compiled
    from quire.grammar.masks import Masks

_WAIT = 0.01  # seconds between looks at a grammar that compiles
Allowed = np.ndarray[tuple[int], np.dtype[np.bool_]]


class BeamForms:
    """The forms of one engine's searches, compiled when the first is requested. From any thread."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config, self._size = config, vocab_size
        self._lock = threading.Lock()
        self._masks: Masks | None = None

    def make(self, constraint: StructuredOutputsParams) -> BeamForm:
        """Waits until it is compiled."""
        from quire.grammar.request import make_spec  # lazy

        spec = make_spec(constraint, self._config.structured_outputs_config)
        with self._lock:
            from quire.engine.masking import make_masks  # lazy

            self._masks = self._masks or make_masks(self._config, self._size)
            compiler = self._masks.compiler
        compiler.submit(spec)
        while (compiled := compiler.fetch(spec)) is None:
            time.sleep(_WAIT)
        if isinstance(compiled, QuireError):
            raise compiled
        return BeamForm(compiled, compiler.vocabulary())

    def close(self) -> None:
        if self._masks is not None:
            self._masks.close()


class BeamForm:
    """One constraint."""

    def __init__(self, compiled: Compiled, vocabulary: GrammarVocabulary) -> None:
        self._compiled = compiled
        self._size, self._ends = vocabulary.size, list(vocabulary.ends)

    def allowed(self, token_ids: Sequence[int]) -> Allowed:
        """One entry per token: whether it may follow."""
        matcher = self._matcher(token_ids)
        rows = np.zeros((1, (self._size + 31) // 32), np.int32)
        self._compiled.backend.fill([matcher], rows, [0])
        if (fault := matcher.fault()) is not None:
            raise QuireError(f"the grammar is too complex to go on: {fault}")
        bits: Allowed = np.unpackbits(rows.view(np.uint8)[0], bitorder="little")[: self._size].astype(bool)
        bits[self._ends] = matcher.can_end()
        return bits

    def _matcher(self, token_ids: Sequence[int]) -> Matcher:
        """Walked from the start: several beams may go on from one."""
        matcher: Matcher = self._compiled.backend.start(self._compiled.loaded)
        for token_id in token_ids:
            if not matcher.accept(token_id):
                raise QuireError(f"token {token_id} does not follow the grammar")
        return matcher
