"""When a request ends: the rules that need token ids only. Stop strings are the client's business.

In order, for each new token: end-of-text or a stop id (not before min_tokens), the length limit, repetition.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.sched.request import Request
from quire.schema.messages import FinishReason


class Ending(NamedTuple):
    reason: FinishReason
    stop_id: int | None = None


def append(request: Request, new: list[int]) -> tuple[list[int], Ending | None]:
    """Add new tokens up to the one that ends it; those kept, and why it ended if it did."""
    tokens, before = request.tokens, len(request.tokens)
    for token in new:
        tokens.append(token)
        if (token in request.stops or len(tokens) >= request.watch_from) and (ending := ends(request, token)):
            return new[: len(tokens) - before], ending
    return new, None


def ends(request: Request, token: int) -> Ending | None:
    """`token` is its last; does it end here?"""
    given, params = request.given, request.given.sampling
    may_stop = request.num_outputs >= params.min_tokens
    if may_stop and token in request.stops:
        is_eos = token == given.eos_token_id and not params.ignore_eos
        return Ending(FinishReason.STOP, None if is_eos else token)
    if len(request.tokens) >= request.limit:
        return Ending(FinishReason.LENGTH)
    if may_stop and request.repetition is not None and request.repetition.found(request.tokens):
        return Ending(FinishReason.REPETITION)
    return None
