"""How long steps take, learned from those that ran: what one of some size will take, how many tokens fit some time.

In: tokens and seconds of committed steps. Out: estimates. The loop asks when the device will want its next step, a gate
how much of a prompt a step may hold. Must not know: devices, requests, what a step was made of beyond its tokens.
"""

from __future__ import annotations

from collections import deque

KEPT = 8  # seconds of steps of one size
CLASS = 64  # tokens: steps whose numbers of tokens round up to the same multiple are alike; smaller ones by themselves
LEAST = 256  # tokens of a step from which on a GPU's time grows with them: fewer wait for the weights
SHARE = 0.125  # of a new step in the average


class StepTimeEstimator:
    def __init__(self, least: int = LEAST) -> None:
        """`least`: tokens of a step from which on its time tells how long a token takes."""
        self._least = least
        self._recent: dict[int, deque[float]] = {}
        self._per_token = 0.0  # seconds, of steps that are long enough to tell

    def learn(self, tokens: int, seconds: float) -> None:
        self._recent.setdefault(_class(tokens), deque(maxlen=KEPT)).append(seconds)
        if tokens >= self._least:
            each = seconds / tokens
            self._per_token = each if not self._per_token else self._per_token + SHARE * (each - self._per_token)

    def expect(self, tokens: int) -> float:
        """Seconds that such a step takes at least, as far as is known; 0: it never ran."""
        recent = self._recent.get(_class(tokens))
        return min(recent) if recent else 0.0

    def tokens_within(self, seconds: float) -> int | None:
        """How many tokens a step of so many seconds computes; None: no step was long enough to tell."""
        return int(seconds / self._per_token) if self._per_token else None


def _class(tokens: int) -> int:
    return tokens if tokens < CLASS else -(-tokens // CLASS) * CLASS
