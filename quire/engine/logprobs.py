"""Log probabilities as callers read them: a list of dicts, or FlatLogprobs, grown from an engine's rows.

In: LogprobRows (a row is the chosen or given token, then the most likely, then those asked for by id). Out: the public
containers, with ranks and decoded tokens. Must not know: which request they belong to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.schema.outputs import FlatLogprobs, Logprob, LogprobsOnePosition, PromptLogprobs, SampleLogprobs
from quire.schema.params import ResolvedParams
from quire.schema.step import LogprobRows

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class LogprobList:
    """The log probabilities of one answer, or of a prompt (whose first token has none)."""

    def __init__(
        self, params: ResolvedParams, tokenizer: Tokenizer | None, *, num_ranked: int, prompt: bool = False
    ) -> None:
        """`num_ranked`: how many entries after the first are the most likely ones; -1: all."""
        self.total = 0.0  # of the chosen tokens
        self._tokenizer = tokenizer if params.detokenize else None
        self._num_ranked = num_ranked
        self._flat = FlatLogprobs() if params.flat_logprobs else None
        self._dicts: list[LogprobsOnePosition | None] = []
        if prompt:
            self._append(None)

    def __len__(self) -> int:
        """Positions so far."""
        return len(self._dicts if self._flat is None else self._flat)

    def extend(self, rows: LogprobRows, count: int | None = None) -> None:
        """Add the first `count` rows (all by default)."""
        for token_ids, logprobs, rank in list(zip(rows.token_ids, rows.logprobs, rows.ranks, strict=True))[:count]:
            self.total += logprobs[0]
            self._append(self._position(token_ids, logprobs, rank))

    def sample(self, begin: int, *, final: bool) -> SampleLogprobs:
        """From position `begin` on; a copy while more may come."""
        if self._flat is not None:
            return self._flat if final and begin == 0 else self._flat[begin:]
        return [entry for entry in self._dicts[begin:] if entry is not None]

    def prompt(self) -> PromptLogprobs:
        """Told when complete, so never a copy."""
        return self._dicts if self._flat is None else self._flat

    def _append(self, position: LogprobsOnePosition | None) -> None:
        if self._flat is not None:
            self._flat.append(position)
        else:
            self._dicts.append(position)

    def _position(self, token_ids: list[int], logprobs: list[float], rank: int) -> LogprobsOnePosition:
        position = {token_ids[0]: Logprob(logprobs[0], rank, self._text(token_ids[0]))}
        num_ranked = len(token_ids) if self._num_ranked == -1 else self._num_ranked
        for place, (token_id, logprob) in enumerate(zip(token_ids[1:], logprobs[1:], strict=True), start=1):
            if token_id not in position:
                position[token_id] = Logprob(logprob, place if place <= num_ranked else None, self._text(token_id))
        return position

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)
