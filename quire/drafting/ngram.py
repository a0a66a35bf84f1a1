"""Prompt lookup (method ngram): what followed the row's last tokens when they occurred before, in the same row.

The longest agreement wins, of equally long ones the latest. Must not know: other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.drafting.index import TokenIndex, follow
from quire.drafting.proposer import NOTHING, Proposal
from quire.schema.step import NewRow

if TYPE_CHECKING:
    from quire.config.drafting import SpeculativeConfig

_MOST_COMPARED = 16  # occurrences per proposal
_LONGEST = 16  # agreement that is told from a longer one
_WIDEST_KEY = 4  # tokens: longer n-grams are compared, shorter ones looked up


def evidence_of(agreement: int) -> int:
    """Agreements that are about as good: 1, 2, 3, 4-5, 6-8, 9-15, longer."""
    return agreement if agreement < 4 else 4 if agreement < 6 else 5 if agreement < 9 else 6 if agreement < 16 else 7


class NgramProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._shortest, self._longest = config.prompt_lookup_min or 1, config.prompt_lookup_max or 1
        self._texts: dict[str, _FollowedText] = {}

    def begin(self, new: NewRow) -> None:
        text = self._texts[new.request_id] = _FollowedText(min(self._shortest, _WIDEST_KEY))
        text.index.extend(new.token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        text = self._texts[request_id]
        text.index.extend(token_ids)
        text.source += len(token_ids) if text.source else 0

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [self._texts[name].propose(self._shortest, max(self._longest, _LONGEST), count) for name in request_ids]

    def end(self, request_id: str) -> None:
        self._texts.pop(request_id, None)


class _FollowedText:
    """One row's text, and the position that its last draft was taken from."""

    __slots__ = ("index", "source")

    def __init__(self, width: int) -> None:
        self.index, self.source = TokenIndex(width), 0

    def propose(self, shortest: int, longest: int, count: int) -> Proposal:
        index, best, source = self.index, shortest - 1, 0
        tail = index.text
        if self.source:  # what was followed so far is preferred among equals: it is likely to go on
            agreed = index.agreement(self.source, tail, longest)
            if agreed > best:
                best, source = agreed, self.source
        if best < longest:
            for at in index.occurrences(_MOST_COMPARED):
                if best and tail[at - best - 1 : at] != tail[-best - 1 :]:
                    continue  # no longer than the best
                agreed = index.agreement(at, tail, longest)
                if agreed > best:
                    best, source = agreed, at
                    if best == longest:
                        break
        self.source = source
        return Proposal(follow(index, source, count), evidence_of(best)) if source else NOTHING
