"""What one request's next token must be, in plain Python, one row at a time: the oracle of the sampling tests.

Shares no code with quire.ops or quire.sampling: the noise is written again from its definition, in Python integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.schema.params import ResolvedParams, SamplingParams

INF = math.inf
M64, M32 = (1 << 64) - 1, (1 << 32) - 1
Row = list[float]


def finish64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def noise(seed: int, position: int, token: int) -> float:
    key = finish64((finish64(seed & M64) + position * 0x9E3779B97F4A7C15) & M64)
    low, high = key & M32, key >> 32
    x = (token * 0x9E3779B1 + low) & M32
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & M32
    x ^= high
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & M32
    x ^= x >> 16
    u = min(((x >> 1) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-u))


def resolved(**given: Any) -> ResolvedParams:
    """Parameters as a worker gets them."""
    return SamplingParams(**given).freeze()


@dataclass
class Known:
    """One request as the sampler knows it at one step."""

    params: ResolvedParams
    prompt: Sequence[int]
    outputs: Sequence[int]
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    grammar: Sequence[bool] | None = None
    custom: Sequence[Callable[[Known, Row], Row]] = ()  # may change the argmax
    invariant: Sequence[Callable[[Known, Row], Row]] = ()


@dataclass
class Wanted:
    token: int
    raw: Row = field(default_factory=list)
    processed: Row = field(default_factory=list)


def adjusted(logits: Row, of: Known) -> Row:
    params, outputs = of.params, list(of.outputs)
    row = list(logits)
    allowed = set(range(len(row))) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    if of.grammar is not None:
        allowed &= {i for i, yes in enumerate(of.grammar) if yes}
    banned = set(range(len(row))) - allowed
    for word in params.bad_words_token_ids or ():
        prefix = list(word[:-1])
        if not prefix or outputs[-len(prefix) :] == prefix:
            banned.add(word[-1])
    if len(outputs) < params.min_tokens:
        banned |= set(of.stop_token_ids)
    row = [-INF if i in banned else value for i, value in enumerate(row)]
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for change in of.custom:
        row = change(of, row)
    for token in set(of.prompt) | set(outputs):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(outputs):
        row[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    return row


def narrowed(row: Row, of: Known) -> Row:
    params = of.params
    row = [value / params.temperature for value in row]
    if params.min_p:
        least = max(row) + math.log(params.min_p)
        row = [value if value >= least else -INF for value in row]
    for change in of.invariant:
        row = change(of, row)
    if 0 < params.top_k < len(row):
        least = sorted(row, reverse=True)[params.top_k - 1]
        row = [value if value >= least else -INF for value in row]
    if params.top_p < 1:
        probs = softmax(row)
        total, least = 0.0, INF
        for value, prob in sorted(zip(row, probs, strict=True), reverse=True):
            if total >= params.top_p:
                break
            total, least = total + prob, value
        row = [value if value >= least else -INF for value in row]
    return row


def softmax(row: Row) -> Row:
    top = max(row)
    shares = [math.exp(value - top) for value in row]
    return [share / sum(shares) for share in shares]


def log_softmax(row: Row) -> Row:
    top = max(row)
    total = top + math.log(sum(math.exp(value - top) for value in row))
    return [value - total for value in row]


def best(row: Row) -> int:
    return max(range(len(row)), key=lambda i: (row[i], -i))


def next_token(logits: Row, of: Known) -> Wanted:
    row = adjusted(logits, of)
    if of.params.temperature < 1e-5:
        return Wanted(best(row), logits, row)
    row = narrowed(row, of)
    position = len(of.prompt) + len(of.outputs)
    noised = [value + noise(of.seed, position, i) if value > -INF else value for i, value in enumerate(row)]
    return Wanted(best(noised), logits, row)
