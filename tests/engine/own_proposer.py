"""A user's own proposer, for test_speculative.py: what followed each token last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from quire.config.drafting import SpeculativeConfig
from quire.drafting.proposer import Proposal
from quire.schema.step import NewRow

VOCABULARY = 3


class Bigrams:
    def __init__(self, config: SpeculativeConfig) -> None:
        self.texts: dict[str, list[int]] = {}

    def begin(self, new: NewRow) -> None:
        self.texts[new.request_id] = list(new.token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id] += token_ids

    def end(self, request_id: str) -> None:
        self.texts.pop(request_id, None)

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [Proposal(self._draft(self.texts[name], count)) for name in request_ids]

    def _draft(self, text: list[int], count: int) -> list[int]:
        following = dict(pairwise(text))
        drafts = [following.get(text[-1], 0)]
        while len(drafts) < count:
            drafts.append(following.get(drafts[-1], 0))
        return drafts


class Half:
    """Not a proposer: it only begins."""

    def begin(self, new: NewRow) -> None: ...


class Same:
    """Drafts one token, whatever was said."""

    def __init__(self, config: SpeculativeConfig) -> None: ...
    def begin(self, new: NewRow) -> None: ...
    def extend(self, request_id: str, token_ids: Sequence[int]) -> None: ...
    def end(self, request_id: str) -> None: ...
    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [Proposal([9] * count) for _ in request_ids]
