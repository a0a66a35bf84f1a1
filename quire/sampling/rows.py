"""Every live request's sampling parameters, as rows; and what a step's rows together need.

In: add, remove and move of rows as the batch changes; the rows of one step. Out: a Selection, the parameters gathered
for those rows with only the parts that some row uses. It is kept until a row changes, so a steady batch costs nothing.
Must not know: logits, the order of the steps (pipeline.py), or where tokens lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.sampling.logprobs import Ask
from quire.schema.errors import InputError
from quire.schema.step import NewRow

_RANDOM, _MIN_P, _TOP_K, _TOP_P, _ALLOWED, _WORDS, _MIN_TOKENS, _BIAS, _PENALTY, _LOGPROBS = (1 << i for i in range(10))
_FLOATS = ("temperature", "min_p", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class Filter(NamedTuple):
    """A parameter of some of the rows that draw. where None: of all of them."""

    where: Tensor | None
    value: Tensor
    largest: int = 0  # top-k only


class Pairs(NamedTuple):
    """(row, token) pairs, rows counted within the step."""

    rows: Tensor
    ids: Tensor
    values: Tensor  # logit bias: what is added. min_tokens: pairs are banned below this position


class Words(NamedTuple):
    """Banned words of two or more tokens or one, over all rows of the step."""

    rows: Tensor  # [W]
    prefixes: Tensor  # [W, L] right-aligned, -1 in front
    last: Tensor  # [W]
    prompt_lengths: Tensor  # [W]


class Penalties(NamedTuple):
    where: Tensor  # [P]
    prompt_lengths: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass
class Selection:
    """Parameters of the rows that sample in one step, in the step's order. A part nobody needs is None."""

    rows: np.ndarray  # [S] int64: their batch rows
    row_index: Tensor  # [S] the same, on the device
    num_random: int = 0
    random: Tensor | None = None  # [R] places of the rows that draw; None: all or none do
    temperature: Tensor | None = None  # [R]
    seeds: Tensor | None = None  # [R]
    min_p: Filter | None = None
    top_k: Filter | None = None
    top_p: Filter | None = None
    allowed: tuple[Tensor, Tensor] | None = None  # places [m], bool [m, V]
    words: Words | None = None
    min_tokens: Pairs | None = None
    last_min_position: int = 0  # no min_tokens pair is active from this position on
    bias: Pairs | None = None
    penalties: Penalties | None = None
    asks: list[Ask] = field(default_factory=list)


@dataclass
class _Sparse:
    """Parameters that are lists, of one row; checked against the vocabulary."""

    allowed: np.ndarray | None = None
    words: tuple[tuple[int, ...], ...] = ()
    held_back: np.ndarray | None = None  # ids that min_tokens bans
    bias: tuple[np.ndarray, np.ndarray] | None = None
    num_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()


class SamplingRows:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.prompt_logprobs: list[int | None] = [None] * max_rows  # k per row; -1 is given as V
        self._flags = np.zeros(max_rows, np.int64)
        self._floats = np.zeros((max_rows, len(_FLOATS)), np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._seed = np.zeros(max_rows, np.int64)
        self.num_prompt = np.zeros(max_rows, np.int64)
        self._min_tokens = np.zeros(max_rows, np.int64)
        self._sparse: list[_Sparse | None] = [None] * max_rows
        self._kept: Selection | None = None

    def add(self, row: int, new: NewRow) -> None:
        """Fill a row, whatever it held. InputError when the parameters cannot be served (the row is then neutral)."""
        self.remove(row)
        self.num_prompt[row] = new.num_prompt_tokens
        self._seed[row] = np.uint64(new.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        params = new.params
        flags, sparse = self._read_lists(new)
        self._sparse[row] = sparse
        self._floats[row] = [getattr(params, name) for name in _FLOATS]
        self._top_k[row] = params.top_k
        self._min_tokens[row] = params.min_tokens
        self.prompt_logprobs[row] = self._count(params.prompt_logprobs)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            flags |= _PENALTY
        if not params.greedy:
            flags |= _RANDOM
            flags |= _MIN_P if params.min_p > 0 else 0
            flags |= _TOP_K if 0 < params.top_k < self.vocab_size else 0
            flags |= _TOP_P if params.top_p < 1 else 0
        self._flags[row] = flags

    def remove(self, row: int) -> None:
        self._flags[row] = 0
        self._sparse[row] = self.prompt_logprobs[row] = self._kept = None

    def move(self, source: int, target: int) -> None:
        for column in (self._flags, self._floats, self._top_k, self._seed, self.num_prompt, self._min_tokens):
            column[target] = column[source]
        self._sparse[target] = self._sparse[source]
        self.prompt_logprobs[target] = self.prompt_logprobs[source]
        self.remove(source)

    def select(self, rows: np.ndarray) -> Selection:
        """`rows`: the batch rows that sample in this step."""
        if self._kept is None or not np.array_equal(self._kept.rows, rows):
            self._kept = self._gather(rows.copy())
        return self._kept

    # --- reading a request's lists

    def _read_lists(self, new: NewRow) -> tuple[int, _Sparse | None]:
        params, sparse, flags = new.params, _Sparse(), 0
        if params.allowed_token_ids is not None:
            sparse.allowed = self._ids("allowed_token_ids", params.allowed_token_ids)
            flags |= _ALLOWED
        if params.bad_words_token_ids:
            for word in params.bad_words_token_ids:
                self._ids("bad_words", word)
            sparse.words = tuple(tuple(word) for word in params.bad_words_token_ids if word)
            flags |= _WORDS if sparse.words else 0
        if params.min_tokens and (held := [i for i in new.stop_token_ids if 0 <= i < self.vocab_size]):
            sparse.held_back = np.array(sorted(set(held)), np.int64)
            flags |= _MIN_TOKENS
        if params.logit_bias:
            ids = self._ids("logit_bias", list(params.logit_bias))
            sparse.bias = ids, np.array(list(params.logit_bias.values()), np.float32)
            flags |= _BIAS
        if params.logprobs is not None or params.logprob_token_ids:
            sparse.num_logprobs = self._count(params.logprobs) or 0
            sparse.logprob_ids = tuple(self._ids("logprob_token_ids", params.logprob_token_ids or ()).tolist())
            flags |= _LOGPROBS
        return flags, sparse if flags else None

    def _ids(self, name: str, ids: Sequence[int]) -> np.ndarray:
        wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < self.vocab_size] if ids else []
        if wrong:
            raise InputError(
                f"{name} holds token id {wrong[0]}; the model's vocabulary is 0 to {self.vocab_size - 1}",
                param=name,
                value=wrong[0],
            )
        return np.array(ids, np.int64)

    def _count(self, k: int | None) -> int | None:
        return k if k is None else self.vocab_size if k < 0 else min(k, self.vocab_size)

    # --- gathering for a step

    def _gather(self, rows: np.ndarray) -> Selection:
        chosen = Selection(rows=rows, row_index=self._tensor(rows))
        flags = self._flags[rows]
        used = int(np.bitwise_or.reduce(flags)) if rows.size else 0
        if used & _RANDOM:
            self._gather_random(chosen, flags)
        if used & _PENALTY:
            self._gather_penalties(chosen, flags)
        if used & (_ALLOWED | _WORDS | _MIN_TOKENS | _BIAS | _LOGPROBS):
            places = [(place, sparse) for place, row in enumerate(rows) if (sparse := self._sparse[row]) is not None]
            self._gather_allowed(chosen, places)
            self._gather_words(chosen, places)
            self._gather_pairs(chosen, places)
            self._gather_asks(chosen, places)
        return chosen

    def _gather_random(self, chosen: Selection, flags: np.ndarray) -> None:
        places = np.flatnonzero(flags & _RANDOM)
        rows, flags = chosen.rows[places], flags[places]
        chosen.num_random = places.size
        if places.size < chosen.rows.size:
            chosen.random = self._tensor(places)
        chosen.temperature = self._tensor(self._floats[rows, 0])
        chosen.seeds = self._tensor(self._seed[rows])
        chosen.min_p = self._filter(flags & _MIN_P, self._floats[rows, 1])
        chosen.top_k = self._filter(flags & _TOP_K, self._top_k[rows])
        chosen.top_p = self._filter(flags & _TOP_P, self._floats[rows, 2])

    def _filter(self, wanted: np.ndarray, values: np.ndarray) -> Filter | None:
        index = np.flatnonzero(wanted)
        if not index.size:
            return None
        values = values[index]
        everyone = index.size == wanted.size
        return Filter(None if everyone else self._tensor(index), self._tensor(values), int(values.max()))

    def _gather_penalties(self, chosen: Selection, flags: np.ndarray) -> None:
        places = np.flatnonzero(flags & _PENALTY)
        rows = chosen.rows[places]
        columns = (self._tensor(self._floats[rows, i]) for i in (3, 4, 5))
        chosen.penalties = Penalties(self._tensor(places), self._tensor(self.num_prompt[rows]), *columns)

    def _gather_allowed(self, chosen: Selection, places: list[tuple[int, _Sparse]]) -> None:
        own = [(place, sparse.allowed) for place, sparse in places if sparse.allowed is not None]
        if own:
            mask = np.zeros((len(own), self.vocab_size), np.bool_)
            for line, (_, ids) in zip(mask, own, strict=True):
                line[ids] = True
            chosen.allowed = self._tensor(np.array([place for place, _ in own])), self._tensor(mask)

    def _gather_words(self, chosen: Selection, places: list[tuple[int, _Sparse]]) -> None:
        own = [(place, word) for place, sparse in places for word in sparse.words]
        if not own:
            return
        width = max(len(word) for _, word in own) - 1
        prefixes = np.full((len(own), width), -1, np.int64)
        for line, (_, word) in zip(prefixes, own, strict=True):
            line[width - len(word) + 1 :] = word[:-1]
        rows = np.array([place for place, _ in own])
        last = np.array([word[-1] for _, word in own])
        chosen.words = Words(*map(self._tensor, (rows, prefixes, last, self.num_prompt[chosen.rows[rows]])))

    def _gather_pairs(self, chosen: Selection, places: list[tuple[int, _Sparse]]) -> None:
        biased = [(place, *sparse.bias) for place, sparse in places if sparse.bias is not None]
        if biased:
            chosen.bias = self._pairs(biased)
        held = []
        for place, sparse in places:
            if sparse.held_back is not None:
                row = chosen.rows[place]
                until = self.num_prompt[row] + self._min_tokens[row]
                held.append((place, sparse.held_back, np.full(sparse.held_back.size, until)))
                chosen.last_min_position = max(chosen.last_min_position, int(until))
        if held:
            chosen.min_tokens = self._pairs(held)

    def _pairs(self, own: list[tuple[int, np.ndarray, np.ndarray]]) -> Pairs:
        rows = np.concatenate([np.full(ids.size, place) for place, ids, _ in own])
        ids, values = (np.concatenate([entry[i] for entry in own]) for i in (1, 2))
        return Pairs(self._tensor(rows), self._tensor(ids), self._tensor(values))

    def _gather_asks(self, chosen: Selection, places: list[tuple[int, _Sparse]]) -> None:
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for place, sparse in places:
            if self._flags[chosen.rows[place]] & _LOGPROBS:
                groups.setdefault((sparse.num_logprobs, sparse.logprob_ids), []).append(place)
        for (k, ids), own in groups.items():
            named = self._tensor(np.array(ids, np.int64)) if ids else None
            chosen.asks.append(Ask(self._tensor(np.array(own)), tuple(own), k, named))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
