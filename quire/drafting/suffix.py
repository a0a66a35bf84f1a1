"""Suffix decoding (method suffix): what most often followed the longest known ending of a row's text.

Two suffix trees are asked, and the one that expects more of its draft answers: the row's own text, and past answers
of requests with the same scope (NewRow.scope: tenant, cache salt and adapter), so that nobody's drafts show what
others were told. Neither tree is built: its nodes are the chains of index.py, walked as deep as one proposal needs.
Past answers are dropped oldest first, by their number and by their tokens. Must not know: what a scope is made of.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.drafting.index import TokenIndex
from quire.drafting.ngram import evidence_of
from quire.drafting.proposer import NOTHING, Proposal
from quire.schema.step import NewRow

if TYPE_CHECKING:
    from quire.config.drafting import SpeculativeConfig

MOST_TOKENS = 1 << 20  # of past answers: each takes about 150 bytes
_WIDTH = 2  # tokens of the shortest ending that is looked up
_MOST_COMPARED = 32  # occurrences per tree and proposal
_CONTEXT = 8  # prompt tokens kept before an answer, so that its beginning can be found
_BETWEEN = -1  # separates answers
_ENOUGH = 3  # tokens that agree: reason to leave what was followed so far
_GAP = 16  # evidence: added where a token before did not agree
_CERTAIN = 8  # evidence: added where the next token was always the same


class _RowText:
    __slots__ = ("followed", "index", "scope", "source", "told_from", "trust")

    def __init__(self, new: NewRow) -> None:
        self.index = TokenIndex(_WIDTH)
        self.index.extend(new.token_ids)
        self.scope = new.scope
        self.followed: TokenIndex | None = None  # where the last draft came from: this text, or past answers
        self.source = 0  # the position in it that corresponds to the end of the row
        self.trust = 0  # tokens that agreed when it was found; half of that after each time that they did not
        resumed = len(new.token_ids) > new.num_prompt_tokens  # what came before was told when the row left
        self.told_from = len(new.token_ids) if resumed else max(0, new.num_prompt_tokens - _CONTEXT)


class Guess(NamedTuple):
    token_ids: list[int]
    source: int  # the latest position that it was read from
    agreed: int  # tokens before it that are the row's last
    expected: float  # how many of them are right, by frequency
    evidence: int


class SuffixProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob
        self._rows: dict[str, _RowText] = {}
        self.past = PastAnswers(config.suffix_decoding_max_cached_requests)

    def begin(self, new: NewRow) -> None:
        self._rows[new.request_id] = _RowText(new)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        row = self._rows[request_id]
        row.index.extend(token_ids)
        if (followed := row.followed) is not None:
            row.source += len(token_ids)
            if row.source >= followed.length or row.source <= followed.dropped:
                row.followed = None
            elif followed.text[row.source - followed.dropped - 1] != token_ids[-1]:
                row.trust //= 2

    def end(self, request_id: str) -> None:
        if (row := self._rows.pop(request_id, None)) is not None:
            self.past.add(row.scope, row.index.text[row.told_from :])

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [self._propose(self._rows[name], count) for name in request_ids]

    def _propose(self, row: _RowText, count: int) -> Proposal:
        tail = row.index.text
        best, followed = self._guess(row.index, row.index.occurrences(_MOST_COMPARED), tail, count), row.index
        past = self.past.of(row.scope)
        if past is not None:
            other = self._guess(past, past.occurrences_of(tail, _MOST_COMPARED), tail, count)
            if other is not None and (best is None or other.expected > best.expected):
                best = other
                followed = past
        if best is not None and (row.followed is None or best.agreed >= min(row.trust, _ENOUGH)):
            row.followed, row.source, row.trust = followed, best.source, best.agreed
            return Proposal(best.token_ids, best.evidence)
        return self._go_on(row, count) or (NOTHING if best is None else Proposal(best.token_ids, best.evidence))

    def _go_on(self, row: _RowText, count: int) -> Proposal | None:
        """What was followed before goes on as if one of its tokens had been replaced: agents change a number or a name
        and repeat the rest."""
        followed, count = row.followed, min(count, int(self._factor * row.trust))
        if followed is None or count < _WIDTH:
            return None
        agreed = followed.agreement(row.source, row.index.text, self._depth)
        drafts = _rest(followed.text, row.source - followed.dropped, count)
        return Proposal(drafts, _GAP + evidence_of(agreed)) if drafts else None

    def _guess(self, index: TokenIndex, positions: Iterator[int], tail: list[int], count: int) -> Guess | None:
        """By the occurrences that agree longest with the end of the text."""
        longest, nodes = 0, list[int]()
        for at in positions:
            if longest and index.text[at - index.dropped - longest : at - index.dropped] != tail[-longest:]:
                continue
            agreed = index.agreement(at, tail, self._depth)
            if agreed > longest:
                longest, nodes = agreed, [at]
            else:
                nodes.append(at)
        count = min(count, int(self._factor * longest))
        if longest < _WIDTH or count < 1:
            return None
        return _walk(index, nodes, count, self._least, longest)


def _walk(index: TokenIndex, nodes: list[int], count: int, least: float, agreed: int) -> Guess | None:
    """The most frequent path: at each step the most frequent next token, as long as the whole path is likely enough."""
    text, total = index.text, len(nodes)
    starts = [at - index.dropped for at in nodes]
    path: list[int] = []
    expected, evidence = 0.0, evidence_of(agreed)
    while len(path) < count:
        if len(starts) == 1:
            rest = _rest(text, starts[0] + len(path), count - len(path)) if 1 / total >= least else []
            if rest and not path:
                evidence += _CERTAIN
            expected += len(rest) / total
            path += rest
            break
        following = _next_tokens(text, starts, len(path))
        if not following:
            break
        token, _ = Counter(following.values()).most_common(1)[0]
        alive = [start for start in starts if following.get(start) == token]
        if len(alive) / total < least:
            break
        if not path and len(alive) == total:
            evidence += _CERTAIN
        expected += len(alive) / total
        path.append(token)
        starts = alive
    source = starts[0] + index.dropped
    return Guess(path, source, agreed, expected, evidence) if path else None


def _rest(text: list[int], start: int, count: int) -> list[int]:
    """Where one text goes on, up to its end."""
    rest = text[start : start + count]
    return rest[: rest.index(_BETWEEN)] if _BETWEEN in rest else rest


def _next_tokens(text: list[int], starts: Iterable[int], offset: int) -> dict[int, int]:
    """By start, where the text goes on."""
    end = len(text) - offset
    return {start: token for start in starts if start < end and (token := text[start + offset]) != _BETWEEN}


class PastAnswers:
    """Answers by scope, bounded over all scopes."""

    def __init__(self, most: int, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._most_tokens = most, most_tokens
        self._indices: dict[str, TokenIndex] = {}
        self._sizes: deque[tuple[str, int]] = deque()  # oldest first: scope, tokens
        self._due: Counter[str] = Counter()  # tokens of a scope that are dropped with the next ones
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def of(self, scope: str) -> TokenIndex | None:
        return self._indices.get(scope)

    def add(self, scope: str, token_ids: list[int]) -> None:
        if not self._most or len(token_ids) <= _WIDTH or len(token_ids) >= self._most_tokens:
            return
        index = self._indices.setdefault(scope, TokenIndex(_WIDTH))
        index.extend(token_ids)
        index.extend((_BETWEEN,))
        self._sizes.append((scope, len(token_ids) + 1))
        self.num_tokens += len(token_ids) + 1
        while len(self._sizes) > self._most or self.num_tokens > self._most_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Tokens go when they are a quarter of their scope's: what is left has to be moved."""
        scope, size = self._sizes.popleft()
        self.num_tokens -= size
        self._due[scope] += size
        index = self._indices[scope]
        if self._due[scope] == len(index.text):
            del self._indices[scope], self._due[scope]
        elif 4 * self._due[scope] >= len(index.text):
            index.drop(self._due.pop(scope))
