"""DraftBudget: whether a draft model should draft at all, for which rows, and how many tokens.

N-grams cost nothing, so lengths.py decides after they were proposed. A draft model is paid before it is known whether
its drafts are right: one pass for every token, and a longer one for texts that it has not read yet. So the same
probabilities are weighed against that cost first. Where it does not pay, a small share of the time is spent on drafts
that are only compared with what the row says, so that a text which becomes predictable is noticed. Must not know: how
a draft model works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.drafting.lengths import CLEAR_GAIN, DraftLengths

_EXPLORED = 0.015  # of the time of steps without drafts
_MOST_FACTOR = 8.0  # of what reading a text takes
_MOST_SAVED = 256.0  # of that time, in steps of one token
_FIRST_ANSWER = 64.0  # tokens, until answers were seen
_ANSWER_SHARE = 0.05  # of a new answer in their mean length
_LEARN, _LEARN_READING = 0.1, 0.3  # of a newly measured cost
Behind = Callable[[str], int | None]  # tokens that the draft model has not read; None: it cannot draft for the row


class DraftBudget:
    def __init__(self, lengths: DraftLengths, pass_cost: float = 0.5, step_seconds: float = 0.0) -> None:
        """`pass_cost`: of one pass of the draft model, in passes of the model with as many tokens. `step_seconds`: of a
        step of one token; 0: not known."""
        self._lengths, self._pass_cost, self._step_seconds = lengths, pass_cost, step_seconds
        self._reading_factor = 1.0  # what reading texts takes, in what a pass of as many tokens should take
        self._saved = 0.0  # time for drafts that are only compared, in steps of one token
        self._said: dict[str, int] = {}
        self._mean_answer = _FIRST_ANSWER

    @property
    def pass_cost(self) -> float:
        return self._pass_cost

    def observe(self, request_id: str, count: int) -> None:
        """The row has sampled so many tokens."""
        self._said[request_id] = self._said.get(request_id, 0) + count

    def end(self, request_id: str) -> None:
        if (num_tokens := self._said.pop(request_id, 0)) > 0:
            self._mean_answer += _ANSWER_SHARE * (num_tokens - self._mean_answer)

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        unit = seconds / self._lengths.costs.of(num_tokens)
        self._step_seconds += (unit - self._step_seconds) * (_LEARN if self._step_seconds else 1.0)

    def learn_drafting(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """Drafting took so long, where nothing had to be caught up on."""
        if self._step_seconds and num_passes:
            unit = self._step_seconds * self._lengths.costs.of(num_rows) * num_passes
            self._pass_cost += _LEARN * (seconds / unit - self._pass_cost)

    def learn_reading(self, num_tokens: int, num_rows: int, num_passes: int, seconds: float) -> None:
        """Drafting took so long, where so many tokens had to be caught up on."""
        costs = self._lengths.costs
        if self._step_seconds and num_passes:
            others = (num_passes - 1) * costs.of(num_rows)
            factor = (seconds / self._step_seconds / max(1e-9, self._pass_cost) - others) / costs.of(num_tokens)
            factor = min(_MOST_FACTOR, max(1.0, factor))  # what a first time compiles is no cost of later ones
            self._reading_factor += _LEARN_READING * (factor - self._reading_factor)

    def plan(self, request_ids: Sequence[str], behind: Behind) -> tuple[list[str], int]:
        """Rows to draft for, and how many tokens."""
        known = {name: tokens for name in request_ids if (tokens := behind(name)) is not None}
        if not known:
            return [], 0
        count, saved = self._best(request_ids, known)
        if count:
            names = [name for name, tokens in known.items() if self._is_worth_reading(name, tokens, saved)]
            if names:
                return names, count
        return self._explore(len(request_ids), known)

    def promises(self, request_ids: Sequence[str], behind: Behind, num_steps: int = 1) -> bool:
        """Whether `plan` would name a row. `num_steps`: since the last time."""
        known = {name: tokens for name in request_ids if (tokens := behind(name)) is not None}
        if not known:
            return False
        count, saved = self._best(request_ids, known)
        if count and any(self._is_worth_reading(name, tokens, saved) for name, tokens in known.items()):
            return True
        self._save(len(request_ids), num_steps)
        return self._saved >= self._exploring(min(known.values()))

    def _best(self, request_ids: Sequence[str], known: dict[str, int]) -> tuple[int, float]:
        """Drafts per row with the most tokens per second, 0: none pay; and the time that each token of a row saves."""
        lengths, num_rows, costs = self._lengths, len(request_ids), self._lengths.costs
        firsts = [lengths.first_probability(name) for name in known]
        later = lengths.later_probability()
        plain = num_rows / costs.of(num_rows)
        best, count, tokens, values = plain * CLEAR_GAIN, 0, float(num_rows), sum(firsts)
        for k in range(1, lengths.most(num_rows) + 1):
            tokens += values
            values *= later
            cost = costs.of(num_rows + k * len(known)) + costs.wait + k * self._pass_cost * costs.of(len(known))
            if (rate := tokens / cost) > best:
                best, count = rate, k
        return count, 1 / plain - 1 / best

    def _is_worth_reading(self, request_id: str, tokens: int, saved: float) -> bool:
        """Whether the rest of an answer, as long as answers are, pays for reading the text first."""
        if tokens <= 2:
            return True
        num_tokens = self._said.get(request_id, 0)
        return max(self._mean_answer - num_tokens, num_tokens) * saved > self._reading(tokens)

    def _reading(self, tokens: int) -> float:
        return self._reading_factor * self._pass_cost * self._lengths.costs.of(tokens)

    def _exploring(self, tokens: int) -> float:
        """What a draft that is only compared costs, the wait for the tokens it is made from included."""
        return self._reading(max(1, tokens)) + self._lengths.costs.wait

    def _save(self, num_rows: int, num_steps: int = 1) -> None:
        self._saved = min(_MOST_SAVED, self._saved + num_steps * _EXPLORED * self._lengths.costs.of(num_rows))

    def _explore(self, num_rows: int, known: dict[str, int]) -> tuple[list[str], int]:
        self._save(num_rows)
        name = min(known, key=known.__getitem__)
        cost = self._exploring(known[name])
        if self._saved < cost:
            return [], 0
        self._saved -= cost
        return [name], 1
