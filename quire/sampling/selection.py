"""What the rows of one step together need: their parameters gathered, only the parts that some row uses.

Made by `gather` from SamplingRows when the batch or the set of sampling rows changed; read by pipeline.py and
sampler.py. Places count within the step: place i is the i-th row that samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.ops.copy import upload
from quire.sampling.logprobs import LogprobRequest

if TYPE_CHECKING:
    from quire.sampling.rows import RowLists, SamplingRows

RANDOM, MIN_P, TOP_K, TOP_P, ALLOWED, WORDS, MIN_TOKENS, BIAS, PENALTY, LOGPROBS, GRAMMAR = (1 << i for i in range(11))
Owners = list[tuple[int, "RowLists"]]  # place, that row's lists


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
    asks: list[LogprobRequest] = field(default_factory=list)


def columns_of(store: SamplingRows, rows: np.ndarray) -> tuple[Tensor, Columns]:
    """(seeds, the rest) of all rows of a step."""
    flags = store.flags[rows]
    parts = (
        (RANDOM, store.temperature, 0), (MIN_P, store.min_p, 0), (TOP_K, store.top_k, 0), (TOP_P, store.top_p, 1)
    )  # fmt: skip
    found = (np.where(flags & part, column[rows], column.dtype.type(other)) for part, column, other in parts)
    return upload(store.seed[rows], store.device), Columns(*(upload(column, store.device) for column in found))


def gather(store: SamplingRows, rows: np.ndarray) -> Selection:
    chosen = Selection(rows=rows, row_index=upload(rows, store.device))
    flags = store.flags[rows]
    used = int(np.bitwise_or.reduce(flags)) if rows.size else 0
    if used & RANDOM:
        _gather_random(store, chosen, flags)
    if used & PENALTY:
        _gather_penalties(store, chosen, flags)
    if used & (ALLOWED | WORDS | MIN_TOKENS | BIAS | LOGPROBS):
        owners = [(place, lists) for place, row in enumerate(rows) if (lists := store.lists[row]) is not None]
        _gather_allowed(store, chosen, owners)
        _gather_words(store, chosen, owners)
        _gather_pairs(store, chosen, owners)
        _gather_asks(store, chosen, owners)
    return chosen


def _gather_random(store: SamplingRows, chosen: Selection, flags: np.ndarray) -> None:
    places = np.flatnonzero(flags & RANDOM)
    rows, flags, device = chosen.rows[places], flags[places], store.device
    chosen.num_random = places.size
    if places.size < chosen.rows.size:
        chosen.random = upload(places, device)
    chosen.temperature = upload(store.temperature[rows], device)
    chosen.seeds = upload(store.seed[rows], device)
    chosen.min_p = _filter(flags & MIN_P, store.min_p[rows], device)
    chosen.top_k = _filter(flags & TOP_K, store.top_k[rows], device)
    chosen.top_p = _filter(flags & TOP_P, store.top_p[rows], device)


def _filter(wanted: np.ndarray, values: np.ndarray, device: torch.device) -> Filter | None:
    where = np.flatnonzero(wanted)
    if not where.size:
        return None
    values = values[where]
    everyone = where.size == wanted.size
    return Filter(None if everyone else upload(where, device), upload(values, device), int(values.max()))


def _gather_penalties(store: SamplingRows, chosen: Selection, flags: np.ndarray) -> None:
    places = np.flatnonzero(flags & PENALTY)
    rows = chosen.rows[places]
    columns = (
        places,
        *(column[rows] for column in (store.num_prompt, store.presence, store.frequency, store.repetition)),
    )
    chosen.penalties = Penalties(*(upload(column, store.device) for column in columns))


def _gather_allowed(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    own = [(place, lists.allowed) for place, lists in owners if lists.allowed is not None]
    if own:
        mask = np.zeros((len(own), store.vocab_size), np.bool_)
        for line, (_, ids) in zip(mask, own, strict=True):
            line[ids] = True
        chosen.allowed = upload(np.array([place for place, _ in own]), store.device), upload(mask, store.device)


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
    chosen.words = BannedWords(*(upload(column, store.device) for column in columns))


def _gather_pairs(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    biased = [(place, *lists.bias) for place, lists in owners if lists.bias is not None]
    held = []
    for place, lists in owners:
        if lists.held_back is not None:
            row = chosen.rows[place]
            until = int(store.num_prompt[row] + store.min_tokens[row])
            held.append((place, lists.held_back, np.full(lists.held_back.size, until)))
            chosen.last_min_position = max(chosen.last_min_position, until)
    chosen.bias = _pairs(biased, store.device)
    chosen.min_tokens = _pairs(held, store.device)


def _pairs(own: list[tuple[int, np.ndarray, np.ndarray]], device: torch.device) -> Pairs | None:
    if not own:
        return None
    places = np.concatenate([np.full(ids.size, place) for place, ids, _ in own])
    ids, values = (np.concatenate([entry[i] for entry in own]) for i in (1, 2))
    return Pairs(*(upload(column, device) for column in (places, ids, values)))


def _gather_asks(store: SamplingRows, chosen: Selection, owners: Owners) -> None:
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, lists in owners:
        if store.flags[chosen.rows[place]] & LOGPROBS:
            groups.setdefault((lists.num_logprobs, lists.logprob_ids), []).append(place)
    for (k, ids), own in groups.items():
        named = upload(np.array(ids, np.int64), store.device) if ids else None
        chosen.asks.append(LogprobRequest(upload(np.array(own), store.device), tuple(own), k, named))
