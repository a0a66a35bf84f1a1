"""Every live request's sampling parameters, as rows: numbers in columns, lists as arrays. All are checked by now.

In: add, remove and move of rows as the batch changes; the rows of one step. Out: their Selection, kept until a row
changes, so that a steady batch costs nothing. Must not know: logits, the order of the steps, or where tokens lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.sampling import selection as needs
from quire.sampling.selection import Selection, gather
from quire.schema.params import ResolvedParams
from quire.schema.step import NewRow


@dataclass
class RowLists:
    """Parameters of one row that are lists."""

    allowed: np.ndarray | None = None
    words: tuple[tuple[int, ...], ...] = ()
    held_back: np.ndarray | None = None  # ids that min_tokens bans
    bias: tuple[np.ndarray, np.ndarray] | None = None
    num_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()


class SamplingRows:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.flags = np.zeros(max_rows, np.int64)  # which steps a row needs
        floats = np.zeros((6, max_rows), np.float32)
        self.temperature, self.min_p, self.top_p, self.presence, self.frequency, self.repetition = floats
        integers = np.zeros((4, max_rows), np.int64)
        self.top_k, self.seed, self.num_prompt, self.min_tokens = integers
        self.lists: list[RowLists | None] = [None] * max_rows
        self.prompt_logprobs: list[int | None] = [None] * max_rows  # k per row; the whole vocabulary is given as V
        self._numbers = (floats, integers)
        self._kept: Selection | None = None
        self._changed = True

    def add(self, row: int, new: NewRow) -> None:
        """Fill a row, whatever it held."""
        self.remove(row)
        params = new.sampling
        self.num_prompt[row] = new.num_prompt_tokens
        flags, self.lists[row] = self._read_lists(new)
        self.prompt_logprobs[row] = self._count(params.prompt_logprobs)
        self.seed[row] = np.uint64(new.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self.temperature[row], self.min_p[row], self.top_p[row] = params.temperature, params.min_p, params.top_p
        self.presence[row], self.frequency[row] = params.presence_penalty, params.frequency_penalty
        self.repetition[row], self.min_tokens[row] = params.repetition_penalty, params.min_tokens
        self.top_k[row] = min(params.top_k, self.vocab_size)
        self.flags[row] = flags | self._read_numbers(params) | (needs.GRAMMAR if params.grammar else 0)

    def remove(self, row: int) -> None:
        self.flags[row] = 0
        self.lists[row] = self.prompt_logprobs[row] = self._kept = None
        self._changed = True

    def take_changed(self) -> bool:
        """True if any row changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def move(self, source: int, target: int) -> None:
        self.flags[target] = self.flags[source]
        for columns in self._numbers:
            columns[:, target] = columns[:, source]
        self.lists[target] = self.lists[source]
        self.prompt_logprobs[target] = self.prompt_logprobs[source]
        self.remove(source)

    def select(self, rows: np.ndarray) -> Selection:
        """`rows`: the batch rows that sample in this step."""
        if self._kept is None or not np.array_equal(self._kept.rows, rows):
            self._kept = gather(self, rows.copy())
        return self._kept

    def _read_numbers(self, params: ResolvedParams) -> int:
        flags = 0
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            flags |= needs.PENALTY
        if not params.greedy:
            flags |= needs.RANDOM
            flags |= needs.MIN_P if params.min_p > 0 else 0
            flags |= needs.TOP_K if 0 < params.top_k < self.vocab_size else 0
            flags |= needs.TOP_P if params.top_p < 1 else 0
        return flags

    def _read_lists(self, new: NewRow) -> tuple[int, RowLists | None]:
        params, lists, flags = new.sampling, RowLists(), 0
        if params.allowed_token_ids is not None:
            lists.allowed = np.array(params.allowed_token_ids, np.int64)
            flags |= needs.ALLOWED
        if params.bad_words_token_ids:
            lists.words = params.bad_words_token_ids
            flags |= needs.WORDS
        if params.min_tokens and (held := [i for i in new.stop_token_ids if 0 <= i < self.vocab_size]):
            lists.held_back = np.array(sorted(set(held)), np.int64)
            flags |= needs.MIN_TOKENS
        if params.logit_bias:
            lists.bias = (
                np.array(list(params.logit_bias), np.int64),
                np.array(list(params.logit_bias.values()), np.float32),
            )
            flags |= needs.BIAS
        if params.logprobs is not None or params.logprob_token_ids:
            lists.num_logprobs = self._count(params.logprobs) or 0
            lists.logprob_ids = params.logprob_token_ids
            flags |= needs.LOGPROBS
        return flags, lists if flags else None

    def _count(self, k: int | None) -> int | None:
        return k if k is None else self.vocab_size if k < 0 else min(k, self.vocab_size)
