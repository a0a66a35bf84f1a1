"""The one ordered logit pipeline. What may change the best token comes first; what only narrows the draw comes after.

    logits of the model                                        raw_logprobs, raw_logits are taken here
      grammar mask · allowed_token_ids · bad_words             what may be said at all
      min_tokens · logit_bias · custom processors (not argmax-invariant)
      repetition, frequency, presence penalties
      times between words (speech models)
    ── greedy requests leave here with the best token ──       their processed values are taken here
      temperature
      min_p · custom processors (argmax-invariant)
      top_k · top_p                                            processed_logprobs, processed_logits are taken here
    drawn by seeded noise (sampler.py)

In: logits [S, V] of the rows that sample, their Selection, their positions. Each part runs only if a row needs it, on
the rows that need it, and never lets one row change another. Must not know: requests, log probabilities, the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.ops import sample
from quire.sampling.custom import CustomSteps
from quire.sampling.rows import Filter, Selection, TimedRows


class StepRows(NamedTuple):
    """The rows of one step, beside their parameters."""

    positions: np.ndarray  # [S] int64: where in its row each new token will stand
    places: Tensor  # [S] int64: the same, on the device
    num_rows: int  # of the whole batch
    mask: tuple[Tensor, Tensor] | None = None  # grammar: places [m], allowed int32 [m, words], a bit per id


class Pipeline:
    def __init__(self, custom: CustomSteps | None, tokens: Tensor) -> None:
        self.custom = custom
        self._tokens = tokens  # [max_rows, width] int32: the rows' tokens, kept by the worker
        self._allow = sample.allow_words_.on(tokens.device)

    def adjust(self, logits: Tensor, rows: Selection, step: StepRows) -> Tensor:
        """The steps that may change which token is best. Changes `logits`, and may return another tensor."""
        if step.mask is not None:
            self._allow(logits, *step.mask)
        if rows.allowed is not None:
            sample.allow_only_(logits, *rows.allowed)
        if rows.words is not None:
            self._ban_words(logits, rows, step)
        if rows.min_tokens is not None:
            _hold_back(logits, rows, step)
        if rows.bias is not None:
            sample.bias_(logits, *rows.bias)
        if self.custom is not None:
            logits = self.custom.apply(logits, rows.rows, step.num_rows, invariant=False)
        if rows.penalties is not None:
            self._penalize(logits, rows, step)
        for timed in rows.times:
            self._write_times(logits, timed, rows, step)
        return logits

    def narrow(self, logits: Tensor, rows: Selection, step: StepRows) -> Tensor:
        """The steps for rows that draw: `logits` holds only those, in order. May change and return another tensor."""
        assert rows.temperature is not None
        sample.scale_(logits, rows.temperature)
        if rows.min_p is not None:
            _on(logits, rows.min_p, sample.min_p_)
        if self.custom is not None:
            drawing = rows.rows if rows.random is None else rows.rows[rows.random.cpu().numpy()]
            logits = self.custom.apply(logits, drawing, step.num_rows, invariant=True)
        if rows.top_k is not None:
            largest = rows.top_k.largest
            _on(logits, rows.top_k, lambda part, k: sample.top_k_(part, k, largest))
        if rows.top_p is not None:
            _on(logits, rows.top_p, sample.top_p_)
        return logits

    def _ban_words(self, logits: Tensor, rows: Selection, step: StepRows) -> None:
        words = rows.words
        assert words is not None
        ends = step.places[words.rows]
        width = words.prefixes.shape[1]
        places = ends.unsqueeze(1) + torch.arange(-width, 0, device=ends.device)
        # before the row's first token nothing can match: such a place counts as prompt
        tails = self._tokens[rows.row_index[words.rows].unsqueeze(1), places.clamp_(min=0)]
        sample.ban_words_(logits, words.rows, tails, ends - words.prompt_lengths, words.prefixes, words.last)

    def _write_times(self, logits: Tensor, timed: TimedRows, rows: Selection, step: StepRows) -> None:
        rules = timed.rules
        part = logits[timed.rows]
        sample.keep_times_(
            part,
            self._tokens[rows.row_index[timed.rows], : int(step.positions.max())],
            timed.prompt_lengths,
            step.places[timed.rows],
            first=rules.first_id,
            end=rules.end_id,
            plain=rules.plain_id,
            latest=rules.latest,
        )
        logits[timed.rows] = part

    def _penalize(self, logits: Tensor, rows: Selection, step: StepRows) -> None:
        penalties = rows.penalties
        assert penalties is not None
        part = logits[penalties.where]
        longest = int(step.positions.max())
        sample.penalize_(
            part,
            self._tokens[rows.row_index[penalties.where], :longest],
            penalties.prompt_lengths,
            step.places[penalties.where],
            presence=penalties.presence,
            frequency=penalties.frequency,
            repetition=penalties.repetition,
        )
        logits[penalties.where] = part


def _hold_back(logits: Tensor, rows: Selection, step: StepRows) -> None:
    """min_tokens: no end-of-text and no stop id before enough outputs."""
    if rows.min_tokens is None or int(step.positions.min()) >= rows.last_min_position:
        return
    row, ids, until = rows.min_tokens
    sample.ban_where_(logits, row, ids, step.places[row] < until)


def _on(logits: Tensor, rows: Filter, change: Callable[[Tensor, Tensor], None]) -> None:
    if rows.where is None:
        change(logits, rows.value)
        return
    part = logits[rows.where]
    change(part, rows.value)
    logits[rows.where] = part
