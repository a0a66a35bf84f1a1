"""Every live request's sampling parameters, as rows: numbers in columns, lists as arrays. All are checked by now.

In: add, remove and move of rows as the batch changes; the rows of one step. Out: their Selection: the parameters of the
rows that sample, only the parts that some row uses. It is kept until a row changes, so that a steady batch costs
nothing. Places count within the step: place i is the i-th row that samples.
Must not know: logits, the order of the steps, or where tokens lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.ops.copy import Upload, uploader
from quire.sampling.logprobs import LogprobRequest
from quire.schema.params import ResolvedParams, TimeRules, sampling_of
from quire.schema.step import NewRow

RANDOM, MIN_P, TOP_K, TOP_P, ALLOWED, WORDS, MIN_TOKENS, BIAS, PENALTY, LOGPROBS, GRAMMAR, TIMES = (
    1 << i for i in range(12)
)
ADJUSTING = ALLOWED | WORDS | MIN_TOKENS | BIAS | PENALTY | TIMES  # may change which token is best


@dataclass
class RowLists:
    """Parameters of one row that are lists."""

    allowed: np.ndarray | None = None
    words: tuple[tuple[int, ...], ...] = ()
    held_back: list[tuple[np.ndarray, int]] = field(default_factory=list)  # ids, and before how many outputs
    bias: tuple[np.ndarray, np.ndarray] | None = None
    num_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    times: TimeRules | None = None


Owners = list[tuple[int, RowLists]]  # place, that row's lists


class Filter(NamedTuple):
    """A parameter of some of the rows that draw. where None: of all of them."""

    where: Tensor | None
    value: Tensor
    largest: int = 0  # top-k only


class Pairs(NamedTuple):
    """(place, token) pairs."""

    rows: Tensor
    ids: Tensor
    values: Tensor  # logit bias: what is added. min_tokens: pairs are banned below this position


class BannedWords(NamedTuple):
    """Banned words, over all rows of the step."""

    rows: Tensor  # [W]
    prefixes: Tensor  # [W, L] right-aligned, -1 in front
    last: Tensor  # [W]
    prompt_lengths: Tensor  # [W]


class TimedRows(NamedTuple):
    """Rows that write times, all by the same rules."""

    rules: TimeRules
    rows: Tensor  # [T]
    prompt_lengths: Tensor  # [T]


class Penalties(NamedTuple):
    where: Tensor  # [P]
    prompt_lengths: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


class Columns(NamedTuple):
    """How each row of the step chooses, neutral where it does not ask for a part: see `draw` in ops/sample.py."""

    temperature: Tensor  # [S] each; 0: greedy
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor


@dataclass
class Selection:
    """Parameters of the rows that sample in one step, in the step's order. A part nobody needs is None."""

    rows: np.ndarray  # [S] int64: their batch rows
    row_index: Tensor  # [S] the same, on the device
    adjusts: bool = False  # some row needs a part of the pipeline that may change which token is best
    num_random: int = 0
    random: Tensor | None = None  # [R] places of the rows that draw; None: all or none do
    temperature: Tensor | None = None  # [R]
    seeds: Tensor | None = None  # [R]
    columns: tuple[Tensor, Columns] | None = None  # of all rows, where one call chooses for all of them
    min_p: Filter | None = None
    top_k: Filter | None = None
    top_p: Filter | None = None
    allowed: tuple[Tensor, Tensor] | None = None  # places [m], bool [m, V]
    words: BannedWords | None = None
    min_tokens: Pairs | None = None
    last_min_position: int = 0  # no min_tokens pair is active from this position on
    bias: Pairs | None = None
    penalties: Penalties | None = None
    times: list[TimedRows] = field(default_factory=list)
    asks: list[LogprobRequest] = field(default_factory=list)


class SamplingRows:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size, self.upload = vocab_size, uploader(device)
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
        params = sampling_of(new.params)
        self.num_prompt[row] = new.num_prompt_tokens
        flags, self.lists[row] = self._read_lists(new)
        self.prompt_logprobs[row] = self._count(params.prompt_logprobs)
        self.seed[row] = np.uint64(new.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self.temperature[row], self.min_p[row], self.top_p[row] = params.temperature, params.min_p, params.top_p
        self.presence[row], self.frequency[row] = params.presence_penalty, params.frequency_penalty
        self.repetition[row], self.min_tokens[row] = params.repetition_penalty, params.min_tokens
        self.top_k[row] = min(params.top_k, self.vocab_size)
        self.flags[row] = flags | self._read_numbers(params) | (GRAMMAR if params.grammar else 0)

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
            flags |= PENALTY
        if not params.greedy:
            flags |= RANDOM
            flags |= MIN_P if params.min_p > 0 else 0
            flags |= TOP_K if 0 < params.top_k < self.vocab_size else 0
            flags |= TOP_P if params.top_p < 1 else 0
        return flags

    def _read_lists(self, new: NewRow) -> tuple[int, RowLists | None]:
        params, lists, flags = sampling_of(new.params), RowLists(), 0
        if params.allowed_token_ids is not None:
            lists.allowed = np.array(params.allowed_token_ids, np.int64)
            flags |= ALLOWED
        if params.bad_words_token_ids:
            lists.words = params.bad_words_token_ids
            flags |= WORDS
        if params.min_tokens and (stops := [i for i in new.stop_token_ids if 0 <= i < self.vocab_size]):
            lists.held_back.append((np.array(sorted(set(stops)), np.int64), params.min_tokens))
            flags |= MIN_TOKENS
        if (rules := params.speech_rules) is not None:
            if rules.never_first:
                lists.held_back.append((np.array(sorted(set(rules.never_first)), np.int64), 1))
                flags |= MIN_TOKENS
            if rules.times is not None:
                lists.times = rules.times
                flags |= TIMES
        if params.logit_bias:
            lists.bias = (
                np.array(list(params.logit_bias), np.int64),
                np.array(list(params.logit_bias.values()), np.float32),
            )
            flags |= BIAS
        if params.logprobs is not None or params.logprob_token_ids:
            lists.num_logprobs = self._count(params.logprobs) or 0
            lists.logprob_ids = params.logprob_token_ids
            flags |= LOGPROBS
        return flags, lists if flags else None

    def _count(self, k: int | None) -> int | None:
        return k if k is None else self.vocab_size if k < 0 else min(k, self.vocab_size)


def columns_of(store: SamplingRows, rows: np.ndarray) -> tuple[Tensor, Columns]:
    """(seeds, the rest) of all rows of a step."""
    flags = store.flags[rows]
    parts = (
        (RANDOM, store.temperature, 0), (MIN_P, store.min_p, 0), (TOP_K, store.top_k, 0), (TOP_P, store.top_p, 1)
    )  # fmt: skip
    columns = (np.where(flags & part, column[rows], column.dtype.type(other)) for part, column, other in parts)
    return store.upload(store.seed[rows]), Columns(*(store.upload(column) for column in columns))


def gather(store: SamplingRows, rows: np.ndarray) -> Selection:
    chosen = Selection(rows=rows, row_index=store.upload(rows))
    flags = store.flags[rows]
    used = int(np.bitwise_or.reduce(flags)) if rows.size else 0
    chosen.adjusts = bool(used & ADJUSTING)
    if used & RANDOM:
        _gather_random(store, chosen, flags)
    if used & PENALTY:
        _gather_penalties(store, chosen, flags)
    if used & (ALLOWED | WORDS | MIN_TOKENS | BIAS | LOGPROBS | TIMES):
        owners = [(place, lists) for place, row in enumerate(rows) if (lists := store.lists[row]) is not None]
        _gather_allowed(store, chosen, owners)
        _gather_words(store, chosen, owners)
        _gather_pairs(store, chosen, owners)
        _gather_asks(store, chosen, owners)
        _gather_times(store, chosen, owners)
    return chosen


def _gather_random(store: SamplingRows, chosen: Selection, flags: np.ndarray) -> None:
    places = np.flatnonzero(flags & RANDOM)
    rows, flags, upload = chosen.rows[places], flags[places], store.upload
    chosen.num_random = places.size
    if places.size < chosen.rows.size:
        chosen.random = upload(places)
    chosen.temperature = upload(store.temperature[rows])
    chosen.seeds = upload(store.seed[rows])
    chosen.min_p = _filter(flags & MIN_P, store.min_p[rows], upload)
    chosen.top_k = _filter(flags & TOP_K, store.top_k[rows], upload)
    chosen.top_p = _filter(flags & TOP_P, store.top_p[rows], upload)


def _filter(is_on: np.ndarray, values: np.ndarray, upload: Upload) -> Filter | None:
    where = np.flatnonzero(is_on)
    if not where.size:
        return None
    values = values[where]
    everyone = where.size == is_on.size
    return Filter(None if everyone else upload(where), upload(values), int(values.max()))


def _gather_penalties(store: SamplingRows, chosen: Selection, flags: np.ndarray) -> None:
    places = np.flatnonzero(flags & PENALTY)
    rows = chosen.rows[places]
    columns = (
        places,
        *(column[rows] for column in (store.num_prompt, store.presence, store.frequency, store.repetition)),
    )
    chosen.penalties = Penalties(*(store.upload(column) for column in columns))


def _gather_allowed(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    own = [(place, lists.allowed) for place, lists in owners if lists.allowed is not None]
    if own:
        mask = np.zeros((len(own), store.vocab_size), np.bool_)
        for line, (_, ids) in zip(mask, own, strict=True):
            line[ids] = True
        chosen.allowed = store.upload(np.array([place for place, _ in own])), store.upload(mask)


def _gather_words(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    own = [(place, word) for place, lists in owners for word in lists.words]
    if not own:
        return
    width = max(len(word) for _, word in own) - 1
    prefixes = np.full((len(own), width), -1, np.int64)
    for line, (_, word) in zip(prefixes, own, strict=True):
        line[width - len(word) + 1 :] = word[:-1]
    places = np.array([place for place, _ in own])
    columns = (places, prefixes, np.array([word[-1] for _, word in own]), store.num_prompt[chosen.rows[places]])
    chosen.words = BannedWords(*(store.upload(column) for column in columns))


def _gather_pairs(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    biased = [(place, *lists.bias) for place, lists in owners if lists.bias is not None]
    pairs = []
    for place, lists in owners:
        for ids, num_outputs in lists.held_back:
            until = int(store.num_prompt[chosen.rows[place]]) + num_outputs
            pairs.append((place, ids, np.full(ids.size, until)))
            chosen.last_min_position = max(chosen.last_min_position, until)
    chosen.bias = _pairs(biased, store.upload)
    chosen.min_tokens = _pairs(pairs, store.upload)


def _pairs(own: list[tuple[int, np.ndarray, np.ndarray]], upload: Upload) -> Pairs | None:
    if not own:
        return None
    places = np.concatenate([np.full(ids.size, place) for place, ids, _ in own])
    ids, values = (np.concatenate([entry[i] for entry in own]) for i in (1, 2))
    return Pairs(*(upload(column) for column in (places, ids, values)))


def _gather_times(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    groups: dict[TimeRules, list[int]] = {}
    for place, lists in owners:
        if lists.times is not None:
            groups.setdefault(lists.times, []).append(place)
    for rules, own in groups.items():
        places = np.array(own)
        chosen.times.append(TimedRows(rules, store.upload(places), store.upload(store.num_prompt[chosen.rows[places]])))


def _gather_asks(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, lists in owners:
        if store.flags[chosen.rows[place]] & LOGPROBS:
            groups.setdefault((lists.num_logprobs, lists.logprob_ids), []).append(place)
    for (k, ids), own in groups.items():
        named = store.upload(np.array(ids, np.int64)) if ids else None
        chosen.asks.append(LogprobRequest(store.upload(np.array(own)), tuple(own), k, named))
