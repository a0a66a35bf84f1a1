"""How many drafts are worth verifying: by how often they were right, and by what a longer step costs.

A draft at position j of a row is right with the probability that the j tokens before it were, times its own.
Verifying m of them in a step of R rows brings R plus the sum of their probabilities in tokens, and costs a step of R
+ m tokens. The m with the most tokens per second is taken, and 0 unless the gain is clear. Probabilities are learned
from every proposal, also from those that were not verified: what the row said next tells whether they would have been
right. Costs are ratios between steps: a probe at start, then neighbouring steps of different sizes, so that a machine
which becomes slower or faster changes nothing. Must not know: how drafts are made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.drafting.proposer import MODEL_EVIDENCE, Proposal

if TYPE_CHECKING:
    from quire.config.drafting import SpeculativeConfig

CLEAR_GAIN = 1.03  # tokens per second with drafts over those without, below which none are verified
_FIRST, _LATER, _PRIOR_WEIGHT = 0.5, 0.7, 2.0  # of an evidence never seen
_MODEL_FIRST, _MODEL_LATER = 0.8, 0.8  # of a draft model whose drafts were never seen
_MOST_LIKELY = 0.98
_OWN_WEIGHT = 4.0  # observations of a row itself that count as much as what is known of all rows
_DECAY, _OWN_DECAY = 0.99, 0.9  # per observation
_LEAST_VALUE = 0.02  # probability below which a draft is not considered
_ADJUST = 0.05  # of the difference (in logarithms) by which a measured ratio changes a cost
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # costs are kept at these numbers of tokens
PROBES, DEVICE_PROBES = _SIZES[:7], _SIZES
_PLAIN_SLOPE = 0.03  # of a step's cost per token more, where nothing was measured


class Rate:
    """How often something was the case, lately."""

    __slots__ = ("_decay", "_hits", "_weight")

    def __init__(self, decay: float) -> None:
        self._decay, self._hits, self._weight = decay, 0.0, 0.0

    def add(self, hit: bool) -> None:
        self._hits = self._hits * self._decay + hit
        self._weight = self._weight * self._decay + 1.0

    def value(self, prior: float) -> float:
        return (self._hits + prior * _PRIOR_WEIGHT) / (self._weight + _PRIOR_WEIGHT)


class StepCosts:
    """What steps cost relative to each other, by their number of tokens."""

    def __init__(self) -> None:
        self.wait = 0.0  # of a step that verifies drafts: for the tokens of the step before, in steps of one token
        self.is_fixed = False  # measured at start, and not learned from steps
        self._costs = [1.0 + _PLAIN_SLOPE * (size - 1) for size in _SIZES]
        self._last: tuple[int, float] | None = None  # the step before: place in _SIZES, seconds

    def probed(self, seconds: Sequence[float]) -> None:
        """Measured at the first of _SIZES; the others go on as the last two measured ones do."""
        count = len(seconds)
        if count < 2:
            return
        slope = (seconds[-1] - seconds[-2]) / (_SIZES[count - 1] - _SIZES[count - 2])
        further = [seconds[-1] + max(0.0, slope) * (size - _SIZES[count - 1]) for size in _SIZES[count:]]
        self._costs = [max(1e-9, one) / max(1e-9, seconds[0]) for one in (*seconds, *further)]
        for i in range(1, len(_SIZES)):  # noise does not make a longer step cheaper
            self._costs[i] = max(self._costs[i], self._costs[i - 1])

    def learn(self, num_tokens: int, seconds: float) -> None:
        place, before = bisect_left(_SIZES, num_tokens), self._last
        if place == len(_SIZES) or seconds <= 0:
            self._last = None
            return
        self._last = place, seconds
        if before is None or before[0] == place:
            return
        costs = self._costs
        ratio = costs[before[0]] * (seconds / before[1]) / costs[place]
        costs[place] *= min(2.0, max(0.5, ratio)) ** _ADJUST

    def of(self, num_tokens: int) -> float:
        """In steps of one token. Up to 16 tokens kernels work in blocks of 2, 4, 8: sizes in between cost as much."""
        sizes, costs = _SIZES, self._costs
        place = bisect_left(sizes, num_tokens)
        if place == len(sizes):
            return costs[-1] * num_tokens / sizes[-1]
        if num_tokens <= 16:
            return costs[place]
        share = (num_tokens - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return costs[place - 1] + share * (costs[place] - costs[place - 1])


@dataclass
class _RowRecord:
    """A row's latest proposal, an older one that is still compared with what it says, and how often they were right."""

    latest: Proposal | None = None
    compared: Proposal | None = None
    at: int = 0  # tokens of `compared` that were right
    expected: float = 0.0  # how likely the first token of `latest` seemed
    hits: float = _OWN_WEIGHT
    weight: float = _OWN_WEIGHT  # what hits would be if this row were like all others

    def add(self, hit: bool) -> None:
        self.hits = _OWN_WEIGHT + (self.hits - _OWN_WEIGHT) * _OWN_DECAY + hit
        self.weight = _OWN_WEIGHT + (self.weight - _OWN_WEIGHT) * _OWN_DECAY + self.expected


class DraftLengths:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens or 0
        self._disable_from = config.disable_by_batch_size
        self._by_batch_size = config.num_speculative_tokens_per_batch_size or ()
        self.costs = StepCosts()
        self._first: dict[int, Rate] = {}  # by evidence: the first token of a proposal
        self._later: dict[int, Rate] = {}  # each further one, if those before it were right
        self._rows: dict[str, _RowRecord] = {}
        # rows with a proposal that is to be compared with what they say, in the order in which they got it: rates go by
        # what was seen last, and ranks must come to the same ones
        self._open: dict[str, None] = {}

    def most(self, num_rows: int) -> int:
        """Drafts per row in a step of so many rows, whatever they are worth."""
        if self._disable_from is not None and num_rows >= self._disable_from:
            return 0
        return next((most for low, high, most in self._by_batch_size if low <= num_rows <= high), self._most)

    def end(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
        self._open.pop(request_id, None)

    def observe_all(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """What rows have sampled after their last proposals. Most rows have none where drafts are not worth it."""
        for request_id in [name for name in self._open if name in sampled]:
            self.observe(request_id, sampled[request_id])

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        record = self._rows.get(request_id)
        if record is None:
            return
        if (latest := record.latest) is not None:
            hit = latest.token_ids[0] == token_ids[0]
            record.add(hit)
            self._first.setdefault(latest.evidence, Rate(_DECAY)).add(hit)
            if record.compared is None:
                record.compared, record.at = latest, 0
            record.latest = None
        if record.compared is not None:
            self._compare(record, record.compared, token_ids)
        if record.compared is None:
            self._open.pop(request_id, None)

    def _compare(self, record: _RowRecord, compared: Proposal, token_ids: Sequence[int]) -> None:
        expected, at = compared.token_ids, record.at
        for token in token_ids:
            hit = expected[at] == token
            if at:
                self._later.setdefault(compared.evidence, Rate(_DECAY)).add(hit)
            at += 1
            if not hit or at == len(expected):
                record.compared = None
                return
        record.at = at

    def choose(
        self, request_ids: Sequence[str], proposals: Sequence[Proposal], num_rows: int | None = None
    ) -> list[int]:
        """How many of each row's drafts to verify, and remember what was proposed. `num_rows`: of the step, if it has
        more than these."""
        chosen = [0] * len(request_ids)
        for _, i in self._worth(self._values(request_ids, proposals), num_rows or len(request_ids)):
            chosen[i] += 1
        return chosen

    def promises(self, request_ids: Sequence[str], proposals: Sequence[Proposal], num_rows: int) -> bool:
        """Whether any would be verified, if all rows of a step were like these; what was proposed is remembered."""
        values = self._values(request_ids, proposals) * max(1, round(num_rows / len(request_ids)))
        return bool(self._worth(values, num_rows))

    def _values(self, request_ids: Sequence[str], proposals: Sequence[Proposal]) -> list[tuple[float, int]]:
        """Of each draft the probability that it is right, and its row."""
        values: list[tuple[float, int]] = []
        for i, (name, proposal) in enumerate(zip(request_ids, proposals, strict=True)):
            if not proposal.token_ids:
                continue
            record = self._rows.get(name)
            if record is None:
                record = self._rows[name] = _RowRecord()
            record.latest = proposal
            self._open[name] = None
            record.expected = self._first_rate(proposal.evidence)
            value = min(_MOST_LIKELY, record.expected * record.hits / record.weight)
            later = self._later_rate(proposal.evidence)
            for _ in proposal.token_ids:
                if value < _LEAST_VALUE:
                    break
                values.append((value, i))
                value *= later
        return values

    def _worth(self, values: list[tuple[float, int]], num_rows: int) -> list[tuple[float, int]]:
        """The drafts of a step with the most tokens per second. Values fall along a row, so what is taken of it is its
        beginning."""
        if not values:
            return values
        values.sort(key=_falling)
        plain, tokens = num_rows / self.costs.of(num_rows), float(num_rows)
        best, count, wait = plain * CLEAR_GAIN, 0, self.costs.wait
        for m, (value, _) in enumerate(values, 1):
            tokens += value
            if (rate := tokens / (self.costs.of(num_rows + m) + wait)) > best:
                best, count = rate, m
        return values[:count]

    def first_probability(self, request_id: str) -> float:
        """That the first draft of a model for a row is right, before it is made."""
        rate, record = self._first_rate(MODEL_EVIDENCE), self._rows.get(request_id)
        return min(_MOST_LIKELY, rate if record is None else rate * record.hits / record.weight)

    def later_probability(self) -> float:
        """That a further draft is right if those before it are."""
        return self._later_rate(MODEL_EVIDENCE)

    def _first_rate(self, evidence: int) -> float:
        rate, prior = self._first.get(evidence), _MODEL_FIRST if evidence == MODEL_EVIDENCE else _FIRST
        return prior if rate is None else rate.value(prior)

    def _later_rate(self, evidence: int) -> float:
        rate, prior = self._later.get(evidence), _MODEL_LATER if evidence == MODEL_EVIDENCE else _LATER
        return prior if rate is None else rate.value(prior)


def _falling(value: tuple[float, int]) -> float:
    return -value[0]
